"""Engines of one process start, stop and refuse to start."""

import json

import pytest

from stagevox.contract import StageExecutionType
from stagevox.errors import CapabilityError, CheckpointError, ConfigError
from stagevox.stage.engine import StageEngine
from stagevox.stage.vllm_config import make_config
from tests.engine.stage.harness import Harness, spec_of


def speculation(method="ngram"):
    return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.covers("EX-1")
def test_a_diffusion_stage_is_refused_at_start(checkpoints):
    with pytest.raises(CapabilityError, match=r"^toy: no runtime for diffusion stages yet \(allowed: ar, generation\)$"):
        make_config(spec_of(checkpoints["ToyVocoder"], kind=StageExecutionType.DIFFUSION), {})


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize(("method", "async_scheduling"), [("ngram", False), ("ngram_gpu", True)])
def test_speculation_with_mtp_is_refused(checkpoints, method, async_scheduling):
    overrides = {"speculative_config": speculation(method), "async_scheduling": async_scheduling}
    with pytest.raises(CapabilityError, match=r"toy\.speculative_config: verify positions lack the hidden state"):
        make_config(spec_of(checkpoints["ToyMTP"]), overrides)


@pytest.mark.covers("RT-8")
def test_the_short_names_of_speculation_are_no_way_around(checkpoints):
    with pytest.raises(CapabilityError, match=r"toy\.spec_method: verify positions lack the hidden state"):
        make_config(spec_of(checkpoints["ToyMTP"]), {"spec_method": "ngram", "spec_tokens": 2})


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"])
def test_more_workers_than_one_are_refused_instead_of_waited_for(checkpoints, size):
    with pytest.raises(CapabilityError, match=rf"^toy\.{size}: .*\(allowed: 1\)$"):
        make_config(spec_of(checkpoints["ToyMTP"]), {size: 2})
    make_config(spec_of(checkpoints["ToyMTP"]), {size: 1})


@pytest.mark.parametrize("overrides", [{"runner": "pooling"}, {"convert": "embed"}])
def test_a_stage_is_no_pooling_engine(checkpoints, overrides):
    with pytest.raises(CapabilityError, match=r"^toy\.runner: .*\(allowed: generate\)$"):
        make_config(spec_of(checkpoints["ToyMTP"]), overrides)


def test_what_vllm_trips_over_is_the_settings_fault(checkpoints):
    spec = spec_of(checkpoints["ToyMTP"])
    with pytest.raises(CapabilityError, match=r"^toy: .*/no/such/file"):
        make_config(spec, {"log_config_file": "/no/such/file"})
    with pytest.raises(ConfigError, match=r"^toy: the engine can't start: RuntimeError: Cannot find any model weights"):
        StageEngine(spec, {"load_format": "pt"})


@pytest.mark.parametrize("architectures", [5, "MiniTalkerForCausalLM", [["a"]], None])
def test_architectures_that_are_no_list_of_names_are_refused(checkpoints, tmp_path, architectures):
    config = json.loads((checkpoints["ToyMTP"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    with pytest.raises(CheckpointError, match="no known architecture"):
        make_config(spec_of(tmp_path), {})


@pytest.mark.covers("RT-8")
@pytest.mark.parametrize("model", ["ToyConditioned", "ToyScalar"])
def test_speculation_with_hooks_and_async_scheduling_is_refused_on_a_cpu(checkpoints, model):
    overrides = {"speculative_config": speculation("ngram_gpu")}
    with pytest.raises(CapabilityError, match=r"toy\.speculative_config: hooks with speculation need synchronous"):
        make_config(spec_of(checkpoints[model]), {**overrides, "async_scheduling": True})
    assert make_config(spec_of(checkpoints[model]), overrides).speculative_config is not None


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
