"""vLLM's layers without an engine: one rank, made for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from stagevox.stage.worker import add_expert_group


@contextmanager
def one_rank(config: VllmConfig | None = None) -> Iterator[None]:
    """A process group of this process alone, unless one is there; layers may be made and called inside."""
    with set_current_vllm_config(config or VllmConfig()), TemporaryDirectory() as folder:
        if parallel_state.model_parallel_is_initialized():
            if config is not None:
                add_expert_group(config)
            yield
            return
        file = f"file://{Path(folder) / 'store'}"
        parallel_state.init_distributed_environment(1, 0, file, 0, "gloo")
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Weights wide enough that outputs differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def ready(module: torch.nn.Module) -> None:
    """What vLLM does once weights are loaded; on a CPU the linear layers pack theirs and let go of the plain ones."""
    for part in module.modules():
        if method := getattr(part, "quant_method", None):
            method.process_weights_after_loading(part)
