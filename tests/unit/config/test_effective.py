"""Who wins: command line, the platform's part, the deploy file, the model (SV-2); a stage before the deployment (EX-11)."""

from __future__ import annotations

import pytest

from stagevox import Omni
from stagevox.config.blueprint import Blueprint
from stagevox.config.effective import Setting, resolve_stage_model_runner
from stagevox.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and vLLM warn of while they are imported

ARGS = ("stages", "talker", "engine_args")
FILE = """
stages:
  talker:
    engine_args: {max_num_seqs: 4, block_size: 16}
    sampling: {temperature: 0.5, seed: 3}
platforms:
  cpu:
    stages: {talker: {engine_args: {max_num_seqs: 2}, sampling: {seed: 4}}}
    deadlines: {input: 60}
  cuda:
    stages: {talker: {engine_args: {max_num_seqs: 256}}}
"""


def chain(setting):
    found = []
    while setting is not None:
        found.append((setting.value, setting.source))
        setting = setting.over
    return found


@pytest.mark.covers("SV-2")
def test_precedence_and_where_each_value_comes_from(model, deploy):
    path = deploy(FILE)
    settings = ["talker.max_num_seqs=1", "talker.sampling.temperature=1"]
    effective = Blueprint.of("fake", deploy_config=path, stage_settings=settings, platform="cpu").effective
    assert chain(effective.settings[(*ARGS, "max_num_seqs")]) == [
        (1, "--stage"),
        (2, f"{path}:8 (platforms.cpu)"),
        (4, f"{path}:4"),
        (8, "model"),
    ]
    assert chain(effective.settings[(*ARGS, "block_size")]) == [(16, f"{path}:4")]
    assert chain(effective.settings[(*ARGS, "dtype")]) == [("float32", "model")]
    assert chain(effective.settings[("stages", "talker", "sampling", "temperature")]) == [
        (1, "--stage"),
        (0.5, f"{path}:5"),
        (0.0, "model"),
    ]
    assert chain(effective.settings[("deadlines", "input")]) == [(60, f"{path}:9 (platforms.cpu)"), (30, "default")]


@pytest.mark.covers("SV-2")
@pytest.mark.parametrize("platform, seqs, deadline", [("cpu", 2, 60), ("cuda", 256, 30), ("rocm", 4, 30)])
def test_only_the_running_platforms_part_counts(model, deploy, platform, seqs, deadline):
    blueprint = Blueprint.of("fake", deploy_config=deploy(FILE), platform=platform)
    assert blueprint.overrides["talker"]["max_num_seqs"] == seqs
    assert blueprint.effective.deadline == deadline and blueprint.effective.platform == platform


def test_the_running_platform_is_vllms(model, deploy, monkeypatch):
    monkeypatch.setattr("stagevox.config.vllm_names.running_platform", lambda: "cuda")
    assert Blueprint.of("fake", deploy_config=deploy(FILE)).overrides["talker"]["max_num_seqs"] == 256
    monkeypatch.undo()


def test_without_a_part_for_a_platform_nobody_asks(fake_model, deploy, monkeypatch):
    monkeypatch.setattr("stagevox.config.vllm_names.running_platform", lambda: pytest.fail("asked"))
    path = deploy("stages: {talker: {sampling: {seed: 1}}}\nplatforms: {cuda: {stages: {talker:}}}")
    assert Blueprint.of("fake", deploy_config=path).effective.platform is None


def test_overrides_in_code_are_as_high_as_the_command_line(model, deploy):
    path = deploy(FILE)
    blueprint = Blueprint.of("fake", {"talker": {"max_num_seqs": 3}}, deploy_config=path, platform="cpu")
    assert chain(blueprint.effective.settings[(*ARGS, "max_num_seqs")])[:2] == [
        (3, "stage_overrides"),
        (2, f"{path}:8 (platforms.cpu)"),
    ]
    with pytest.raises(
        ConfigError, match=r"^stages\.talker\.engine_args\.max_num_seqs: --stage: stands in stage_overrides as well"
    ):
        Blueprint.of("fake", {"talker": {"max_num_seqs": 3}}, stage_settings=["talker.max_num_seqs=3"])


@pytest.mark.covers("SV-2")
def test_omni_takes_the_file(model, deploy):
    with Omni("fake", {"talker": {"block_size": 32}}, deploy_config=deploy(FILE)) as omni:
        assert model.stages["talker"].overrides == {"max_num_seqs": 2, "block_size": 32}
        assert omni._driver._orchestrator.deadline == 60
    with Omni("fake", deploy_config=deploy(FILE), deadline=5) as omni:
        assert omni._driver._orchestrator.deadline == 5
    with pytest.raises(ConfigError, match="deploy_config: belong into the blueprint"):
        Omni(Blueprint.of("fake"), deploy_config=deploy(FILE))


def test_the_operators_defaults_lie_under_the_clients_and_reach_every_stage(model, deploy):
    """Also where a stage's own code reads what a client asked for, such as a cap on frames."""
    path = deploy("stages: {talker: {sampling: {max_tokens: 7, seed: 3, top_k: null}}, thinker: {sampling: {max_tokens: 9}}}")
    blueprint = Blueprint.of("fake", deploy_config=path)
    request = blueprint.admit("r", "hi", {"seed": 5, "thinker": {"temperature": 0.1}})
    assert request.sampling == {"talker": {"max_tokens": 7, "seed": 5}, "thinker": {"max_tokens": 9, "temperature": 0.1}}
    assert blueprint.topology.stages[1].sampling == {"temperature": 0.0, "max_tokens": 7, "seed": 3}
    with Omni("fake", deploy_config=path) as omni:
        (result,) = omni.generate("hello")
        assert (len(result.codes), result.finish_reason) == (7, "length")
        (result,) = omni.generate("hello", {"max_tokens": 4})
        assert len(result.codes) == 4


@pytest.mark.covers("EX-11")
def test_a_stages_model_runner_comes_before_the_deployments(model, deploy):
    path = deploy("model_runner: v1\nstages: {talker: {model_runner: v1}}")
    settings = Blueprint.of("fake", deploy_config=path).effective.settings
    assert chain(settings[("stages", "talker", "model_runner")]) == [("v1", f"{path}:2"), ("v1", f"{path}:1"), ("v1", "default")]
    assert chain(settings[("stages", "thinker", "model_runner")]) == [("v1", f"{path}:1"), ("v1", "default")]
    # What v2 means is not there yet, so who wins is shown on the function.
    deployment = Setting("v2", "a", Setting("v1", "default"))
    assert resolve_stage_model_runner(Setting("v1", "b", Setting("v2", "c")), deployment).value == "v1"
    assert resolve_stage_model_runner(None, deployment) == deployment


def test_a_deployments_model_runner_that_is_not_there_is_harmless_if_every_stage_has_its_own(model, deploy):
    own = "{model_runner: v1}"
    path = deploy(f"model_runner: v2\nstages: {{thinker: {own}, talker: {own}, code2wav: {own}}}")
    assert Blueprint.of("fake", deploy_config=path).effective.value("stages", "talker", "model_runner") == "v1"


def test_explained_has_the_defaults_of_options(model, deploy):
    explained = Blueprint.of("fake", stage_settings=["code2wav.input_options.smooth=on"]).explained()
    assert explained.block("talker", "chunk_options") == {"sizes": (4, 8), "context": 3}
    assert explained.block("code2wav", "input_options") == {"left_context": 25, "smooth": True}


def test_a_plain_blueprint_is_the_models(model):
    blueprint = Blueprint.of("fake")
    assert blueprint.topology == model.topology and blueprint.overrides == {}
    assert blueprint.admit("r", "hi", None).sampling == {}


@pytest.mark.covers("RT-7")
def test_where_outputs_are_made_is_a_setting_of_the_stage(model, deploy):
    path = deploy("stages: {talker: {engine_extras: {output_materialisation: background}}}")
    stages = {spec.name: spec.engine_extras for spec in Blueprint.of("fake", deploy_config=path).topology.stages}
    assert stages == {"thinker": {}, "talker": {"output_materialisation": "background"}, "code2wav": {}}
    with pytest.raises(ConfigError, match=r"output_materialisation.*'later'"):
        Blueprint.of("fake", deploy_config=deploy("stages: {talker: {engine_extras: {output_materialisation: later}}}"))
