"""Workers that make our runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
import vllm.v1.worker.gpu_worker as gpu_worker
from vllm.config import VllmConfig
from vllm.distributed import parallel_state

from stagevox.contract import StageExecutionType

from .generation import CPUGenerationModelRunner, GPUGenerationModelRunner
from .runner import CPUARModelRunner, GPUARModelRunner
from .wire import StageSettings

# At run time a mixin; to the type checker it has what it will be mixed with.
if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase as Upstream
else:
    Upstream = object

AR, GENERATION = StageExecutionType.AR, StageExecutionType.GENERATION
CPU_RUNNERS = {AR: CPUARModelRunner, GENERATION: CPUGenerationModelRunner}
GPU_RUNNERS = {AR: GPUARModelRunner, GENERATION: GPUGenerationModelRunner}


def _execution_type(config: VllmConfig) -> StageExecutionType:
    settings = StageSettings.of(config)
    assert settings is not None, "an Omni worker needs a stage's settings in additional_config"
    return settings.execution_type


def add_expert_group(config: VllmConfig) -> None:
    """Make the process group of experts if ``config`` needs one and there is none.

    Engines of one process share the groups that the first one made, and vLLM makes this one only for a model that has experts.
    """
    if parallel_state._EP is None and config.model_config is not None and config.model_config.is_moe:
        world = parallel_state.get_world_group()
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [world.ranks],  # a stage is one rank: make_config refuses more
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            group_name="ep",
            use_all2all=config.parallel_config.use_all2all,
        )


class _Reports(Upstream):
    """What both workers add: an end for the runner's own thread, and what the engine asks for by ``collective_rpc``."""

    model_runner: Any

    def shutdown(self) -> None:
        """End the thread that makes outputs, then stop as upstream does."""
        if self.model_runner is not None:
            self.model_runner.materialiser.close()
        super().shutdown()

    def omni_step_log(self) -> Any:
        """The runner's step log."""
        return list(self.model_runner.step_log)

    def omni_clear_step_log(self) -> None:
        """Empty the runner's step log."""
        self.model_runner.step_log.clear()

    def omni_state_size(self) -> Any:
        """How many requests hold state in the runner."""
        return self.model_runner.model_intermediate_buffer.sizes()


class OmniCPUWorker(_Reports, cpu_worker.CPUWorker):
    """vLLM's CPU worker with our runners."""

    def init_device(self) -> None:
        """Set up the device; upstream looks the runner class up as a module global, so it is lent ours meanwhile."""
        upstream = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = CPU_RUNNERS[_execution_type(self.vllm_config)]
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = upstream
        add_expert_group(self.vllm_config)


class OmniGPUWorker(_Reports, gpu_worker.Worker):
    """vLLM's GPU worker with our runners."""

    def init_device(self) -> None:
        """Set up the device."""
        super().init_device()
        add_expert_group(self.vllm_config)

    def _make_model_runner(self) -> Any:
        return GPU_RUNNERS[_execution_type(self.vllm_config)](self.vllm_config, self.device)
