"""The shorter way through the decoders on a CPU: it is taken, and what it says is what vLLM's way says."""

import numpy as np

from stagevox.models import cpu_decoder
from stagevox.models.qwen3_omni import talker, thinker
from stagevox.models.qwen3_omni.topology import topology
from support.families import omni
from support.qwen3_omni import ask

FAMILY = "qwen3_omni"
OVERRIDES = {
    "thinker": {"max_model_len": 256, "limit_mm_per_prompt": {"image": 2, "audio": 1, "video": 1}},
    "talker": {"max_model_len": 256},
    "code2wav": {"max_model_len": 128},
}


def spoken(checkpoint, oracle, names, monkeypatch, shorten):
    """Codes by request, and what was said of each model's way."""
    taken = {}

    def note(model, vllm_config):
        taken[type(model).__name__] = shorten(model, vllm_config)
        return taken[type(model).__name__]

    for module in (talker, thinker):
        monkeypatch.setattr(module, "shorten", note)
    with omni(topology(checkpoint(FAMILY)), OVERRIDES) as model:
        return [np.array(result.codes) for result in ask(model, oracle, names).values()], taken


def test_both_ways_say_the_same(checkpoint, golden, monkeypatch):
    oracle = golden(FAMILY)
    names = [name for name, case in oracle.cases.items() if case["codes"]][:6]
    short, taken = spoken(checkpoint, oracle, names, monkeypatch, cpu_decoder.shorten)
    assert taken == {"Qwen3MoeModel": True, "Qwen3MoeLLMModel": True}
    plain, taken = spoken(checkpoint, oracle, names, monkeypatch, lambda model, vllm_config: False)
    assert taken == {"Qwen3MoeModel": False, "Qwen3MoeLLMModel": False}
    assert all(len(codes) > 1 for codes in short)
    for ours, theirs in zip(short, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)
