"""Clients that leave, stop reading, or watch a stage die (F19, F29)."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest

BOTH = ["text", "audio"]
LONG = "many words to say " * 60


def request_bytes(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


CASES = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "chat both": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "modalities": BOTH, "n": 2}),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "modalities": BOTH, "stream": True},
    ),
    "speech": ("/v1/audio/speech", {"input": LONG}),
    "speech raw": ("/v1/audio/speech", {"input": LONG, "response_format": "pcm"}),
    "speech events": ("/v1/audio/speech", {"input": LONG, "stream_format": "sse"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_client_that_leaves_aborts_its_request(listen, case, caplog):
    path, body = CASES[case]
    with listen(pause=0.002) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as wire:
            wire.sendall(request_bytes(path, body))
            until(lambda: server.client.live)
            time.sleep(0.1)
            assert server.client.live
        left = time.monotonic()
        until(lambda: not server.client.live)
        assert time.monotonic() - left < 1.0
        until(lambda: server.state.gate.running == 0)
        assert sorted(server.client.aborted) == sorted(request.req_id for request in server.client.submitted)
        assert httpx.get(server.url + "/health").json()["requests_running"] == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_leaves_the_queue_takes_no_place(listen):
    with listen(pause=0.002, max_running=1) as server:
        path, body = CASES["speech"]
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            first.sendall(request_bytes(path, body))
            until(lambda: server.client.live)
            with socket.create_connection(("127.0.0.1", server.port)) as second:
                second.sendall(request_bytes(path, body))
                until(lambda: server.state.gate.waiting == 1)
            until(lambda: server.state.gate.waiting == 0)
        until(lambda: server.state.gate.running == 0)
        assert len(server.client.submitted) == 1


def test_fifty_aborts_leave_nothing(listen):
    """At every moment of a request's life; what runs beside them is whole."""
    with listen(pause=0.001, max_running=4) as server:

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                beside = asyncio.ensure_future(http.post("/v1/audio/speech", json={"input": "beside", "response_format": "wav"}))
                for n in range(50):
                    path, body = list(CASES.values())[n % len(CASES)]
                    try:
                        async with asyncio.timeout(0.004 * n):
                            async with http.stream("POST", path, json=body) as answer:
                                async for _ in answer.aiter_raw():
                                    pass
                    except TimeoutError:
                        pass
                assert (await beside).status_code == 200

        asyncio.run(main())
        until(lambda: not server.client.live and server.state.gate.running == 0 and server.state.gate.waiting == 0)
        assert len(server.client.aborted) > 20
        assert httpx.get(server.url + "/ready").status_code == 200


def test_a_client_that_stops_reading_is_given_up(listen):
    """Its place in the pipeline is free once the pipeline is done; its answer is dropped once nothing is read."""
    watched = Watched()
    with listen(send_seconds=0.5, observers=(watched,), max_running=1) as server, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", server.port))
        wire.sendall(request_bytes("/v1/audio/speech", {"input": "a" * 2000, "response_format": "pcm", "sample_rate": 96000}))
        until(lambda: watched.records)
        until(lambda: server.state.gate.running == 0 and not server.client.live)
        assert watched.records[0].finish_reason is None
        answer = httpx.post(server.url + "/v1/audio/speech", json={"input": "hello"})
        assert answer.status_code == 200
        until(lambda: watched.records[0].finish_reason == "abort")


class Watched:
    """Keeps the records."""

    def __init__(self):
        self.records, self.ended, self.events = [], [], []

    def started(self, record):
        self.records.append(record)

    def happened(self, record, event):
        self.events.append(event)

    def finished(self, record):
        self.ended.append(record)


def test_observers_are_told_of_every_end(listen):
    from stagevox.errors import DeadlineError

    watched = Watched()
    with listen(observers=(watched,)) as server:
        server.client.fail["bad"] = DeadlineError("x"), 2
        for text in ("hello", "bad", " "):
            httpx.post(server.url + "/v1/audio/speech", json={"input": text})
        httpx.post(server.url + "/v1/audio/speech", json={"input": "hello", "stage_params": {"talker": {"max_tokens": 1}}})
    ends = [(record.finish_reason, record.error) for record in watched.ended]
    assert ends == [("stop", None), ("error", "DeadlineError"), ("error", "EmptyTextError"), ("length", None)]
    first = watched.records[0]
    assert watched.ended == watched.records and watched.events
    assert first.arrived_at <= first.admitted_at <= first.first_text_at <= first.first_audio_at <= first.finished_at
    assert (first.prompt_tokens, first.text_tokens, first.audio_tokens, first.audio_seconds) == (5, 5, 10, 0.2)


def test_an_error_after_sound_breaks_the_connection(listen):
    """Nobody takes half a file for a whole one."""
    from stagevox.errors import DeadlineError

    with listen() as server:
        server.client.fail["hello"] = DeadlineError("talker: no output"), 9
        with httpx.stream("POST", server.url + "/v1/audio/speech", json={"input": "hello", "response_format": "pcm"}) as answer:
            assert answer.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_stage_that_dies_fails_its_requests_at_once(listen, stream):
    """F29."""
    with listen() as server:
        server.on_loop(lambda: setattr(server.client, "hold", asyncio.Event()))

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
                body = {"messages": [{"role": "user", "content": "hello"}], "modalities": BOTH, "stream": stream}
                task = asyncio.ensure_future(http.post("/v1/chat/completions", json=body))
                while not server.client.live:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                died = time.monotonic()
                server.on_loop(server.client.kill, "talker")
                answer = await task
                assert time.monotonic() - died < 2
                again = await http.post("/v1/chat/completions", json=body)
                return answer, again, await http.get("/health")

        answer, again, health = asyncio.run(main())
        if stream:
            assert '"code":"stage_died"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "stage_died"
        assert again.status_code == 503 and health.status_code == 503 and health.json()["stages"]["talker"] == "dead"
