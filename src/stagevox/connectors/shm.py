"""The road between stage processes: ZeroMQ for what is said, shared memory for tensors, or all of it over TCP.

Each process has one :class:`ShmConnector`. It listens for its own stage and sends straight to the next; no third process is on
the way. ZeroMQ sockets can't be shared, so it belongs to one thread.

Backpressure: a request may have ``per_request`` chunks on an edge that its consumer has not copied; then
:meth:`ShmConnector.is_full` is true and its stage should be scheduled without it. Chunks that come all the same wait at the
producer, in order: ``put`` neither blocks nor loses. A driver that takes no notice loses the request in the end, not memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from stagevox.errors import ClosedError, ConfigError, RequestFailedError, UnknownStageError

from .base import Chunk, Connector
from .inbox import Inbox
from .outbox import Outbox, RoadLimits
from .roadmap import RoadMap, hold
from .segments import SegmentPool

_IPC = "ipc://"


class ShmConnector(Connector):
    """The connector of the process of stage ``name``.

    A driver's loop: :meth:`wait` on it and on the driver's own sockets; read the control messages, *then* :meth:`get` and
    :meth:`failures`. ``get`` also does what else is due (acknowledgements, chunks that waited, deadlines), so a stage that
    only produces calls it too.
    """

    def __init__(
        self,
        name: str,
        roadmap: RoadMap,
        feeds: Sequence[str] = (),
        limits: RoadLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at the stage's address, and connect to those it ``feeds``, which else happens with their first chunk.

        Raises:
            ConfigError: an address that can't be used.
            ClosedError: the run's owner has ended it.
        """
        limits = limits or RoadLimits()
        self._name = name
        self._roadmap = roadmap
        self._limits = limits
        self._clock = clock
        self._addresses = dict(roadmap.addresses)
        self._open: set[str] = set()
        self._outboxes: dict[str, Outbox] = {}
        self._closed = False
        address = self._address_of(name)
        try:
            self._lock = hold(roadmap)
        except FileNotFoundError as error:
            raise ClosedError(f"the run that {roadmap.folder} was made for has ended") from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            socket = self._listen(address)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._lock)
            raise
        self._inbox = Inbox(name, socket, roadmap, limits)
        self._pool = SegmentPool(Path(roadmap.segments), roadmap.prefix(name), limits.keep)
        for stage in feeds:
            self._outbox(stage)

    @property
    def address(self) -> str:
        """Where this stage is listening: what others need if the road map left the port open."""
        return self._addresses[self._name]

    def connect(self, stage: str, address: str) -> None:
        """Learn where a stage is listening, before or after the first chunk for it; only once, unless it was left open."""
        if not _is_open(self._address_of(stage)):
            raise ConfigError(f"{stage}.address", f"is {self._addresses[stage]} already")
        self._addresses[stage] = address
        if stage in self._outboxes:
            self._dial(self._outboxes[stage])

    def open(self, req_id: str) -> None:
        """Make a request known."""
        self._check_usable()
        self._open.add(req_id)
        self._inbox.open(req_id)

    def put(self, stage: str, chunk: Chunk) -> None:
        """Send a chunk to ``stage`` or, if its window is full or nobody is connected, queue it; never blocks.

        Tensors are read when the chunk is sent: like with every connector, they are the road's from here on.

        Raises:
            ChunkOrderError: a gap, a repeat, or a chunk after the end.
            PayloadError: a value that can't be carried.
            BackpressureError: the request has too many chunks queued.
        """
        self._check_usable()
        outbox = self._outbox(stage)
        if chunk.req_id in self._open:
            outbox.put(chunk, self._clock())

    def get(self, stage: str) -> list[Chunk]:
        """Take all chunks that have come for this process's stage, and serve the road; never blocks."""
        self._check_usable()
        if stage != self._name:
            raise UnknownStageError("stage", f"{stage!r} doesn't run in this process", [self._name])
        now = self._clock()
        for outbox in self._outboxes.values():
            outbox.serve(now)
        return self._inbox.take(now)

    def failures(self) -> list[tuple[str, RequestFailedError]]:
        """Take the requests, and why, that :meth:`get` found failed; each is told once, and not if dropped meanwhile."""
        found: list[tuple[str, RequestFailedError]] = []
        for box in self._boxes():
            found += [(req_id, error) for req_id, error in box.failures if req_id in self._open]
            box.failures.clear()
        return found

    def drop(self, req_id: str) -> None:
        """Forget a request. Chunks that were sent stay until taken, those that wait here do not: drop when all stages are done."""
        self._open.discard(req_id)
        if self._closed:
            return
        now = self._clock()
        self._inbox.drop(req_id, now)
        for outbox in self._outboxes.values():
            outbox.drop(req_id, now)

    def renew(self, stage: str) -> None:
        """Hear that another process runs ``stage`` now, and forget what was sent to the one before.

        Requests that it is to take must be opened here after this.
        """
        self._check_usable()
        if stage in self._outboxes:
            self._outboxes[stage].renew(self._clock())

    def is_full(self, req_id: str) -> bool:
        """True if as many of the request's chunks are unacknowledged as may be: its stage should not be scheduled for it."""
        return any(outbox.is_full(req_id) for outbox in self._outboxes.values())

    def in_flight(self, req_id: str | None = None) -> int:
        """Chunks of a request, or of all, that were put here and not acknowledged, those that wait included."""
        return sum(outbox.count(req_id) for outbox in self._outboxes.values())

    def pollables(self) -> list[tuple[zmq.Socket[bytes], int]]:
        """Sockets and events for a :class:`zmq.Poller`; they change with every call on the connector."""
        found = [(self._inbox.socket, int(zmq.POLLIN))]
        for outbox in self._outboxes.values():
            if outbox.socket is not None:
                found.append((outbox.socket, zmq.POLLIN | (zmq.POLLOUT if outbox.wants_to_send() else 0)))
        return found

    def due_in(self) -> float:
        """Seconds until :meth:`get` has something to do even if nothing comes; infinity if never."""
        check_at = min((outbox.check_at for outbox in self._outboxes.values()), default=math.inf)
        return max(0.0, min(check_at, self._inbox.check_at) - self._clock())

    def wait(self, timeout: float, *others: zmq.Socket[bytes] | int) -> bool:
        """Sleep until there is something to do here or to read from ``others`` (sockets, file descriptors).

        At most ``timeout`` seconds; returns False if those passed and nothing happened.
        """
        self._check_usable()
        due = self.due_in()
        poller = zmq.Poller()
        for socket, events in self.pollables():
            poller.register(socket, events)
        for other in others:
            poller.register(other, zmq.POLLIN)
        return bool(poller.poll(math.ceil(min(timeout, due) * 1000))) or due <= timeout

    def close(self) -> None:
        """Remove the stage's segments and socket; what has not been taken is lost. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._open.clear()
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._pool.close()
        self._context.destroy(linger=0)
        if self.address.startswith(_IPC):
            Path(self.address.removeprefix(_IPC)).unlink(missing_ok=True)
        os.close(self._lock)

    @property
    def num_open(self) -> int:
        """Requests that are known here or whose chunks still are."""
        held = (box.req_ids() for box in self._boxes())
        return 0 if self._closed else len(self._open.union(*held))

    @property
    def num_refused(self) -> int:
        """Messages that were not of this run and were ignored: strangers have found a port."""
        return sum(box.num_refused for box in self._boxes())

    @property
    def num_segments(self) -> int:
        """Segments of this stage that no consumer has acknowledged."""
        return self._pool.num_used

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the connector is closed")

    def _boxes(self) -> list[Inbox | Outbox]:
        return [self._inbox, *self._outboxes.values()]

    def _address_of(self, stage: str) -> str:
        if stage not in self._addresses:
            raise UnknownStageError("stage", f"the road map has no {stage!r}", sorted(self._addresses))
        return self._addresses[stage]

    def _outbox(self, stage: str) -> Outbox:
        outbox = self._outboxes.get(stage)
        if outbox is None:
            self._address_of(stage)
            outbox = self._outboxes[stage] = Outbox(stage, self._roadmap.key, self._pool, self._limits)
            self._dial(outbox)
        return outbox

    def _dial(self, outbox: Outbox) -> None:
        """Connect, once the address is known. Without a peer nothing is accepted (IMMEDIATE), so ZeroMQ holds nothing for one."""
        address = self._addresses[outbox.stage]
        if _is_open(address):
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, self._limits.per_edge)
        socket.setsockopt(zmq.RCVHWM, 0)  # acknowledgements: as many as chunks in flight
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"{outbox.stage}.address", f"can't connect to {address}: {error}") from error
        outbox.socket = socket
        outbox.shared = address.startswith(_IPC)

    def _listen(self, address: str) -> zmq.Socket[bytes]:
        folder = os.stat(self._roadmap.folder)
        if folder.st_mode & 0o077 or folder.st_uid != os.getuid():
            raise ConfigError(f"{self._name}.address", f"{self._roadmap.folder} must be private to this user")
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # acknowledgements are as many as chunks in flight, and must not be lost
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{self._name}.address", f"can't listen at {address}: {error}") from error
        self._addresses[self._name] = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        if address.startswith(_IPC):
            os.chmod(address.removeprefix(_IPC), 0o600)  # the folder's mode guards it until here
        return socket


def _is_open(address: str) -> bool:
    """True for an address whose port is not known yet."""
    return address.endswith(":*")
