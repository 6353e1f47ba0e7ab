"""What an operator sees of ``stagevox serve`` with the packaged voice: metrics, the trace, log lines; and that a kill leaves the trace."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from support.scrape import gauges, samples

SRC = Path(__file__).resolve().parents[2] / "src"
STAGES = ("thinker", "talker", "code2wav")
TEXTS = ["good morning", "12 + 30 = 42", "hello there"]
LEAVERS = 16
LONG = "the cat and the dog and the cat"


def speak(http, text):
    answer = http.post("/v1/audio/speech", json={"input": text, "response_format": "pcm"})
    assert answer.status_code == 200
    return len(answer.content) // 2 / int(answer.headers["X-Sample-Rate"])


async def leave_early(url, count):
    """Ask for speech many times at once, and go when some of it is being made."""
    body = {"input": LONG, "response_format": "wav"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, httpx.AsyncClient(base_url=url, timeout=60) as scraper:
        asked = [asyncio.ensure_future(http.post("/v1/audio/speech", json=body)) for _ in range(count)]
        running = 0
        while not running:
            found = samples((await scraper.get("/metrics")).text)
            running = found['stagevox_requests_running{endpoint="speech"}']
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)


@pytest.mark.covers("SV-1")
@pytest.mark.parametrize("driver", ["process", "inline"])
def test_metrics_trace_and_log(tmp_path, driver):
    trace, log = tmp_path / "trace.json", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stagevox.cli.main", "serve", "--port", "0", "--driver", driver, "--trace", str(trace)]
    with log.open("wb") as stderr:
        child = subprocess.Popen(
            [*command, "--log-format", "json"], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
    try:
        url = child.stdout.readline().split()[5]
        with httpx.Client(base_url=url, timeout=60) as http:
            idle = gauges(http.get("/metrics").text)
            assert {name for name, value in idle.items() if value} == {
                f'stagevox_stage_ready{{stage="{name}"}}' for name in STAGES
            }
            seconds = sum(speak(http, text) for text in TEXTS)
            asyncio.run(leave_early(url, LEAVERS))
            until = time.monotonic() + 5
            while gauges(text := http.get("/metrics").text) != idle:
                assert time.monotonic() < until, text
                time.sleep(0.05)
            assert http.post("/v1/audio/speech", json={"input": "\N{GRINNING FACE}"}).status_code == 400
            found = samples(http.get("/metrics").text)
        child.send_signal(signal.SIGKILL)  # what was written stays
    finally:
        child.kill()
        child.wait()
        child.stdout.close()

    left = found['stagevox_requests_aborted_total{endpoint="speech"}']
    stopped = found['stagevox_requests_finished_total{endpoint="speech",reason="stop"}']
    assert 1 <= left <= LEAVERS and len(TEXTS) <= stopped <= len(TEXTS) + LEAVERS - left
    assert sum(value for name, value in found.items() if name.startswith("stagevox_request_errors_total")) == 1
    assert found['stagevox_audio_seconds_total{endpoint="speech"}'] >= seconds
    assert found['stagevox_audio_rtf_count{endpoint="speech"}'] == stopped
    assert found['stagevox_stage_payload_bytes_total{stage="talker"}'] > 0

    events = json.loads(trace.read_text())["traceEvents"]
    for stage, pid in zip(STAGES, (2, 3, 4), strict=True):
        track = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert all(before["ts"] + before["dur"] == after["ts"] for before, after in pairwise(track))
        steps = [event for event in track if event["cat"] == "step"]
        assert len(steps) == found[f'stagevox_stage_steps_total{{stage="{stage}"}}'] > 0
        assert sum(event["args"]["tokens"] for event in steps) == found[f'stagevox_stage_ms_per_token_count{{stage="{stage}"}}']
    ends = [event["args"]["finish_reason"] for event in events if event["ph"] == "e" and event["name"] == "speech"]
    assert Counter(ends) == {"abort": left, "error": 1, "stop": stopped}

    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    told = [line for line in lines if line["logger"] == "stagevox.request"]
    assert Counter(line["finish_reason"] for line in told) == {"abort": left, "error": 1, "stop": stopped}
    assert len({line["request_id"] for line in told}) == len(told)
    assert sum(line["audio_seconds"] for line in told[: len(TEXTS)]) == pytest.approx(seconds, abs=1e-3)
    assert all(line["first_audio_seconds"] > 0 and line["rtf"] > 0 for line in told[: len(TEXTS)])
