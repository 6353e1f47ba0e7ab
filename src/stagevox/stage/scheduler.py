"""vLLM's schedulers, told about stages (EX-2, RT-1, RT-2, EX-16).

What differs from upstream, and nothing else does:

- A request may be registered before its input exists. It waits outside vLLM's queues until its first input arrives.
- Payloads ride with the step that first schedules their request.
- A request whose conditioning comes in pieces never runs past the positions it is on hand for. It waits with its slot, and
  reads no cached blocks: nobody else's are its own, and a hit would leave a replay without a position to start from.
- A request whose consumer is behind is held: it keeps its slot and is not scheduled.
- With ``extra_token`` one token is sampled that nobody gets to see, so that the last one that is returned was fed.
- With runner-managed MTP, a replay stops one position short of the newest one, which is then a decode row of its own.
- A request whose model failed ends with an error, and its blocks leave the prefix cache: they were hashed before they were
  computed.
- A generation request's prompt grows while it lives, and it ends when its input has ended and is computed.
- An AR round may merge several decode steps (:mod:`.multi_step`); requests in such a round are held until it is reconciled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from stagevox.config.objects import load_attribute
from stagevox.connectors.base import Chunk, ChunkProcessor
from stagevox.contract import SAMPLING, check_update, merge_update
from stagevox.errors import EmptyTextError, TextTooLongError

from .multi_step.counters import WindowCounters
from .multi_step.gates import Refusal
from .multi_step.plan import WindowLedger, plan_multi_step_window
from .multi_step.reconcile import reconcile_window_shortfall
from .payload import StageInput, StageOutput, StageRequest
from .wait import WaitRoom, WaitState
from .wire import OmniSchedulerOutput, StageSettings

# At run time a mixin; to the type checker it has what it will be mixed with.
if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Upstream
else:
    Upstream = object

_NOTHING: Mapping[str, Any] = {}


def _made(settings: StageSettings, name: str | None, options: Mapping[str, Any]) -> Any:
    """A chunk processor or an input adapter of a stage."""
    return load_attribute(name)(Path(settings.checkpoint), **options) if name else None


class OmniSchedulerMixin(Upstream):
    """What every stage's scheduler adds to vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = StageSettings.of(self.vllm_config)
        assert settings is not None, "an Omni scheduler needs a stage's settings in additional_config"
        self.stage = settings
        self.wait_room = WaitRoom()
        self.omni_requests: dict[str, StageRequest] = {}
        self.make_request: Callable[[StageRequest, StageInput], Request] | None = None
        self._chunks: ChunkProcessor | None = _made(settings, settings.chunk_processor, settings.chunk_options)
        self._adapter: Any = _made(settings, settings.input_adapter, settings.input_options)
        self._inbox: deque[Chunk] = deque()
        self._payloads: dict[str, Mapping[str, Any]] = {}
        self._outputs: list[StageOutput] = []
        self._whole: list[Chunk] = []
        self._ready: dict[str, int] = {}  # positions with conditioning on hand, of requests that don't have all of it
        self.omni_held: Set[str] = set()
        self.omni_preemptions = 0
        self.omni_replays = 0
        self._left: dict[str, int] = {}  # tokens still to be returned, of requests that sample one more

    # -- requests and their input -------------------------------------------------------------------------------------

    def omni_add(self, request: StageRequest) -> None:
        """Register a request; without a prompt it waits for its first input."""
        self.omni_requests[request.req_id] = request
        if request.prompt_token_ids is None:
            self.wait_room[request.req_id] = WaitState.WAITING_FOR_INPUT
            return
        try:
            self._admit(request, StageInput(prompt_token_ids=request.prompt_token_ids))
        except Exception:
            self._forget(request.req_id)
            raise

    def omni_deliver(self, chunk: Chunk) -> None:
        """Take an upstream chunk; it is read when the next step is scheduled."""
        self._inbox.append(chunk)

    def take_outputs(self) -> tuple[list[StageOutput], list[Chunk]]:
        """What came out since the last call: client-facing outputs, and whole chunks for the next stage."""
        outputs, self._outputs = self._outputs, []
        whole, self._whole = self._whole, []
        return outputs, whole

    def _take_inputs(self) -> None:
        while self._inbox:
            chunk = self._inbox.popleft()
            request = self.omni_requests.get(chunk.req_id)
            if request is None:
                continue  # cancelled meanwhile
            try:
                self._accept(request, self._adapter.accept(request, chunk))
            except Exception as error:
                self.omni_fail({request.req_id: error})

    def _accept(self, request: StageRequest, given: StageInput) -> None:
        waits = self.wait_room.get(request.req_id) is WaitState.WAITING_FOR_INPUT
        if waits and given.skip:
            self._emit(request.req_id, [], _NOTHING, _NOTHING, "stop")
            return
        if waits and (given.prompt_token_ids or given.end):
            self._admit(request, given)
            return
        self._ride(request.req_id, given.payload)
        if not waits:
            self._condition(request.req_id, given.ready)

    def _condition(self, req_id: str, ready: int | None) -> None:
        """Note for how many positions conditioning is on hand; what waited for more may run on."""
        if ready is None:
            self._ready.pop(req_id, None)
        else:
            self._ready[req_id] = ready
        self.wait_room.pop(req_id, None)

    def _admit(self, request: StageRequest, given: StageInput) -> None:
        assert self.make_request is not None
        self._check_length(len(given.prompt_token_ids))
        early = self._payloads.get(request.req_id, _NOTHING)
        payload = merge_update(merge_update(request.payload, early), given.payload)
        check_update("payload", payload)
        made = self.make_request(request, given)
        if given.ready is not None:
            made.skip_reading_prefix_cache = True
        if self.stage.extra_token:
            self._left[request.req_id] = made.max_tokens - 1
        self._check_length(made.num_prompt_tokens)
        if self.stage.mtp_request_info:
            payload = {**payload, SAMPLING: {"temperature": made.sampling_params.temperature, "seed": made.sampling_params.seed}}
        self.add_request(made)
        self._condition(request.req_id, given.ready)
        if payload:
            self._payloads[request.req_id] = payload

    def _ride(self, req_id: str, payload: Mapping[str, Any]) -> None:
        if payload:
            check_update("payload", payload)
            self._payloads[req_id] = merge_update(self._payloads.get(req_id, {}), payload)

    def _check_length(self, positions: int) -> None:
        room = self.max_model_len - 1
        if positions == 0:
            raise EmptyTextError("text", f"gives stage {self.stage.name} no positions")
        if positions > room:
            raise TextTooLongError("text", f"needs {positions} positions in stage {self.stage.name}, which has {room}")

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Take in what arrived, run the inherited scheduler, put payloads on board."""
        self._take_inputs()
        output = super().schedule(*args, **kwargs)
        self.omni_replays += len(output.scheduled_cached_reqs.resumed_req_ids)
        if not self._payloads:
            return output
        aboard = {req_id: self._payloads.pop(req_id) for req_id in output.num_scheduled_tokens if req_id in self._payloads}
        return OmniSchedulerOutput.wrap(output, aboard) if aboard else output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Fail what the model failed, run the inherited update, hand out both roads of outputs."""
        failed = getattr(model_runner_output, "failed", None)
        if failed:
            self.omni_fail(failed, _starts(scheduler_output))
        result = super().update_from_output(scheduler_output, model_runner_output)
        client = getattr(model_runner_output, "multimodal_outputs", _NOTHING)
        onward = getattr(model_runner_output, "inter_stage_outputs", _NOTHING)
        for outputs in result.values():
            for output in outputs.outputs:
                req_id, reason = output.request_id, output.finish_reason
                self._emit(
                    req_id,
                    output.new_token_ids,
                    client.get(req_id, _NOTHING),
                    onward.get(req_id, _NOTHING),
                    None if reason is None else str(reason),
                )
        return result

    def _emit(
        self, req_id: str, tokens: list[int], client: Mapping[str, Any], onward: Mapping[str, Any], reason: str | None
    ) -> None:
        if req_id not in self.omni_requests:
            return  # ended by omni_fail, which spoke for it
        if req_id in self._left:
            tokens, reason = self._without_extra(req_id, tokens, reason)
        chunks = self._chunks
        if chunks is not None and (onward or reason is not None or (tokens and chunks.requires_token_updates)):
            try:
                self._whole += chunks.push(req_id, tokens, onward, reason)
            except Exception as error:
                self.omni_fail({req_id: error})
                return
        self._outputs.append(StageOutput(req_id, tokens, client, reason))
        if reason is not None:
            self._forget(req_id)

    def _without_extra(self, req_id: str, tokens: list[int], reason: str | None) -> tuple[list[int], str | None]:
        """A step's tokens without the one too many, whose end is a cut whatever the token was."""
        left = self._left[req_id]
        self._left[req_id] = left - len(tokens)
        return (tokens[:left], "length") if len(tokens) > left else (tokens, reason)

    # -- the end of a request -----------------------------------------------------------------------------------------

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Finish requests from outside, those that only wait included."""
        if request_ids is None:
            ids = list(self.omni_requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for req_id in ids:
            self._forget(req_id)
        finished: list[Request] = super().finish_requests(ids, finished_status)
        return finished

    def omni_fail(self, failed: Mapping[str, BaseException], starts: Mapping[str, int] = _NOTHING) -> None:
        """End requests with an error, and evict from the prefix cache what was not computed right.

        ``starts`` says from which position on a request's rows are wrong; of one that failed outside the model none are. A request
        that adopted wrong blocks can't be right either, and ends with the same error.
        """
        doomed = {req_id: error for req_id, error in failed.items() if req_id in self.omni_requests}
        for req_id, error in list(doomed.items()):
            if req_id not in self.requests or req_id not in starts:
                continue
            blocks = self._blocks_of(req_id, starts[req_id])
            self.kv_cache_manager.block_pool.evict_blocks(blocks)
            for other in self.running:
                if other.request_id not in doomed and blocks & self._blocks_of(other.request_id):
                    doomed[other.request_id] = error
        self.finish_requests(list(doomed), RequestStatus.FINISHED_ERROR)
        for req_id, error in doomed.items():
            self._outputs.append(StageOutput(req_id, [], {}, "error", f"{type(error).__name__}: {error}"))

    def _blocks_of(self, req_id: str, start: int = 0) -> set[int]:
        """The request's blocks that hold positions from ``start`` on."""
        null = self.kv_cache_manager.block_pool.null_block.block_id
        groups = zip(self.kv_cache_manager.get_block_ids(req_id), self.kv_cache_config.kv_cache_groups, strict=True)
        return {block for ids, group in groups for block in ids[start // group.kv_cache_spec.block_size :] if block != null}

    def _forget(self, req_id: str) -> None:
        self.omni_requests.pop(req_id, None)
        self.wait_room.pop(req_id, None)
        self._payloads.pop(req_id, None)
        self._ready.pop(req_id, None)
        self._left.pop(req_id, None)
        if self._chunks is not None:
            self._chunks.drop(req_id)
        if self._adapter is not None:
            self._adapter.drop(req_id)

    # -- is there work? -----------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self) -> int:
        """Requests a step could advance: those that wait for a chunk don't keep an engine awake."""
        count: int = super().get_num_unfinished_requests()
        held = sum(1 for request in self.running if self._is_held(request)) if self.omni_held else 0
        return count - self.wait_room.count(WaitState.WAITING_FOR_CHUNK) - held

    def _is_held(self, request: Request) -> bool:
        """True for a running request that is not scheduled for its consumer's sake, and waits for nothing else."""
        req_id = request.request_id
        return req_id in self.omni_held and req_id not in self.wait_room and request.status == RequestStatus.RUNNING

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.omni_preemptions += 1
        return super()._preempt_request(request, *args, **kwargs)

    def has_requests(self) -> bool:
        """True if a step would do something."""
        return bool(self._inbox) or super().has_requests()


def _starts(step: SchedulerOutput) -> dict[str, int]:
    """The first position of each request's span in a step."""
    cached = step.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}


class _ARMixin(OmniSchedulerMixin):
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


class OmniARScheduler(_ARMixin, Scheduler):
    """For AR stages."""


class OmniAsyncARScheduler(_ARMixin, AsyncScheduler):
    """For AR stages whose steps are scheduled while the one before still runs."""


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
                self._outputs.append(StageOutput(req_id, [], _NOTHING, "stop"))
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
            self._finish(req_id, _NOTHING, 0)

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
        outputs = getattr(model_runner_output, "multimodal_outputs", _NOTHING)
        for req_id, span in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or req_id not in self.omni_requests:
                continue
            named = outputs.get(req_id, _NOTHING)
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
