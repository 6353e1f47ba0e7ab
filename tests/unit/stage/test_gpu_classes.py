"""The classes for GPUs import where there is none, and are the same mixins over vLLM's GPU classes."""

import inspect

import pytest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from stagevox.contract import StageExecutionType
from stagevox.stage.generation import CPUGenerationModelRunner, GPUGenerationModelRunner, OmniGenerationModelRunner
from stagevox.stage.runner import CPUARModelRunner, GPUARModelRunner, OmniGPUModelRunner
from stagevox.stage.worker import CPU_RUNNERS, GPU_RUNNERS, OmniCPUWorker, OmniGPUWorker

CONTRACT = ["_update_states", "_preprocess", "_talker_mtp_forward", "_model_forward", "_postprocess", "_collect", "_gather_rows"]
GENERATION = ["execute_model", "sample_tokens", "_generate", "_forward_rows", "_gather_rows"]


@pytest.mark.covers("PC-12")
@pytest.mark.parametrize(
    "name", [*CONTRACT, "sample_tokens", "_gather_runtime_additional_information", "_build_model_kwargs_extra"]
)
def test_ar_runners_share_the_mixins_methods(name):
    assert getattr(GPUARModelRunner, name) is getattr(CPUARModelRunner, name) is getattr(OmniGPUModelRunner, name)


@pytest.mark.parametrize("name", GENERATION)
def test_generation_runners_share_the_mixins_methods(name):
    assert (
        getattr(GPUGenerationModelRunner, name)
        is getattr(CPUGenerationModelRunner, name)
        is getattr(OmniGenerationModelRunner, name)
    )


@pytest.mark.parametrize("runner", [GPUARModelRunner, GPUGenerationModelRunner])
def test_gpu_runners_stand_on_upstreams(runner):
    assert issubclass(runner, GPUModelRunner)
    assert runner.__mro__.index(OmniGPUModelRunner) < runner.__mro__.index(GPUModelRunner)


def test_the_gpu_worker_overrides_what_upstream_calls():
    """A method of this name exists upstream, with the same parameters: else ours would never be called."""
    assert issubclass(OmniGPUWorker, Worker)
    upstream = inspect.getsource(Worker)
    for name in [name for name in vars(OmniGPUWorker) if name.startswith("_make") or name in ("init_device", "load_model")]:
        assert hasattr(Worker, name), f"{name} is no method of vLLM's worker"
        assert f"self.{name}(" in upstream or name in ("init_device", "load_model")


def test_every_execution_type_that_runs_has_a_runner_on_both_devices():
    runs = {StageExecutionType.AR, StageExecutionType.GENERATION}
    assert set(CPU_RUNNERS) == set(GPU_RUNNERS) == runs
    assert OmniCPUWorker.omni_step_log is OmniGPUWorker.omni_step_log


@pytest.mark.covers("RT-1")
@pytest.mark.parametrize("name", ["_update_states", "_preprocess", "_model_forward", "sample_tokens", "_dummy_run", "load_model"])
def test_what_the_mixin_overrides_exists_upstream(name):
    assert callable(getattr(GPUModelRunner, name))
