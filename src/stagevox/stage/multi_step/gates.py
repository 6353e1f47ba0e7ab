"""The three gates: settings, plan, runner. Any may refuse; what is refused runs step by step, and nothing is lost (MS-6)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from stagevox.contract import Capabilities


class Refusal(enum.StrEnum):
    """Why steps are not merged."""

    # Settings: the stage never merges.
    CAPABILITY = "capability"
    """The model doesn't declare that it can."""
    PARALLEL = "parallel"
    """More than one rank, or micro-batches."""
    SPECULATION = "speculation"
    LORA = "lora"
    ENCODER_DECODER = "encoder_decoder"
    MAMBA = "mamba"
    """State beside the KV cache, aligned to blocks or not, or no KV cache at all."""
    PREFIX_CACHING = "prefix_caching"
    ROUTED_EXPERTS = "routed_experts"
    KV_TRANSFER = "kv_transfer"
    NAN_COUNTS = "nan_counts"
    MODEL_RUNNER = "model_runner"
    """vLLM's second model runner, or prompts that are embeddings."""
    PLATFORM = "platform"

    # Plan: not this round.
    PREFILL = "prefill"
    """A row is prompt, its final token included, or its request is new."""
    REPLAY = "replay"
    """A row computes a position again that is known."""
    WAITING = "waiting"
    """A request waits that could be admitted."""
    OUTSTANDING = "outstanding"
    """Another request's window is not reconciled yet."""
    ENCODER_INPUTS = "encoder_inputs"
    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    BAD_WORDS = "bad_words"
    ALLOWED_IDS = "allowed_ids"
    STRUCTURED_OUTPUT = "structured_output"
    REPETITION_DETECTION = "repetition_detection"
    THINKING_BUDGET = "thinking_budget"
    STREAMING_INPUT = "streaming_input"
    BUDGET = "budget"
    """A request has room for one token: its ``max_tokens``, context, conditioning, or the frame that completes its first chunk."""
    KV_CACHE = "kv_cache"
    """Not enough free blocks for the whole window."""
    PLAN_ERROR = "plan_error"

    # Runner: the plan doesn't fit what it holds.
    BATCH = "batch"
    """The rows are not the plan's, or not all fresh decode rows."""
    SLOTS = "slots"
    """A row's blocks don't reach to the window's end."""
    SAMPLER = "sampler"
    """The sampler needs what only a single step gives it."""
    INPUTS = "inputs"
    """The model takes inputs that only a single step prepares."""
    FAILED = "failed"
    """A request of the batch has failed already."""
    RUNNER_ERROR = "runner_error"


def capability_gate(capabilities: Capabilities, stage: str) -> Refusal | None:
    """Whether a stage's model declares merged decode. A list of stages beats the blanket flag."""
    stages = capabilities.supports_multi_step_stages
    able = stage in stages if stages else capabilities.supports_multi_step_decode
    return None if able else Refusal.CAPABILITY


def static_gate(config: VllmConfig) -> Refusal | None:
    """What in an engine's config rules merged decode out, or None."""
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    sizes = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    checks = {
        Refusal.PARALLEL: any(size != 1 for size in sizes) or parallel.use_ubatching,
        Refusal.SPECULATION: config.speculative_config is not None,
        Refusal.LORA: config.lora_config is not None,
        Refusal.ENCODER_DECODER: model.is_encoder_decoder,
        Refusal.MAMBA: model.is_hybrid or model.is_attention_free or cache.mamba_cache_mode == "align",
        Refusal.PREFIX_CACHING: cache.enable_prefix_caching,
        Refusal.ROUTED_EXPERTS: config.aux_output_config.enable_return_routed_experts,
        Refusal.KV_TRANSFER: config.kv_transfer_config is not None or config.ec_transfer_config is not None,
        Refusal.NAN_COUNTS: envs.VLLM_COMPUTE_NANS_IN_LOGITS,
        Refusal.MODEL_RUNNER: config.use_v2_model_runner or model.enable_prompt_embeds,
        Refusal.PLATFORM: not (current_platform.is_cpu() or current_platform.is_cuda_alike()),
    }
    return next((reason for reason, found in checks.items() if found), None)


def request_gate(request: Any) -> Refusal | None:
    """What in a scheduler's request rules windows out for as long as it runs, or None."""
    params: SamplingParams = request.sampling_params
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    checks = {
        Refusal.LOGPROBS: any(value is not None for value in (params.logprobs, params.prompt_logprobs, params.logprob_token_ids)),
        Refusal.PENALTIES: penalties != (0.0, 0.0, 1.0),
        Refusal.BAD_WORDS: bool(params.bad_words),
        Refusal.ALLOWED_IDS: params.allowed_token_ids is not None,
        Refusal.STRUCTURED_OUTPUT: request.use_structured_output,
        Refusal.REPETITION_DETECTION: params.repetition_detection is not None,
        Refusal.THINKING_BUDGET: params.thinking_token_budget is not None,
        Refusal.STREAMING_INPUT: request.resumable,
    }
    return next((reason for reason, found in checks.items() if found), None)


def validate_multi_step_plan(runner: Any, plan: Mapping[str, int]) -> Refusal | None:
    """Check a plan against what the runner itself holds, after its batch was brought up to date; None if it may run."""
    batch = runner.input_batch
    rows, failed = batch.num_reqs, runner.model_intermediate_buffer.failed
    steps = next(iter(plan.values()))
    if rows != len(plan) or any(plan.get(req_id) != steps for req_id in batch.req_ids):
        return Refusal.BATCH
    computed, known = batch.num_computed_tokens_cpu[:rows], batch.num_tokens_no_spec[:rows]
    if (computed < batch.num_prompt_tokens[:rows]).any() or (computed + 1 != known).any():
        return Refusal.BATCH
    end = computed + steps
    if any((table.num_blocks_per_row[:rows] * table.block_size < end).any() for table in batch.block_table.block_tables):
        return Refusal.SLOTS
    metadata = batch.sampling_metadata
    if (
        not metadata.no_penalties
        or metadata.max_num_logprobs is not None
        or metadata.logprob_token_ids
        or metadata.allowed_token_ids_mask is not None
        or metadata.bad_words_token_ids
        or metadata.output_token_ids
        or runner.num_prompt_logprobs
    ):
        return Refusal.SAMPLER
    if runner.supports_mm_inputs and not runner.embeds_every_row:
        return Refusal.INPUTS
    if any(req_id in failed for req_id in plan):
        return Refusal.FAILED
    return None
