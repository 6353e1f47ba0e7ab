"""Settling a window: what was reserved and never came is given back, exactly once (MS-4, MS-7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from ..wire import OmniSchedulerOutput
from .plan import WindowLedger


def reconcile_window_shortfall(scheduler: Any, plan: Mapping[str, int], produced: Mapping[str, int]) -> list[str]:
    """Close the windows of ``plan``; ``produced`` says how many tokens came for each request.

    To be called before ``update_from_output`` books the tokens. A request that got fewer than planned goes back to the KV slots that
    were written. One that has ended or was preempted since is left alone: its books were closed or reset by then, and
    tokens on their way to a preempted one follow upstream. In-flight tokens are upstream's to take back, by the count of the step.

    Returns the requests that went back.
    """
    ledger: WindowLedger = scheduler.windows
    back = []
    for req_id, steps in plan.items():
        window = ledger.outstanding.pop(req_id)
        request = scheduler.requests.get(req_id)
        missing = steps - produced.get(req_id, 0)
        if request is not window.request or request.num_preemptions != window.preemptions or not missing:
            continue
        assert 0 < missing <= steps, f"{req_id}: {steps - missing} tokens came of a window of {steps}"
        request.num_computed_tokens -= missing
        assert request.num_computed_tokens >= 0
        if ledger.asynchronous:
            request.num_output_placeholders -= missing
            assert request.num_output_placeholders >= 0
        back.append(req_id)
    return back


def shrink_refused_multi_step_window(output: SchedulerOutput) -> SchedulerOutput:
    """A copy of a planned step with one token a planned request, and no plan; a step without a plan is returned as it is.

    Under a uniproc executor the scheduler holds the same object and counts with it later, so it is never changed.
    """
    plan: Mapping[str, int] = getattr(output, "multi_step_plan", {})
    if not plan:
        return output
    assert isinstance(output, OmniSchedulerOutput)
    return output.with_tokens({req_id: 1 for req_id in plan}, {})
