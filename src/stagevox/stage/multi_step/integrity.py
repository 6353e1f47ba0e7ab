"""The books between two steps, checked in full. Tests call this after every step; it costs a walk over all requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from .plan import WindowLedger


def check_integrity(scheduler: Any, in_flight: int = 0) -> None:
    """Assert what holds for every request when no step is being made.

    ``in_flight`` is how many steps the engine has scheduled and not yet answered; 0 with synchronous scheduling.
    """
    ledger: WindowLedger = scheduler.windows
    assert in_flight or not ledger.outstanding, f"windows nobody works on: {ledger.outstanding}"
    for req_id in ledger.outstanding.keys() - scheduler.requests.keys():
        assert in_flight, f"{req_id} has ended and its window was never answered"
    for request in scheduler.requests.values():
        _check(scheduler, ledger, request, in_flight)


def _check(scheduler: Any, ledger: WindowLedger, request: Any, in_flight: int) -> None:
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    who = f"{request.request_id}: computed {computed}, placeholders {placeholders}, known {request.num_tokens}"
    assert computed >= 0 and placeholders >= 0 and request.num_in_flight_tokens >= 0, who
    assert ledger.asynchronous or not placeholders, f"{who}: placeholders without async scheduling"
    assert in_flight or not request.num_in_flight_tokens, f"{who}: {request.num_in_flight_tokens} tokens in flight for ever"
    if request.status != RequestStatus.RUNNING:
        assert request.status != RequestStatus.PREEMPTED or computed == 0, who
        return
    confirmed = computed - placeholders
    assert confirmed < request.num_tokens, f"{who}: the newest token can't be computed before it is fed"
    assert computed <= scheduler.max_model_len, f"{who}: past the context"
    produced = request.num_tokens - request.num_prompt_tokens + placeholders
    assert produced <= request.max_tokens, f"{who}: past max_tokens {request.max_tokens}"
    if placeholders or (confirmed >= request.num_prompt_tokens and not request.num_preemptions):
        assert confirmed == request.num_tokens - 1, f"{who}: a decoding request has slots that were never written"
    if ledger.fences(request):
        steps = ledger.outstanding[request.request_id].steps
        assert request.num_in_flight_tokens >= steps, who
        assert not ledger.asynchronous or placeholders >= steps, who
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    for size, ids in zip(sizes, scheduler.kv_cache_manager.get_block_ids(request.request_id), strict=True):
        assert len(ids) * size >= computed, f"{who}: {len(ids)} blocks of {size}"
