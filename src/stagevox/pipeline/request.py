"""A request as the pipeline sees it, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stagevox.stage.payload import StageRequest


@dataclass(frozen=True, slots=True)
class OmniRequest:
    """One request to the whole pipeline."""

    first: StageRequest
    """What the first stage runs; its options go to every stage."""
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The client's ``SamplingParams`` fields per stage name, laid over those of ``first`` for the first stage."""
    last_stage: str | None = None
    """Where its road ends, such as the Thinker for a text-only answer; None for the last stage of the model."""

    @property
    def req_id(self) -> str:
        """The caller's name for it, unique among requests in flight."""
        return self.first.req_id

    def at(self, stage: str, *, first: bool) -> StageRequest:
        """The request as ``stage`` is told of it: without a prompt downstream of the first."""
        fields = self.sampling.get(stage, {})
        if first:
            return replace(self.first, sampling={**self.first.sampling, **fields})
        return StageRequest(self.req_id, None, sampling=fields, options=self.first.options)


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened to a request, in seconds on the driver's clock."""

    arrived_at: float
    first_output_at: float | None
    """First output of the last stage: time to first audio counts to here."""
    finished_at: float


@dataclass(slots=True)
class StageProgress:
    """How far a request has come at one stage."""

    has_all_input: bool
    finish_reason: str | None = None


class Progress:
    """A request in flight. ``road`` names its stages in order."""

    def __init__(self, request: OmniRequest, road: Sequence[str], now: float) -> None:
        self.request = request
        self.stages = {name: StageProgress(has_all_input=number == 0) for number, name in enumerate(road)}
        self.last = road[-1]
        self.arrived_at = now
        self.heard_at = now
        self.first_output_at: float | None = None

    def open_stages(self) -> list[str]:
        """The stages that still hold the request, in order."""
        return [name for name, stage in self.stages.items() if stage.finish_reason is None]

    def downstream(self, stage: str) -> str | None:
        """The stage that ``stage`` feeds, if the request visits one."""
        road = list(self.stages)
        number = road.index(stage) + 1
        return road[number] if number < len(road) else None

    def has_sent_all(self, stage: str) -> bool:
        """True if the last chunk of ``stage`` has come."""
        target = self.downstream(stage)
        return target is not None and self.stages[target].has_all_input

    def finish_reason(self) -> str:
        """``stop`` if every stage came to its own end, so that all was spoken; else ``length``."""
        return "stop" if all(stage.finish_reason == "stop" for stage in self.stages.values()) else "length"

    def timing(self, now: float) -> Timing:
        """The times of a request that ends now."""
        return Timing(self.arrived_at, self.first_output_at, now)


@dataclass(slots=True)
class StageStats:
    """What a driver measured of one stage."""

    name: str
    steps: int = 0
    tokens: int = 0
    """Token ids, and positions of a generation stage, in its outputs."""
    seconds: float = 0.0
    """Time inside ``Stage.step``."""

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of stepping a token; NaN without tokens."""
        return 1e3 * self.seconds / self.tokens if self.tokens else math.nan

    def since(self, before: StageStats) -> StageStats:
        """What was added since the copy ``before``."""
        return StageStats(self.name, self.steps - before.steps, self.tokens - before.tokens, self.seconds - before.seconds)
