"""From a plan to its pieces: wait for a place, load media, run the choices, and tell who observes. The one road of all endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from stagevox.observe.log import request_id
from stagevox.pipeline.client import RequestStream
from stagevox.pipeline.request import OmniRequest

from .answer import Answer, AudioPiece, Piece, TextPiece
from .errors import as_api_error
from .media import FIELDS, MediaPart
from .record import RequestRecord
from .state import ServerState


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was checked, but for what only the front end can check."""

    prompt: Mapping[str, Any]
    sampling: Mapping[str, Mapping[str, Any]]
    media: Sequence[MediaPart] = ()
    choices: int = 1
    seed: int | None = None
    """Of the first choice, at every stage; the others count up from it."""
    text_only: bool = False
    stops: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names for the pipeline's fields."""


class Run:
    """One plan being carried out: iterate :meth:`pieces`, then read what it took."""

    def __init__(self, plan: Plan, state: ServerState, record: RequestRecord) -> None:
        topology, front_end = state.blueprint.topology, state.blueprint.front_end
        self._plan, self._state, self._record = plan, state, record
        request_id.set(record.req_id)  # for the log lines of this task, and of those it starts
        speaker = None if plan.text_only else state.blueprint.stages[-1]
        self.answers = [
            Answer(index, topology.text_stage, speaker, lambda ids: front_end.reply_text(ids, plan.prompt), plan.stops)
            for index in range(plan.choices)
        ]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """All pieces of all choices as they come; closing it early aborts the choices.

        Raises:
            ApiError: whatever went wrong, as the client is to be told.
        """
        state, record = self._state, self._record
        state.check_open()
        state.observers.started(record)
        try:
            # Without media all can be checked at once: what is wrong needn't wait to be told so.
            requests = [] if self._plan.media else await self._requests()
            async with state.gate.slots(self._plan.choices) as give_back:
                record.admitted_at = time.monotonic()
                async with aclosing(self._run(requests or await self._requests(), give_back)) as pieces:
                    async for piece in pieces:
                        self._note(piece)
                        yield piece
            reasons = {answer.finish_reason for answer in self.answers}
            record.finish_reason = "length" if "length" in reasons else "stop"
        except (asyncio.CancelledError, GeneratorExit):
            record.finish_reason = "abort"
            raise
        except Exception as error:
            told = as_api_error(error, self._plan.names)
            record.finish_reason = "error"
            record.error = told.code if error is told else type(error).__name__
            if error is told:
                raise
            raise told from error
        finally:
            record.finished_at = time.monotonic()
            record.text_tokens = sum(answer.text_tokens for answer in self.answers)
            record.audio_tokens = sum(answer.audio_tokens for answer in self.answers)
            rate = state.blueprint.front_end.sample_rate
            record.audio_seconds = sum(answer.num_samples for answer in self.answers) / rate
            state.observers.finished(record)

    async def _requests(self) -> list[OmniRequest]:
        plan, state = self._plan, self._state
        prompt = dict(plan.prompt)
        budget = state.media.budget()
        for part in plan.media:
            prompt.setdefault(FIELDS[part.kind], []).append(await state.media.load(part, budget))
        last_stage = state.blueprint.topology.text_stage if plan.text_only else None
        requests = [
            await state.admit(f"{self._record.req_id}-{index}", prompt, self._sampling(index), last_stage)
            for index in range(plan.choices)
        ]
        self._record.prompt_tokens = len(requests[0].first.prompt_token_ids or ())
        return requests

    def _sampling(self, index: int) -> dict[str, dict[str, Any]]:
        sampling = {stage: dict(fields) for stage, fields in self._plan.sampling.items()}
        if self._plan.seed is not None:
            for stage in self._state.blueprint.stages:
                sampling.setdefault(stage, {}).setdefault("seed", self._plan.seed + index)
        return sampling

    async def _run(self, requests: Sequence[OmniRequest], give_back: Callable[[], None]) -> AsyncGenerator[Piece, None]:
        """The pieces; ``give_back`` is called when the pipeline is done, however long the client takes to read."""
        streams: list[RequestStream] = []
        tasks: list[asyncio.Task[None]] = []
        pieces: asyncio.Queue[list[Piece] | BaseException] = asyncio.Queue()
        try:
            for answer, request in zip(self.answers, requests, strict=True):
                stream = self._state.client.submit(request)
                streams.append(stream)
                tasks.append(asyncio.ensure_future(self._follow(answer, stream, pieces, give_back)))
            while not (all(answer.done for answer in self.answers) and pieces.empty()):
                made = await pieces.get()
                if isinstance(made, BaseException):
                    raise made
                for piece in made:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            for stream in streams:
                await stream.aclose()

    async def _follow(
        self,
        answer: Answer,
        stream: RequestStream,
        pieces: asyncio.Queue[list[Piece] | BaseException],
        give_back: Callable[[], None],
    ) -> None:
        try:
            async for event in stream:
                self._state.observers.happened(self._record, event)
                made = answer.take(event)
                if made:
                    pieces.put_nowait(made)
                if answer.done:
                    break
            await stream.aclose()
            assert answer.done, "the stream ended without an end"
            if all(one.done for one in self.answers):
                give_back()
        except Exception as error:
            pieces.put_nowait(error)

    def _note(self, piece: Piece) -> None:
        now = time.monotonic()
        if isinstance(piece, TextPiece) and self._record.first_text_at is None:
            self._record.first_text_at = now
        if isinstance(piece, AudioPiece) and self._record.first_audio_at is None:
            self._record.first_audio_at = now
