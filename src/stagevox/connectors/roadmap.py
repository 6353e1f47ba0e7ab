"""Where the stages of a run meet: the sockets' addresses, the run's name, and who clears up after it. No torch here."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stagevox.errors import ConfigError

from .segments import SHM_FOLDER, sweep

LOOPBACK = "tcp://127.0.0.1:*"
"""An address for TCP on this host: any free port, told by :attr:`stagevox.connectors.shm.ShmConnector.address`."""

_FOLDER_PREFIX = "stagevox-"
_LOCK = "lock"
_MAX_PATH = 107  # of a Unix socket
_STAGE_NAME = re.compile(r"[A-Za-z0-9_-]+")


class RoadMap(msgspec.Struct, frozen=True):
    """What every stage process of a run is told; made by :class:`RoadOwner`, plain values throughout.

    ``key`` is in every message, so that a stranger who finds a TCP port can't put anything into a stage. It doesn't
    hide what is said from whoever can listen to the network.
    """

    run: str
    folder: str
    """Mode 0700, holds the sockets."""
    segments: str
    """Holds the segments."""
    key: bytes
    addresses: dict[str, str]
    """Stage -> where it is listening, as ZeroMQ writes it."""

    def prefix(self, stage: str | None = None) -> str:
        """How the names of the segments of a run, or of one stage in it, begin."""
        return f"{_FOLDER_PREFIX}{self.run}." + (f"{stage}." if stage else "")

    def sweep(self, stage: str | None = None) -> int:
        """Remove the segments that ``stage``, or any stage, has made; only after the death of who made them."""
        return sweep(Path(self.segments), self.prefix(stage))


class RoadOwner:
    """Makes a run's folder and, at the end, removes all that is left of the run. It lives in the parent of the stages."""

    def __init__(self, stages: Sequence[str], addresses: Mapping[str, str] | None = None) -> None:
        """``addresses`` has the stages that don't listen on a local socket, such as ``tcp://10.0.0.2:5555``."""
        for name in stages:
            if not _STAGE_NAME.fullmatch(name):
                raise ConfigError("stage", f"a name has letters, digits, - and _, not {name!r}")
        sweep_stale()
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        run = Path(folder).name.removeprefix(_FOLDER_PREFIX)
        local = {name: f"ipc://{folder}/{name}" for name in stages}
        self.map = RoadMap(
            run,
            folder,
            str(SHM_FOLDER if os.access(SHM_FOLDER, os.W_OK | os.X_OK) else folder),
            secrets.token_bytes(16),
            {**local, **(addresses or {})},
        )
        longest = max(map(len, local.values())) - len("ipc://")
        if longest > _MAX_PATH:
            shutil.rmtree(folder)
            raise ConfigError("TMPDIR", f"a socket's path may have {_MAX_PATH} bytes, {folder} makes it {longest}")
        # Locked before it has its name: whoever sweeps finds no lock, or one that is held.
        unnamed = Path(folder) / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        unnamed.rename(Path(folder) / _LOCK)

    def close(self) -> None:
        """Remove segments, sockets and folder, of killed stages too; all stages must have ended. A second call does nothing."""
        if self._lock < 0:
            return
        self.map.sweep()
        shutil.rmtree(self.map.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def hold(roadmap: RoadMap) -> int:
    """A file descriptor that keeps the run from being taken for stale until it is closed; the run must be alive."""
    fd = os.open(Path(roadmap.folder) / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def sweep_stale() -> int:
    """Remove what runs have left whose every process was killed; returns how many runs.

    A lock tells, not process ids: containers may share ``/dev/shm`` and not their ids. A run whose folder can't be seen
    is left alone.
    """
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # being made or removed
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # alive
            continue
        else:
            if SHM_FOLDER.is_dir():
                sweep(SHM_FOLDER, f"{folder.name}.")
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
        finally:
            os.close(fd)
    return count


def with_port(address: str) -> str:
    """``tcp://HOST:*`` with a port that is free now, so that a stage that is started again is found where it was.

    Raises:
        ConfigError: there is no such host, or it isn't this one.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if port != "*":
        return address
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host.strip("[]"), 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"
    except (OSError, UnicodeError) as error:  # the latter for what can't be a host's name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("connectors.addresses", f"no stage can listen at {address}: {reason}") from error
