"""Server-sent events, however their bytes are cut."""

from __future__ import annotations


class EventReader:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete; events without data are none."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found

    @property
    def is_broken(self) -> bool:
        """True if the stream ended inside an event."""
        return bool(self._rest.strip())
