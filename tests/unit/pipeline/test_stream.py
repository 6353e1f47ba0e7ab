"""A request in flight, as an event loop reads it."""

from __future__ import annotations

import asyncio

from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.request import Timing
from stagevox.pipeline.stream import Stream
from stagevox.stage.payload import StageOutput

ROW = EmitOutput("thinker", StageOutput("a", [1], {}))
END = FinishRequest("a", "stop", None, Timing(0.0, None, 1.0))


async def events_of(stream):
    return [event async for event in stream]


def test_what_is_pushed_comes_in_order_up_to_the_end():
    async def scenario():
        aborted = []
        stream = Stream("a", aborted.append)
        reading = asyncio.ensure_future(events_of(stream))
        stream.push(ROW)
        await asyncio.sleep(0)
        stream.push(ROW)
        stream.push(END)
        assert await asyncio.wait_for(reading, 1) == [ROW, ROW, END]
        await stream.aclose()
        assert aborted == []

    asyncio.run(scenario())


def test_one_that_is_closed_drops_its_events_and_wakes_its_reader():
    async def scenario():
        aborted = []
        stream = Stream("a", aborted.append)
        reading = asyncio.ensure_future(events_of(stream))
        await asyncio.sleep(0)  # it waits
        assert not reading.done()
        await stream.aclose()
        await stream.aclose()
        stream.push(END)
        assert await asyncio.wait_for(reading, 1) == [] and aborted == ["a"]
        left = Stream("b", aborted.append)
        left.push(ROW)
        await left.aclose()
        left.push(ROW)
        assert await asyncio.wait_for(events_of(left), 1) == [] and aborted == ["a", "b"]
        assert not left._events

    asyncio.run(scenario())
