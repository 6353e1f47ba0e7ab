"""The timeline: tracks are tiled, files are whole after every write, bounded, and no disk takes a server down."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stagevox.errors import ConfigError
from stagevox.observe.figures import RequestFigures
from stagevox.observe.timeline import BETWEEN, REQUESTS, WAITS, Timeline
from stagevox.observe.trace import Trace, TraceFile
from stagevox.pipeline.spans import StepSpan
from stagevox.server.record import RequestRecord
from stagevox.stage.messages import Gauges, Rest

STAGES = ("thinker", "talker")


def slices(events, pid):
    return sorted((event for event in events if event["ph"] == "X" and event["pid"] == pid), key=lambda event: event["ts"])


def tiled(track):
    """No gap and no overlap from the first slice to the last."""
    return all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(track))


def spans(rng, count, stage):
    """Steps with rests between them, as a stage's process tells them."""
    now, made = 50.0, []
    for _ in range(count):
        rests = []
        for _ in range(int(rng.integers(0, 4))):
            now += float(rng.choice([0.0, 3e-7, 0.002]))
            began = now
            now += float(rng.choice([1e-7, 0.0004, 0.7]))
            rests.append(Rest(str(rng.choice(list(WAITS))), began, now))
        now += float(rng.choice([0.0, 2e-7, 0.00003]))
        began = now
        now += float(rng.uniform(1e-7, 0.02))
        made.append(StepSpan(stage, began, now, rests, 1, 2, Gauges(running=int(rng.integers(0, 3)))))
    return made


def test_a_stages_track_is_tiled_and_has_the_times_that_were_told():
    timeline, rng = Timeline(STAGES, 49.0), np.random.default_rng(3)
    told = spans(rng, 400, "talker")
    events = [event for span in told for event in timeline.step(span)]
    track = slices(events, 3)
    assert tiled(track) and not slices(events, 2)
    steps = [event for event in track if event["cat"] == "step"]
    assert [event["ts"] for event in steps] == [round((span.began - 49.0) * 1e6) for span in told]
    assert [event["ts"] + event["dur"] for event in steps] == [round((span.ended - 49.0) * 1e6) for span in told]
    for reason, name in WAITS.items():
        waited = sum(rest.ended - rest.began for span in told[1:] for rest in span.rests if rest.reason == reason)
        shown = sum(event["dur"] for event in track if event["name"] == name)
        assert waited > 1 and shown == pytest.approx(1e6 * waited, abs=2 * len(told) * 4)
    assert any(event["name"] == BETWEEN for event in track)


def test_counters_are_told_when_they_change():
    timeline = Timeline(STAGES, 0.0)
    told = [timeline.step(StepSpan("talker", n, n + 0.5, (), 1, 1, Gauges(running=n // 3))) for n in range(6)]
    assert [sum(event["ph"] == "C" for event in events) for events in told] == [2, 0, 0, 2, 0, 0]


def figures(req_id="speech-1"):
    record = RequestRecord(req_id, "speech", True, arrived_at=10.0, admitted_at=10.5, finished_at=12.0, finish_reason="stop")
    return RequestFigures(record, first_token_at=10.6, first_audio_at=11.0, done_at=11.9)


def test_a_request_is_a_span_with_its_phases():
    timeline = Timeline(STAGES, 10.0)
    events = timeline.opened(figures()) + timeline.closed(figures())
    open_at, found = {}, {}
    for event in events:
        assert (event["pid"], event["cat"]) == (REQUESTS, "request")
        key = event["id"], event["name"]
        if event["ph"] == "b":
            assert key not in open_at
            open_at[key] = event["ts"]
        else:
            found[key[1]] = open_at.pop(key), event["ts"]
    assert not open_at
    assert found == {
        "speech": (0, 2_000_000),
        "queued": (0, 500_000),
        "until the first audio": (500_000, 1_000_000),
        "speaking": (1_000_000, 1_900_000),
    }
    assert timeline.header()[-1]["ph"] == "M"  # nothing is open


def read(path):
    return json.loads(Path(path).read_text())["traceEvents"]


def test_the_file_is_whole_after_every_write(tmp_path):
    trace = Trace(tmp_path / "t.json", STAGES)
    assert all(event["ph"] == "M" for event in read(tmp_path / "t.json"))
    rng = np.random.default_rng(1)
    for number, span in enumerate(spans(rng, 60, "thinker")):
        trace.stepped(span)
        assert sum(event.get("cat") == "step" for event in read(tmp_path / "t.json")) == number + 1
    trace.opened(figures())
    trace.close()
    trace.close()
    assert read(tmp_path / "t.json")[-1]["name"] == "speech"


def test_an_empty_file_is_a_document_too(tmp_path):
    TraceFile(tmp_path / "t.json", 1000)
    assert read(tmp_path / "t.json") == []


def test_at_its_limit_the_newest_stay_and_open_requests_are_told_again(tmp_path):
    path, limit = tmp_path / "t.json", 40_000
    trace = Trace(path, STAGES, max_bytes=limit)
    trace.opened(figures("long"))
    told = spans(np.random.default_rng(2), 2000, "thinker")
    for span in told:
        trace.stepped(span)
    assert sorted(os.listdir(tmp_path)) == ["t.json", "t.json.1"]
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert sum(sizes) < limit + 4000 and max(sizes) > limit // 3
    older, newer = read(f"{path}.1"), read(path)
    steps = [event["ts"] for event in older + newer if event.get("cat") == "step"]
    expected = [1e6 * (span.began - told[-1].began) + steps[-1] for span in told[-len(steps) :]]
    assert 20 < len(steps) < len(told) and steps == pytest.approx(expected, abs=1.1, rel=0)
    assert tiled(slices(older, 2) + slices(newer, 2))
    for events in (older, newer):
        assert sum(event["name"] == "process_name" for event in events) == 3
        assert [event["id"] for event in events if event["ph"] == "b"] == ["long"]


def test_a_kill_leaves_a_document(tmp_path):
    """Killed at any moment, many times."""
    script = f"""
import itertools
from pathlib import Path
from stagevox.observe.trace import Trace
from stagevox.pipeline.spans import StepSpan
from stagevox.stage.messages import Gauges
trace = Trace(Path({str(tmp_path / "t.json")!r}), ["thinker"], max_bytes=100_000)
print("go", flush=True)
for n in itertools.count():
    trace.stepped(StepSpan("thinker", n, n + 0.5, (), 1, 1, Gauges(running=n)))
"""
    for round_ in range(5):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"go\n"
        time.sleep(0.02 + 0.017 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert tiled(slices(read(tmp_path / "t.json"), 2))


@pytest.mark.parametrize("name", ["missing/t.json", ".", "pipe", "/dev/null"])
def test_what_cannot_be_a_trace_is_told_at_once(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="trace: can't write"):
        Trace(tmp_path / name, STAGES)
    assert not Path("/dev/null.1").exists()


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path, monkeypatch, caplog):
    trace = Trace(tmp_path / "t.json", STAGES)
    span = spans(np.random.default_rng(1), 1, "thinker")[0]
    trace.stepped(span)
    whole = os.pwrite

    def full(file, data, at):
        return whole(file, data[:7], at)  # what a disk with seven bytes left does

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.ERROR, "stagevox.trace"):
        trace.stepped(span)
        trace.stepped(span)
    assert [record.getMessage().count("no space left") for record in caplog.records] == [1]
    monkeypatch.setattr(os, "pwrite", whole)
    trace.stepped(span)
    trace.close()
    assert sum(event.get("cat") == "step" for event in read(tmp_path / "t.json")) == 1
