"""vLLM's schedulers, told about stages (EX-2, RT-1, RT-2, EX-16).

What differs from upstream, and nothing else does:

- A request may be registered before its input exists. It waits outside vLLM's queues until its first input arrives.
- Payloads ride with the step that first schedules their request.
- A request whose conditioning comes in pieces never runs past the positions it is on hand for. It waits with its slot, and
  reads no cached blocks: nobody else's are its own, and a hit would leave a replay without a position to start from.
- A request whose consumer is behind is held: it keeps its slot and is not scheduled.
- With ``extra_token`` one token is sampled that nobody gets to see, so that the last one that is returned was fed.
- A request whose model failed ends with an error, and its blocks leave the prefix cache: they were hashed before they were
  computed.

What only AR or only generation stages need is in :mod:`.ar_scheduler` and :mod:`.generation_scheduler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from stagevox.config.objects import load_attribute
from stagevox.connectors.base import Chunk, ChunkProcessor
from stagevox.contract import SAMPLING, check_update, merge_update
from stagevox.errors import EmptyTextError, TextTooLongError

from .payload import StageInput, StageOutput, StageRequest
from .wait import WaitRoom, WaitState
from .wire import OmniSchedulerOutput, StageSettings

# At run time a mixin; to the type checker it has what it will be mixed with.
if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Upstream
else:
    Upstream = object

NOTHING: Mapping[str, Any] = {}
"""No payload, no outputs."""


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
            self._emit(request.req_id, [], NOTHING, NOTHING, "stop")
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
        early = self._payloads.get(request.req_id, NOTHING)
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
        client = getattr(model_runner_output, "multimodal_outputs", NOTHING)
        onward = getattr(model_runner_output, "inter_stage_outputs", NOTHING)
        for outputs in result.values():
            for output in outputs.outputs:
                req_id, reason = output.request_id, output.finish_reason
                self._emit(
                    req_id,
                    output.new_token_ids,
                    client.get(req_id, NOTHING),
                    onward.get(req_id, NOTHING),
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

    def omni_fail(self, failed: Mapping[str, BaseException], starts: Mapping[str, int] = NOTHING) -> None:
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
