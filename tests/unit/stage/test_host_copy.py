"""Copies from device to host, as far as a CPU can tell (EX-10); tests/gpu has the rest."""

import pytest
import torch

from stagevox.contract import OwnedBatchTensor
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
