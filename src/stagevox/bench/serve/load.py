"""One run: the prompts go out when they are due, never more at a time than allowed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx

from .ask import ask
from .options import Options
from .outcome import Outcome
from .pace import offsets


@dataclass(frozen=True, slots=True)
class Load:
    """What a run gave."""

    outcomes: list[Outcome]
    most_in_flight: int

    @property
    def seconds(self) -> float:
        """From the first request sent to the last one over."""
        return max(one.finished_at or 0.0 for one in self.outcomes) - min(one.sent_at for one in self.outcomes)


async def run_load(
    http: httpx.AsyncClient, options: Options, concurrency: int | None, seed: int, tell: Callable[[Outcome], None]
) -> Load:
    """Send ``num_prompts`` prompts, in the order they stand, over and over; ``tell`` hears of each that is over."""
    slots: Any = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    in_flight = most = 0
    start = time.perf_counter()

    async def one(index: int, offset: float) -> Outcome:
        nonlocal in_flight, most
        due = start + offset
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async with slots:
            in_flight += 1
            most = max(most, in_flight)
            try:
                outcome = await ask(http, options, index, options.prompts[index % len(options.prompts)], due)
            finally:
                in_flight -= 1
        tell(outcome)
        return outcome

    times = offsets(options.num_prompts, options.request_rate, options.burstiness, seed)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, offset)) for index, offset in enumerate(times)]
    return Load([task.result() for task in tasks], most)
