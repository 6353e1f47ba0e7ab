"""Planning a window: which steps may be merged, and what the scheduler's books say meanwhile (MS-3, MS-5, MS-6).

A window is one scheduling round that yields up to K sampled tokens for each of its requests. The books, per request:

- Before a step ``computed == known - 1``, where ``known`` counts tokens and placeholders: the newest token is fed.
- vLLM's own schedule has booked the first step. The planner books ``K - 1`` more: KV slots, ``num_computed_tokens``,
  ``num_in_flight_tokens`` and, under async scheduling, ``num_output_placeholders``. So ``computed - placeholders``, the
  length that is confirmed, doesn't change under async scheduling; there are no placeholders otherwise.
- ``update_from_output`` takes the in-flight tokens back by the step's own count, whatever the runner did with it, and the
  placeholders by what came; :mod:`.reconcile` gives back what never came.
- While a window is outstanding, no further step of its requests is scheduled. Counters don't say so (the next position
  looks due): the ledger does, and the scheduler's one predicate for held requests asks it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from ..wire import OmniSchedulerOutput
from .counters import WindowCounters
from .gates import Refusal, request_gate

logger = logging.getLogger("stagevox.multi_step")


class Window(NamedTuple):
    """A request's share of a window that is not reconciled."""

    request: Any
    steps: int
    preemptions: int
    """The request's preemption count when the window was planned."""


@dataclass(slots=True)
class WindowLedger:
    """What one scheduler knows of its windows."""

    steps: int
    """K; 0: off."""
    asynchronous: bool
    counters: WindowCounters
    outstanding: dict[str, Window] = field(default_factory=dict)
    admits: dict[str, Refusal | None] = field(default_factory=dict)
    """Verdicts of :func:`request_gate`, which hold as long as the request lives."""

    def fences(self, request: Any) -> bool:
        """True while a window of this request is not reconciled."""
        window = self.outstanding.get(request.request_id)
        return window is not None and window.request is request

    def forget(self, req_id: str) -> None:
        """A request has ended. Its window, if there is one, stays until the runner has answered it."""
        self.admits.pop(req_id, None)


class Refused(Exception):
    """A plan that can't be, with its reason."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


def plan_multi_step_window(scheduler: Any, output: SchedulerOutput) -> SchedulerOutput:
    """Turn the round that ``scheduler`` has just scheduled into a window, if it may be one.

    Returns ``output`` itself, or a wider one with ``multi_step_plan``. A refusal is counted, and lossless.
    """
    ledger: WindowLedger = scheduler.windows
    if not output.num_scheduled_tokens:
        return output
    grown: dict[str, tuple[list[int], ...]] = {}
    try:
        steps = _steps(scheduler, output)
        _reserve_slots(scheduler, output, steps - 1, grown)
    except Refused as refused:
        ledger.counters.refuse(refused.reason)
        return _with_blocks(scheduler, output, grown)
    except Exception:
        logger.exception("planning a window failed; this round runs step by step")
        ledger.counters.refuse(Refusal.PLAN_ERROR)
        return _with_blocks(scheduler, output, grown)
    ledger.counters.plan(shortened=steps < ledger.steps)
    extra = steps - 1
    for req_id in output.num_scheduled_tokens:
        request = scheduler.requests[req_id]
        request.num_computed_tokens += extra
        request.num_in_flight_tokens += extra
        if ledger.asynchronous:
            request.num_output_placeholders += extra
        ledger.outstanding[req_id] = Window(request, steps, request.num_preemptions)
    plan = dict.fromkeys(output.num_scheduled_tokens, steps)
    wide = _with_blocks(scheduler, output, grown)
    return OmniSchedulerOutput.planned(wide, plan)


def _steps(scheduler: Any, output: SchedulerOutput) -> int:
    """How many steps the round may have; raises :class:`Refused`."""
    ledger: WindowLedger = scheduler.windows
    if output.scheduled_new_reqs:
        raise Refused(Refusal.PREFILL)
    if output.scheduled_encoder_inputs:
        raise Refused(Refusal.ENCODER_INPUTS)
    if ledger.outstanding:
        raise Refused(Refusal.OUTSTANDING)
    waits = scheduler.waiting or scheduler.kv_holding_waiting
    if waits and len(scheduler.running) < scheduler.max_num_active_reqs:
        raise Refused(Refusal.WAITING)
    steps = ledger.steps
    own = int(ledger.asynchronous)  # the placeholder that this round's own step has booked
    cached = output.scheduled_cached_reqs
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = scheduler.requests[req_id]
        known = request.num_tokens + request.num_output_placeholders - own
        if computed < request.num_prompt_tokens:
            raise Refused(Refusal.PREFILL)
        if computed != known - 1:
            raise Refused(Refusal.REPLAY)
        if req_id not in ledger.admits:
            ledger.admits[req_id] = request_gate(request)
        if (reason := ledger.admits[req_id]) is not None:
            raise Refused(reason)
        left = request.max_tokens - (known - request.num_prompt_tokens)
        rooms = [left, scheduler.max_model_len - known, *scheduler.window_limits(req_id, computed)]
        steps = min(steps, *rooms)
        if steps < 2:
            raise Refused(Refusal.BUDGET)
    return steps


def _reserve_slots(scheduler: Any, output: SchedulerOutput, extra: int, grown: dict[str, tuple[list[int], ...]]) -> None:
    """Reserve ``extra`` more slots for every row, or for none; ``grown`` gets the new block ids."""
    manager = scheduler.kv_cache_manager
    requests = [scheduler.requests[req_id] for req_id in output.num_scheduled_tokens]
    if sum(_missing_blocks(scheduler, requests, extra)) > manager.block_pool.get_num_free_blocks():
        raise Refused(Refusal.KV_CACHE)
    for request in requests:
        blocks = manager.allocate_slots(request, extra)
        if blocks is None:  # what was given to the rows before stays theirs; the runner is told
            raise Refused(Refusal.KV_CACHE)
        ids = blocks.get_block_ids(allow_none=True)
        if ids is not None:
            grown[request.request_id] = ids


def _missing_blocks(scheduler: Any, requests: Iterable[Any], extra: int) -> Iterable[int]:
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    for request in requests:
        end = request.num_computed_tokens + extra
        for size, ids in zip(sizes, scheduler.kv_cache_manager.get_block_ids(request.request_id), strict=True):
            yield max(0, -(-end // size) - len(ids))


def _with_blocks(scheduler: Any, output: SchedulerOutput, grown: dict[str, tuple[list[int], ...]]) -> SchedulerOutput:
    """The round with the blocks that the planner got, so that the runner's block tables stay those of the scheduler."""
    if not grown:
        return output
    cached = output.scheduled_cached_reqs
    blocks = [_joined(old, grown.get(req_id)) for req_id, old in zip(cached.req_ids, cached.new_block_ids, strict=True)]
    zero = scheduler.window_blocks_to_zero()
    return replace(
        output,
        scheduled_cached_reqs=replace(cached, new_block_ids=blocks),
        new_block_ids_to_zero=[*(output.new_block_ids_to_zero or ()), *zero] or None,
    )


def _joined(old: tuple[list[int], ...] | None, new: tuple[list[int], ...] | None) -> tuple[list[int], ...] | None:
    if old is None or new is None:
        return new if old is None else old
    return tuple([*first, *second] for first, second in zip(old, new, strict=True))
