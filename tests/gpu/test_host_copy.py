"""Batched copies from a CUDA device: side stream, pinned memory, streams other than the default one (EX-10, RT-7)."""

import threading

import pytest
import torch

from stagevox.contract import OwnedBatchTensor, RowPhase
from stagevox.stage.host_copy import HostCopyBatch
from stagevox.stage.materialise import Materialiser
from stagevox.stage.outputs import plan_outputs

pytestmark = [
    pytest.mark.covers("EX-10"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 200_000_000
"""Cycles, about a tenth of a second: long enough that nothing is right by chance."""


def slow_fill(storage, value):
    """Keep the current stream busy, then write."""
    torch.cuda._sleep(LONG)
    storage.copy_(value)


def numbers(*shape, dtype=torch.float32):
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, device="cuda").to(dtype).view(*shape)


def test_the_copy_waits_for_the_stream_that_made_the_source():
    stream = torch.cuda.Stream()
    storage = torch.zeros(1 << 16, device="cuda")
    expected = numbers(1 << 16)
    torch.cuda.synchronize()
    batch = HostCopyBatch()
    with torch.cuda.stream(stream):
        slow_fill(storage, expected)
        copy = batch.add(OwnedBatchTensor(storage))
    batch.copy()  # from another stream
    assert not stream.query(), "the source was ready too early to prove anything"
    batch.wait()
    assert copy.tensor.device.type == "cpu" and copy.tensor.is_pinned()
    assert copy.tensor.equal(expected.cpu())


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_source_may_be_written_again_once_the_copy_has_started(own_stream):
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    storage, expected = torch.zeros(512, 512, device="cuda"), numbers(512, 512)
    torch.cuda.synchronize()
    batch = HostCopyBatch()
    with torch.cuda.stream(stream):
        slow_fill(storage, expected)
        copy = batch.add(storage.T)
        batch.copy()
        storage.fill_(-1)  # the next step
    batch.wait()
    assert copy.tensor.equal(expected.cpu().T)


def test_any_layout_and_type_in_one_batch():
    sources = [
        numbers(4, 6, dtype=torch.bfloat16)[:, ::2],
        numbers(4, 6, dtype=torch.int64).T,
        torch.tensor(7.5, dtype=torch.float64, device="cuda"),
        numbers(3)[None].expand(5, 3),
        torch.zeros(0, 5, device="cuda"),
        (numbers(24) > 7)[::5],
        numbers(7, dtype=torch.uint8),
        torch.arange(3),  # on the host already
    ]
    batch = HostCopyBatch()
    copies = [batch.add(source) for source in sources]
    batch.copy()
    batch.wait()
    for copy, source in zip(copies, sources, strict=True):
        assert copy.tensor.dtype == source.dtype and copy.tensor.equal(source.cpu())


def test_sources_of_two_streams():
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    storages, batch, copies = [torch.zeros(1 << 16, device="cuda") for _ in streams], HostCopyBatch(), []
    torch.cuda.synchronize()
    for index, (stream, storage) in enumerate(zip(streams, storages, strict=True)):
        with torch.cuda.stream(stream):
            slow_fill(storage, numbers(1 << 16) + index)
            copies.append(batch.add(storage))
    batch.copy()
    batch.wait()
    for index, copy in enumerate(copies):
        assert copy.tensor.equal(torch.arange(1 << 16).float() + index)


def test_a_dropped_source_is_kept_alive_until_its_copy_is_done():
    expected = numbers(1 << 20)
    batch = HostCopyBatch()
    torch.cuda._sleep(LONG)
    source = expected + 1
    where = source.data_ptr()
    copy = batch.add(OwnedBatchTensor(source))
    del source
    batch.copy()
    others = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(8)]
    assert where not in {other.data_ptr() for other in others}
    batch.wait()
    assert copy.tensor.equal(expected.cpu() + 1)


def test_a_batch_that_nobody_waits_for_harms_nobody():
    for _ in range(20):
        batch = HostCopyBatch()
        torch.cuda._sleep(LONG // 100)
        batch.add(OwnedBatchTensor(numbers(1 << 16)))
        batch.copy()
        del batch
    kept = HostCopyBatch()
    copy = kept.add(numbers(1 << 16))
    kept.copy()
    kept.wait()
    assert copy.tensor.equal(torch.arange(1 << 16).float())


@pytest.mark.covers("RT-7")
@pytest.mark.parametrize("background", [False, True])
def test_outputs_of_steps_that_overwrite_each_other(background):
    """The host runs three steps ahead of the device; outputs are made at the end."""
    materialiser = Materialiser(background=background)
    gate = threading.Event()
    storage = torch.zeros(64, 256, device="cuda")
    pending = []
    for step in range(3):
        slow_fill(storage, torch.full((), float(step), device="cuda"))
        rows = [RowPhase(name, 2 * index, 2, 4 + 2 * step, 4, 6 + 2 * step) for index, name in enumerate("ab")]
        single = [storage[index, :4] for index in range(2)]
        planned = plan_outputs(rows, {"x": storage[:, ::2], "one": single}, 4, snapshot=background)
        if background:
            planned.result = _after(gate, planned.result)
        pending.append(materialiser.start(planned))
    storage.fill_(-1)
    gate.set()
    for step, one in enumerate(pending):
        outputs, failed = one.join()
        assert not failed
        for name in "ab":
            assert outputs[name]["x"].device.type == "cpu"
            assert outputs[name]["x"].equal(torch.full((2, 128), float(step)))
            assert outputs[name]["one"].equal(torch.full((4,), float(step)))
    materialiser.close()


def _after(gate, make):
    def held_up():
        assert gate.wait(60)
        return make()

    return held_up
