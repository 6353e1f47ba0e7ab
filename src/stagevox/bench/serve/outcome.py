"""What became of one request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .player import Arrival, Playback, play
from .sound import Samples


@dataclass(slots=True)
class Outcome:
    """Times are seconds on the client's clock; None: never."""

    index: int
    prompt: str
    due_at: float
    """When it should have been sent."""
    sent_at: float
    headers_at: float | None = None
    first_text_at: float | None = None
    finished_at: float | None = None
    """When the last byte came, or the request failed."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Samples as they came; never empty ones."""
    chunks: list[Samples] = field(default_factory=list)
    sample_rate: int | None = None
    text: str = ""
    text_tokens: int | None = None
    audio_tokens: int | None = None
    finish_reason: str | None = None
    server_id: str | None = None
    failure: str | None = None
    """Its kind, such as ``HTTP 429``; None for a success."""
    detail: str | None = None
    server: dict[str, Any] | None = None
    """What the server says of it afterwards, if it keeps such records."""

    @property
    def ok(self) -> bool:
        """True for a whole answer with all that was asked for."""
        return self.failure is None

    @property
    def spoken(self) -> bool:
        """True if samples came."""
        return bool(self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first_text_at is None else self.first_text_at - self.sent_at

    @property
    def ttfa(self) -> float | None:
        """Seconds to the first sample: a header is none."""
        return self.arrivals[0].at - self.sent_at if self.arrivals else None

    @property
    def e2el(self) -> float:
        """Seconds to the last byte."""
        assert self.finished_at is not None
        return self.finished_at - self.sent_at

    @property
    def num_samples(self) -> int:
        """Samples that came."""
        return sum(arrival.samples for arrival in self.arrivals)

    @property
    def audio_seconds(self) -> float:
        """How long the speech is."""
        return self.num_samples / self.sample_rate if self.sample_rate else 0.0

    @property
    def rtf(self) -> float | None:
        """Time from sending to the last byte, over the speech's own."""
        return self.e2el / self.audio_seconds if self.audio_seconds else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks of speech."""
        return [after.at - before.at for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def playback(self) -> Playback | None:
        """What a listener heard; None without speech."""
        if not self.arrivals:
            return None
        assert self.sample_rate is not None
        return play(self.arrivals, self.sample_rate)

    def samples(self) -> Samples:
        """All samples, 16 bits each."""
        return np.concatenate(self.chunks) if self.chunks else np.zeros(0, np.int16)
