"""Running a window: K decode steps inside one call of the runner (MS-9 to MS-11).

The first step of a window is an ordinary step, forward and sampling and all. The others repeat its forward over the same rows, in the same
buffers. Device-neutral: the same code runs over the CPU and the GPU runner.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from stagevox.errors import ContractError

from ..materialise import PendingOutputs
from ..outputs import Outputs, client_facing
from ..wire import OmniAsyncOutput, OmniModelRunnerOutput, WindowReport
from .derive import TokenDeriver
from .gates import Refusal, validate_multi_step_plan
from .layout import DecodeLayout
from .merge import WindowTokens, merge_outputs

logger = logging.getLogger("stagevox.multi_step")


Made = tuple[Outputs, dict[str, BaseException]]
"""Outputs by request, and the requests whose outputs could not be made."""


class FirstStep:
    """A window's plan, and what its first step leaves for the others."""

    def __init__(self, plan: Mapping[str, int]) -> None:
        self.plan = plan
        self.inputs: dict[str, Any] = {}
        """The forward's keyword arguments: views of the runner's buffers, padding included."""
        self.context: Any = None

    def see_forward(self, inputs: dict[str, Any]) -> None:
        """Called where the first forward is about to run."""
        self.inputs, self.context = inputs, get_forward_context()


class WindowRun:
    """What the steps of one window have made so far."""

    def __init__(self, runner: Any, first: FirstStep) -> None:
        batch = runner.input_batch
        self.first = first
        self.steps = next(iter(first.plan.values()))
        self.states = [runner.requests[req_id] for req_id in batch.req_ids]
        self.tokens = WindowTokens(list(batch.req_ids), [_stops(state.sampling_params) for state in self.states])
        self.outputs: list[Made | PendingOutputs] = []
        """Of each step: its outputs and whose could not be made, or both on their way."""
        self.derived = 0
        self.on_host = runner.device.type == "cpu"
        """Reading a token costs nothing: a window ends as soon as all its requests have stopped."""
        self.on_device: list[torch.Tensor] = []


def execute_multi_step_window(runner: Any, first: FirstStep) -> ModelRunnerOutput:
    """Sample the step that has run and run the rest of its window; or only sample it, if the runner refuses the window.

    An exception while the plan is checked is a refusal. One while the window runs is not: it goes up, as in any step.
    """
    try:
        refusal = validate_multi_step_plan(runner, first.plan)
        if refusal is None and first.context is None:
            refusal = Refusal.RUNNER_ERROR
    except Exception:
        logger.exception("checking a window failed; its first step runs alone")
        refusal = Refusal.RUNNER_ERROR
    if refusal is not None:
        return _refused(runner._sample_step(None), refusal)
    return _execute(runner, WindowRun(runner, first))


@torch.inference_mode()
def _execute(runner: Any, run: WindowRun) -> ModelRunnerOutput:
    result = runner._sample_step(None)
    sampled = _sampled(runner, result)
    run.outputs.append(_outputs_of(runner, result))
    failed = runner.model_intermediate_buffer.failed
    if not _keep(run, sampled, failed, append=False):
        sampled = runner.window_loop(runner, run, sampled)
    if not run.on_host:
        for ids in torch.stack(run.on_device).cpu().tolist():
            run.tokens.add(ids, {})
    _backfill(runner, run)
    made = [part.join() if isinstance(part, PendingOutputs) else part for part in run.outputs]
    for step, (_, lost) in enumerate(made):
        run.tokens.add_failures(step, lost)
        failed = lost | dict(failed)
    if runner.use_async_scheduling:
        runner.input_batch.prev_sampled_token_ids = sampled
    return _result(run, _done(result), [outputs for outputs, _ in made], failed)


def tight_loop(runner: Any, run: WindowRun, sampled: torch.Tensor) -> torch.Tensor:
    """The steps after the first, without leaving the runner: only what differs from step to step is touched.

    ``sampled [n, 1]`` are the first step's tokens; returns the last step's.
    """
    batch, model, buffer = runner.input_batch, runner.model, runner.model_intermediate_buffer
    rows, inputs, context = batch.num_reqs, run.first.inputs, run.first.context
    layout = DecodeLayout(runner, context, run.steps)
    input_ids = runner.input_ids.gpu[:rows]
    deriver = TokenDeriver.of(runner)
    processors = list(batch.logitsprocs.all)
    phases, step = runner._rows, 0
    for step in range(1, run.steps):
        input_ids.copy_(sampled.view(-1))
        layout.advance(step)
        for processor in processors:
            processor.update_state(None)
        phases = [phase.advanced() for phase in phases]
        runner._condition(phases, input_ids)
        runner.step_log.note(runner._rows, runner._new_codes, (), step + 1)
        with override_forward_context(context):
            hidden = runner._model_forward(**inputs)
        derived = None
        if deriver is not None:
            try:
                derived = deriver.tokens(phases)
            except ContractError as error:
                runner._fail_step(error)
        if derived is not None:
            sampled = derived
            run.derived += 1
        else:
            sampled = runner._sample(model.compute_logits(hidden[:rows]), None).sampled_token_ids
        pending = runner._finish_step(hidden) if runner._has_afterwork or runner._new_codes else None
        run.outputs.append(_begun(runner, pending))
        ended = _keep(run, sampled, buffer.failed, append=True)
        if ended:
            break
    batch.num_computed_tokens_cpu[:rows] += step
    batch.num_tokens_no_spec[:rows] += step
    for state in run.states:
        state.num_computed_tokens += step
    return sampled


def reentrant_loop(runner: Any, run: WindowRun, sampled: torch.Tensor) -> torch.Tensor:
    """The same by calling the ordinary step again and again, as if each had been scheduled: the oracle of :func:`tight_loop`."""
    batch, buffer = runner.input_batch, runner.model_intermediate_buffer
    ids = list(batch.req_ids)
    for _ in range(1, run.steps):
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        output.total_num_scheduled_tokens = len(ids)
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(ids),
            num_computed_tokens=[state.num_computed_tokens + 1 for state in run.states],
            num_output_tokens=[len(state.output_token_ids) for state in run.states],
        )
        runner.execute_model(output)
        result = runner._sample_step(None)
        sampled = _sampled(runner, result)
        run.outputs.append(_outputs_of(runner, result))
        if _keep(run, sampled, buffer.failed, append=False):
            break
    return sampled


def _keep(run: WindowRun, sampled: torch.Tensor, failed: Mapping[str, BaseException], *, append: bool) -> bool:
    """Take a step's tokens ``sampled [n, 1]``; True if no request has a use for another step.

    ``append``: vLLM's own bookkeeping has not added them to the requests' output, so that is done here.
    """
    if run.on_host:
        ids = sampled.view(-1).tolist()
        ended = run.tokens.add(ids, failed)
    else:
        run.on_device.append(sampled.view(-1).clone())
        ids = [-1] * len(run.states)
        ended = False
        if failed:
            run.tokens.add_failures(len(run.on_device) - 1, failed)
    if append:
        for state, token in zip(run.states, ids, strict=True):
            state.output_token_ids.append(token)
    return ended


def _backfill(runner: Any, run: WindowRun) -> None:
    """Write the window's ids where vLLM looks for a request's tokens; placeholders of async scheduling are replaced."""
    batch = runner.input_batch
    for row, (ids, state) in enumerate(zip(run.tokens.columns(), run.states, strict=True)):
        end = int(batch.num_tokens_no_spec[row])
        batch.token_ids_cpu[row, end - len(ids) : end] = ids
        batch.is_token_ids[row, end - len(ids) : end] = True
        state.output_token_ids[-len(ids) :] = ids


def _result(
    run: WindowRun, first: ModelRunnerOutput, outputs: list[Outputs], failed: Mapping[str, BaseException]
) -> OmniModelRunnerOutput:
    tokens, faults = run.tokens.shipped()
    counts = {req_id: len(ids) for req_id, ids in zip(run.tokens.req_ids, tokens, strict=True)}
    inter_stage, apart = merge_outputs(outputs, counts)
    return OmniModelRunnerOutput.of_window(
        first,
        tokens,
        WindowReport(len(run.outputs), run.derived),
        inter_stage_outputs=inter_stage,
        multimodal_outputs=client_facing(inter_stage),
        failed=apart | {req_id: failed[req_id] for req_id, count in faults.items() if not count},
        failed_after={req_id: failed[req_id] for req_id, count in faults.items() if count},
    )


def _refused(result: Any, refusal: Refusal) -> ModelRunnerOutput:
    first = result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result
    report = WindowReport(1, refusal=refusal.value)
    if isinstance(first, OmniModelRunnerOutput):
        first.window = report
        return first
    return OmniModelRunnerOutput.of_window(first, first.sampled_token_ids, report)


def _sampled(runner: Any, result: Any) -> torch.Tensor:
    """The tokens ``[n, 1]`` of an ordinary step."""
    ahead: torch.Tensor | None = runner.input_batch.prev_sampled_token_ids
    if ahead is not None:  # async scheduling keeps them on the device
        return ahead
    result = _done(result)
    return torch.tensor(result.sampled_token_ids, dtype=torch.int32, device=runner.device)


def _begun(runner: Any, pending: PendingOutputs | None) -> Made | PendingOutputs:
    """A step's outputs: made now, before the next step writes over what they are made of, unless a thread has its own copy of that."""
    if pending is None:
        return {}, {}
    return pending if runner.materialiser.background else pending.join()


def _outputs_of(runner: Any, result: Any) -> Made | PendingOutputs:
    """The outputs of an ordinary step."""
    if isinstance(result, OmniAsyncOutput):
        return _begun(runner, next(iter(result.pending), None))
    return getattr(result, "inter_stage_outputs", {}), dict(getattr(result, "failed", {}))


def _done(result: Any) -> ModelRunnerOutput:
    """The tokens of an ordinary step; its outputs are taken elsewhere."""
    if isinstance(result, OmniAsyncOutput):
        result = result.inner
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result


def _stops(params: Any) -> frozenset[int]:
    """The ids that end a request."""
    ids: Sequence[int] = params.stop_token_ids or ()
    return frozenset(ids) if params.eos_token_id is None else frozenset((*ids, params.eos_token_id))
