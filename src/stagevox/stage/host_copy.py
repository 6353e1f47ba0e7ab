"""Copies from device to host, started together and awaited once (EX-10).

On CUDA the sources are packed into one tensor on a side stream, so that one copy into pinned memory serves them all, whatever their
strides. The side stream waits for the streams that made the sources; what those streams do next waits for the packing, where a
source may be written again. On a CPU a source is cloned, or handed over if it was given away; from other devices it is fetched at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from stagevox.contract import OwnedBatchTensor


class HostCopy:
    """One copy of a batch."""

    __slots__ = ("_made", "owned", "source")

    def __init__(self, source: torch.Tensor, *, owned: bool) -> None:
        self.source: torch.Tensor | None = source
        self.owned = owned
        self._made: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, on the host; only once its batch was waited for."""
        assert self._made is not None, "read before HostCopyBatch.wait()"
        return self._made

    def finish(self, made: torch.Tensor) -> None:
        """Set the copy; the source is let go."""
        self._made, self.source = made, None


class HostCopyBatch:
    """Copies that are started together.

    ``add`` belongs to the thread and the stream that made the source; ``copy`` and ``wait`` may be called by another thread. What is
    not an :class:`OwnedBatchTensor` may be written again once ``copy`` has returned, and not before.
    """

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []
        self._batches: dict[torch.device, _DeviceBatch] = {}
        self._started = False

    def add(self, source: torch.Tensor | OwnedBatchTensor) -> HostCopy:
        """Take a source up; its copy can be read after ``wait``."""
        assert not self._started, "a batch that was started takes no more"
        owned = isinstance(source, OwnedBatchTensor)
        tensor = source.tensor if isinstance(source, OwnedBatchTensor) else source
        copy = HostCopy(tensor, owned=owned)
        if tensor.is_cuda:
            batch = self._batches.get(tensor.device)
            if batch is None:
                batch = self._batches[tensor.device] = _DeviceBatch(tensor.device)
            batch.add(copy)
        else:
            self._copies.append(copy)
        return copy

    def copy(self) -> None:
        """Start all copies; a second call does nothing."""
        if self._started:
            return
        self._started = True
        for batch in self._batches.values():
            batch.start()
        for copy in self._copies:
            source = _source(copy)
            if source.device.type != "cpu":
                copy.finish(source.cpu())
            else:
                copy.finish(source if copy.owned else source.clone(memory_format=torch.contiguous_format))
        self._copies = []

    def wait(self) -> None:
        """Return once all copies can be read; sources are kept alive until then."""
        assert self._started, "wait() before copy()"
        for batch in self._batches.values():
            batch.finish()
        self._batches = {}


class _DeviceBatch:
    """The copies of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: list[HostCopy] = []
        self._made: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        """By stream: a point behind all sources that it made."""
        self._reused: dict[torch.cuda.Stream, None] = {}
        """Streams that may write a source again."""
        self._done: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None

    def add(self, copy: HostCopy) -> None:
        stream = torch.cuda.current_stream(self._device)
        event = self._made.get(stream)
        if event is None:
            event = self._made[stream] = torch.cuda.Event()
        event.record(stream)
        if not copy.owned:
            self._reused[stream] = None
        self._copies.append(copy)

    def start(self) -> None:
        self._copies.sort(key=lambda copy: -_source(copy).element_size())
        side = _side_stream(self._device)
        # A sleeping wait: a worker thread must not spin on the driver's lock while the main thread launches kernels.
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            for event in self._made.values():
                side.wait_event(event)
            packed = pack([_source(copy) for copy in self._copies])
            for stream in self._reused:
                stream.wait_stream(side)
            self._host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            done.record(side)
        for copy in self._copies:
            # The allocator too must know, in case this batch is dropped before it was waited for.
            _source(copy).record_stream(side)
        self._done = done

    def finish(self) -> None:
        assert self._done is not None and self._host is not None
        self._done.synchronize()
        for copy, made in zip(self._copies, unpack(self._host, [_source(copy) for copy in self._copies]), strict=True):
            copy.finish(made)


def _source(copy: HostCopy) -> torch.Tensor:
    assert copy.source is not None
    return copy.source


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def pack(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all sources, of any strides, one after another: ``[bytes]``, on their device.

    Sources come with the largest elements first, so that each starts at a multiple of its element's size.
    """
    return torch.cat([source.contiguous().view(-1).view(torch.uint8) for source in sources])


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``packed [bytes]`` with the types and shapes of the sources that :func:`pack` was given."""
    views, start = [], 0
    for source in like:
        end = start + source.numel() * source.element_size()
        views.append(packed[start:end].view(source.dtype).view(source.shape))
        start = end
    return views
