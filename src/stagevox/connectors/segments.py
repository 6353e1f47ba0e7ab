"""Shared memory for tensors: POSIX shared-memory objects that their maker writes and one other process reads.

On Linux such an object is a file in ``/dev/shm``, so it's used as one. Reading and writing it, not mapping it, has no page faults
and no mapping that outlives a chunk, and a full ``/dev/shm`` (64 MiB in a container) is an ``ENOSPC``, not a ``SIGBUS``. Python's
``SharedMemory`` isn't used: in 3.11 attaching registers the object with a resource tracker, which removes it from under its maker.

Names start with a prefix of the run, so whoever owns the run can remove what a killed process has left (:func:`sweep`). No torch here.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

SHM_FOLDER = Path("/dev/shm")

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE}


class Segment:
    """One shared-memory object of a pool; ``capacity`` is the bytes it holds on to."""

    __slots__ = ("capacity", "fd", "name")

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.capacity = 0


class SegmentPool:
    """Writes bytes to segments and uses those again that come back.

    ``keep`` bounds the bytes of segments that wait to be used again. A segment in use is written only once: its reader must
    have said that it is done (:meth:`release`), or the name is given up for good (:meth:`discard`).
    """

    def __init__(self, folder: Path, prefix: str, keep: int) -> None:
        self._folder = folder
        self._prefix = f"{prefix}{secrets.token_hex(4)}."  # a restarted stage takes no name of its predecessor
        self._numbers = itertools.count()
        self._keep = keep
        self._free: list[Segment] = []
        self._used: dict[str, Segment] = {}

    def write(self, views: Sequence[memoryview]) -> Segment | None:
        """Copy the bytes of ``views``, one after the other, to a segment; None if the machine has no room for them."""
        size = sum(map(len, views))
        try:
            segment = self._take(size)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return None
            raise
        self._used[segment.name] = segment
        try:
            _transfer(os.pwritev, segment.fd, views)
        except OSError as error:
            self.discard(segment)
            if error.errno in _NO_ROOM:
                return None
            raise
        segment.capacity = max(segment.capacity, size)
        return segment

    def release(self, segment: Segment) -> None:
        """The reader is done with it."""
        if sum(free.capacity for free in self._free) + segment.capacity > self._keep:
            self.discard(segment)
            return
        del self._used[segment.name]
        self._free.append(segment)

    def discard(self, segment: Segment) -> None:
        """Remove a segment whose reader may or may not be done: one that has opened it can finish, a later one finds nothing."""
        del self._used[segment.name]
        self._remove(segment)

    def close(self) -> None:
        """Remove all segments."""
        for segment in [*self._used.values(), *self._free]:
            self._remove(segment)
        self._used.clear()
        self._free.clear()

    @property
    def num_used(self) -> int:
        """Segments that a reader may still want."""
        return len(self._used)

    def _take(self, size: int) -> Segment:
        """The smallest free segment of that size, else the largest, which grows, else a new one."""
        if self._free:
            fitting = [free for free in self._free if free.capacity >= size]
            chosen = min(fitting, key=lambda free: free.capacity) if fitting else max(self._free, key=lambda free: free.capacity)
            self._free.remove(chosen)
            return chosen
        name = f"{self._prefix}{next(self._numbers)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        return Segment(name, os.open(self._folder / name, flags, 0o600))

    def _remove(self, segment: Segment) -> None:
        os.close(segment.fd)
        (self._folder / segment.name).unlink(missing_ok=True)  # the run's owner may have swept it


def read(folder: Path, prefix: str, name: str, views: Sequence[memoryview]) -> None:
    """Fill ``views`` with the bytes of another process's segment, from its start.

    Raises:
        FileNotFoundError: the segment is gone.
        ValueError: not the name of a segment of this run, or it is shorter than ``views``.
    """
    if not name.startswith(prefix) or "/" in name:
        raise ValueError(f"{name!r} is not a segment of this run")
    fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _transfer(os.preadv, fd, views)
    finally:
        os.close(fd)


def size_of(folder: Path, name: str) -> int:
    """Bytes that a segment holds, 0 if it is gone."""
    try:
        return (folder / name).lstat().st_size
    except FileNotFoundError:
        return 0


def sweep(folder: Path, prefix: str) -> int:
    """Remove every segment whose name starts with ``prefix`` and return how many there were."""
    found = [path for path in folder.iterdir() if path.name.startswith(prefix)]
    for path in found:
        path.unlink(missing_ok=True)  # its maker may be alive and closing
    return len(found)


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, views: Sequence[memoryview]) -> None:
    """Read or write all of ``views`` from offset 0, in as many calls as it takes."""
    left = [view for view in reversed(views) if len(view)]  # the next one is the last
    offset = 0
    while left:
        done = call(fd, left[: -_IOV_MAX - 1 : -1], offset)
        if not done:
            raise ValueError("the segment is shorter than the tensors in it")
        offset += done
        while done:
            view = left.pop()
            if done < len(view):
                left.append(view[done:])
            done -= min(done, len(view))
