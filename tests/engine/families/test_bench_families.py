"""The benchmark of the families: it times nothing that isn't the same on both sides."""

from __future__ import annotations

import json

import pytest

from stagevox.bench.families import FAMILIES, Family, Reference, measure

SCRIPT = """
import json, sys
print("a library greets")
print("@ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    together = asked[0] == "together"
    prompts = asked[together:]
    codes = [[[len(prompt["text"])] * 2] * prompt["frames"] for prompt in prompts]
    print("@" + json.dumps({"seconds": 0.5 if together else 2.0, "codes": codes}), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "speak.py"
    path.write_text(SCRIPT)
    return path


def test_a_reference_answers_line_by_line(script, tmp_path):
    family = Family(({"text": "a"}, {"text": "bcd"}), 3, {}, batches=True)
    with Reference(script, "any", tmp_path) as reference:
        seconds, codes = reference.speak(family, 2)
        assert seconds == 2.0 and [each.tolist() for each in codes] == [[[1, 1]] * 3, [[3, 3]] * 3]
        assert [each.tolist() for each in reference.speak(family, 1)[1]] == [[[1, 1]] * 3]
        assert reference.speak(family, 2, together=True)[0] == 0.5


def test_a_thinker_is_told_its_limit():
    family = FAMILIES["qwen3_omni"]
    assert family.asked(family.prompts[0]) == {**family.prompts[0], "frames": family.frames, "tokens": family.tokens}
    assert family.sampling["thinker"] == {"temperature": 0.0, "max_tokens": family.tokens}
    assert "thinker" not in FAMILIES["qwen3_tts"].sampling


def test_a_reference_that_ends_is_an_error(tmp_path):
    path = tmp_path / "speak.py"
    path.write_text("print('@ready', flush=True)")
    with Reference(path, "any", tmp_path) as reference, pytest.raises((RuntimeError, BrokenPipeError)):
        reference.speak(FAMILIES["qwen3_tts"], 1)


def test_other_codes_than_the_references_are_not_timed(script):
    family = FAMILIES["qwen3_tts"]
    with pytest.raises(AssertionError, match="codes differ from the reference's"):
        measure("qwen3_tts", family._replace(prompts=family.prompts[:1], frames=2), script, 1)


def test_figures_without_a_reference():
    family = FAMILIES["qwen3_tts"]
    figures = measure("qwen3_tts", family._replace(frames=3), None, 1)
    assert {"alone.frames_per_second", "eight.frames_per_second", "eight.talker.ms_per_token"} <= figures.keys()
    assert all(figure["median"] > 0 for figure in figures.values())
    json.dumps(figures)


def test_eight_prompts_each():
    assert all(len(family.prompts) == 8 for family in FAMILIES.values())
