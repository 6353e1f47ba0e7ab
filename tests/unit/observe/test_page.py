"""docs/observability.md has every metric, name in a trace and field of a log line, and no other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from stagevox.observe.figures import RequestFigures
from stagevox.observe.log import FORMATS
from stagevox.observe.metrics import STAGE_COUNTS
from stagevox.observe.timeline import BETWEEN, WAITS
from stagevox.server.app import create_app
from stagevox.server.record import RequestRecord
from stagevox.server.settings import ServerSettings
from stagevox.stage.messages import Gauges
from support.scripted_client import ScriptedClient, make_blueprint

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "observability.md").read_text()
ROWS = re.findall(r"^\| `(stagevox_\w+)` \| (\w+) \| ?([^|]*?) ?\| ([^|]+) \|$", PAGE, re.M)


@pytest.fixture
def families(monkeypatch):
    """What a server's registry has, errors included."""
    registry = CollectorRegistry()
    client = ScriptedClient()
    monkeypatch.setattr(client, "gauges", lambda: {"talker": Gauges(refusals={"waiting": 1})})
    app = create_app(client, make_blueprint(), ServerSettings(registry=registry))
    record = RequestRecord("r", "chat", False, finish_reason="error", error="DeadlineError", finished_at=1.0)
    app.state.server.observers.started(record)
    app.state.server.observers.finished(record)
    return list(registry.collect())


def test_every_metric_is_on_the_page_and_every_one_on_the_page_is_one(families):
    found = {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in families
    }
    assert {(name, kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROWS} == found
    assert len(ROWS) == len(found) == len(families) >= 27
    assert all(name.startswith("stagevox_") for name, _, _ in found)
    assert {f"stagevox_stage_{name}_total" for name, *_ in STAGE_COUNTS} <= {name for name, *_ in found}


def test_the_queries_ask_for_what_there_is(families):
    names = {sample.name for family in families for sample in family.samples}
    (queries,) = re.findall(r"^```promql\n(.*?)^```", PAGE, re.M | re.S)
    asked = set(re.findall(r"stagevox_\w+", queries))
    assert len(asked) >= 5 and asked <= names


def test_slices_of_a_trace():
    rows = re.findall(r"^\| `([a-z ]+)` \| [^|]+ \|$", PAGE, re.M)
    assert rows == ["step", *WAITS.values(), BETWEEN]


def test_fields_of_a_line():
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    shown = json.loads(block)
    record = RequestRecord("r", "chat", True, 1.0, 1.0, finished_at=3.0, audio_seconds=2.0, finish_reason="stop", error="x")
    every = RequestFigures(record, first_token_at=2.0, first_audio_at=2.0, done_at=2.0, gaps=1).as_dict()
    assert set(shown) == {"time", "level", "logger", "message", "request_id", *every} - {"error"}
    assert all(f"`{form}`" in PAGE or f"--log-format {form}" in PAGE for form in FORMATS)


def test_observing_imports_no_tensors():
    modules = [f"stagevox.observe.{path.stem}" for path in (ROOT / "src" / "stagevox" / "observe").glob("*.py")]
    code = f"import {', '.join(modules)}, sys; print([name for name in ('torch', 'vllm') if name in sys.modules])"
    assert len(modules) >= 7
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
