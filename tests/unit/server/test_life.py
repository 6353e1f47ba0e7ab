"""A server's life in a process of its own: start, signals, a stage's death (F29, F32, F49)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stagevox.errors import ConfigError
from stagevox.server.app import create_app
from stagevox.server.run import bind, serve
from support.scripted_client import ScriptedClient, make_blueprint

TESTS = Path(__file__).resolve().parents[2]
LONG = "many words to say " * 20
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}


@contextmanager
def process(**options):
    command = [sys.executable, str(TESTS / "support" / "scripted_server.py"), json.dumps(options)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        child.port = int(child.stdout.readline().split()[1])
        child.url = f"http://127.0.0.1:{child.port}"
        yield child
    finally:
        child.kill()
        child.communicate()


def ready(child):
    assert child.stdout.readline() == "ready\n"


def in_thread(call):
    box = {}

    def run():
        try:
            box["answer"] = call()
        except Exception as error:
            box["answer"] = error

    thread = threading.Thread(target=run)
    thread.start()
    return thread, box


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def speak(child):
    return in_thread(lambda: httpx.post(child.url + "/v1/audio/speech", json={"input": LONG}, timeout=30))


def health(child):
    return httpx.get(child.url + "/health").json()


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_says_that_it_starts_and_when_it_is_ready():
    with process(start=1.0) as child:
        answer = httpx.get(child.url + "/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert httpx.post(child.url + "/v1/audio/speech", json={"input": "hello"}).status_code == 503
        ready(child)
        assert httpx.get(child.url + "/ready").status_code == 200
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=10)
        assert child.returncode == 0 and is_free(child.port)
        assert out == "False False\n"  # neither torch nor vLLM was loaded


@pytest.mark.covers("SV-1")
def test_sigterm_finishes_what_is_in_flight_and_takes_nothing_new():
    """F32."""
    with process(pause=0.002) as child:
        ready(child)
        thread, box = speak(child)
        until(lambda: health(child)["requests_running"] == 1)
        child.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(child.url + "/ready").status_code == 503)
        assert health(child)["status"] == "draining"
        refused = httpx.post(child.url + "/v1/audio/speech", json={"input": "hello"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        child.communicate(timeout=20)
        thread.join(5)
        assert box["answer"].status_code == 200 and child.returncode == 0


@pytest.mark.parametrize("case", ["drain is over", "second signal", "SIGINT"])
def test_what_can_t_finish_is_ended(case):
    """F32: in bounded time, with a 503 for those who wait."""
    with process(pause=1.0, drain=0.3 if case == "drain is over" else 60) as child:
        ready(child)
        thread, box = speak(child)
        until(lambda: health(child)["requests_running"] == 1)
        child.send_signal(signal.SIGINT if case == "SIGINT" else signal.SIGTERM)
        if case == "second signal":
            until(lambda: httpx.get(child.url + "/ready").status_code == 503)
            child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        child.communicate(timeout=20)
        assert time.monotonic() - started < 8 and child.returncode == 0
        thread.join(5)
        assert box["answer"].status_code == 503
        assert is_free(child.port)


def test_a_signal_while_it_loads():
    with process(start=60) as child:
        assert health(child)["status"] == "starting"
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=10)
        assert child.returncode == 0


def test_a_load_that_fails_is_said_in_a_line():
    with process(fail=True) as child:
        _, error = child.communicate(timeout=10)
        assert child.returncode == 1 and error == "error: talker: can't work\n"


@pytest.mark.parametrize("stay", [False, True])
def test_a_stage_that_dies(stay):
    """F29: those in flight are told, and the server ends, or says that it is down."""
    with process(pause=0.5, stay=stay) as child:
        ready(child)
        thread, box = speak(child)
        until(lambda: health(child)["requests_running"] == 1)
        child.send_signal(signal.SIGUSR1)
        thread.join(10)
        assert box["answer"].status_code == 503
        if stay:
            assert httpx.get(child.url + "/health").status_code == 503
            child.send_signal(signal.SIGTERM)
        _, error = child.communicate(timeout=10)
        assert child.returncode == (0 if stay else 1)
        assert stay or "talker: the engine died" in error


@pytest.mark.parametrize("twice", [False, True])
def test_whatever_ends_the_server_all_is_closed(monkeypatch, twice):
    """Uvicorn breaks, and perhaps a part of the end too: the stages are closed, and signals are nobody's again."""
    closed = []

    class Client(ScriptedClient):
        async def drain(self, seconds):
            closed.append("drained")
            if twice:
                raise RuntimeError("the pipeline broke")

        async def close(self):
            closed.append("closed")
            await super().close()

    async def broken(self, sockets=None):
        await asyncio.sleep(0.01)
        raise OSError("the sockets broke")

    monkeypatch.setattr("stagevox.server.run.uvicorn.Server.serve", broken)

    async def main():
        client = Client()
        with bind("127.0.0.1", 0) as sock, pytest.raises(OSError, match="the sockets broke") as caught:
            await serve(create_app(client, make_blueprint()), client, sock)
        assert not twice or str(caught.value.__context__) == "the pipeline broke"
        assert closed == ["drained", "closed"]
        assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM), "it was still taken"

    asyncio.run(main())


def serve_command(*options, **environment):
    command = [sys.executable, "-m", "stagevox.cli.main", "serve", *options]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**ENVIRONMENT, **environment}, timeout=60)
    return done, time.monotonic() - started


def test_a_busy_port_is_noticed_before_anything_is_loaded():
    """F49."""
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done, _ = serve_command("--port", str(port))
        assert done.returncode == 2
        assert done.stderr == f"stagevox: error: port: can't listen on 127.0.0.1:{port}: Address already in use\n"
        with pytest.raises(ConfigError):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    "options, said",
    [
        (["--port", "70000"], "--port"),
        (["--port", "http"], "--port"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--max-running", "0"], "--max-running"),
        (["--drain-timeout", "nan"], "--drain-timeout"),
        (["--host", "no.such.host.invalid", "--port", "0"], "host"),
        (["--api-key", " ", "--port", "0"], "api_key"),
        (["--allowed-local-media-path", "/no/such/folder", "--port", "0"], "allowed_local_media_path"),
        (["--driver", "magic", "--port", "0"], "driver"),
        (["--stage-overrides", "{", "--port", "0"], "stage_overrides"),
        (["--stage", "talkr.max_num_seqs=4", "--port", "0"], "talkr"),
        (["--deploy-config", "/no/such/file.yaml", "--port", "0"], "deploy_config"),
        (["--driver", "inline", "--on-stage-death", "restart", "--port", "0"], "on_stage_death"),
        (["no-such-model", "--port", "0"], "no-such-model"),
        (["--on-stage-death", "panic"], "--on-stage-death"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_settings_that_can_t_work_are_one_line(options, said):
    done, _ = serve_command(*options)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_blank_key_in_the_environment_is_no_open_door():
    done, _ = serve_command("--port", "0", STAGEVOX_API_KEY="")
    assert done.returncode == 2 and "api_key" in done.stderr
