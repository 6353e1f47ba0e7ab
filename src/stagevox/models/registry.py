"""Which models there are: their vLLM classes, and the stages behind a name or a folder."""

from __future__ import annotations

from pathlib import Path

from stagevox.config.objects import load_attribute
from stagevox.config.topology import FrontEnd, Topology
from stagevox.errors import UnknownModelError

from .checkpoint import blamed_on, check_sizes, read_json

ARCHITECTURES = {
    "MiniTalkerForCausalLM": "stagevox.models.mini.talker:MiniTalkerForCausalLM",
    "MiniCode2Wav": "stagevox.models.mini.code2wav:MiniCode2Wav",
    "Qwen3OmniThinker": "stagevox.models.qwen3_omni.thinker:Qwen3OmniThinker",
    "Qwen3OmniTalker": "stagevox.models.qwen3_omni.talker:Qwen3OmniTalker",
    "Qwen3OmniCode2Wav": "stagevox.models.qwen3_omni.code2wav:Qwen3OmniCode2Wav",
    "Qwen3TTSTalkerForConditionalGeneration": "stagevox.models.qwen3_tts.talker:Qwen3TTSTalkerForConditionalGeneration",
    "Qwen3TTSCode2Wav": "stagevox.models.qwen3_tts.code2wav:Qwen3TTSCode2Wav",
    "Qwen2_5OmniThinker": "stagevox.models.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
    "Qwen2_5OmniTalker": "stagevox.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
    "Qwen2_5OmniToken2Wav": "stagevox.models.qwen2_5_omni.code2wav:Qwen2_5OmniToken2Wav",
}


def register_models() -> None:
    """Tell vLLM and transformers of our models; called in every process, calling it again does nothing."""
    from vllm import ModelRegistry

    from .mini import config as mini
    from .qwen3_tts import config as qwen3_tts

    for family in (mini, qwen3_tts):
        family.register_configs()
    known = ModelRegistry.get_supported_archs()
    for name, target in ARCHITECTURES.items():
        if name not in known:
            ModelRegistry.register_model(name, target)


PACKAGED = ("mini",)
"""Models that ship with stagevox."""

FAMILIES: dict[str, str] = {
    "qwen3_omni_moe": "stagevox.models.qwen3_omni.topology",
    "qwen3_tts": "stagevox.models.qwen3_tts.topology",
    "qwen2_5_omni": "stagevox.models.qwen2_5_omni.topology",
}
"""``model_type`` in a checkpoint's ``config.json`` to the module whose ``topology(folder)`` gives its stages."""


def resolve_topology(model: str | Path) -> Topology:
    """The stages behind a packaged model's name or a checkpoint folder.

    Raises :class:`UnknownModelError` with the known names, or :class:`CheckpointError` with the file that a folder lacks.
    """
    from .mini import topology as mini

    if model == mini.NAME:
        return mini.topology()
    folder = Path(model)
    if not folder.is_dir():
        raise UnknownModelError("model", f"no model {str(model)!r}, and no such folder", PACKAGED)
    folder = folder.resolve()
    if mini.looks_like(folder):
        return mini.topology(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise UnknownModelError("model", f"{folder} holds no config.json, and no model of a known family", PACKAGED)
    values = read_json(config)
    model_type = values.get("model_type")
    module = FAMILIES.get(str(model_type))
    if module is None:
        raise UnknownModelError("model", f"{config} has model_type {model_type!r}", sorted(FAMILIES))
    check_sizes(config, values)
    with blamed_on(config):
        topology: Topology = load_attribute(f"{module}:topology")(folder)
    return topology


def front_end_of(topology: Topology) -> FrontEnd:
    """What checks the prompts of a model; raises :class:`CheckpointError` for files of its folder that can't be used."""
    with blamed_on(topology.checkpoint):
        front_end: FrontEnd = load_attribute(topology.front_end)(topology.checkpoint)
    return front_end
