"""``POST /v1/chat/completions``: text, or text and speech, whole or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from .answer import Piece
from .chat_answer import ChatAnswer, ChatStream, ChatWhole, make_usage
from .chat_plan import read_plan
from .disconnect import PiecesResponse, unless_gone
from .errors import RESPONSES, ApiError
from .events import DONE, event, primed
from .generate import Run
from .protocol.chat import ChatCompletion, ChatRequest, Usage
from .record import RequestRecord
from .state import ServerState


async def events(
    stream: ChatStream, pieces: AsyncGenerator[Piece, None], usage: Callable[[], Usage] | None
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: chunks, the usage if it is wanted, and ``[DONE]``. An error after the start is an event too."""
    async with aclosing(pieces):
        try:
            for chunk in stream.first():
                yield event(chunk)
            async for piece in pieces:
                for chunk in await stream.take(piece):
                    yield event(chunk)
            if usage is not None:
                yield event(stream.usage(usage()))
        except ApiError as error:
            yield b"data: " + error.json() + b"\n\n"
    yield DONE


def router(state: ServerState) -> APIRouter:
    """``POST /v1/chat/completions``."""
    routes = APIRouter(tags=["chat"])

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={200: {"description": "The answer; with `stream: true` as `text/event-stream`."}, **RESPONSES},
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation in text, or in text and speech."""
        plan = read_plan(body, state)
        answer = ChatAnswer(body, state)
        record = RequestRecord(answer.id, "chat", bool(body.stream))
        run = Run(plan, state, record)
        headers = {"X-Request-Id": answer.id}
        if not body.stream:
            whole = ChatWhole(answer, run, state)
            await unless_gone(request, whole.collect(run.pieces()))
            data = whole.completion(make_usage(run, record)).json_bytes()
            return Response(data, headers=headers, media_type="application/json")
        # Whatever fails before the first piece is a status, not an event.
        pieces = await unless_gone(request, primed(run.pieces()))
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        stream = ChatStream(answer, run, state, with_usage)
        parts = events(stream, pieces, (lambda: make_usage(run, record)) if with_usage else None)
        return PiecesResponse(parts, pieces, "text/event-stream", headers, state.settings.send_seconds)

    return routes
