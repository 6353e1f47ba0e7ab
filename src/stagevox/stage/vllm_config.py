"""A stage's spec and an operator's overrides as the config that vLLM builds an engine from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from stagevox.config.topology import StageSpec
from stagevox.contract import Capabilities, StageExecutionType
from stagevox.errors import CapabilityError, CheckpointError

from .engine_args import check_engine_args
from .plugin import register
from .wire import StageSettings


def make_config(spec: StageSpec, overrides: Mapping[str, Any], *, record: bool = False) -> VllmConfig:
    """The vLLM config of a stage; raises a :class:`stagevox.errors.ConfigError` for what can't work."""
    if spec.execution_type is StageExecutionType.DIFFUSION:
        raise CapabilityError(spec.name, "no runtime for diffusion stages yet", ["ar", "generation"])
    check_engine_args(spec.name, overrides)
    register()
    load_general_plugins()
    capabilities = Capabilities.of(_import_model_class(spec))
    cpu = current_platform.is_cpu()
    arguments = {**spec.engine_args, **overrides}
    generation = spec.execution_type is StageExecutionType.GENERATION
    async_scheduling = bool(arguments.pop("async_scheduling", not (cpu or generation)))
    if generation and async_scheduling:
        raise CapabilityError(f"{spec.name}.async_scheduling", "a generation stage has no sampler to run ahead of", ["false"])
    if arguments.get("speculative_config") is not None:
        _refuse_speculation(f"{spec.name}.speculative_config", capabilities, ahead=async_scheduling)
    settings = StageSettings(
        name=spec.name,
        execution_type=spec.execution_type,
        async_scheduling=async_scheduling,
        record=record,
        chunk_processor=spec.chunk_processor,
        input_adapter=spec.input_adapter,
        has_talker_mtp=capabilities.has_talker_mtp,
        has_preprocess=capabilities.has_preprocess,
    )
    args = EngineArgs(
        model=str(spec.checkpoint),
        async_scheduling=async_scheduling,
        worker_cls="stagevox.stage.worker." + ("OmniCPUWorker" if cpu else "OmniGPUWorker"),
        scheduler_cls=_scheduler_class(spec.execution_type, async_scheduling),
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        additional_config=settings.to_config(),
        **{"use_tqdm_on_load": False, **arguments},
    )
    try:
        return args.create_engine_config()
    except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        raise CapabilityError(spec.name, first_reason(error)) from error


def _import_model_class(spec: StageSpec) -> type:
    """Import the checkpoint's model class now; raises :class:`CheckpointError` if there is none.

    It is needed here anyway, and vLLM looks at a class that it has not imported yet in a process of its own, for seconds.
    """
    config = spec.checkpoint / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    for name in names:
        registered = ModelRegistry.models.get(name)
        if registered is None:
            continue
        model_class: type = registered.load_model_cls()
        if not hasattr(registered, "model_cls"):
            ModelRegistry.register_model(name, model_class)
        return model_class
    raise CheckpointError(spec.name, f"{config}: no known architecture in {names}")


def first_reason(error: Exception) -> str:
    """The first reason of a validation error, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return " ".join(f"{where} {first['msg']}".split())
    return " ".join(str(error).split())


def _scheduler_class(execution_type: StageExecutionType, async_scheduling: bool) -> str:
    if execution_type is StageExecutionType.GENERATION:
        return "stagevox.stage.scheduler.OmniGenerationScheduler"
    return "stagevox.stage.scheduler." + ("OmniAsyncARScheduler" if async_scheduling else "OmniARScheduler")


def _refuse_speculation(field: str, capabilities: Capabilities, *, ahead: bool) -> None:
    """Models that can't be verified several positions at a time; ``ahead``: steps are scheduled before the one before is known (RT-8)."""
    if capabilities.has_talker_mtp:
        raise CapabilityError(field, "verify positions lack the hidden state that runner-managed MTP needs", ["null"])
    if ahead and (capabilities.has_preprocess or capabilities.has_postprocess):
        raise CapabilityError(field, "hooks with speculation need synchronous scheduling", ["async_scheduling=false"])
