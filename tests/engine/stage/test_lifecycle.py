"""Engines of one process start, stop and refuse to start."""

import pytest

from stagevox.contract import StageExecutionType
from stagevox.errors import CapabilityError
from stagevox.stage.engine import make_config
from tests.engine.stage.harness import Harness, spec_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.covers("EX-1")
def test_a_diffusion_stage_is_refused_at_start(checkpoints):
    with pytest.raises(CapabilityError, match=r"^toy: no runtime for diffusion stages yet \(allowed: ar, generation\)$"):
        make_config(spec_of(checkpoints["ToyVocoder"], kind=StageExecutionType.DIFFUSION), {})


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_speculation_with_mtp_is_refused(checkpoints, async_scheduling):
    overrides = {"speculative_config": NGRAM, "async_scheduling": async_scheduling}
    with pytest.raises(CapabilityError, match="toy.speculative_config: verify positions lack the hidden state"):
        make_config(spec_of(checkpoints["ToyMTP"]), overrides)


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("model", ["ToyConditioned", "ToyScalar"])
def test_speculation_with_hooks_and_async_scheduling_is_refused_on_a_cpu(checkpoints, model):
    overrides = {"speculative_config": NGRAM, "async_scheduling": True}
    with pytest.raises(CapabilityError, match="toy.speculative_config: hooks with speculation need synchronous"):
        make_config(spec_of(checkpoints[model]), overrides)
    make_config(spec_of(checkpoints[model]), {**overrides, "async_scheduling": False})


def test_a_generation_stage_cannot_run_ahead(checkpoints):
    with pytest.raises(CapabilityError, match="toy.async_scheduling"):
        make_config(spec_of(checkpoints["ToyVocoder"], kind=StageExecutionType.GENERATION), {"async_scheduling": True})


def test_closing_one_engine_leaves_its_neighbours_running(checkpoints, engine, oracle, prompt):
    stage = engine("Qwen2ForCausalLM")
    other = Harness(spec_of(checkpoints["Qwen2ForCausalLM"]))
    other.engine.close()
    other.engine.close()
    stage.add("a", prompt(9), 5)
    assert stage.run().tokens["a"] == oracle.say(prompt(9), 5).tokens
