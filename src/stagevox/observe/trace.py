"""``--trace FILE``: a timeline that is written while a server runs, and is whole JSON after every write.

The end of the document is written with every event and overwritten by the next: what a kill leaves can be read. When the file has
reached its limit it becomes ``FILE.1``, over the one before, and a new one is begun: at most two files, the newest events.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stagevox.errors import ConfigError
from stagevox.pipeline.spans import StepSpan

from .figures import RequestFigures
from .timeline import Event, Timeline

logger = logging.getLogger("stagevox.trace")

MIB = 1 << 20
TAIL = b"\n]}\n"


def encode(event: Event) -> bytes:
    """One event as a line."""
    return json.dumps(event, separators=(",", ":")).encode()


class TraceFile:
    """A JSON document ``{"traceEvents": [...]}`` that grows."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Make the file; raises :class:`ConfigError` if that can't be done."""
        self.path = path
        self._max_bytes = max_bytes
        self._file = -1
        self._end = 0
        self._failed = False
        try:
            self._open()
        except OSError as error:
            raise ConfigError("trace", f"can't write {str(path)!r}: {error.strerror}") from None

    @property
    def is_full(self) -> bool:
        """True once a new file should be begun."""
        return self._end >= self._max_bytes

    def _open(self) -> None:
        """Put an empty document where the file is to be: whole before it has that name."""
        if self.path.exists() and not self.path.is_file():  # such as a pipe, which can't be overwritten
            raise OSError(errno.EINVAL, "not a regular file")
        new = f"{self.path}.new"
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        head = b'{"displayTimeUnit":"ms","traceEvents":['
        self._end, self._is_first = len(head), True
        os.pwrite(self._file, head + TAIL, 0)
        os.replace(new, self.path)

    def write(self, events: Sequence[Event]) -> None:
        """Add events. A disk that takes no more ends the trace with a line in the log, and nothing else."""
        if not events or self._file < 0:
            return
        lines = b",\n".join(map(encode, events))
        data = (b"\n" if self._is_first else b",\n") + lines
        try:
            written = os.pwrite(self._file, data + TAIL, self._end)
            if written < len(data) + len(TAIL):
                raise OSError(errno.ENOSPC, "no space left")
        except OSError as error:
            self._give_up(error)
            return
        self._end += len(data)
        self._is_first = False

    def rotate(self) -> None:
        """Keep what there is as ``FILE.1`` and begin anew."""
        if self._file < 0:
            return
        try:
            os.close(self._file)
            self._file = -1
            self._keep(f"{self.path}.1")
            self._open()
        except OSError as error:
            self._give_up(error)

    def _keep(self, older: str) -> None:
        """Give the file a second name, the first one meanwhile kept."""
        with suppress(FileNotFoundError):
            os.unlink(older)
        try:
            os.link(self.path, older)
        except PermissionError:  # a file system without links
            os.replace(self.path, older)

    def _give_up(self, error: OSError) -> None:
        logger.error("trace: can't write %r any more: %s", str(self.path), error.strerror)
        if self._file >= 0:
            with suppress(OSError):  # then the document lacks its end
                os.ftruncate(self._file, self._end)
                os.pwrite(self._file, TAIL, self._end)
        self.close()

    def close(self) -> None:
        """Let go of the file; closing again does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class Trace:
    """Writes a pipeline's timeline: a sink of figures, and a watcher of steps."""

    def __init__(self, path: Path, stages: Sequence[str], *, max_bytes: int = 64 * MIB, name: str = "stagevox") -> None:
        """``max_bytes`` of events in all; raises :class:`ConfigError` if the file can't be written."""
        self._timeline = Timeline(stages, time.monotonic(), name=name)
        self._file = TraceFile(path, max_bytes // 2)
        self._file.write(self._timeline.header())

    def stepped(self, span: StepSpan) -> None:
        """A stage has made a step."""
        self._write(self._timeline.step(span))

    def opened(self, figures: RequestFigures) -> None:
        """A request has come."""
        self._write(self._timeline.opened(figures))

    def audio_gap(self, figures: RequestFigures, seconds: float) -> None:
        """Nothing: the steps show it."""

    def closed(self, figures: RequestFigures) -> None:
        """A request is over."""
        self._write(self._timeline.closed(figures))

    def _write(self, events: Sequence[Event]) -> None:
        self._file.write(events)
        if self._file.is_full:
            self._file.rotate()
            self._file.write(self._timeline.header())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
