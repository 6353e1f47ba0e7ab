"""Log lines: one line each, with the request's id, for people and for machines."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from stagevox.observe.figures import RequestFigures, RequestWatch
from stagevox.observe.log import LOGGERS, RequestLog, request_id, set_up
from stagevox.server.record import RequestRecord


@pytest.fixture
def lines():
    """``lines(format, level)`` starts logging; calling what it returns gives the lines so far."""
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in (*LOGGERS, "uvicorn.error")}
    handlers = []

    def start(form, level="info"):
        handler = set_up(form, level)
        handlers.append(handler)
        stream = io.StringIO()
        handler.setStream(stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    for name, (level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)


def record(**fields):
    base = {"arrived_at": 1.0, "admitted_at": 1.25, "finished_at": 3.0, "finish_reason": "stop"}
    tokens = {"prompt_tokens": 3, "text_tokens": 4, "audio_tokens": 8, "audio_seconds": 5.0}
    return RequestRecord("speech-7", "speech", True, **{**base, **tokens, **fields})


def test_a_line_a_request_in_json(lines):
    read = lines("json")
    RequestLog().closed(RequestFigures(record(), first_token_at=1.5, first_audio_at=2.0, done_at=2.75))
    (line,) = read()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00") and "audio" in found.pop("message")
    assert found == {
        "level": "info",
        "logger": "stagevox.request",
        "request_id": "speech-7",
        "endpoint": "speech",
        "stream": True,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "text_tokens": 4,
        "audio_tokens": 8,
        "audio_seconds": 5.0,
        "queue_seconds": 0.25,
        "first_token_seconds": 0.5,
        "first_audio_seconds": 1.0,
        "seconds": 2.0,
        "rtf": 0.3,
    }


def test_a_line_a_request_for_people(lines):
    read = lines("human")
    RequestLog().closed(RequestFigures(record(), first_token_at=1.5, first_audio_at=2.0, done_at=2.75))
    told = "speech stop, 2.000 s, queued 0.250 s, 3 + 4 tokens, 5.00 s of audio, the first after 1.000 s, RTF 0.300 [speech-7]"
    assert read()[0].split("INFO stagevox.request: ")[1] == told


def test_an_error_is_a_warning_with_its_name(lines):
    read = lines("json")
    RequestLog().closed(RequestFigures(record(finish_reason="error", error="DeadlineError", audio_seconds=0.0)))
    found = json.loads(read()[0])
    assert (found["level"], found["error"]) == ("warning", "DeadlineError") and "rtf" not in found
    assert "speech error DeadlineError" in found["message"]


def test_one_line_a_request_from_start_to_end_and_one_more_for_those_who_look_closely(lines):
    for level, count in (("info", 1), ("debug", 2), ("error", 0)):
        read = lines("json", level)
        watch, one = RequestWatch([RequestLog()]), record()
        watch.started(one)
        watch.finished(one)
        assert len(read()) == count and all(json.loads(line)["request_id"] == "speech-7" for line in read())


def test_lines_of_a_requests_tasks_have_its_id(lines):
    read = lines("json")

    async def work(name):
        request_id.set(name)
        await asyncio.sleep(0)
        await asyncio.ensure_future(inner())

    async def inner():
        await asyncio.sleep(0)
        logging.getLogger("stagevox.server").info("working")

    async def main():
        await asyncio.gather(*(asyncio.ensure_future(work(f"r{n}")) for n in range(3)))
        logging.getLogger("stagevox.server").info("idle")

    asyncio.run(main())
    assert [json.loads(line).get("request_id") for line in read()] == ["r0", "r1", "r2", None]


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_message_stays_in_its_line(lines, form):
    read = lines(form)
    logging.getLogger("stagevox.server").warning("no voice %r", "a\nb")
    logging.getLogger("stagevox.server").warning("two\nlines \ud800")
    assert len(read()) == 2 and read()[1].endswith(r"two\nlines " + "\ud800" if form == "human" else "}")


def test_a_traceback_is_there(lines):
    read = lines("json")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("stagevox.server").exception("unexpected")
    assert "ValueError: bad" in json.loads(read()[0])["exception"]
