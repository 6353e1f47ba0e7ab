"""A full house queues, then answers 429; large and slow bodies are refused (F20)."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest

from stagevox.server.errors import ApiError
from stagevox.server.limits import Gate

BODY = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_full_house_queues_and_then_answers_429(listen):
    """F20: 2 run, 3 wait, the rest is told when to come again; once there is room all that waited are served."""
    with listen(max_running=2, max_queue=3) as server:
        server.on_loop(hold, server)

        async def main():
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=20) as http:
                tasks = []
                for n in range(8):
                    tasks.append(asyncio.ensure_future(http.post("/v1/chat/completions", json=BODY | {"n": 1})))
                    await until(lambda n=n: server.state.gate.running + server.state.gate.waiting + refused(tasks) == n + 1)
                assert (server.state.gate.running, server.state.gate.waiting) == (2, 3)
                health = (await http.get("/health")).json()
                assert (health["requests_running"], health["requests_waiting"]) == (2, 3)
                server.on_loop(release, server)
                return await asyncio.gather(*tasks)

        answers = asyncio.run(main())
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 3
        for answer in answers[5:]:
            assert answer.json()["error"]["code"] == "queue_full" and 1 <= int(answer.headers["retry-after"]) <= 60
        assert server.client.most_live == 2
        assert (server.state.gate.running, server.state.gate.waiting) == (0, 0)


def refused(tasks):
    return sum(task.done() and task.result().status_code == 429 for task in tasks)


def hold(server):
    server.client.hold = asyncio.Event()


def release(server):
    server.client.hold.set()


async def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


def test_bad_requests_don_t_wait(listen):
    with listen(max_running=1, max_queue=3) as server:
        server.on_loop(hold, server)

        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as http:
                first = asyncio.ensure_future(http.post("/v1/chat/completions", json=BODY))
                await until(lambda: server.state.gate.running == 1)
                bad = {"messages": [{"role": "user", "content": " "}]}
                assert (await http.post("/v1/chat/completions", json=bad)).status_code == 400
                server.on_loop(release, server)
                assert (await first).status_code == 200

        asyncio.run(main())


def test_the_gate_is_fair_and_forgets_who_left():
    async def main():
        gate = Gate(2, 10)
        order = []

        async def one(name, count, until):
            async with gate.slots(count):
                order.append(name)
                await until.wait()

        end = asyncio.Event()
        tasks = {}
        for name, count in (("a", 1), ("b", 2), ("c", 1), ("d", 1)):
            tasks[name] = asyncio.ensure_future(one(name, count, end))
            await asyncio.sleep(0)
        assert order == ["a"] and gate.waiting == 3  # c would fit, but b was first
        tasks["b"].cancel()
        await asyncio.sleep(0.01)
        assert order == ["a", "c"] and gate.running == 2 and gate.waiting == 1
        end.set()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["a", "c", "d"] and gate.running == gate.waiting == 0

    asyncio.run(main())


def test_one_that_is_let_in_as_it_leaves_gives_its_place_back():
    async def main():
        gate = Gate(1, 10)
        holder = gate.slots(1)
        await holder.__aenter__()

        async def wait():
            async with gate.slots(1):
                raise AssertionError("it had left")

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        await holder.__aexit__(None, None, None)
        assert gate.running == 1  # handed over, not taken up yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.running == 0

    asyncio.run(main())


def test_one_that_leaves_as_a_place_is_free_gives_back_none():
    """Cancelled first, and only then, in the same turn of the loop, a place is free: it was never let in."""

    async def main():
        gate = Gate(1, 10)
        holder = gate.slots(1)
        await holder.__aenter__()
        leaver = asyncio.ensure_future(enter(gate))
        await asyncio.sleep(0)
        assert gate.waiting == 1
        leaver.cancel()
        await holder.__aexit__(None, None, None)
        assert not leaver.done() and (gate.running, gate.waiting) == (0, 0)  # its entry is gone before it knows
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert gate.running == 0
        async with gate.slots(1):
            second = asyncio.ensure_future(enter(gate))
            await asyncio.sleep(0.01)
            assert (gate.running, gate.waiting) == (1, 1)  # one at a time, still
        await second
        assert gate.running == 0

    asyncio.run(main())


def test_one_that_is_sent_away_as_it_leaves_gives_back_none():
    async def main():
        gate = Gate(1, 10)
        async with gate.slots(1):
            leaver = asyncio.ensure_future(enter(gate))
            await asyncio.sleep(0)
            gate.close()
            leaver.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaver
            assert gate.running == 1
        assert gate.running == 0

    asyncio.run(main())


async def enter(gate):
    async with gate.slots(1):
        pass


def test_no_queue_at_all():
    async def main():
        gate = Gate(1, 0)
        async with gate.slots(1):
            with pytest.raises(ApiError) as caught:
                async with gate.slots(1):
                    pass
        assert caught.value.status == 429

    asyncio.run(main())


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_413(serve, declared):
    server = serve(max_body_bytes=1000)
    data = b'{"input": "' + b"a" * 2000 + b'"}'

    async def pieces():
        for first in range(0, len(data), 100):
            yield data[first : first + 100]

    answer = server.call(
        "POST", "/v1/audio/speech", content=data if declared else pieces(), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_never_comes_is_408(listen):
    with listen(body_seconds=0.2) as server, socket.create_connection(("127.0.0.1", server.port), timeout=5) as wire:
        wire.sendall(
            b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert wire.recv(1000).startswith(b"HTTP/1.1 408")
