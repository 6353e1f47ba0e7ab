"""Whole benchmarks of a scripted server: the figures are those of the files, of the script and of the server's own counts."""

from __future__ import annotations

import wave
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter

from stagevox.audio.wav import pcm16
from stagevox.contract import CODES
from stagevox.errors import RequestFailedError
from stagevox.pipeline.request import StageStats
from support.scripted_client import FRAMES, RATE, SAMPLES, STAGES, ScriptedClient, samples_of

PROMPTS = ["hello there", "good morning to you all", "yes"]


class CountingClient(ScriptedClient):
    """Counts what its stages do, as a real one: a step an output, of exactly 2 ms."""

    def __init__(self, pause=0.0):
        super().__init__(pause)
        self.totals = {stage: StageStats(stage) for stage in STAGES}

    async def script(self, request):
        async for event in super().script(request):
            stats = self.totals[event.stage]
            stats.steps += 1
            stats.tokens += (
                len(event.output.multimodal[CODES]) if CODES in event.output.multimodal else len(event.output.new_token_ids)
            )
            stats.seconds += 0.002
            yield event

    def stats(self):
        return [replace(stats) for stats in self.totals.values()]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def read_wav(path):
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), file.readframes(file.getnframes())


@pytest.mark.covers("SV-4")
@pytest.mark.parametrize("endpoint", ["speech", "chat"])
@pytest.mark.parametrize("audio_format", ["wav", "pcm"])
def test_figures_are_those_of_the_files(listen, bench, prompts, tmp_path, endpoint, audio_format):
    """F50: three requests; durations, samples and tokens add up to what is on disk and in the script."""
    wavs = tmp_path / "wavs"
    extra = ["--extra-body", '{"sample_rate": 16000}'] if (endpoint, audio_format) == ("speech", "pcm") else []
    with listen(client=lambda: CountingClient(pause=0.001)) as server:
        done = bench(
            server.url,
            "--endpoint",
            endpoint,
            "--audio-format",
            audio_format,
            "--prompts",
            prompts,
            "--num-prompts",
            3,
            "--save-wavs",
            wavs,
            *extra,
        )
    assert done.code == 0
    (run,) = done.result["runs"]
    assert (run["completed"], run["failed"], run["failures"]) == (3, 0, {})
    assert run["finish_reasons"] == {"stop": 3}
    names = sorted(path.name for path in wavs.iterdir())
    assert names == sorted(request["wav"] for request in run["requests"]) and len(names) == 3
    seconds = samples = 0
    for request in run["requests"]:
        rate, data = read_wav(wavs / request["wav"])
        resampled = (endpoint, audio_format) == ("chat", "pcm")  # to 24 kHz, as OpenAI's
        assert rate == (24_000 if resampled else RATE)
        if not resampled:
            assert data == pcm16(samples_of(request["prompt"].encode()))
        assert request["audio_samples"] == len(data) // 2
        assert request["audio_seconds"] == pytest.approx(len(data) / 2 / rate)
        assert request["audio_rtf"] == pytest.approx(request["e2el_s"] / request["audio_seconds"])
        seconds += len(data) / 2 / rate
        samples += len(data) // 2
    assert run["total_audio_samples"] == samples
    assert run["total_audio_seconds"] == pytest.approx(seconds)
    assert run["audio_seconds_per_second"] == pytest.approx(seconds / run["duration"])
    assert run["server_audio_seconds"] == pytest.approx(seconds, abs=1e-3) and run["server_records"] == 3
    # Tokens: of the script, of the usage, and of the stages, warm-ups left out.
    letters = sum(map(len, PROMPTS))
    assert (run["total_text_tokens"], run["total_audio_tokens"]) == (letters, FRAMES * letters)
    assert run["stages"]["thinker"]["tokens"] == letters == run["stages"]["thinker"]["steps"]
    assert run["stages"]["talker"]["tokens"] == FRAMES * letters
    assert seconds == pytest.approx(FRAMES * letters * SAMPLES / RATE, abs=1e-3)
    assert run["stages"]["thinker"]["ms_per_token"] == pytest.approx(2.0)
    assert run["stages"]["code2wav"]["ms_per_token"] is None and run["stages"]["code2wav"]["ms_per_step"] == pytest.approx(2.0)
    # Latencies are possible ones: the script pauses 1 ms before each output.
    for request in run["requests"]:
        assert 0.001 * len(request["prompt"]) <= request["ttfa_s"] <= request["e2el_s"] <= run["duration"]
    assert (run.get("mean_ttft_ms") is not None) == (endpoint == "chat")
    for name in ("ttfa", "e2el"):
        values = [1e3 * request[f"{name}_s"] for request in run["requests"]]
        assert run[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert run[f"p50_{name}_ms"] == pytest.approx(np.median(values)) and run[f"max_{name}_ms"] == pytest.approx(max(values))


def test_failures_count_as_nothing_else(listen, bench, prompts):
    """F50: one of three breaks in its middle, after some sound; its speech, tokens and times are in no figure."""
    with listen(client=CountingClient) as server:
        broken = "good morning to you all"
        server.client.fail = {broken: (RequestFailedError("talker: it broke"), len(broken) + 4)}
        done = bench(server.url, "--prompts", prompts, "--num-prompts", 6, "--num-warmups", 1, "--max-concurrency", 2)
        chat = bench(server.url, "--prompts", prompts, "--num-prompts", 6, "--num-warmups", 1, "--endpoint", "chat")
    good = 2 * FRAMES * (len("hello there") + len("yes"))
    for one, kind in ((done, "broken stream"), (chat, "error event")):
        assert one.code == 0
        (run,) = one.result["runs"]
        assert (run["completed"], run["failed"], run["failures"]) == (4, 2, {kind: 2})
        assert run["total_audio_samples"] == good * SAMPLES and run["total_audio_tokens"] == good
        assert f"{kind}:" in one.out
        values = [request["e2el_s"] for request in run["requests"] if not request["failure"]]
        assert run["mean_e2el_ms"] == pytest.approx(1e3 * np.mean(values)) and len(values) == 4
        failed = [request for request in run["requests"] if request["failure"]]
        assert {request["prompt"] for request in failed} == {broken} and all(request["audio_rtf"] is None for request in failed)
        assert all(request["audio_samples"] for request in failed)  # it had begun


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_at_a_time_than_allowed(listen, bench, limit):
    with listen(pause=0.001) as server:
        done = bench(server.url, "--num-prompts", 5, "--num-warmups", 0, "--max-concurrency", limit)
        assert server.client.most_live == limit == done.result["runs"][0]["most_in_flight"]


def test_sweeps_and_repeats_have_a_noise_band(listen, bench):
    with listen() as server:
        done = bench(
            server.url, "--num-prompts", 2, "--max-concurrency", 1, 2, "--repeats", 3, "--metadata", "k=8", "dtype=float32"
        )
        assert len(server.client.submitted) == 2 + 2 * 3 * 2  # two warm-ups
    assert [(run["max_concurrency"], run["repeat"]) for run in done.result["runs"]] == [(c, r) for c in (1, 2) for r in (1, 2, 3)]
    assert done.result["metadata"] == {"k": "8", "dtype": "float32"}
    for band in done.result["bands"]:
        runs = [run["p50_ttfa_ms"] for run in done.result["runs"] if run["max_concurrency"] == band["max_concurrency"]]
        figure = band["figures"]["p50_ttfa_ms"]
        assert [figure["min"], figure["median"], figure["max"]] == sorted(runs)
    assert "3 repeats" in done.out


def test_counters_that_moved_are_kept(listen, bench):
    registry = CollectorRegistry()
    windows = Counter("stagevox_windows", "Windows.", ["stage"], registry=registry)
    idle = Counter("stagevox_idle", "Never moves.", registry=registry)
    idle.inc(3)

    class Client(ScriptedClient):
        def submit(self, request):
            windows.labels(stage="talker").inc(2)
            return super().submit(request)

    with listen(client=Client, registry=registry) as server:
        done = bench(server.url, "--num-prompts", 3)
    counters = done.result["runs"][0]["counters"]
    assert counters['stagevox_windows_total{stage="talker"}'] == 6.0
    assert counters['stagevox_requests_finished_total{endpoint="speech",reason="stop"}'] == 3.0
    assert not any("stagevox_idle" in name for name in counters)


def test_a_rate_is_kept(listen, bench):
    with listen() as server:
        done = bench(server.url, "--num-prompts", 9, "--request-rate", 100, "--seed", 5, "--num-warmups", 0)
        again = bench(server.url, "--num-prompts", 9, "--request-rate", 100, "--seed", 5, "--num-warmups", 0)
    from stagevox.bench.serve.pace import offsets

    for one in (done, again):
        (run,) = one.result["runs"]
        assert run["duration"] >= offsets(9, 100, 1.0, 5)[-1]
        assert run["min_late_ms"] >= 0 and all(request["late_s"] >= 0 for request in run["requests"])


def test_text_only_needs_no_speech(listen, bench):
    with listen() as server:
        done = bench(server.url, "--endpoint", "chat", "--modalities", "text", "--num-prompts", 2, "--save-detailed")
    (run,) = done.result["runs"]
    assert run["completed"] == 2 and run["total_audio_seconds"] == 0 and "underruns" not in run
    assert [request["text"] for request in run["requests"]] == [request["prompt"] for request in run["requests"]]


def test_a_key_a_voice_and_other_fields(listen, bench):
    with listen(api_keys=("secret",)) as server:
        done = bench(
            server.url + "/v1/", "--api-key", "secret", "--voice", "kal", "--extra-body", '{"seed": 7}', "--num-prompts", 1
        )
        assert server.client.submitted[-1].first.options["voice"] == "kal"
        assert server.client.submitted[-1].sampling["talker"]["seed"] == 7
        assert "secret" not in str(done.result)
        denied = bench(server.url, "--num-prompts", 1)
    assert done.code == 0
    assert denied.code == 1 and denied.result is None and "warm-up 1 of 2 failed: HTTP 401" in denied.err


@pytest.mark.parametrize(
    "args, named",
    [
        (["--num-prompts", "0"], "num-prompts"),
        (["--request-rate", "0"], "request-rate"),
        (["--request-rate", "nan"], "request-rate"),
        (["--metric-percentiles", "101"], "percentiles"),
        (["--extra-body", "[]"], "extra-body"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--base-url", "ftp://x"], "base_url"),
        (["--prompts", "/nowhere/at/all"], "prompts"),
        (["--save-wavs", "/dev/null/x"], "save_wavs"),
        (["--save-result", "/nowhere/at/all.json"], "save_result"),
        (["--modalities", "audio"], "modalities"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(bench, capsys, args, named):
    try:
        code = bench("http://127.0.0.1:9", *args).code
    except SystemExit as end:
        code = end.code
    assert code == 2


def test_a_server_that_has_forgotten_the_first(listen, bench):
    """Its records are of the latest requests; what they don't know of the others is left out, not guessed."""
    with listen() as server:
        server.state.timings._most = 3
        done = bench(server.url, "--num-prompts", 5, "--max-concurrency", 1)
    (run,) = done.result["runs"]
    assert run["completed"] == 5 and run["server_records"] == 3 and run["total_audio_tokens"] is None
    assert [request["audio_tokens"] is None for request in run["requests"]] == [True, True, False, False, False]
