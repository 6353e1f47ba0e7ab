"""The producing end of the road from one stage to the next: what may leave, what waits, what has not been acknowledged."""

from __future__ import annotations

import hmac
import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import zmq

from stagevox.errors import BackpressureError, ChunkOrderError, DeadlineError, RequestFailedError

from .base import Chunk
from .segments import Segment, SegmentPool
from .wire import Payload, Put, decode_ack, encode


@dataclass(frozen=True, slots=True)
class RoadLimits:
    """Bounds of what a road holds. Counts are chunks, sizes bytes, times seconds."""

    per_request: int = 8
    """Sent and not yet acknowledged, of one request on one edge; further ones wait at the producer."""
    per_edge: int = 64
    """The same for all requests of an edge."""
    edge_bytes: int = 256 << 20
    """The same in bytes; a single larger chunk may pass alone."""
    queued: int = 64
    """Waiting at the producer, of one request: one that goes on in spite of ``is_full`` fails with a BackpressureError."""
    deadline: float = 30.0
    """How long a chunk may stay unacknowledged, or wait while its consumer takes nothing at all."""
    grace: float = 1.0
    """How long chunks of a request that the consumer has not opened are kept for it."""
    inline: int = 4096
    """Tensors below this travel in the message, larger ones in shared memory."""
    keep: int = 32 << 20
    """Shared memory that is kept to be used again."""

    def __post_init__(self) -> None:
        if self.queued < self.per_request:
            raise ValueError(f"as many chunks must be able to wait as may be sent: {self}")
        if min(self.per_request, self.per_edge, self.edge_bytes, self.queued) < 1 or min(self.inline, self.keep) < 0:
            raise ValueError(f"counts must be positive and sizes not negative: {self}")
        if not (0 < self.deadline < math.inf and 0 <= self.grace < math.inf):
            raise ValueError(f"times must be finite and not negative: {self}")


class _Waiting(NamedTuple):
    seq: int
    end: bool
    payload: Payload
    since: float


class _Sent(NamedTuple):
    segment: Segment | None
    nbytes: int
    at: float


@dataclass(slots=True, eq=False)
class _Lane:
    """One request's road to the stage."""

    number: int
    req_id: str
    expected: int = 0  # -1 after the end
    waiting: deque[_Waiting] = field(default_factory=deque)
    sent: dict[int, _Sent] = field(default_factory=dict)  # by seq, oldest first
    is_ready: bool = False
    has_failed: bool = False
    is_dropped: bool = False


_lane_numbers = itertools.count(time.time_ns())
"""They grow, also from one process to the one that replaces it."""


class Outbox:
    """Everything on its way to ``stage``. ``shared`` is False if the stage may be on another host.

    The socket accepts a message only while a consumer is connected, so what waits for one is here and counted.
    """

    def __init__(self, stage: str, key: bytes, pool: SegmentPool, limits: RoadLimits) -> None:
        self.stage = stage
        self.socket: zmq.Socket[bytes] | None = None
        self.shared = False
        self.failures: list[tuple[str, RequestFailedError]] = []
        self.check_at = math.inf  # nothing expires before
        self.num_refused = 0
        self._key = key
        self._pool = pool
        self._limits = limits
        self._lanes: dict[int, _Lane] = {}
        self._by_req: dict[str, _Lane] = {}
        self._ready: deque[_Lane] = deque()
        self._count = 0
        self._bytes = 0
        self._heard_at = -math.inf

    def put(self, chunk: Chunk, now: float) -> None:
        """Send a chunk, or queue it; raises what :meth:`stagevox.connectors.shm.ShmConnector.put` does."""
        lane = self._by_req.get(chunk.req_id)
        expected = lane.expected if lane else 0
        if chunk.seq != expected:
            wanted = "no more chunks" if expected < 0 else f"chunk {expected}"
            raise ChunkOrderError(f"{self.stage}: expected {wanted} of {chunk.req_id}, got chunk {chunk.seq}")
        if lane is not None and lane.has_failed:
            return  # it has been told
        payload = Payload(chunk.data)
        if lane is None:
            lane = _Lane(next(_lane_numbers), chunk.req_id)
            self._lanes[lane.number] = self._by_req[chunk.req_id] = lane
        elif self._is_full(lane):
            self.serve(now)
        if len(lane.waiting) >= self._limits.queued:
            raise BackpressureError(f"{self.stage}: {len(lane.waiting)} chunks of {chunk.req_id} wait and none is taken")
        lane.expected = -1 if chunk.end else chunk.seq + 1
        lane.waiting.append(_Waiting(chunk.seq, chunk.end, payload, now))
        self.check_at = min(self.check_at, now + self._limits.deadline)
        self._make_ready(lane)
        self._send_ready(now)

    def is_full(self, req_id: str) -> bool:
        """True if as many chunks of the request are unacknowledged as may be."""
        lane = self._by_req.get(req_id)
        return lane is not None and self._is_full(lane)

    def count(self, req_id: str | None = None) -> int:
        """Chunks of one request, or of all, that are not acknowledged, those that wait included."""
        return sum(len(lane.sent) + len(lane.waiting) for lane in self._lanes.values() if req_id is None or lane.req_id == req_id)

    def req_ids(self) -> set[str]:
        """Requests that hold anything here."""
        return {lane.req_id for lane in self._lanes.values()}

    def wants_to_send(self) -> bool:
        """True if chunks wait for a connection, not for an acknowledgement."""
        return bool(self._ready) and self._has_room(self._ready[0].waiting)

    def drop(self, req_id: str, now: float) -> None:
        """Forget a request. What was sent of it stays until the consumer has acknowledged it, or the deadline."""
        lane = self._by_req.pop(req_id, None)
        if lane is None:
            return
        lane.is_dropped = True
        lane.waiting.clear()
        if lane.is_ready:
            lane.is_ready = False
            self._ready.remove(lane)
        if not lane.sent:
            del self._lanes[lane.number]
        self._send_ready(now)

    def serve(self, now: float) -> None:
        """Read acknowledgements, fail what has waited too long, send what may be sent now."""
        while self.socket is not None:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._acknowledged(frame, now)
        if now >= self.check_at:
            self._expire(now)
        self._send_ready(now)

    def renew(self, now: float) -> None:
        """Another process has taken the consumer's place: what was sent to the one before is lost and gives its room back.

        It may have been on the way when the consumer died, or been sent to the new one, which won't miss it: it knows none of
        these requests. A road to it that is still in use goes on where it was.
        """
        for lane in list(self._lanes.values()):
            self._free_sent(lane)
            if lane.is_dropped:
                del self._lanes[lane.number]
            self._make_ready(lane)
        self._send_ready(now)

    def close(self) -> None:
        """Forget everything; the pool is closed by its owner."""
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None
        self._lanes.clear()
        self._by_req.clear()
        self._ready.clear()

    def _is_full(self, lane: _Lane) -> bool:
        return len(lane.sent) + len(lane.waiting) >= self._limits.per_request

    def _has_room(self, waiting: deque[_Waiting]) -> bool:
        """True if the edge's bounds let the next of these chunks go."""
        if self._count >= self._limits.per_edge:
            return False
        return not self._count or self._bytes + waiting[0].payload.nbytes <= self._limits.edge_bytes

    def _make_ready(self, lane: _Lane) -> None:
        """Queue a lane, behind others, that has something to send and may."""
        if lane.waiting and not lane.is_ready and len(lane.sent) < self._limits.per_request:
            lane.is_ready = True
            self._ready.append(lane)

    def _send_ready(self, now: float) -> None:
        """Send a chunk a lane, round and round, while there is room."""
        while self._ready and self._has_room(self._ready[0].waiting):
            lane = self._ready[0]
            if self.socket is None or not self._send(self.socket, lane, lane.waiting[0], now):
                return
            lane.waiting.popleft()
            self._ready.popleft()
            lane.is_ready = False
            self._make_ready(lane)

    def _send(self, socket: zmq.Socket[bytes], lane: _Lane, chunk: _Waiting, now: float) -> bool:
        """Send one chunk; False if no consumer is connected or the pipe to it is full."""
        if not socket.poll(0, zmq.POLLOUT):
            return False
        payload = chunk.payload
        large = [index for index, view in enumerate(payload.views) if len(view) >= self._limits.inline] if self.shared else []
        segment = self._pool.write([payload.views[index] for index in large]) if large else None
        if segment is None:  # also if the machine has no shared memory left
            large = []
        chosen = set(large)
        put = Put(
            self._key,
            self.stage,
            lane.number,
            lane.req_id,
            chunk.seq,
            chunk.end,
            msgspec.Raw(payload.data),
            payload.specs,
            large,
            segment.name if segment else None,
        )
        frames = [view for index, view in enumerate(payload.views) if index not in chosen]
        try:
            socket.send_multipart([encode(put), *frames], zmq.NOBLOCK)
        except zmq.Again:  # the consumer left meanwhile
            if segment:
                self._pool.release(segment)
            return False
        lane.sent[chunk.seq] = _Sent(segment, payload.nbytes, now)
        self._count += 1
        self._bytes += payload.nbytes
        self.check_at = min(self.check_at, now + self._limits.deadline)
        return True

    def _acknowledged(self, frame: bytes, now: float) -> None:
        try:
            ack = decode_ack(frame)
        except msgspec.MsgspecError:
            ack = None
        if ack is None or not hmac.compare_digest(ack.key, self._key):
            self.num_refused += 1  # a stranger listens where our stage should
            return
        self._heard_at = now
        for number, seq in ack.taken:
            lane = self._lanes.get(number)
            sent = lane.sent.pop(seq, None) if lane else None
            if lane is None or sent is None:
                continue  # given up meanwhile
            self._count -= 1
            self._bytes -= sent.nbytes
            if sent.segment:
                self._pool.release(sent.segment)
            if lane.is_dropped and not lane.sent:
                del self._lanes[number]
            self._make_ready(lane)

    def _expire(self, now: float) -> None:
        """Fail the requests of chunks that nobody took in time."""
        self.check_at = math.inf
        for lane in list(self._lanes.values()):
            if lane.sent:  # those that wait, wait for these
                seq = next(iter(lane.sent))
                since = lane.sent[seq].at
            elif lane.waiting:
                seq = lane.waiting[0].seq
                since = max(lane.waiting[0].since, self._heard_at)
            else:
                continue
            if since + self._limits.deadline > now:
                self.check_at = min(self.check_at, since + self._limits.deadline)
                continue
            self._give_up(lane)
            if not lane.is_dropped:
                limit = f"{self._limits.deadline:g} s"
                error = DeadlineError(f"{self.stage}: chunk {seq} of {lane.req_id} was not taken in {limit}")
                self.failures.append((lane.req_id, error))

    def _give_up(self, lane: _Lane) -> None:
        """Free what a lane holds."""
        self._free_sent(lane)
        lane.waiting.clear()
        lane.has_failed = True
        if lane.is_ready:
            lane.is_ready = False
            self._ready.remove(lane)
        if lane.is_dropped:
            del self._lanes[lane.number]

    def _free_sent(self, lane: _Lane) -> None:
        """Forget what was sent. Its segments are removed, not used again: the consumer may yet read them."""
        for sent in lane.sent.values():
            self._count -= 1
            self._bytes -= sent.nbytes
            if sent.segment:
                self._pool.discard(sent.segment)
        lane.sent.clear()
