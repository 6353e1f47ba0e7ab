"""The schedulers of AR stages.

- With runner-managed MTP, a replay stops one position short of the newest one, which is then a decode row of its own.
- A round may merge several decode steps (:mod:`.multi_step`); requests in such a round are held until it is reconciled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .multi_step.counters import WindowCounters
from .multi_step.gates import Refusal
from .multi_step.plan import WindowLedger, plan_multi_step_window
from .multi_step.reconcile import reconcile_window_shortfall
from .scheduler import OmniSchedulerMixin
from .wait import WaitState


class ARSchedulerMixin(OmniSchedulerMixin):
    """What AR stages add: windows of merged steps, and replays that end where the contract has a row for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        steps, counters = self.stage.multi_step_decode_steps, WindowCounters(self.stage.name)
        self.windows = WindowLedger(steps, isinstance(self, AsyncScheduler), counters)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As above, steps merged where that may be; requests that stand where their conditioning ends wait for more."""
        output = super().schedule(*args, **kwargs)
        if self.windows.steps:
            output = plan_multi_step_window(self, output)
        for req_id, ready in self._ready.items():
            request = self.requests[req_id]
            if request.status == RequestStatus.RUNNING and request.num_computed_tokens >= ready:
                self.wait_room[req_id] = WaitState.WAITING_FOR_CHUNK
        return output

    def window_limits(self, req_id: str, computed: int) -> Iterator[int]:
        """How many steps from position ``computed`` on a request's conditioning and its first chunk allow."""
        if (ready := self._ready.get(req_id)) is not None:
            yield ready - computed
        if self._chunks is not None and (rows := self._chunks.rows_to_first_chunk(req_id)) is not None:
            request = self.requests[req_id]
            rows -= computed - max(request.num_prompt_tokens, request.num_tokens - 1)  # on their way
            if rows > 0:
                yield rows

    def window_blocks_to_zero(self) -> list[int]:
        """New blocks to be zeroed before they are written, taken since the round was scheduled."""
        return self._get_new_block_ids_to_zero() or []

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """As above; a window is settled before its tokens are booked, and who failed within it fails after them."""
        plan = getattr(scheduler_output, "multi_step_plan", None)
        if not plan:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._settle(plan, model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output)
        late = getattr(model_runner_output, "failed_after", None)
        if late:
            self.omni_fail(late)
        return result

    def _settle(self, plan: Mapping[str, int], done: ModelRunnerOutput) -> None:
        tokens = done.sampled_token_ids
        produced = {req_id: len(tokens[index]) for req_id, index in done.req_id_to_index.items()}
        for req_id in reconcile_window_shortfall(self, plan, produced):
            # Parked for a position that the window never reached: it may run on to there.
            if self.wait_room.get(req_id) is WaitState.WAITING_FOR_CHUNK:
                del self.wait_room[req_id]
        counters, report = self.windows.counters, getattr(done, "window", None)
        assert report is not None, "a planned step came back without a word about its window"
        if report.refusal is not None:
            counters.refuse(Refusal(report.refusal))
        else:
            steps = next(iter(plan.values()))
            counters.execute(
                steps, report.steps, sum(produced.values()), len(plan), report.derived, shortened=steps < self.windows.steps
            )
        counters.log()

    def _stands(self, request: Request, num_computed_tokens: int) -> bool:
        """True if no step of this request may be scheduled: its window is outstanding, its conditioning ends here, or its consumer is full.

        The one predicate for all of them; each reason ends on its own, none ends another.
        """
        req_id = request.request_id
        ready = self._ready.get(req_id)
        starved = ready is not None and num_computed_tokens >= ready
        return starved or self.windows.fences(request) or (bool(self.omni_held) and self._is_held(request))

    def get_num_unfinished_requests(self) -> int:
        """As above, without those whose window is outstanding and that were not counted as waiting already."""
        count: int = super().get_num_unfinished_requests()
        if not self.windows.outstanding:
            return count
        fenced = [request for request in self.requests.values() if self.windows.fences(request)]
        return count - sum(request.request_id not in self.wait_room and not self._is_held(request) for request in fenced)

    def _forget(self, req_id: str) -> None:
        super()._forget(req_id)
        self.windows.forget(req_id)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self._stands(request, num_computed_tokens):
            return 0
        if (ready := self._ready.get(request.request_id)) is not None:
            count = min(count, ready - num_computed_tokens)
        if self.stage.has_talker_mtp:
            known = request.num_tokens + request.num_output_placeholders
            reaches_newest = num_computed_tokens + count == known
            if reaches_newest and num_computed_tokens + 1 < known and known > request.num_prompt_tokens:
                return count - 1
        return count


class OmniARScheduler(ARSchedulerMixin, Scheduler):
    """For AR stages."""


class OmniAsyncARScheduler(ARSchedulerMixin, AsyncScheduler):
    """For AR stages whose steps are scheduled while the one before still runs."""
