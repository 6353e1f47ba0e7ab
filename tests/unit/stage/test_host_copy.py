"""Copies from device to host, as far as a CPU can tell (EX-10); tests/gpu has the rest."""

import contextlib

import pytest
import torch

from stagevox.contract import OwnedBatchTensor
from stagevox.stage import host_copy
from stagevox.stage.host_copy import HostCopyBatch, pack, unpack

pytestmark = pytest.mark.covers("EX-10")


def sources():
    """Every kind of element and of layout: strided, transposed, expanded, empty, without an axis."""
    numbers = torch.arange(24)
    return [
        numbers.to(torch.float64).view(4, 6)[:, ::2],
        numbers.view(4, 6).T,
        torch.tensor(7.5, dtype=torch.float64),
        numbers.to(torch.float32)[None, :3].expand(5, 3),
        numbers.to(torch.int32).view(2, 3, 4).permute(2, 0, 1),
        torch.zeros(0, 5),
        numbers.to(torch.bfloat16)[1::3],
        numbers.to(torch.float16).view(4, 6)[1:3, 1:4],
        (numbers % 3 == 0)[::5],
        numbers.to(torch.uint8)[3:4],
    ]


def test_any_layout_is_copied_right():
    batch = HostCopyBatch()
    copies = [batch.add(source) for source in sources()]
    batch.copy()
    batch.wait()
    for copy, source in zip(copies, sources(), strict=True):
        assert copy.tensor.dtype == source.dtype and copy.tensor.shape == source.shape
        assert copy.tensor.equal(source) and copy.tensor.is_contiguous()


def test_a_source_may_be_written_again_once_the_copy_has_started():
    storage = torch.arange(12).view(3, 4)
    batch = HostCopyBatch()
    copy = batch.add(storage.T)
    batch.copy()
    storage.fill_(-1)
    batch.wait()
    assert copy.tensor.tolist() == torch.arange(12).view(3, 4).T.tolist()
    assert copy.source is None  # let go


def test_what_was_given_away_is_handed_over():
    given = torch.ones(3)
    batch = HostCopyBatch()
    copy = batch.add(OwnedBatchTensor(given))
    batch.copy()
    batch.wait()
    assert copy.tensor is given


def test_many_tensors_go_as_one():
    ordered = sorted(sources(), key=lambda source: -source.element_size())
    packed = pack(ordered)
    assert packed.dtype == torch.uint8 and packed.dim() == 1
    for made, source in zip(unpack(packed, ordered), ordered, strict=True):
        assert made.dtype == source.dtype and made.shape == source.shape
        assert made.equal(source)


def test_order_of_calls():
    batch = HostCopyBatch()
    copy = batch.add(torch.ones(1))
    with pytest.raises(AssertionError, match="before copy"):
        batch.wait()
    with pytest.raises(AssertionError, match="read before"):
        _ = copy.tensor
    batch.copy()
    batch.copy()  # a second call does nothing
    with pytest.raises(AssertionError, match="takes no more"):
        batch.add(torch.ones(1))
    batch.wait()
    batch.wait()
    assert copy.tensor.tolist() == [1.0]


def test_an_empty_batch():
    batch = HostCopyBatch()
    batch.copy()
    batch.wait()


class Recorder:
    """Stands in for torch.cuda: a stream is its name, and every call on one is noted in order."""

    def __init__(self, monkeypatch):
        self.calls, self.current = [], "main"
        note = self.calls.append

        class Stream:
            def __init__(self, name="side"):
                self.name = name

            def __hash__(self):
                return hash(self.name)

            def __eq__(self, other):
                return self.name == other.name

            def wait_event(self, event):
                note((self.name, "waits for", event.at))

            def wait_stream(self, other):
                note((self.name, "waits for", other.name))

        class Event:
            def __init__(self, blocking=False):
                self.at = None

            def record(self, stream):
                self.at = f"event on {stream.name}"
                note((stream.name, "records"))

            def synchronize(self):
                note(("host", "waits for", self.at))

        @contextlib.contextmanager
        def stream(which):
            before, self.current = self.current, which.name
            yield
            self.current = before

        empty, cat, copy_ = torch.empty, torch.cat, torch.Tensor.copy_
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self.current))
        monkeypatch.setattr(torch, "cat", lambda parts: note((self.current, "packs")) or cat(parts))
        monkeypatch.setattr(
            torch, "empty", lambda shape, dtype, pin_memory: note(("host", "pins", pin_memory)) or empty(shape, dtype=dtype)
        )
        monkeypatch.setattr(
            torch.Tensor,
            "copy_",
            lambda to, source, non_blocking: note((self.current, "copies", non_blocking)) or copy_(to, source),
        )
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda source, stream: note(("source", "kept for", stream.name)))
        monkeypatch.setattr(host_copy, "_side_stream", lambda device: Stream())


@pytest.mark.parametrize("is_owned", [False, True])
def test_what_waits_for_what_on_a_device(monkeypatch, is_owned):
    """The order of the calls that make it right; that they do so is for tests/gpu to show."""
    cuda = Recorder(monkeypatch)
    batch = host_copy._DeviceBatch(torch.device("cuda", 0))
    copies = [
        host_copy.HostCopy(source, owned=is_owned) for source in (torch.arange(6).view(2, 3).T, torch.ones(2, dtype=torch.bool))
    ]
    batch.add(copies[1])
    cuda.current = "other"
    batch.add(copies[0])
    cuda.current = "worker"
    batch.start()
    batch.finish()
    assert cuda.calls == [
        ("main", "records"),
        ("other", "records"),
        ("side", "waits for", "event on main"),
        ("side", "waits for", "event on other"),
        ("side", "packs"),
        *([] if is_owned else [(name, "waits for", "side") for name in sorted(["main", "other"])]),
        ("host", "pins", True),
        ("side", "copies", True),
        ("side", "records"),
        *[("source", "kept for", "side")] * 2,
        ("host", "waits for", "event on side"),
    ]
    assert copies[0].tensor.tolist() == [[0, 3], [1, 4], [2, 5]] and copies[1].tensor.tolist() == [True, True]
