"""What every vLLM process loads before it makes a config (entry point ``vllm.general_plugins``).

Patches of upstream's globals stand here, each with its reason:

- ``CpuPlatform.check_and_update_config`` switches async scheduling off. A stage that asked for it gets it back.
- ``AsyncGPUModelRunnerOutput`` copies over a CUDA stream. On a CPU there is none: sampled ids are snapshot at once.
- ``CpuPlatform.register_triton_kernel_overrides`` walks every module each time an engine starts, and trips over llvmlite once
  n-gram speculation has imported it. Engines share a process here, and the first walk has done all there is to do.
- torchvision's operator schemas are declared if its compiled half doesn't load beside a CPU torch, so that it can be imported.
"""

from __future__ import annotations

from typing import Any

import torch

from .torchvision_schemas import declare_missing_schemas

_done = False


def register() -> None:
    """Make models, configs and patches known; safe to call again."""
    global _done
    if _done:
        return
    _done = True
    declare_missing_schemas()
    from stagevox.models.registry import register_models

    register_models()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _keep_async_scheduling()
        _async_output_without_streams()
        _override_kernels_once()


def _keep_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    from .wire import StageSettings

    upstream = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], config: Any) -> None:
        upstream(cls, config)
        settings = StageSettings.of(config)
        if settings is not None and settings.async_scheduling:
            config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _async_output_without_streams() -> None:
    import vllm.v1.worker.gpu_model_runner as gpu_model_runner
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    class CPUAsyncOutput(AsyncModelRunnerOutput):
        """Takes the arguments of the class it stands in for."""

        def __init__(
            self,
            model_runner_output: ModelRunnerOutput,
            sampled_token_ids: torch.Tensor,
            logprobs_tensors: Any,
            invalid_req_indices: list[int],
            async_output_copy_stream: None,
            vocab_size: int,
            check_ep_fault: bool = False,
            num_nans: Any = None,
        ) -> None:
            self._output = model_runner_output
            self._invalid = invalid_req_indices
            self._vocab_size = vocab_size
            self._logprobs = logprobs_tensors
            self.sampled_token_ids_cpu = sampled_token_ids.clone()
            self.async_copy_ready_event = _Ready()

        def get_output(self) -> ModelRunnerOutput:
            """The step's output with its token ids filled in."""
            ids, output = self.sampled_token_ids_cpu, self._output
            if ids.shape[-1] == 1:  # one token a row; more only with speculation
                tokens = ids.tolist()
                for row in self._invalid:
                    tokens[row].clear()
                logprobs = self._logprobs.tolists() if self._logprobs is not None else None
            else:
                tokens, logprobs = RejectionSampler.parse_output(
                    ids, self._vocab_size, self._invalid, logprobs_tensors=self._logprobs
                )
            output.sampled_token_ids, output.logprobs = tokens, logprobs
            return output

    gpu_model_runner.AsyncGPUModelRunnerOutput = CPUAsyncOutput


def _override_kernels_once() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import dispatcher

    upstream = CpuPlatform.register_triton_kernel_overrides.__func__

    def register_triton_kernel_overrides(cls: type[CpuPlatform]) -> None:
        if not dispatcher._registry:
            upstream(cls)

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


class _Ready:
    """An event that has always happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def record(self) -> None:
        """Do nothing."""
