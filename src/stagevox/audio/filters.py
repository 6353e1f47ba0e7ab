"""FFmpeg's audio filters as a stage that takes samples piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from .check import Samples

if TYPE_CHECKING:
    from av.filter import Graph

BLOCK = 512
"""Filters are fed in blocks of this many samples, so that their output doesn't depend on the sizes of the pieces."""
_MAX_SILENT_BLOCKS = 10_000
_TAPS = 64  # of the resampling filter, at the lower of the two rates


class FilterStage:
    """A chain of filters over mono samples that changes how many there are by the factor ``ratio``.

    After ``finish`` exactly ``ceil(pushed × ratio)`` samples have come out, and at no time more than that for what was pushed
    so far. Filters on their own swallow or add some at the end: here they are fed silence until they have let go of all, and
    what is over is cut. ``lead`` samples of silence go before the first, and what becomes of them is cut too.
    """

    def __init__(self, sample_rate: int, chain: Sequence[tuple[str, str]], ratio: Fraction, *, lead: int = 0) -> None:
        assert (lead * ratio).denominator == 1
        self.ratio = ratio
        self._rate = sample_rate
        self._graph = _graph(sample_rate, chain)
        self._pushed = self._fed = self._made = 0
        self._skip = int(lead * ratio)
        self._waiting: Samples = np.zeros(lead, np.float32)  # less than a block, once samples came
        self._over: Samples = np.zeros(0, np.float32)  # what came out ahead of its time

    def push(self, samples: Samples) -> Samples:
        """The samples that are ready after these ``[samples]``."""
        self._pushed += len(samples)
        self._waiting = np.concatenate([self._waiting, samples])
        whole = len(self._waiting) // BLOCK * BLOCK
        blocks, self._waiting = self._waiting[:whole], self._waiting[whole:]
        return self._emit([self._filtered(block) for block in blocks.reshape(-1, BLOCK)])

    def finish(self) -> Samples:
        """The rest."""
        parts = [self.push(np.zeros(0, np.float32))]  # the lead of a stage that was never fed
        for _ in range(_MAX_SILENT_BLOCKS):
            if self._made == self._due:
                return np.concatenate(parts)
            block = np.zeros(BLOCK, np.float32)
            block[: len(self._waiting)] = self._waiting
            self._waiting = self._waiting[:0]
            parts.append(self._emit([self._filtered(block)]))
        raise AssertionError("the filters hold back their samples for ever")

    @property
    def _due(self) -> int:
        return -(-self._pushed * self.ratio.numerator // self.ratio.denominator)

    def _emit(self, parts: list[Samples]) -> Samples:
        ready = np.concatenate([self._over, *parts])
        skipped = min(self._skip, len(ready))
        self._skip -= skipped
        ready = ready[skipped:]
        due = self._due - self._made
        ready, self._over = ready[:due], ready[due:]
        self._made += len(ready)
        return ready

    def _filtered(self, block: Samples) -> Samples:
        import av

        frame = av.AudioFrame.from_ndarray(block[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._fed, Fraction(1, self._rate)
        self._fed += len(block)
        self._graph.push(frame)
        parts: list[Samples] = []
        while True:
            try:
                made = self._graph.pull()
            except av.BlockingIOError:  # wants more
                return np.concatenate(parts) if parts else np.zeros(0, np.float32)
            assert isinstance(made, av.AudioFrame)
            parts.append(made.to_ndarray().reshape(-1).astype(np.float32))


class Resampler(FilterStage):
    """Brings mono samples from one rate (Hz) to another, by FFmpeg's polyphase filter; ``ceil(n × target / source)`` of them.

    The first sample stays where it is in time; before it and after the last there was silence.
    """

    def __init__(self, source: int, target: int) -> None:
        ratio = Fraction(target, source)
        reach = _TAPS * max(1, -(-source // target))
        # Left to itself the filter takes the sound to be mirrored at its start.
        lead = -(-reach // ratio.denominator) * ratio.denominator
        super().__init__(source, [("aresample", f"{target}:filter_size={_TAPS}")], ratio, lead=lead)


def resampled(samples: Samples, source: int, target: int) -> Samples:
    """All samples of a clip at another rate."""
    if source == target:
        return samples
    stage = Resampler(source, target)
    return np.concatenate([stage.push(samples), stage.finish()])


def _graph(sample_rate: int, chain: Sequence[tuple[str, str]]) -> Graph:
    import av.filter

    graph = av.filter.Graph()
    last = graph.add_abuffer(sample_rate=sample_rate, format="flt", layout="mono", time_base=Fraction(1, sample_rate))
    for name, arguments in [*chain, ("aformat", "sample_fmts=flt:channel_layouts=mono"), ("abuffersink", "")]:
        step = graph.add(name, arguments or None)
        last.link_to(step)
        last = step
    graph.configure()
    return graph
