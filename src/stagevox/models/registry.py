"""Which models there are: their vLLM classes, and the stages behind a name or a folder."""

from __future__ import annotations

ARCHITECTURES = {
    "MiniTalkerForCausalLM": "stagevox.models.mini.talker:MiniTalkerForCausalLM",
    "MiniCode2Wav": "stagevox.models.mini.code2wav:MiniCode2Wav",
}


def register_models() -> None:
    """Tell vLLM and transformers of our models; called in every process, calling it again does nothing."""
    from vllm import ModelRegistry

    from .mini.config import register_configs

    register_configs()
    known = ModelRegistry.get_supported_archs()
    for name, target in ARCHITECTURES.items():
        if name not in known:
            ModelRegistry.register_model(name, target)
