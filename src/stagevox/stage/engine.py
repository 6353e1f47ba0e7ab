"""One stage: a vLLM engine core in this process, built from a stage's spec and an operator's overrides."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from stagevox.config.topology import StageSpec
from stagevox.connectors.base import Chunk
from stagevox.contract import Capabilities, StageExecutionType
from stagevox.errors import CapabilityError, CheckpointError, ConfigError, StagevoxError

from .engine_args import check_engine_args
from .payload import StageInput, StageOutput, StageRequest, StepRow
from .plugin import register
from .wire import StageSettings

# Engines of this process. vLLM's shutdown destroys the process groups that all of them share: only the last one may call it.
_open: set[StageEngine] = set()

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


class StageEngine:
    """A stage as the drivers see it (:class:`stagevox.pipeline.stage.Stage`)."""

    def __init__(self, spec: StageSpec, overrides: Mapping[str, Any] | None = None, *, record: bool = False) -> None:
        """Load the stage. ``overrides`` are vLLM engine arguments; ``record`` keeps a step log."""
        self.name = spec.name
        self._spec = spec
        config = make_config(spec, overrides or {}, record=record)
        try:
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except ValueError as error:  # such as a KV pool too small for one request
            raise CapabilityError(spec.name, first_reason(error)) from error
        except StagevoxError:
            raise
        except Exception as error:  # whatever vLLM trips over: weights it can't read, settings it only asserts
            reason = f"{type(error).__name__}: {first_reason(error)}"
            raise ConfigError(spec.name, f"the engine can't start: {reason}") from error
        _open.add(self)
        self._scheduler: Any = self._core.scheduler
        self._scheduler.make_request = self._make_request
        self._max_model_len = config.model_config.max_model_len

    def add(self, request: StageRequest) -> None:
        """Register a request; it runs at once if it has a prompt, else it waits for its input."""
        self._scheduler.omni_add(request)

    def deliver(self, chunk: Chunk) -> None:
        """Hand over an upstream chunk."""
        self._scheduler.omni_deliver(chunk)

    def abort(self, req_ids: Sequence[str]) -> None:
        """Free the requests here; unknown ids are ignored."""
        self._core.abort_requests(list(req_ids))

    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._core.batch_queue) or self._scheduler.has_requests()

    def step(self) -> tuple[list[StageOutput], list[Chunk]]:
        """Run one scheduling round."""
        _, executed = self._core.step_fn()
        self._core.post_step(executed)
        outputs, chunks = self._scheduler.take_outputs()
        return outputs, chunks

    def trace(self) -> list[StepRow]:
        """The step log so far; empty unless made with ``record``."""
        log: list[StepRow] = self._core.collective_rpc("omni_step_log")[0]
        return log

    def clear_trace(self) -> None:
        """Forget the step log so far, and count steps from 0 again."""
        self._core.collective_rpc("omni_clear_step_log")

    @property
    def num_requests(self) -> int:
        """Requests held here, waiting ones included."""
        return len(self._scheduler.omni_requests)

    def state_size(self) -> dict[str, int]:
        """What the runner holds per request, by kind; all zero once idle."""
        size: dict[str, int] = self._core.collective_rpc("omni_state_size")[0]
        return size

    def close(self) -> None:
        """Stop the engine; closing it again does nothing."""
        if self not in _open:
            return
        _open.discard(self)
        if _open:
            self._core.model_executor.shutdown()
            self._core.scheduler.shutdown()
        else:
            self._core.shutdown()

    def _make_request(self, request: StageRequest, given: StageInput) -> Request:
        fields = {**self._spec.sampling, **request.sampling, **given.sampling}
        made, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=request.req_id,
                prompt_token_ids=list(given.prompt_token_ids),
                mm_features=None,
                sampling_params=sampling_params(
                    fields, self._spec.constraints, self._max_model_len - len(given.prompt_token_ids)
                ),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=given.cache_salt or request.cache_salt,
                data_parallel_rank=None,
            )
        )
        return made


def sampling_params(fields: Mapping[str, Any], constraints: Mapping[str, Any], room: int) -> SamplingParams:
    """The client's parameters with the model's constraints laid over them.

    Lists such as ``stop_token_ids`` are joined; ``max_tokens`` is the least of the client's, the model's and the ``room`` that
    the context leaves.
    """
    merged = dict(fields)
    for key, value in constraints.items():
        old = merged.get(key)
        merged[key] = [*old, *(item for item in value if item not in old)] if isinstance(value, list) and old else value
    caps = [fields.get("max_tokens"), constraints.get("max_tokens"), room]
    merged["max_tokens"] = min(cap for cap in caps if cap is not None)
    merged.setdefault("detokenize", False)
    return SamplingParams(**merged)


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
    for size in _SIZES:
        if arguments.get(size) not in (None, 1):
            raise CapabilityError(f"{spec.name}.{size}", "a stage's engine is one worker in this process", ["1"])
    for speculation in _SPECULATION:
        if arguments.get(speculation) is not None:
            _refuse_speculation(f"{spec.name}.{speculation}", capabilities, ahead=async_scheduling and cpu)
    settings = StageSettings(
        name=spec.name,
        execution_type=spec.execution_type,
        async_scheduling=async_scheduling,
        record=record,
        chunk_processor=spec.chunk_processor,
        input_adapter=spec.input_adapter,
        has_talker_mtp=capabilities.has_talker_mtp,
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
        config = args.create_engine_config()
    except Exception as error:
        raise CapabilityError(spec.name, first_reason(error)) from error
    if config.model_config.runner_type != "generate":
        raise CapabilityError(f"{spec.name}.runner", f"a stage can't be a {config.model_config.runner_type} engine", ["generate"])
    return config


def _import_model_class(spec: StageSpec) -> type:
    """Import the checkpoint's model class now; raises :class:`CheckpointError` if there is none.

    It is needed here anyway, and vLLM looks at a class that it has not imported yet in a process of its own, for seconds.
    """
    config = spec.checkpoint / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    for name in names if isinstance(names, list) else ():
        registered = ModelRegistry.models.get(str(name))
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
    return " ".join(str(error).split()) or type(error).__name__


def _scheduler_class(execution_type: StageExecutionType, async_scheduling: bool) -> str:
    if execution_type is StageExecutionType.GENERATION:
        return "stagevox.stage.scheduler.OmniGenerationScheduler"
    return "stagevox.stage.scheduler." + ("OmniAsyncARScheduler" if async_scheduling else "OmniARScheduler")


def _refuse_speculation(field: str, capabilities: Capabilities, *, ahead: bool) -> None:
    """Models that can't be verified several positions at a time; ``ahead``: scheduling runs ahead of the CPU (RT-8)."""
    if capabilities.has_talker_mtp:
        raise CapabilityError(field, "verify positions lack the hidden state that runner-managed MTP needs", ["null"])
    if ahead and (capabilities.has_preprocess or capabilities.has_postprocess):
        raise CapabilityError(field, "hooks with speculation need synchronous scheduling on a CPU", ["async_scheduling=false"])
