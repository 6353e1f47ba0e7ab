"""One request and its stream, with the time of everything that comes. Whatever isn't a whole answer is a failure."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from typing import Any

import httpx

from .options import Options
from .outcome import Outcome
from .player import Arrival
from .sound import BadAudioError, Decoder, make_decoder
from .sse import EventReader

OPENAI_PCM_RATE = 24_000
DETAIL_CHARS = 300


class AnswerError(Exception):
    """A request failed; ``kind`` is what it is counted as."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


async def ask(http: httpx.AsyncClient, options: Options, index: int, prompt: str, due_at: float) -> Outcome:
    """Send one prompt and read all of the answer. Only cancellation is raised."""
    outcome = Outcome(index, prompt, due_at, time.perf_counter())
    try:
        async with asyncio.timeout(options.timeout):
            if options.endpoint == "speech":
                await _Speech(options, outcome).run(http)
            else:
                await _Chat(options, outcome).run(http)
    except AnswerError as error:
        _fail(outcome, error.kind, error.detail)
    except BadAudioError as error:
        _fail(outcome, "bad audio", str(error))
    except TimeoutError:
        _fail(outcome, "timeout", f"no whole answer within {options.timeout:g} s")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        _fail(outcome, "no connection", str(error) or type(error).__name__)
    except httpx.HTTPError as error:
        _fail(outcome, "broken stream", str(error) or type(error).__name__)
    if outcome.finished_at is None:
        outcome.finished_at = time.perf_counter()
    return outcome


def _fail(outcome: Outcome, kind: str, detail: str) -> None:
    outcome.failure, outcome.detail = kind, detail[:DETAIL_CHARS]
    outcome.finished_at = time.perf_counter()


class _Reader:
    """What chat and speech have in common."""

    path: str

    def __init__(self, options: Options, outcome: Outcome) -> None:
        self.options, self.outcome = options, outcome
        self.decoder: Decoder | None = None

    async def run(self, http: httpx.AsyncClient) -> None:
        outcome = self.outcome
        body = self.body() | dict(self.options.extra_body)
        async with http.stream("POST", self.path, json=body) as response:
            outcome.headers_at = time.perf_counter()
            outcome.server_id = response.headers.get("x-request-id")
            if response.status_code != 200:
                raise AnswerError(f"HTTP {response.status_code}", _message(await response.aread()))
            self.check(response)
            async for data in response.aiter_raw():
                self.take(data, time.perf_counter())
            outcome.finished_at = time.perf_counter()
        self.finish()

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def check(self, response: httpx.Response) -> None:
        raise NotImplementedError

    def take(self, data: bytes, now: float) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def hear(self, data: bytes, now: float) -> None:
        """Take bytes of audio."""
        assert self.decoder is not None
        samples = self.decoder.push(data)
        if len(samples):
            self.outcome.arrivals.append(Arrival(now, len(samples)))
            self.outcome.chunks.append(samples)

    def end_audio(self) -> None:
        assert self.decoder is not None
        self.decoder.finish()
        self.outcome.sample_rate = self.decoder.sample_rate
        if not self.outcome.arrivals:
            raise AnswerError("empty audio", "not one sample came")


class _Speech(_Reader):
    path = "v1/audio/speech"

    def body(self) -> dict[str, Any]:
        options = self.options
        fields = {"input": self.outcome.prompt, "response_format": options.audio_format, "stream_format": "audio"}
        return fields | options.named()

    def check(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "")
        if not kind.startswith(("audio/", "application/octet-stream")):
            raise AnswerError("bad audio", f"content type {kind!r}")
        given = response.headers.get("x-sample-rate", "")
        self.decoder = make_decoder(self.options.audio_format, int(given) if given.isdecimal() else OPENAI_PCM_RATE)

    def take(self, data: bytes, now: float) -> None:
        self.hear(data, now)

    def finish(self) -> None:
        self.end_audio()


class _Chat(_Reader):
    path = "v1/chat/completions"

    def __init__(self, options: Options, outcome: Outcome) -> None:
        super().__init__(options, outcome)
        self._events = EventReader()
        self._done = False
        if options.spoken:
            self.decoder = make_decoder(options.audio_format, OPENAI_PCM_RATE)

    def body(self) -> dict[str, Any]:
        options = self.options
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.outcome.prompt}],
            "modalities": list(options.modalities),
            "stream": True,
            "stream_options": {"include_usage": True},
        } | options.named()
        voice = fields.pop("voice", None)
        if options.spoken:
            name = "pcm16" if options.audio_format == "pcm" else options.audio_format
            fields["audio"] = {"format": name} | ({} if voice is None else {"voice": voice})
        return fields

    def check(self, response: httpx.Response) -> None:
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise AnswerError("broken stream", f"content type {kind!r}")

    def take(self, data: bytes, now: float) -> None:
        for event in self._events.push(data):
            if self._done:
                raise AnswerError("broken stream", "an event after [DONE]")
            if event == b"[DONE]":
                self._done = True
            else:
                self._chunk(event, now)

    def _chunk(self, event: bytes, now: float) -> None:
        outcome = self.outcome
        try:
            chunk = json.loads(event)
            if error := chunk.get("error"):
                raise AnswerError("error event", str(error.get("message", error)))
            if usage := chunk.get("usage"):
                details = usage.get("completion_tokens_details") or {}
                outcome.audio_tokens = details.get("audio_tokens")
                outcome.text_tokens = details.get("text_tokens", usage.get("completion_tokens"))
            for choice in chunk["choices"]:
                if outcome.finish_reason is not None:
                    raise AnswerError("broken stream", "a chunk after the finish reason")
                delta = choice["delta"]
                audio = delta.get("audio") or {}
                if text := delta.get("content") or audio.get("transcript"):
                    outcome.first_text_at = outcome.first_text_at or now
                    outcome.text += text
                if audio.get("data"):
                    if self.decoder is None:
                        raise AnswerError("broken stream", "speech that was not asked for")
                    self.hear(base64.b64decode(audio["data"], validate=True), now)
                outcome.finish_reason = choice.get("finish_reason")
        except (ValueError, TypeError, KeyError, AttributeError, binascii.Error) as error:
            raise AnswerError("broken stream", f"an event that is no chunk: {type(error).__name__}: {error}") from None

    def finish(self) -> None:
        outcome = self.outcome
        if not self._done or self._events.is_broken:
            raise AnswerError("broken stream", "it ended before [DONE]")
        if outcome.finish_reason is None:
            raise AnswerError("broken stream", "no finish reason")
        if self.decoder is not None:
            self.end_audio()
        if "text" in self.options.modalities and not outcome.text:
            raise AnswerError("empty text", "not one character came")


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
