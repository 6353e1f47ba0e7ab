"""Two results side by side: no conclusion inside the noise."""

from __future__ import annotations

import json

import pytest

from stagevox.bench.serve.compare import compare, verdict
from stagevox.cli.main import main
from stagevox.errors import ConfigError


def band(low, middle, high):
    return {"min": low, "median": middle, "max": high}


def result(figure, repeats=3, concurrency=1, **head):
    bands = [{"max_concurrency": concurrency, "repeats": repeats, "figures": {"p50_ttfa_ms": figure}}]
    return {"endpoint": "speech", "num_prompts": 4, "runs": [], "bands": bands, **head}


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize(
    "before, after, said",
    [
        (band(10, 11, 12), band(6, 7, 9), "lower"),
        (band(10, 11, 12), band(13, 14, 20), "higher"),
        (band(10, 11, 12), band(6, 7, 10), "within the noise"),
        (band(10, 11, 12), band(12, 15, 20), "within the noise"),
        (band(10, 11, 12), band(1, 2, 30), "within the noise"),
        (band(10, 10, 10), band(10, 10, 10), "within the noise"),
    ],
)
def test_a_difference_is_one_only_where_no_repeats_meet(before, after, said):
    assert verdict(before, after) == said
    lines = compare(result(before), result(after))
    assert lines[1].endswith(said) and f"{after['median'] / before['median']:.3f}x" in lines[1]


@pytest.mark.parametrize(
    "other, why",
    [
        (result(band(1, 2, 3), repeats=2), "repeats"),
        (result(band(1, 2, 3), concurrency=8), "repeats"),
        (result(band(1, 2, 3), num_prompts=5), "num_prompts"),
        (result(band(1, 2, 3), endpoint="chat"), "endpoint"),
    ],
)
def test_what_can_t_be_compared_is_refused(other, why):
    with pytest.raises(ConfigError, match=why):
        compare(result(band(1, 2, 3)), other)


def test_from_the_command_line(tmp_path, capsys):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(result(band(10, 11, 12))))
    after.write_text(json.dumps(result(band(5, 6, 7))))
    assert main(["bench", "compare", str(before), str(after)]) == 0
    assert "lower" in capsys.readouterr().out
    after.write_text("{}")
    assert main(["bench", "compare", str(before), str(after)]) == 2
    assert main(["bench", "compare", str(before), str(tmp_path / "none")]) == 2
