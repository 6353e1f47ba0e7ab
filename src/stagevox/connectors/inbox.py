"""The consuming end of the roads to one stage: chunks are copied, checked and acknowledged as they are taken."""

from __future__ import annotations

import hmac
import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import zmq

from stagevox.errors import ChunkOrderError, PayloadError, RequestFailedError

from .base import Chunk
from .outbox import RoadLimits
from .roadmap import RoadMap
from .segments import read, size_of
from .wire import Ack, Put, blank, decode_put, encode, unpack

_MAX_DROPPED = 4096


class _Arrived(NamedTuple):
    """A chunk as it came, and the peer that gets its acknowledgement."""

    peer: bytes
    put: Put
    frames: Sequence[zmq.Frame]
    at: float


class _Lane:
    """What has come of an open request; ``number`` is 0 until something has, ``expected`` -1 after the end."""

    __slots__ = ("expected", "has_failed", "number")

    def __init__(self) -> None:
        self.number = 0
        self.expected = 0
        self.has_failed = False


class _Dropped(NamedTuple):
    number: int
    at: float


class Inbox:
    """Everything that comes to the stage ``name``.

    A chunk can overtake the message that opens its request here, since the two come from different processes. So chunks of a
    request that was never opened are kept for a short while, unacknowledged; those of a dropped one are refused at once.
    """

    def __init__(self, name: str, socket: zmq.Socket[bytes], roadmap: RoadMap, limits: RoadLimits) -> None:
        self.socket = socket
        self.failures: list[tuple[str, RequestFailedError]] = []
        self.num_refused = 0
        self._name = name
        self._roadmap = roadmap
        self._limits = limits
        self._open: dict[str, _Lane] = {}
        self._dropped: OrderedDict[str, _Dropped] = OrderedDict()
        self._early: dict[str, list[_Arrived]] = {}
        self._ready: list[_Arrived] = []
        self._acks: dict[bytes, list[tuple[int, int]]] = {}

    def open(self, req_id: str) -> None:
        """Take chunks of the request from now on, those that came early included."""
        self._open.setdefault(req_id, _Lane())
        self._ready += self._early.pop(req_id, ())

    def drop(self, req_id: str, now: float) -> None:
        """Refuse chunks of the request from now on."""
        lane = self._open.pop(req_id, None)
        if lane is not None:
            self._dropped.pop(req_id, None)
            self._dropped[req_id] = _Dropped(lane.number, now)
        for arrived in self._early.pop(req_id, ()):
            self._done(arrived)
        self._send_acks()

    def take(self, now: float) -> list[Chunk]:
        """All chunks that have come, in order."""
        chunks: list[Chunk] = []
        ready, self._ready = self._ready, []
        for arrived in ready:
            self._arrived(arrived, chunks)
        while True:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            put = self._read(frames)
            if put is None:
                self.num_refused += 1
            else:
                self._arrived(_Arrived(peer.bytes, put, frames[1:], now), chunks)
        self._forget(now)
        self._send_acks()
        return chunks

    @property
    def check_at(self) -> float:
        """When there is something to do even if nothing comes."""
        if self._ready:
            return -math.inf
        return min((early[0].at for early in self._early.values()), default=math.inf) + self._limits.grace

    def req_ids(self) -> set[str]:
        """Requests that hold anything here."""
        return {*self._open, *self._early}

    def close(self) -> None:
        """Forget everything."""
        self.socket.close(linger=0)
        self._open.clear()
        self._dropped.clear()
        self._early.clear()
        self._ready.clear()

    def _read(self, frames: Sequence[zmq.Frame]) -> Put | None:
        """The chunk in a message, None if it isn't one of this run for this stage."""
        try:
            put = decode_put(frames[0].buffer if frames else b"")
        except msgspec.MsgspecError:
            return None
        return put if hmac.compare_digest(put.key, self._roadmap.key) and put.stage == self._name else None

    def _arrived(self, arrived: _Arrived, chunks: list[Chunk]) -> None:
        put = arrived.put
        dropped = self._dropped.get(put.req_id)
        lane = self._open.get(put.req_id)
        is_late = dropped is not None and put.lane <= dropped.number
        if lane is None and not is_late and (dropped is None or dropped.number):
            self._early.setdefault(put.req_id, []).append(arrived)
            return
        if lane is not None and not is_late and not lane.has_failed:
            try:
                chunks.append(self._accept(lane, arrived))
            except RequestFailedError as error:
                lane.has_failed = True
                self.failures.append((put.req_id, error))
        self._done(arrived)

    def _accept(self, lane: _Lane, arrived: _Arrived) -> Chunk:
        """Check a chunk's place and copy it."""
        put, what = arrived.put, f"chunk {arrived.put.seq} of {arrived.put.req_id}"
        if lane.number not in (0, put.lane):
            raise ChunkOrderError(f"{self._name}: {what} comes from another sender than those before it")
        if put.seq != lane.expected:
            wanted = "no more chunks" if lane.expected < 0 else f"chunk {lane.expected}"
            raise ChunkOrderError(f"{self._name}: expected {wanted} of {put.req_id}, got chunk {put.seq}")
        try:
            data = unpack(put.data, self._tensors(put, arrived.frames))
        except FileNotFoundError as error:
            raise ChunkOrderError(f"{self._name}: {what} was lost: its sender has died or given it up") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise PayloadError(f"{self._name}: {what} can't be read: {error}") from error
        lane.number = put.lane
        lane.expected = -1 if put.end else put.seq + 1
        return Chunk(put.req_id, put.seq, put.end, data)

    def _tensors(self, put: Put, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:
        """The tensors of a chunk, copied out of frames and shared memory. Sizes are checked before memory is taken."""
        shared = set(put.shared)
        folder, prefix = Path(self._roadmap.segments), self._roadmap.prefix()
        sizes = [spec.nbytes() for spec in put.tensors]
        framed = [index for index in range(len(sizes)) if index not in shared]
        if [sizes[index] for index in framed] != [len(frame) for frame in frames]:
            raise ValueError("the frames are not those of its tensors")
        if shared:
            if put.segment is None or put.shared != sorted(shared) or not shared <= set(range(len(sizes))):
                raise ValueError("the segment is not that of its tensors")
            if not put.segment.startswith(prefix) or "/" in put.segment:
                raise ValueError(f"{put.segment!r} is not a segment of this run")
            if size_of(folder, put.segment) < sum(sizes[index] for index in put.shared):
                raise FileNotFoundError(put.segment)
        made = [blank(spec) for spec in put.tensors]
        for index, frame in zip(framed, frames, strict=True):
            made[index][1][:] = frame.buffer
        if put.segment is not None:
            read(folder, prefix, put.segment, [made[index][1] for index in put.shared])
        return [tensor for tensor, _ in made]

    def _done(self, arrived: _Arrived) -> None:
        self._acks.setdefault(arrived.peer, []).append((arrived.put.lane, arrived.put.seq))

    def _send_acks(self) -> None:
        for peer, taken in self._acks.items():
            try:
                self.socket.send_multipart([peer, encode(Ack(self._roadmap.key, taken))], zmq.NOBLOCK)
            except zmq.Again:
                continue  # a peer that has left, or reads nothing
        self._acks.clear()

    def _forget(self, now: float) -> None:
        """Let go of early chunks that nobody wants, and of the memory of requests whose chunks can't come any more."""
        for req_id, early in list(self._early.items()):
            if early[0].at + self._limits.grace <= now:
                for arrived in self._early.pop(req_id):
                    self._done(arrived)
        while self._dropped:
            oldest = next(iter(self._dropped))
            if len(self._dropped) <= _MAX_DROPPED and self._dropped[oldest].at + self._limits.deadline > now:
                break
            del self._dropped[oldest]
