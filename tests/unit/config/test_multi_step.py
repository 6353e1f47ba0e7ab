"""Where a stage's number of merged steps comes from, and what it may be."""

from pathlib import Path

import pytest

from stagevox.config.multi_step import ENVIRONMENT, MultiStepSetting, parse_multi_step_steps, resolve_multi_step_steps
from stagevox.config.topology import StageSpec
from stagevox.contract import StageExecutionType
from stagevox.errors import ConfigError

pytestmark = pytest.mark.covers("MS-1")


def resolved(stage=None, *, cli=None, environ=None):
    extras = {} if stage is None else {"multi_step_decode_steps": stage}
    spec = StageSpec("talker", StageExecutionType.AR, Path("/nowhere"), engine_extras=extras, multi_step_for_all=cli)
    return resolve_multi_step_steps(spec, environ)


@pytest.mark.parametrize(
    ("cli", "environment", "stage", "expected"),
    [
        (None, None, None, (0, "default")),
        (None, None, 4, (4, "stage")),
        (None, "6", 4, (6, "environment")),
        (8, "6", 4, (8, "cli")),
        (0, "6", 4, (0, "cli")),
        (None, "0", 4, (0, "environment")),
        (None, " ", 4, (4, "stage")),
        (16, None, None, (16, "cli")),
        (2, None, None, (2, "cli")),
    ],
)
def test_command_line_over_environment_over_stage_over_off(cli, environment, stage, expected):
    environ = {} if environment is None else {ENVIRONMENT: environment}
    found = resolved(stage, cli=cli, environ=environ)
    assert found == MultiStepSetting(*expected)
    assert found.is_blanket == (expected[1] in ("cli", "environment"))


def test_the_process_environment_counts(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "12")
    assert resolved(4) == (12, "environment")


@pytest.mark.parametrize("value", [-1, 1, 17, 1000, True, False, 2.0, "8", [8], float("nan")])
def test_a_stage_value_that_can_t_be(value):
    with pytest.raises(ConfigError) as caught:
        resolved(value, environ={})
    assert caught.value.field == "talker.multi_step_decode_steps"
    assert caught.value.allowed == ("0", "2 to 16")


@pytest.mark.parametrize("value", [-1, 1, 17, True, 2.5, "8"])
def test_a_command_line_value_that_can_t_be(value):
    with pytest.raises(ConfigError, match="^multi_step_decode_steps: "):
        resolved(cli=value, environ={})


@pytest.mark.parametrize("text", ["-1", "1", "17", "2.0", "eight", "0x8", "8,"])
def test_an_environment_value_that_can_t_be(text):
    with pytest.raises(ConfigError, match=f"^{ENVIRONMENT}: "):
        resolved(environ={ENVIRONMENT: text})


def test_what_is_overruled_is_checked_all_the_same():
    with pytest.raises(ConfigError):
        resolved(1, cli=8, environ={})
    with pytest.raises(ConfigError):
        resolved(4, cli=8, environ={ENVIRONMENT: "1"})


def test_text_is_parsed():
    assert parse_multi_step_steps("x", " 16 ") == 16
