"""Figures and metrics of requests, against what the test reckons from the same events on its own clock."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from stagevox.contract import CODES, WAVEFORM
from stagevox.observe.families import OTHER
from stagevox.observe.figures import RequestWatch
from stagevox.observe.metrics import MOST_ERRORS, Metrics
from stagevox.pipeline.client import StageHealth
from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.request import StageStats, Timing
from stagevox.pipeline.spans import StepSpan
from stagevox.server.record import RequestRecord
from stagevox.stage.messages import Gauges, Rest
from stagevox.stage.payload import StageOutput
from support.scrape import gauges, samples

STAGES = ("thinker", "talker", "code2wav")


class Client:
    """What metrics read of a pipeline."""

    def __init__(self):
        self.num_requests = 0
        self.now = {name: Gauges() for name in STAGES}
        self.watchers = []

    def watch(self, watcher):
        self.watchers.append(watcher)

    def gauges(self):
        return self.now

    def stats(self):
        return [StageStats(name) for name in STAGES]

    def health(self):
        return dict.fromkeys(STAGES, StageHealth.READY)


@pytest.fixture
def server():
    registry, client, clock = CollectorRegistry(), Client(), SimpleNamespace(now=1000.0)
    watch = RequestWatch([Metrics(client, STAGES, registry)], clock=lambda: clock.now)

    def text():
        return generate_latest(registry).decode()

    return SimpleNamespace(client=client, clock=clock, watch=watch, text=text, scrape=lambda: samples(text()))


def begin(server, req_id, endpoint="speech", queued=0.0):
    record = RequestRecord(req_id, endpoint, True, arrived_at=server.clock.now)
    server.watch.started(record)
    server.clock.now += queued
    record.admitted_at = server.clock.now
    return record


def emit(server, record, stage, tokens=(), choice=0, positions=0, **named):
    output = StageOutput(f"{record.req_id}-{choice}", list(tokens), named.pop("named", {}), positions=positions)
    server.watch.happened(record, EmitOutput(stage, output))


def end(server, record, reason="stop", error=None, timing=True):
    now = server.clock.now
    if timing:
        server.watch.happened(record, FinishRequest(f"{record.req_id}-0", reason, None, Timing(record.arrived_at, None, now)))
    record.finished_at, record.finish_reason, record.error = now, reason, error
    server.watch.finished(record)


def test_the_figures_are_those_of_the_events(server):
    """Random requests that overlap; everything is reckoned anew from a list of (time, what)."""
    rng = np.random.default_rng(7)
    truth = {key: [] for key in ("queue", "token", "audio", "whole", "rtf", "gap", "talker", "seconds")}
    for number in range(40):
        arrived = server.clock.now
        queued = float(rng.uniform(0, 0.4))
        record = begin(server, f"r{number}", queued=queued)
        admitted = server.clock.now
        token_at, audio_at = {}, {0: [], 1: []}
        for _ in range(int(rng.integers(0, 30))):
            server.clock.now += float(rng.uniform(0.001, 0.3))
            stage, choice = STAGES[rng.integers(0, 3)], int(rng.integers(0, 2))
            if stage == "code2wav":
                emit(server, record, stage, choice=choice, positions=2, named={WAVEFORM: np.zeros(20)})
                audio_at[choice].append(server.clock.now)
            else:
                emit(
                    server, record, stage, tokens=[1], choice=choice, named={CODES: np.zeros((1, 4))} if stage == "talker" else {}
                )
            token_at.setdefault(stage, server.clock.now)
        record.audio_seconds = 0.1 * sum(map(len, audio_at.values()))
        done = server.clock.now
        truth["queue"].append(queued)
        truth["seconds"].append(record.audio_seconds)
        tokens = [moment for stage, moment in token_at.items() if stage != "code2wav"]
        truth["token"] += [min(tokens) - arrived] if tokens else []
        heard = [moments[0] for moments in audio_at.values() if moments]
        truth["audio"] += [min(heard) - arrived] if heard else []
        truth["gap"] += [after - before for moments in audio_at.values() for before, after in pairwise(moments)]
        truth["rtf"] += [(done - admitted) / record.audio_seconds] if heard else []
        if "thinker" in token_at and "talker" in token_at:
            truth["talker"].append(max(0.0, token_at["talker"] - token_at["thinker"]))
        end_before = server.clock.now
        server.watch.happened(record, FinishRequest(f"r{number}-0", "stop", None, Timing(arrived, None, end_before)))
        server.clock.now += 0.5  # a client that reads slowly: part of the whole, not of the RTF
        end(server, record, timing=False)
        truth["whole"].append(server.clock.now - arrived)
    assert len(truth["gap"]) > 50 and len(truth["talker"]) > 10
    found = server.scrape()
    for name, key in {
        "request_queue_seconds": "queue",
        "time_to_first_token_seconds": "token",
        "time_to_first_audio_seconds": "audio",
        "audio_chunk_gap_seconds": "gap",
        "request_seconds": "whole",
        "audio_rtf": "rtf",
    }.items():
        assert found[f'stagevox_{name}_count{{endpoint="speech"}}'] == len(truth[key]), name
        assert math.isclose(found[f'stagevox_{name}_sum{{endpoint="speech"}}'], math.fsum(truth[key]), rel_tol=1e-9), name
        for bound in ("0.1", "0.3", "1.0", "+Inf"):
            bucket = found.get(f'stagevox_{name}_bucket{{endpoint="speech",le="{bound}"}}')
            assert bucket is None or bucket == sum(value <= float(bound) for value in truth[key]), (name, bound)
    assert found['stagevox_stage_first_output_seconds_count{stage="talker"}'] == len(truth["talker"])
    assert math.isclose(
        found['stagevox_stage_first_output_seconds_sum{stage="talker"}'], math.fsum(truth["talker"]), rel_tol=1e-9
    )
    assert math.isclose(found['stagevox_audio_seconds_total{endpoint="speech"}'], math.fsum(truth["seconds"]), rel_tol=1e-9)
    assert found['stagevox_requests_finished_total{endpoint="speech",reason="stop"}'] == 40


def test_running_and_waiting_are_counted_while_they_are(server):
    waiting = RequestRecord("w", "chat", False, arrived_at=server.clock.now)
    server.watch.started(waiting)
    begin(server, "r", "chat")
    found = server.scrape()
    assert found['stagevox_requests_running{endpoint="chat"}'] == 1
    assert found['stagevox_requests_waiting{endpoint="chat"}'] == 1
    waiting.admitted_at = server.clock.now
    assert server.scrape()['stagevox_requests_running{endpoint="chat"}'] == 2


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_each_end_is_counted_once_and_leaves_nothing(server, reason):
    error = "DeadlineError" if reason == "error" else None
    for number in range(5):
        end(server, begin(server, f"r{number}", "chat"), reason, error)
    found = server.scrape()
    ends = {name: value for name, value in found.items() if name.startswith("stagevox_requests_finished_total") and value}
    assert ends == {f'stagevox_requests_finished_total{{endpoint="chat",reason="{reason}"}}': 5}
    assert found['stagevox_requests_aborted_total{endpoint="chat"}'] == (5 if reason == "abort" else 0)
    assert found.get('stagevox_request_errors_total{error="DeadlineError"}', 0) == (5 if reason == "error" else 0)
    assert found['stagevox_requests_running{endpoint="chat"}'] == found['stagevox_requests_waiting{endpoint="chat"}'] == 0


def test_what_comes_after_the_end_changes_nothing(server):
    record = begin(server, "r")
    end(server, record, "abort")
    before = server.scrape()
    emit(server, record, "code2wav", named={WAVEFORM: np.zeros(20)})
    assert server.scrape() == before


def test_an_idle_server_shows_every_gauge_and_it_is_0(server):
    before = gauges(server.text())
    ready = {f'stagevox_stage_ready{{stage="{name}"}}': 1 for name in STAGES}
    assert {name: value for name, value in before.items() if value} == ready
    assert len(before) == 2 * 2 + 1 + 3 * (1 + 3 + 1)
    assert not any(name.endswith("_created") for name in before)


def test_labels_are_bounded_whatever_comes(server):
    for number in range(3 * MOST_ERRORS):
        end(server, begin(server, f"r{number}", f"endpoint-{number}"), "error", f"Error{number}")
    found = server.scrape()
    errors = {name: value for name, value in found.items() if name.startswith("stagevox_request_errors_total")}
    assert len(errors) == MOST_ERRORS + 1 and errors[f'stagevox_request_errors_total{{error="{OTHER}"}}'] == 2 * MOST_ERRORS
    assert found[f'stagevox_requests_finished_total{{endpoint="{OTHER}",reason="error"}}'] == 3 * MOST_ERRORS
    assert not any("endpoint-" in name for name in found)


def test_stages_are_read_when_they_are_asked_for(server):
    server.client.now["talker"] = Gauges(2, 3, 4, 0.25, preemptions=5, payload_bytes=6, replays=7)
    found = server.scrape()
    for state, count in {"running": 2, "waiting": 3, "parked": 4}.items():
        assert found[f'stagevox_stage_requests{{stage="talker",state="{state}"}}'] == count
    assert found['stagevox_stage_kv_usage_ratio{stage="talker"}'] == 0.25
    for name, count in {"preemptions": 5, "payload_bytes": 6, "replays": 7}.items():
        assert found[f'stagevox_stage_{name}_total{{stage="talker"}}'] == count


@pytest.mark.covers("MS-12")
def test_merged_steps_and_refusals_by_their_reason(server):
    server.client.now["talker"] = Gauges(windows=3, window_steps=24, tokens_saved=21, refusals={"waiting": 2, "prefill": 1})
    found = server.scrape()
    for name, count in {"windows": 3, "steps": 24, "tokens_saved": 21}.items():
        assert found[f'stagevox_stage_multi_step_{name}_total{{stage="talker"}}'] == count
    for reason, count in {"waiting": 2, "prefill": 1}.items():
        assert found[f'stagevox_stage_multi_step_refusals_total{{reason="{reason}",stage="talker"}}'] == count
    assert not any("refusals_total" in name and 'stage="thinker"' in name for name in found)


def test_steps_and_rests_add_up(server):
    rests = [Rest("idle", 1.0, 1.5), Rest("input", 1.5, 1.75), Rest("consumer", 2.0, 2.25), Rest("input", 3.0, 3.5)]
    for watcher in server.client.watchers:
        watcher(StepSpan("talker", 4.0, 4.5, rests, 1, 3, Gauges()))
    found = server.scrape()
    assert found['stagevox_stage_step_seconds_sum{stage="talker"}'] == 0.5
    for reason, seconds in {"idle": 0.5, "input": 0.75, "consumer": 0.25}.items():
        assert found[f'stagevox_stage_wait_seconds_total{{reason="{reason}",stage="talker"}}'] == seconds
