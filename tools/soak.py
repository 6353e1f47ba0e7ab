"""Many requests and many aborts against ``stagevox serve``: nothing fails, nothing is left, memory stays: ``python tools/soak.py``.

Prints one JSON object; exits 1 if a request failed, if requests remain, or if memory grew by more than ``--growth`` of its level
after the warm-up. ``-- OPTIONS`` go to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

SRC = Path(__file__).resolve().parent.parent / "src"
TEXTS = ("12 + 30 = 42", "good morning", "it is 7:30", "see you on 4 july", "the cat and the dog", "5 x 3 = 15", "hello there")
BODIES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/audio/speech", {"response_format": "pcm"}),
    ("/v1/audio/speech", {"response_format": "mp3"}),
    ("/v1/audio/speech", {"response_format": "wav", "stream_format": "sse"}),
    ("/v1/chat/completions", {"modalities": ["text", "audio"], "stream": True}),
    ("/v1/chat/completions", {"modalities": ["text", "audio"], "n": 2}),
    ("/v1/chat/completions", {}),
)


def request_of(rng: random.Random) -> tuple[str, dict[str, object]]:
    """A path and a body."""
    path, fields = rng.choice(BODIES)
    text = rng.choice(TEXTS)
    words: dict[str, object] = {"input": text} if "speech" in path else {"messages": [{"role": "user", "content": text}]}
    return path, {**words, **fields}


async def ask(http: httpx.AsyncClient, rng: random.Random) -> str:
    """One request to its end; returns ``ok``, or what went wrong."""
    path, body = request_of(rng)
    try:
        answer = await http.post(path, json=body)
    except httpx.HTTPError as error:
        return type(error).__name__
    whole = answer.status_code == 200 and (not body.get("stream") or answer.text.endswith("data: [DONE]\n\n"))
    return "ok" if whole and '"error"' not in answer.text[-300:] else f"status {answer.status_code}"


async def leave(http: httpx.AsyncClient, rng: random.Random) -> str:
    """One request that is given up after a while."""
    path, body = request_of(rng)
    with suppress(TimeoutError):
        async with asyncio.timeout(rng.uniform(0.0, 0.3)), http.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_raw():
                pass
    return "left"


async def rounds(url: str, count: int, concurrency: int, call: object, seed: int) -> Counter[str]:
    """``count`` calls, so many at a time."""
    rng, seen, left = random.Random(seed), Counter[str](), count
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                seen[await call(http, rng)] += 1  # type: ignore[operator]

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return seen


def resident(pid: int) -> list[int]:
    """MiB of a process and of what it has started, each."""
    process = psutil.Process(pid)
    return [round(one.memory_info().rss / 2**20) for one in (process, *process.children(recursive=True))]


def idle(url: str) -> bool:
    """True once nothing is in flight; waits up to ten seconds for it."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        health = httpx.get(url + "/health").json()
        if health["requests_running"] == health["requests_waiting"] == 0:
            return True
        time.sleep(0.1)
    return False


def soak(url: str, pid: int, args: argparse.Namespace) -> dict[str, object]:
    """Run it all against a server that is ready."""
    warm = asyncio.run(rounds(url, args.warm_up, args.concurrency, ask, 0))
    before, started = resident(pid), time.monotonic()
    asked = asyncio.run(rounds(url, args.requests, args.concurrency, ask, 1))
    seconds, between = time.monotonic() - started, resident(pid)
    asyncio.run(rounds(url, args.aborts, args.concurrency, leave, 2))
    empty, after = idle(url), resident(pid)
    growth = sum(after) / sum(before) - 1
    good = set(warm) == set(asked) == {"ok"} and empty and growth <= args.growth
    return {
        "requests": dict(asked),
        "seconds": round(seconds, 1),
        "aborts": args.aborts,
        "idle_after": empty,
        "mib_before": before,
        "mib_between": between,
        "mib_after": after,
        "growth": round(growth, 4),
        "passed": good,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=300, help="memory levels off after 200 to 300 (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--growth", type=float, default=0.02, help="most growth of memory, as a share (default: %(default)s)")
    parser.add_argument("server", nargs="*", help="options of stagevox serve, after --")
    args = parser.parse_args()
    command = [sys.executable, "-m", "stagevox.cli.main", "serve", "--port", "0", *args.server]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if " is ready at " not in line:
            return child.wait() or 1
        url = line.split()[5]
        try:
            report = soak(url, child.pid, args)
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait(60)
    report["exit_code"] = child.returncode
    print(json.dumps(report))
    return 0 if report["passed"] and child.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
