"""Settings and capability: what is an error, what falls back to step by step with one warning (MS-1, MS-6, MS-8)."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from stagevox.config.multi_step import ENVIRONMENT
from stagevox.contract import Capabilities
from stagevox.errors import ConfigError
from stagevox.models.registry import resolve_topology
from stagevox.stage.multi_step.gates import Refusal, capability_gate, static_gate, validate_multi_step_plan
from stagevox.stage.vllm_config import make_config
from stagevox.stage.wire import StageSettings

SPECS = {spec.name: spec for spec in resolve_topology("mini").stages}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "stagevox.multi_step")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "stagevox.multi_step"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def made(name, overrides=None, *, steps=None, multi_step=None):
    extras = {} if steps is None else {"multi_step_decode_steps": steps}
    config = make_config(dataclasses.replace(SPECS[name], engine_extras=extras, multi_step_for_all=multi_step), overrides or {})
    return StageSettings.of(config).multi_step_decode_steps, config


@pytest.mark.covers("MS-1", "MS-8")
def test_off_unless_asked_for(warnings):
    steps, config = made("talker")
    assert steps == 0 and config.cache_config.enable_prefix_caching
    assert warnings() == []


@pytest.mark.covers("MS-1", "MS-6")
def test_windows_turn_vllm_s_default_off_with_which_they_could_not_be(warnings):
    steps, config = made("talker", steps=8)
    assert steps == 8 and not config.cache_config.enable_prefix_caching
    assert warnings() == []


@pytest.mark.covers("MS-6")
def test_an_operator_s_prefix_caching_stays_and_rules_windows_out(warnings):
    steps, config = made("talker", {"enable_prefix_caching": True}, steps=8)
    assert steps == 0 and config.cache_config.enable_prefix_caching
    assert warnings() == ["talker: multi_step_decode_steps 8 is off: the prefix_caching gate refuses"]


@pytest.mark.covers("MS-1", "MS-8")
@pytest.mark.parametrize("source", ["cli", "environment"])
def test_a_value_for_all_stages_reaches_those_that_can(warnings, monkeypatch, source):
    if source == "environment":
        monkeypatch.setenv(ENVIRONMENT, "6")
    given = {"multi_step": 6} if source == "cli" else {}
    assert {name: made(name, **given)[0] for name in SPECS} == {"thinker": 0, "talker": 6, "code2wav": 0}
    assert warnings() == [], "nobody meant the others"
    assert made("thinker", **given)[1].cache_config.enable_prefix_caching


@pytest.mark.covers("MS-6", "MS-8")
def test_a_stage_s_own_value_without_the_capability_is_told_once(warnings):
    steps, config = made("thinker", steps=4)
    assert steps == 0 and config.cache_config.enable_prefix_caching
    assert made("code2wav", steps=4)[0] == 0
    assert warnings() == [
        "thinker: multi_step_decode_steps 4 is off: the capability gate refuses",
        "code2wav: multi_step_decode_steps 4 is off: the capability gate refuses",
    ]


@pytest.mark.covers("MS-1")
@pytest.mark.parametrize("value", [-1, 1, 17, "8", True])
def test_a_value_that_can_t_be_is_an_error_not_a_fallback(value):
    with pytest.raises(ConfigError, match="^talker.multi_step_decode_steps: "):
        made("talker", steps=value)


@pytest.mark.covers("MS-1")
def test_the_environment_of_a_stage_is_checked(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "1")
    with pytest.raises(ConfigError, match=f"^{ENVIRONMENT}: "):
        made("talker")


@pytest.mark.covers("MS-6")
def test_speculation_rules_windows_out(warnings, monkeypatch):
    """On a model without MTP, where speculation is allowed at all."""
    monkeypatch.setattr("stagevox.stage.vllm_config.capability_gate", lambda capabilities, stage: None)
    steps, _ = made("thinker", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, steps=8)
    assert steps == 0
    assert warnings() == ["thinker: multi_step_decode_steps 8 is off: the speculation gate refuses"]


def engine(**changes):
    """A config that the static gate lets pass, with changes by path."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_hybrid=False, is_attention_free=False, enable_prompt_embeds=False
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False, mamba_cache_mode="none"),
        speculative_config=None,
        lora_config=None,
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        kv_transfer_config=None,
        ec_transfer_config=None,
        use_v2_model_runner=False,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name)
        setattr(target, name, value)
    return config


@pytest.mark.covers("MS-6")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel_config__tensor_parallel_size": 2}, Refusal.PARALLEL),
        ({"parallel_config__pipeline_parallel_size": 2}, Refusal.PARALLEL),
        ({"parallel_config__data_parallel_size": 2}, Refusal.PARALLEL),
        ({"parallel_config__prefill_context_parallel_size": 2}, Refusal.PARALLEL),
        ({"parallel_config__decode_context_parallel_size": 2}, Refusal.PARALLEL),
        ({"parallel_config__use_ubatching": True}, Refusal.PARALLEL),
        ({"speculative_config": object()}, Refusal.SPECULATION),
        ({"lora_config": object()}, Refusal.LORA),
        ({"model_config__is_encoder_decoder": True}, Refusal.ENCODER_DECODER),
        ({"model_config__is_hybrid": True}, Refusal.MAMBA),
        ({"model_config__is_attention_free": True}, Refusal.MAMBA),
        ({"cache_config__mamba_cache_mode": "align"}, Refusal.MAMBA),
        ({"cache_config__enable_prefix_caching": True}, Refusal.PREFIX_CACHING),
        ({"aux_output_config__enable_return_routed_experts": True}, Refusal.ROUTED_EXPERTS),
        ({"kv_transfer_config": object()}, Refusal.KV_TRANSFER),
        ({"ec_transfer_config": object()}, Refusal.KV_TRANSFER),
        ({"use_v2_model_runner": True}, Refusal.MODEL_RUNNER),
        ({"model_config__enable_prompt_embeds": True}, Refusal.MODEL_RUNNER),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_what_in_an_engine_rules_windows_out(change, reason):
    assert static_gate(engine(**change)) is reason


@pytest.mark.covers("MS-6")
def test_nan_counts_and_other_platforms_rule_windows_out(monkeypatch):
    assert static_gate(engine()) is None
    with monkeypatch.context() as patch:
        patch.setattr("stagevox.stage.multi_step.gates.envs", SimpleNamespace(VLLM_COMPUTE_NANS_IN_LOGITS=True))
        assert static_gate(engine()) is Refusal.NAN_COUNTS
    other = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: False)
    monkeypatch.setattr("stagevox.stage.multi_step.gates.current_platform", other)
    assert static_gate(engine()) is Refusal.PLATFORM


@pytest.mark.covers("MS-8")
@pytest.mark.parametrize(
    ("flag", "stages", "stage", "able"),
    [
        (True, (), "talker", True),
        (False, (), "talker", False),
        (False, ("tts",), "tts", True),
        (False, ("tts",), "llm", False),
        (True, ("tts",), "llm", False),
    ],
)
def test_a_stage_flag_beats_the_blanket_one(flag, stages, stage, able):
    class Model:
        supports_multi_step_decode = flag
        supports_multi_step_stages = stages

    assert (capability_gate(Capabilities.of(Model), stage) is None) == able


def test_the_packaged_talker_can_and_the_thinker_can_t():
    from vllm.model_executor.models.llama import LlamaForCausalLM

    from stagevox.models.mini.talker import MiniTalkerForCausalLM

    assert capability_gate(Capabilities.of(MiniTalkerForCausalLM), "talker") is None
    assert capability_gate(Capabilities.of(LlamaForCausalLM), "thinker") is Refusal.CAPABILITY


class Held(SimpleNamespace):
    """What the runner's own gate looks at: two fresh decode rows with blocks for 64 positions."""

    def __init__(self):
        import numpy as np

        table = SimpleNamespace(num_blocks_per_row=np.array([2, 2, 0]), block_size=32)
        metadata = SimpleNamespace(
            no_penalties=True,
            max_num_logprobs=None,
            logprob_token_ids=None,
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            output_token_ids=[],
        )
        batch = SimpleNamespace(
            num_reqs=2,
            req_ids=["a", "b"],
            num_computed_tokens_cpu=np.array([10, 40, 0]),
            num_tokens_no_spec=np.array([11, 41, 0]),
            num_prompt_tokens=np.array([6, 6, 0]),
            block_table=SimpleNamespace(block_tables=[table]),
            sampling_metadata=metadata,
        )
        super().__init__(
            input_batch=batch,
            model_intermediate_buffer=SimpleNamespace(failed={}),
            num_prompt_logprobs={},
            supports_mm_inputs=False,
            embeds_every_row=True,
        )


PLAN = {"a": 8, "b": 8}


def change(path, value):
    def apply(runner):
        *parents, name = path.split(".")
        target = runner
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return apply


def row(name, index, value):
    return lambda runner: getattr(runner.input_batch, name).__setitem__(index, value)


@pytest.mark.covers("MS-6")
@pytest.mark.parametrize(
    ("plan", "apply", "reason"),
    [
        (PLAN, lambda runner: None, None),
        ({"a": 8}, lambda runner: None, Refusal.BATCH),
        ({"a": 8, "c": 8}, lambda runner: None, Refusal.BATCH),
        ({"a": 8, "b": 4}, lambda runner: None, Refusal.BATCH),
        (PLAN, row("num_computed_tokens_cpu", 1, 5), Refusal.BATCH),
        (PLAN, row("num_tokens_no_spec", 0, 13), Refusal.BATCH),
        ({"a": 16, "b": 16}, row("num_computed_tokens_cpu", 1, 49), Refusal.BATCH),
        (dict.fromkeys("ab", 25), lambda runner: None, Refusal.SLOTS),
        (dict.fromkeys("ab", 24), lambda runner: None, None),
        (PLAN, change("input_batch.sampling_metadata.no_penalties", False), Refusal.SAMPLER),
        (PLAN, change("input_batch.sampling_metadata.max_num_logprobs", 0), Refusal.SAMPLER),
        (PLAN, change("input_batch.sampling_metadata.logprob_token_ids", {0: [1]}), Refusal.SAMPLER),
        (PLAN, change("input_batch.sampling_metadata.allowed_token_ids_mask", object()), Refusal.SAMPLER),
        (PLAN, change("input_batch.sampling_metadata.bad_words_token_ids", {0: [[1]]}), Refusal.SAMPLER),
        (PLAN, change("input_batch.sampling_metadata.output_token_ids", [[1]]), Refusal.SAMPLER),
        (PLAN, change("num_prompt_logprobs", {"a": 1}), Refusal.SAMPLER),
        (PLAN, lambda runner: runner.__dict__.update(supports_mm_inputs=True, embeds_every_row=False), Refusal.INPUTS),
        (PLAN, change("model_intermediate_buffer.failed", {"b": ValueError()}), Refusal.FAILED),
    ],
)
def test_the_runner_looks_for_itself(plan, apply, reason):
    runner = Held()
    apply(runner)
    assert validate_multi_step_plan(runner, plan) is reason
