"""Where the time of a request went, stage by stage, as the server saw it.

Only times and counts are kept, never what was said, and only of the latest requests.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict

from stagevox.pipeline.events import ClientEvent, EmitOutput

from .protocol.timings import RequestTiming, StageTiming
from .record import RequestRecord

MOST_REQUESTS = 1024
MOST_MARKS = 64


class _StageTrack:
    """What one stage gave one request: a mark for each output, with its tokens. When there are too many, neighbours are joined."""

    __slots__ = ("counts", "first_at", "outputs", "times", "tokens")

    def __init__(self, now: float) -> None:
        self.first_at = now
        self.outputs = self.tokens = 0
        self.times, self.counts = array("d"), array("I")

    def add(self, now: float, tokens: int) -> None:
        """Mark an output."""
        self.outputs += 1
        self.tokens += tokens
        self.times.append(now)
        self.counts.append(tokens)
        if len(self.times) > MOST_MARKS:
            # The newest stays apart: where marks are joined, the later time counts.
            self.times = self.times[1:-1:2] + self.times[-1:]
            self.counts = array("I", map(sum, zip(self.counts[:-1:2], self.counts[1:-1:2], strict=True))) + self.counts[-1:]


class RequestTimings:
    """Watches requests (an :class:`.record.Observer`) and keeps the timings of the latest ones."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._held: OrderedDict[str, tuple[RequestRecord, dict[str, _StageTrack]]] = OrderedDict()

    def started(self, record: RequestRecord) -> None:
        """Begin to watch one; the oldest that are over make room."""
        self._held[record.req_id] = (record, {})
        if len(self._held) > self._most:
            over = next((req_id for req_id, (other, _) in self._held.items() if other.finished_at is not None), None)
            self._held.pop(over) if over is not None else self._held.popitem(last=False)

    def happened(self, record: RequestRecord, event: ClientEvent) -> None:
        """A stage gave something."""
        held = self._held.get(record.req_id)
        if held is None or not isinstance(event, EmitOutput):
            return
        now = time.monotonic()
        track = held[1].get(event.stage)
        if track is None:
            track = held[1][event.stage] = _StageTrack(now)
        track.add(now, len(event.output.new_token_ids))

    def finished(self, record: RequestRecord) -> None:
        """The record itself knows when."""

    def get(self, req_id: str) -> RequestTiming | None:
        """One request's times, in seconds from its arrival; None if it isn't kept."""
        held = self._held.get(req_id)
        if held is None:
            return None
        record, stages = held

        def since(at: float | None) -> float | None:
            return None if at is None else round(at - record.arrived_at, 6)

        finished = since(record.finished_at)
        rtf = finished / record.audio_seconds if finished is not None and record.audio_seconds else None
        return RequestTiming(
            id=record.req_id,
            object="timing",
            endpoint=record.endpoint,
            stream=record.stream,
            queue_s=since(record.admitted_at),
            first_text_s=since(record.first_text_at),
            first_audio_s=since(record.first_audio_at),
            finished_s=finished,
            audio_seconds=record.audio_seconds,
            audio_rtf=rtf,
            prompt_tokens=record.prompt_tokens,
            text_tokens=record.text_tokens,
            audio_tokens=record.audio_tokens,
            finish_reason=record.finish_reason,
            error=record.error,
            stages=[
                StageTiming(
                    name=name,
                    first_s=since(track.first_at),
                    last_s=since(track.times[-1]),
                    outputs=track.outputs,
                    tokens=track.tokens,
                    marks=[
                        (round(at - record.arrived_at, 6), tokens) for at, tokens in zip(track.times, track.counts, strict=True)
                    ],
                )
                for name, track in stages.items()
            ],
        )
