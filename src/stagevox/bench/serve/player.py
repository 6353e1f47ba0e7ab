"""What a listener hears whose player starts at the first chunk, and stops whenever the next one isn't there yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """Samples that came at a time."""

    at: float
    """Seconds on the client's clock."""
    samples: int


@dataclass(frozen=True, slots=True)
class Playback:
    """Times in seconds."""

    audio_seconds: float
    underruns: int
    """How often the player had nothing left to play before the end."""
    stalled_seconds: float
    """Silence that it put in, all together."""
    needed_head_start: float
    """How much later it would have had to start to play without a break."""

    @property
    def continuity(self) -> float:
        """Speech as a share of the time from its first to its last sample: 1 without a break."""
        return self.audio_seconds / (self.audio_seconds + self.stalled_seconds)


def play(arrivals: Sequence[Arrival], sample_rate: int) -> Playback:
    """Play ``arrivals``, at least one, in order. A chunk that comes as the last sample ends, or half a sample later, is in time."""
    start = arrivals[0].at
    total = underruns = 0
    stalled = head_start = 0.0
    for at, samples in arrivals:
        runs_dry = start + total / sample_rate
        head_start = max(head_start, at - runs_dry)
        if total and at - (runs_dry + stalled) > 0.5 / sample_rate:
            underruns += 1
            stalled = at - runs_dry
        total += samples
    return Playback(total / sample_rate, underruns, stalled, head_start)
