"""A stage's spec and an operator's overrides as the config that vLLM builds an engine from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from stagevox.config.multi_step import FIELD, MultiStepSetting, resolve_multi_step_steps
from stagevox.config.topology import StageSpec
from stagevox.contract import Capabilities, StageExecutionType
from stagevox.errors import CapabilityError, CheckpointError, ConfigError

from .engine_args import coerce_engine_args
from .materialise import INLINE, MODES
from .multi_step.gates import Refusal, capability_gate, static_gate
from .plugin import register
from .wire import StageSettings

logger = logging.getLogger("stagevox.multi_step")

_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
)
"""Engine arguments that ask for more workers than one; vLLM would wait for the others for ever."""

_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Engine arguments that turn speculation on."""


def make_config(spec: StageSpec, overrides: Mapping[str, Any], *, record: bool = False) -> VllmConfig:
    """The vLLM config of a stage; raises a :class:`stagevox.errors.ConfigError` for what can't work.

    Warns if the stage was asked to merge decode steps and can't.
    """
    config, wanted, refusal = make_merging_config(spec, overrides, record=record)
    if refusal is not None:
        logger.warning("%s: %s %d is off: the %s gate refuses", spec.name, FIELD, wanted.steps, refusal.value)
    return config


def make_merging_config(
    spec: StageSpec, overrides: Mapping[str, Any], *, record: bool = False
) -> tuple[VllmConfig, MultiStepSetting, Refusal | None]:
    """The same with what was wanted of merged decode, and why there will be none if it was meant for this stage."""
    if spec.execution_type is StageExecutionType.DIFFUSION:
        raise CapabilityError(spec.name, "no runtime for diffusion stages yet", ["ar", "generation"])
    wanted = resolve_multi_step_steps(spec)
    overrides = coerce_engine_args(spec.name, overrides)
    register()
    load_general_plugins()
    capabilities = Capabilities.of(_import_model_class(spec))
    cpu = current_platform.is_cpu()
    arguments = {**spec.engine_args, **overrides}
    generation = spec.execution_type is StageExecutionType.GENERATION
    async_scheduling = bool(arguments.pop("async_scheduling", not (cpu or generation)))
    if generation and async_scheduling:
        raise CapabilityError(f"{spec.name}.async_scheduling", "a generation stage has no sampler to run ahead of", ["false"])
    for size in _SIZES:
        if arguments.get(size) not in (None, 1):
            raise CapabilityError(f"{spec.name}.{size}", "a stage's engine is one worker in this process", ["1"])
    for speculation in _SPECULATION:
        if arguments.get(speculation) is not None:
            _refuse_speculation(f"{spec.name}.{speculation}", capabilities, ahead=async_scheduling)
    refusal = _model_gate(spec, capabilities) if wanted.steps else None
    steps = 0 if refusal else wanted.steps
    settings = StageSettings(
        name=spec.name,
        execution_type=spec.execution_type,
        async_scheduling=async_scheduling,
        record=record,
        checkpoint=str(spec.checkpoint),
        chunk_processor=spec.chunk_processor,
        chunk_options=dict(spec.chunk_options),
        input_adapter=spec.input_adapter,
        input_options=dict(spec.input_options),
        extra_token=spec.extra_token,
        output_materialisation=_materialisation(spec),
        has_talker_mtp=capabilities.has_talker_mtp,
        mtp_request_info=capabilities.mtp_request_info,
        has_preprocess=capabilities.has_preprocess,
        multi_step_decode_steps=steps,
    )
    config = _engine_config(spec, arguments | _without_prefix_caching(steps, overrides), settings)
    if steps and (refusal := static_gate(config)) is not None:
        config = _engine_config(spec, arguments, replace(settings, multi_step_decode_steps=0))
    if config.model_config.runner_type != "generate":
        raise CapabilityError(f"{spec.name}.runner", f"a stage can't be a {config.model_config.runner_type} engine", ["generate"])
    if refusal is Refusal.CAPABILITY and wanted.is_blanket:
        refusal = None  # a value for all stages is not meant for one whose model can't
    return config, wanted, refusal


def _engine_config(spec: StageSpec, arguments: Mapping[str, Any], settings: StageSettings) -> VllmConfig:
    """The config of an engine with these arguments and settings."""
    args = EngineArgs(
        model=str(spec.checkpoint),
        async_scheduling=settings.async_scheduling,
        worker_cls="stagevox.stage.worker." + ("OmniCPUWorker" if current_platform.is_cpu() else "OmniGPUWorker"),
        scheduler_cls=_scheduler_class(spec.execution_type, settings.async_scheduling),
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        additional_config=settings.to_config(),
        **{"use_tqdm_on_load": False, **_part_of(spec), **arguments},
    )
    try:
        config = args.create_engine_config()
    except Exception as error:
        raise CapabilityError(spec.name, first_reason(error)) from error
    return config


def _model_gate(spec: StageSpec, capabilities: Capabilities) -> Refusal | None:
    """Whether the stage's model declares that it can merge steps; only AR stages have any."""
    return capability_gate(capabilities, spec.name) if spec.execution_type is StageExecutionType.AR else Refusal.CAPABILITY


def _without_prefix_caching(steps: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merged decode and cached blocks exclude each other, and vLLM caches by default: only an operator's word counts (MS-6)."""
    return {"enable_prefix_caching": False} if steps and "enable_prefix_caching" not in overrides else {}


def _materialisation(spec: StageSpec) -> str:
    """Where the stage's outputs are made."""
    chosen = spec.engine_extras.get("output_materialisation", INLINE)
    if chosen not in MODES:
        raise ConfigError(f"{spec.name}.engine_extras.output_materialisation", f"not {chosen!r}", MODES)
    return str(chosen)


def _import_model_class(spec: StageSpec) -> type:
    """Import the stage's model class now; raises :class:`CheckpointError` if there is none.

    It is needed here anyway, and vLLM looks at a class that it has not imported yet in a process of its own, for seconds.
    """
    config = spec.checkpoint / "config.json"
    names = (
        [spec.architecture] if spec.architecture else json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    )
    for name in names if isinstance(names, list) else ():
        registered = ModelRegistry.models.get(str(name))
        if registered is None:
            continue
        model_class: type = registered.load_model_cls()
        if not hasattr(registered, "model_cls"):
            ModelRegistry.register_model(name, model_class)
        return model_class
    raise CheckpointError(spec.name, f"{config}: no known architecture in {names}")


@dataclass(frozen=True, slots=True)
class ConfigPart:
    """Tells vLLM which part of a checkpoint's config a stage is made of, and under which architecture; crosses processes."""

    part: str | None
    architecture: str | None
    is_vocoder: bool
    """The stage has no attention of vLLM's: what its config lacks of a decoder's sizes is filled in, since vLLM asks for them."""

    def __call__(self, config: Any) -> Any:
        """The part of a ``transformers`` config; vLLM also asks with an empty one, which is handed back as it is."""
        found = getattr(config, self.part, None) if self.part else config
        if found is None:
            return config
        if self.architecture:
            found.architectures = [self.architecture]
        if self.is_vocoder:
            for name, value in _DECODER_SIZES.items():
                if not hasattr(found, name):
                    setattr(found, name, value)
        return found


_DECODER_SIZES = {
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1,
    "max_position_embeddings": 2048,
}


def _part_of(spec: StageSpec) -> dict[str, Any]:
    if spec.config_part is None and spec.architecture is None:
        return {}
    is_vocoder = spec.execution_type is StageExecutionType.GENERATION
    return {"hf_overrides": ConfigPart(spec.config_part, spec.architecture, is_vocoder)}


def first_reason(error: Exception) -> str:
    """The first reason of a validation error, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return " ".join(f"{where} {first['msg']}".split())
    return " ".join(str(error).split()) or type(error).__name__


def _scheduler_class(execution_type: StageExecutionType, async_scheduling: bool) -> str:
    if execution_type is StageExecutionType.GENERATION:
        return "stagevox.stage.generation_scheduler.OmniGenerationScheduler"
    return "stagevox.stage.ar_scheduler." + ("OmniAsyncARScheduler" if async_scheduling else "OmniARScheduler")


def _refuse_speculation(field: str, capabilities: Capabilities, *, ahead: bool) -> None:
    """Models that can't be verified several positions at a time; ``ahead``: steps are scheduled before the one before is known (RT-8)."""
    if capabilities.has_talker_mtp:
        raise CapabilityError(field, "verify positions lack the hidden state that runner-managed MTP needs", ["null"])
    hooks = capabilities.has_preprocess or capabilities.has_postprocess
    exports = capabilities.has_make_omni_output or capabilities.include_hidden
    if ahead and (hooks or exports):
        what = "hooks" if hooks else "exported rows"
        raise CapabilityError(field, f"{what} with speculation need synchronous scheduling", ["async_scheduling=false"])
