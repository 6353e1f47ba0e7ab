"""What is worth telling of one HTTP request, taken from the events it made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stagevox.contract import WAVEFORM
from stagevox.pipeline.events import ClientEvent, EmitOutput, FinishRequest

if TYPE_CHECKING:  # the server imports this package
    from stagevox.server.record import RequestRecord


@dataclass(slots=True)
class StageFigures:
    """What one stage made for a request, all choices together. Times are seconds of ``time.monotonic``."""

    first_at: float
    last_at: float
    outputs: int = 0
    tokens: int = 0
    """Token ids, and positions of a generation stage."""


@dataclass(slots=True)
class RequestFigures:
    """One request: the server's record, and what its events say. Properties that don't exist, such as an RTF of no audio, are None."""

    record: RequestRecord
    first_token_at: float | None = None
    first_audio_at: float | None = None
    done_at: float | None = None
    """When the pipeline had ended its last choice; a client that reads slowly gets the rest later."""
    stages: dict[str, StageFigures] = field(default_factory=dict)
    gaps: int = 0
    longest_gap: float = 0.0
    """The longest time between two pieces of audio of a choice."""
    audio_at: dict[str, float] = field(default_factory=dict, repr=False)
    """When the newest audio of each choice came."""

    def take(self, event: ClientEvent, now: float) -> float | None:
        """Note an event; returns the time since the choice's audio before, if it has more audio."""
        match event:
            case FinishRequest(timing=timing):
                self.done_at = max(timing.finished_at, self.done_at or 0.0)
                return None
            case EmitOutput(name, output):
                stage = self.stages.setdefault(name, StageFigures(now, now))
                stage.last_at = now
                stage.outputs += 1
                stage.tokens += len(output.new_token_ids) + output.positions
                if output.new_token_ids and self.first_token_at is None:
                    self.first_token_at = now
                if WAVEFORM in output.multimodal and len(output.multimodal[WAVEFORM]):
                    return self._audio(output.req_id, now)
        return None

    def _audio(self, req_id: str, now: float) -> float | None:
        before = self.audio_at.get(req_id)
        self.audio_at[req_id] = now
        if before is None:
            self.first_audio_at = now if self.first_audio_at is None else self.first_audio_at
            return None
        gap = now - before
        self.gaps += 1
        self.longest_gap = max(self.longest_gap, gap)
        return gap

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self.record.finish_reason or "error"

    @property
    def seconds(self) -> float | None:
        """From its arrival to its end."""
        return self._since_arrival(self.record.finished_at)

    @property
    def queue_seconds(self) -> float | None:
        """From its arrival until it left the queue."""
        return self._since_arrival(self.record.admitted_at)

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to the first token of any stage."""
        return self._since_arrival(self.first_token_at)

    @property
    def first_audio_seconds(self) -> float | None:
        """From its arrival to the first sample."""
        return self._since_arrival(self.first_audio_at)

    @property
    def rtf(self) -> float | None:
        """Of a request that was spoken to its end: the time from leaving the queue until all was made, over the audio's length."""
        record = self.record
        if (
            self.done_at is None
            or record.admitted_at is None
            or not record.audio_seconds
            or self.reason not in ("stop", "length")
        ):
            return None
        return (self.done_at - record.admitted_at) / record.audio_seconds

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.record.arrived_at

    def stage_waits(self, order: Iterable[str]) -> dict[str, float]:
        """How long each stage's first output came after that of the stage before it; the first stage's after leaving the queue."""
        waits, before = {}, self.record.admitted_at
        for name in order:
            stage = self.stages.get(name)
            if stage is None or before is None:
                break
            waits[name] = max(0.0, stage.first_at - before)
            before = stage.first_at
        return waits

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values; what doesn't exist is left out."""
        record = self.record
        found = {
            "endpoint": record.endpoint,
            "stream": record.stream,
            "finish_reason": self.reason,
            "error": record.error,
            "prompt_tokens": record.prompt_tokens,
            "text_tokens": record.text_tokens,
            "audio_tokens": record.audio_tokens,
            "audio_seconds": record.audio_seconds,
            "queue_seconds": self.queue_seconds,
            "first_token_seconds": self.first_token_seconds,
            "first_audio_seconds": self.first_audio_seconds,
            "seconds": self.seconds,
            "rtf": self.rtf,
            "longest_gap_seconds": self.longest_gap if self.gaps else None,
        }
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in found.items() if value is not None}


class Sink(Protocol):
    """Where figures go."""

    def opened(self, figures: RequestFigures) -> None:
        """A request has come."""
        ...

    def audio_gap(self, figures: RequestFigures, seconds: float) -> None:
        """More audio came, so long after the piece before."""
        ...

    def closed(self, figures: RequestFigures) -> None:
        """It is over, and all figures are there."""
        ...


class RequestWatch:
    """Turns what a server tells its observers (:class:`stagevox.server.record.Observer`) into figures."""

    def __init__(self, sinks: Sequence[Sink], clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks = tuple(sinks)
        self._clock = clock
        self._live: dict[str, RequestFigures] = {}

    def started(self, record: RequestRecord) -> None:
        """A request has come."""
        figures = self._live[record.req_id] = RequestFigures(record)
        for sink in self._sinks:
            sink.opened(figures)

    def happened(self, record: RequestRecord, event: ClientEvent) -> None:
        """A stage had an output for it, or one of its choices ended."""
        figures = self._live.get(record.req_id)
        if figures is None:
            return  # it is over: what still comes was on its way
        gap = figures.take(event, self._clock())
        if gap is not None:
            for sink in self._sinks:
                sink.audio_gap(figures, gap)

    def finished(self, record: RequestRecord) -> None:
        """It is over."""
        figures = self._live.pop(record.req_id)
        for sink in self._sinks:
            sink.closed(figures)
