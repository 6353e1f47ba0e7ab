"""The scheduler of generation stages: a request's prompt grows while it lives, and it ends when its input has ended and is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .payload import StageInput, StageOutput, StageRequest
from .scheduler import NOTHING, OmniSchedulerMixin
from .wait import WaitState


class OmniGenerationScheduler(OmniSchedulerMixin, Scheduler):
    """For generation stages: positions are input frames, all of them prompt, and more may come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream turns chunking off for models without a KV cache. A generation model reads its frames by absolute position,
        # so any split is exact, and without it a span above the token budget would never run.
        self.scheduler_config.enable_chunked_prefill = True
        self._ended: set[str] = set()

    def _accept(self, request: StageRequest, given: StageInput) -> None:
        req_id, frames = request.req_id, given.prompt_token_ids
        if given.end:
            self._ended.add(req_id)
        if self.wait_room.get(req_id) is WaitState.WAITING_FOR_INPUT:
            if frames:
                self._admit(request, given)
            elif given.end:
                self._outputs.append(StageOutput(req_id, [], NOTHING, "stop"))
                self._forget(req_id)
            else:
                self._ride(req_id, given.payload)
            return
        self._ride(req_id, given.payload)
        live = self.requests[req_id]
        self._check_length(live.num_tokens + len(frames))
        if frames:
            self._extend(live, frames)
            self.wait_room.pop(req_id, None)
        elif given.end and live.num_computed_tokens == live.num_tokens:
            self._finish(req_id, NOTHING, 0)

    def _extend(self, request: Request, frames: list[int]) -> None:
        assert request.prompt_token_ids is not None
        request.prompt_token_ids.extend(frames)
        request._all_token_ids.extend(frames)
        request.num_prompt_tokens += len(frames)

    def _emit(self, req_id: str, *args: Any) -> None:
        pass  # tokens are never sampled here; see update_from_output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Hand out the samples; finish requests whose input has ended, park those that wait for more."""
        result = super().update_from_output(scheduler_output, model_runner_output)
        outputs = getattr(model_runner_output, "multimodal_outputs", NOTHING)
        for req_id, span in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or req_id not in self.omni_requests:
                continue
            named = outputs.get(req_id, NOTHING)
            if request.num_computed_tokens < request.num_tokens:
                self._outputs.append(StageOutput(req_id, [], named, positions=span))
            elif req_id in self._ended:
                self._finish(req_id, named, span)
            else:
                self.wait_room[req_id] = WaitState.WAITING_FOR_CHUNK
                self._outputs.append(StageOutput(req_id, [], named, positions=span))
        return result

    def _finish(self, req_id: str, named: Mapping[str, Any], span: int) -> None:
        self._outputs.append(StageOutput(req_id, [], named, "stop", positions=span))
        self.finish_requests(req_id, RequestStatus.FINISHED_STOPPED)

    def _forget(self, req_id: str) -> None:
        super()._forget(req_id)
        self._ended.discard(req_id)
