"""The AR runner: vLLM's model runner with the phase contract around its forward.

:class:`OmniGPUModelRunner` is free of any device and works over vLLM's GPU and CPU runners alike. A step goes
``_update_states`` (super, then the buffer) -> ``_preprocess`` (super, then rows, hooks, MTP) -> ``_model_forward`` (super, then
``make_omni_output``) -> ``sample_tokens`` (super, then ``postprocess`` and outputs).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from stagevox.contract import (
    HIDDEN,
    MROPE_POSITIONS,
    Capabilities,
    OmniOutput,
    RowPhase,
    check_output,
    check_update,
)
from stagevox.errors import ContractError, HookRaisedError

from .border import call_hook, copying
from .buffer import IntermediateBuffer
from .materialise import BACKGROUND, Materialiser, PendingOutputs
from .mtp import MTPRows, complete_frames
from .multi_step.executor import FirstStep, execute_multi_step_window, tight_loop
from .multi_step.reconcile import shrink_refused_multi_step_window
from .outputs import plan_outputs
from .preprocess import HookRouter
from .row_store import RowStore, rows_along
from .rows import build_rows, request_token_spans
from .seeded import keep_generators, without_offsets
from .step_log import StepLog
from .wire import OmniAsyncOutput, StageSettings

logger = logging.getLogger("stagevox.stage")

# At run time a mixin; to the type checker it has what it will be mixed with.
if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Upstream
else:
    Upstream = object


class OmniGPUModelRunner(Upstream):
    """Mixin that gives a vLLM V1 model runner per-request model state, hooks, MTP and several outputs."""

    model: Any
    execute_model_state: Any
    model_intermediate_buffer: IntermediateBuffer
    window_loop = staticmethod(tight_loop)
    """Runs the steps of a window after its first; tests put :func:`.multi_step.executor.reentrant_loop` here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = StageSettings.of(self.vllm_config)
        self._omni_setup(record=bool(settings and settings.record))
        self.materialiser = Materialiser(background=settings is not None and settings.output_materialisation == BACKGROUND)

    def _omni_setup(self, *, record: bool) -> None:
        self.model_intermediate_buffer = IntermediateBuffer()
        self.step_log = StepLog(recording=record)
        self._arriving: Mapping[str, Mapping[str, Any]] = {}
        self._row_store: RowStore | None = None
        self._rows: list[RowPhase] = []
        self._new_codes: dict[str, torch.Tensor] = {}
        self._omni_output: OmniOutput | None = None
        self._capabilities = Capabilities.of(object())
        self._router: HookRouter | None = None
        self._window: FirstStep | None = None

    @property
    def runtime_additional_information(self) -> IntermediateBuffer:
        """The buffer under its older name."""
        return self.model_intermediate_buffer

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then read the model's capabilities once."""
        super().load_model(*args, **kwargs)
        self._omni_bind(self.model)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; then there is a place for exported rows beside each KV slot, if blocks are shared."""
        result = super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.cache_config.enable_prefix_caching and kv_cache_config.kv_cache_groups:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            self._row_store = RowStore(kv_cache_config.num_blocks * spec.block_size)
        return result

    def _omni_bind(self, model: Any) -> None:
        self._capabilities = Capabilities.of(model)
        if self._capabilities.has_preprocess:
            self._router = HookRouter(model, self._capabilities, self.model_intermediate_buffer, self.inputs_embeds.gpu)

    @property
    def embeds_every_row(self) -> bool:
        """True if the model's hooks make the embeddings of every row, whatever the inherited preprocessing would put there."""
        return self._router is not None

    @property
    def derives_engine_token(self) -> bool:
        """True if the model can name the token that its requests' state decides."""
        return self._capabilities.derives_engine_token

    # -- request state ------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """As upstream. Of a round that merges steps this runs the first, an ordinary one; the rest follow when it is sampled."""
        plan = getattr(scheduler_output, "multi_step_plan", None)
        if plan:
            self._window = FirstStep(plan)
            scheduler_output = shrink_refused_multi_step_window(scheduler_output)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        self._arriving = getattr(scheduler_output, "omni_payloads", {})
        deferred = super()._update_states(scheduler_output)
        if scheduler_output.finished_req_ids and self._capabilities.has_on_requests_finished:
            self._tell_finished(scheduler_output.finished_req_ids)
        buffer = self.model_intermediate_buffer
        for new in scheduler_output.scheduled_new_reqs:
            buffer.open(new.req_id, {})
        for req_id, payload in self._arriving.items():
            buffer.open(req_id, payload)
        return deferred

    def _tell_finished(self, req_ids: Set[str]) -> None:
        try:
            call_hook("on_requests_finished", self.model.on_requests_finished, req_ids)
        except ContractError as error:  # whom it is about has ended: there is nobody to fail
            logger.error("%s: %s", ", ".join(sorted(req_ids)), error)

    def _init_mrope_positions(self, req_state: Any) -> None:
        given = self._arriving.get(req_state.req_id, {}).get(MROPE_POSITIONS)
        if given is not None:
            req_state.mrope_positions, req_state.mrope_position_delta = given
        elif hasattr(self.model, "get_mrope_input_positions"):
            super()._init_mrope_positions(req_state)
        else:  # a model that never sees media: text has the same position on all axes
            positions = torch.arange(req_state.num_prompt_tokens)
            req_state.mrope_positions, req_state.mrope_position_delta = positions.expand(3, -1), 0

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        self.model_intermediate_buffer.drop(req_id)
        super()._on_request_state_removed(req_id, req_state)

    # -- before forward -----------------------------------------------------------------------------------------------

    def _gather_rows(self, scheduler_output: SchedulerOutput) -> list[RowPhase]:
        batch = self.input_batch
        count = batch.num_reqs
        bounds = self.query_start_loc.np[: count + 1].tolist()
        return build_rows(
            batch.req_ids,
            bounds[:-1],
            bounds[1:],
            batch.num_computed_tokens_cpu[:count].tolist(),
            batch.num_prompt_tokens[:count].tolist(),
            batch.num_tokens_no_spec[:count].tolist(),
        )

    def _gather_runtime_additional_information(self) -> list[dict[str, Any]]:
        """The requests' states in the order of the current input batch (EX-3)."""
        return self.model_intermediate_buffer.gather(self.input_batch.req_ids)

    def _compute_request_token_spans(self) -> list[tuple[int, int]]:
        """``[start, end)`` on the flattened token axis, in batch order (EX-4)."""
        return request_token_spans(self._rows)

    def _build_model_kwargs_extra(self) -> dict[str, Any]:
        return {
            "model_intermediate_buffer": self._gather_runtime_additional_information(),
            "request_token_spans": self._compute_request_token_spans(),
        }

    def _preprocess(self, scheduler_output: SchedulerOutput, num_input_tokens: int, intermediate_tensors: Any = None) -> Any:
        result = super()._preprocess(scheduler_output, num_input_tokens, intermediate_tensors)
        rows = self._gather_rows(scheduler_output)
        self._condition(rows, self.input_ids.gpu[: scheduler_output.total_num_scheduled_tokens])
        if self._router is not None:
            result = (None, self.inputs_embeds.gpu[:num_input_tokens], *result[2:])
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.step_log.note(rows, self._new_codes, resumed, int(self._window is not None))
        return result

    def _condition(self, rows: list[RowPhase], input_ids: torch.Tensor) -> None:
        """Start a step: the model's hooks, then MTP, make the embeddings of ``rows`` from ``input_ids [num_tokens]``."""
        self._rows = rows
        self._new_codes = {}
        self.step_log.begin()
        if self._router is not None:
            batch = self._router.run(rows, input_ids)
            if batch is not None:
                self._new_codes = self._talker_mtp_forward(batch)

    def _talker_mtp_forward(self, batch: MTPRows) -> dict[str, torch.Tensor]:
        """Complete the frames of the step's decode rows; new codes ``[1, Q]`` by request."""
        infos = self._capabilities.mtp_request_info
        return complete_frames(self.model, batch, self.inputs_embeds.gpu, self.model_intermediate_buffer, with_infos=infos)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._omni_output = None
        if self._window is not None:
            self._window.see_forward(kwargs)
        try:
            result = super()._model_forward(*args, **kwargs)
        except Exception as error:
            # The engine lives on: these requests end with the error, and their blocks leave the prefix cache.
            self._fail_step(HookRaisedError("forward", f"{type(error).__name__}: {error}"))
            return self.inputs_embeds.gpu.new_zeros(kwargs["positions"].shape[-1], self.model_config.get_hidden_size())
        if self._capabilities.has_make_omni_output:
            try:
                made = call_hook("make_omni_output", self.model.make_omni_output, result, **self._build_model_kwargs_extra())
                result = check_output(made, self._rows[-1].end)
            except ContractError as error:
                self._fail_step(error)
                return torch.zeros_like(self.inputs_embeds.gpu[: self._rows[-1].end])  # something to sample from
        if isinstance(result, OmniOutput):
            self._omni_output = result
            return result.text_hidden_states
        return result

    def _fail_step(self, error: BaseException) -> None:
        """A hook over the whole batch failed: nobody can tell whose rows are right."""
        for row in self._rows:
            self.model_intermediate_buffer.failed.setdefault(row.req_id, error)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        # Profiling calls the model directly: give it embeddings, as at run time, and unwrap what it returns.
        real, embeds = self.model, self.inputs_embeds.gpu if self._router is not None else None
        self.model = _Unwrapped(real, embeds)
        try:
            return super()._dummy_run(*args, **kwargs)
        finally:
            self.model = real

    # -- after forward ------------------------------------------------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput | Any:
        """Sample, then keep what the next step needs and hand out what this one made; a round that merges steps runs the rest of them."""
        window, self._window = self._window, None
        if window is not None:
            return execute_multi_step_window(self, window)
        return self._sample_step(grammar_output)

    def _sample_step(self, grammar_output: Any) -> Any:
        """Sample one step and hand out what it made."""
        state = self.execute_model_state
        result = super().sample_tokens(grammar_output)
        if state is None or not (self._has_afterwork or self._new_codes or self.model_intermediate_buffer.failed):
            return result
        return self._after_sampling(state, result)

    @property
    def _has_afterwork(self) -> bool:
        """True if this step's hidden states or outputs are anyone's business but the sampler's."""
        capabilities = self._capabilities
        return capabilities.has_postprocess or capabilities.include_hidden or self._omni_output is not None

    @torch.inference_mode()
    def _after_sampling(self, state: Any, result: Any) -> Any:
        drafts = state.scheduler_output.scheduled_spec_decode_tokens
        if drafts and isinstance(result, ModelRunnerOutput):
            self._drop_rejected(drafts, result.sampled_token_ids)
        pending = self._finish_step(state.hidden_states)
        failed = self.model_intermediate_buffer.failed
        if not (pending or failed):
            return result
        return self._hand_out(result, [pending] if pending else [], failed)

    def _hand_out(self, result: Any, pending: list[PendingOutputs], failed: Mapping[str, BaseException]) -> Any:
        """The step's result with its outputs; whoever takes an unfinished one up, joins it."""
        output = OmniAsyncOutput(result, pending, dict(failed))
        ahead = self.materialiser.background or isinstance(result, AsyncModelRunnerOutput)
        return output if ahead else output.get_output()

    def _finish_step(self, hidden: torch.Tensor) -> PendingOutputs | None:
        """What follows a step's sampling, given its hidden states: ``postprocess``, and this step's outputs by request."""
        if self._capabilities.has_postprocess:
            self._postprocess(hidden)
        return self._collect(hidden)

    def _drop_rejected(self, drafts: Mapping[str, list[int]], sampled: list[list[int]]) -> None:
        """Cut rejected drafts off their rows: they are no positions of the request."""
        for index, row in enumerate(self._rows):
            drafted = len(drafts.get(row.req_id, ()))
            if drafted and sampled[index]:
                self._rows[index] = row._replace(span=row.span - drafted + len(sampled[index]) - 1)

    def _postprocess(self, hidden: torch.Tensor) -> None:
        """Call ``postprocess`` with the rows of positions it has not seen yet: a replay never moves state back."""
        buffer = self.model_intermediate_buffer
        seen, failed = buffer.post_seen, buffer.failed
        for row in self._rows:
            req_id, end = row.req_id, row.num_computed + row.span
            fresh = max(row.num_computed, seen.get(req_id, 0))
            if fresh >= end or req_id in failed:
                continue
            offset = row.start + fresh - row.num_computed
            info = {**buffer[req_id], **row._replace(num_computed=fresh).fields()}
            try:
                update = call_hook("postprocess", self.model.postprocess, hidden[offset : row.end], **info)
                buffer.apply(req_id, check_update("postprocess", update))
            except ContractError as error:
                failed[req_id] = error
                continue
            seen[req_id] = end

    def _keep_rows(self, values: Mapping[str, Any] | None) -> None:
        """Keep the step's rows beside the KV cache, and hold for each request those of positions that a prefix hit spared it."""
        if self._row_store is None or not values or not (shared := rows_along(values, self._rows[-1].end)):
            return
        table = self.input_batch.block_table[0]
        with copying("make_omni_output"):  # rows of another shape or type than those of steps before
            # First: a request may have adopted a block that another one fills in this very step.
            self._row_store.put(shared, table.slot_mapping.gpu[: self._rows[-1].end])
        self._row_store.hold(shared, self._rows, table, self.model_intermediate_buffer.outputs)

    def _collect(self, hidden: torch.Tensor) -> PendingOutputs | None:
        """Start making this step's outputs; None when there is nothing. What it reads of the step is the step's own from here on."""
        values = self._omni_output.multimodal_outputs if self._omni_output is not None else None
        if self._capabilities.include_hidden:
            values = {**(values or {}), HIDDEN: hidden}
        if not values and not self._new_codes:
            return None
        memory, background = self.model_intermediate_buffer.outputs, self.materialiser.background
        try:
            self._keep_rows(values)
            step = plan_outputs(self._rows, values, self._rows[-1].end, memory, codes=self._new_codes, snapshot=background)
        except ContractError as error:
            self._fail_step(error)
            return None
        return self.materialiser.start(step) if step is not None else None


class _Unwrapped:
    """A model as ``_dummy_run`` may call it."""

    def __init__(self, model: Any, embeds: torch.Tensor | None) -> None:
        self._model = model
        self._embeds = embeds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **kwargs: Any) -> Any:
        if self._embeds is not None and kwargs.get("inputs_embeds") is None:
            kwargs["inputs_embeds"] = self._embeds[: kwargs["input_ids"].shape[0]]
            kwargs["input_ids"] = None
        result = self._model(**kwargs)
        return result.text_hidden_states if isinstance(result, OmniOutput) else result


class GPUARModelRunner(OmniGPUModelRunner, GPUModelRunner):
    """The AR runner on vLLM's GPU runner."""


class CPUARModelRunner(OmniGPUModelRunner, CPUModelRunner):
    """The AR runner on vLLM's CPU runner, with two of its limits lifted: async scheduling and seeded, chunked requests."""

    def _get_or_create_async_output_copy_stream(self) -> None:
        return None  # nothing to overlap: see plugin.CPUAsyncOutput

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        generators = self.input_batch.generators
        if not generators:
            return super()._sample(logits, spec_decode_metadata)
        with keep_generators(generators, self.discard_request_mask.np[: self.input_batch.num_reqs]):
            return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        if not self.input_batch.generators:
            return super()._bookkeeping_sync(*args, **kwargs)
        with without_offsets(self.input_batch):
            return super()._bookkeeping_sync(*args, **kwargs)
