"""The generation runner: each position of a request yields output once, without logits (EX-9).

Positions are codec frames. A step covers whatever span the scheduler chose; the model reads the frames it needs, left context
included, from the request's state by absolute position, so any split of the positions gives the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from stagevox.contract import OmniOutput, RowPhase
from stagevox.errors import ContractError

from .border import call_hook
from .materialise import PendingOutputs
from .outputs import plan_outputs
from .runner import OmniGPUModelRunner


class GenerationStep(NamedTuple):
    """What ``execute_model`` leaves for ``sample_tokens``."""

    req_ids: list[str]
    outputs: list[PendingOutputs]
    failed: dict[str, BaseException]


class OmniGenerationModelRunner(OmniGPUModelRunner):
    """Mixin for stages without a sampler. Attention-free: no metadata is built, no token is drawn."""

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> ModelRunnerOutput | None:
        """Run the model over this step's spans; ``sample_tokens`` hands out the result."""
        if self.execute_model_state is not None:
            raise RuntimeError("State error: sample_tokens() must be called after execute_model() returns None.")
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.step_log.begin()
        rows = self._rows = self._gather_rows(scheduler_output)
        self._new_codes = {}
        self.step_log.note(rows, (), scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        outputs = self._generate(rows)
        self.execute_model_state = GenerationStep(
            [row.req_id for row in rows], outputs, dict(self.model_intermediate_buffer.failed)
        )
        return None

    def _gather_rows(self, scheduler_output: SchedulerOutput) -> list[RowPhase]:
        # A request's prompt grows while it lives, so only the scheduler knows where it stands.
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows, start = [], 0
        for req_id in self.input_batch.req_ids:
            span = scheduler_output.num_scheduled_tokens[req_id]
            known = computed[req_id] + span
            rows.append(RowPhase(req_id, start, span, computed[req_id], known, known))
            start += span
        return rows

    def _generate(self, rows: list[RowPhase]) -> list[PendingOutputs]:
        """One forward for all rows; if it fails, one forward a request, so that only the guilty one fails."""
        try:
            return self._forward_rows(rows)
        except ContractError as error:
            if len(rows) == 1:
                self.model_intermediate_buffer.failed[rows[0].req_id] = error
                return []
        return [pending for row in rows for pending in self._generate([row._replace(start=0)])]

    def _forward_rows(self, rows: list[RowPhase]) -> list[PendingOutputs]:
        num_tokens = rows[-1].end
        states = [{**self.model_intermediate_buffer[row.req_id], **row.fields()} for row in rows]
        input_ids = self.input_ids.gpu[:num_tokens]
        # Without vLLM's forward context, a global of the process: no attention reads it here, and another stage may be stepping.
        result = call_hook(
            "forward",
            self.model,
            input_ids=input_ids,
            positions=self.positions[:num_tokens],
            model_intermediate_buffer=states,
            request_token_spans=[(row.start, row.end) for row in rows],
        )
        if not isinstance(result, OmniOutput):
            raise ContractError("forward", f"a generation model returns an OmniOutput, not a {type(result).__name__}")
        values: Any = result.multimodal_outputs
        if not (values is None or isinstance(values, Mapping)):
            raise ContractError("forward", f"multimodal_outputs is a {type(values).__name__}, not a mapping")
        step = plan_outputs(rows, values, num_tokens, hook="forward", snapshot=self.materialiser.background)
        return [self.materialiser.start(step)] if step is not None else []

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Hand out the step's result; no token is sampled."""
        step = self.execute_model_state
        if step is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.execute_model_state = None
        base = ModelRunnerOutput(
            req_ids=step.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled_token_ids=[[] for _ in step.req_ids],
        )
        return self._hand_out(base, step.outputs, step.failed)


class GPUGenerationModelRunner(OmniGenerationModelRunner, GPUModelRunner):
    """The generation runner on vLLM's GPU runner."""


class CPUGenerationModelRunner(OmniGenerationModelRunner, CPUModelRunner):
    """The generation runner on vLLM's CPU runner."""
