"""``POST /v1/audio/speech``: a text as speech, whole, as raw bytes while they are made, or as server-sent events."""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from stagevox.errors import UnknownVoiceError

from .answer import AudioPiece, Piece
from .disconnect import PiecesResponse, unless_gone
from .errors import RESPONSES, ApiError, UnfinishedResponse, as_api_error, refused
from .events import event, primed
from .generate import Plan, Run
from .protocol.speech import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from .record import RequestRecord
from .sampling import by_stage
from .sound import RAW, Sound, check_sound
from .state import ServerState
from .voices import resolve_voice

DEFAULT_FORMAT = "mp3"
PARAMS = {"format": "response_format"}


def read_plan(body: SpeechRequest, state: ServerState) -> Plan:
    """Check everything that can be checked before the pipeline is asked.

    Raises:
        ApiError: 400 or 404.
    """
    state.check_model(body.model)
    fields = state.blueprint.front_end.fields
    if "text" not in fields:
        raise refused("model", "this model answers and doesn't read aloud: use /v1/chat/completions", "no_speech")
    check_sound(format_of(body), body.sample_rate, body.speed, lambda field: PARAMS.get(field, field))
    try:
        voice = resolve_voice(body.voice, state.blueprint.front_end.voices, "voice")
    except UnknownVoiceError as error:
        raise as_api_error(error) from error
    prompt = {"text": body.input} | ({"voice": voice} if voice is not None else {})
    if body.instructions:
        if "instructions" not in fields:
            raise refused("instructions", "this model takes none", "unsupported")
        prompt["instructions"] = body.instructions
    if body.seed is not None and not 0 <= body.seed < 2**63:
        raise refused("seed", "out of range (allowed: 0 to 2^63 - 1)")
    sampling, names = by_stage(state, body.stage_params)
    return Plan(prompt, sampling, seed=body.seed, names=names | {"text": "input", "voice": "voice", "seed": "seed"})


def format_of(body: SpeechRequest) -> str:
    """The format that is asked for, or the default."""
    return DEFAULT_FORMAT if body.response_format is None else body.response_format


def is_streamed(body: SpeechRequest) -> bool:
    """Raw samples have no header that could be wrong before the end is known: they needn't wait for it."""
    return body.stream_format is not None or format_of(body) in RAW


def make_usage(run: Run, record: RequestRecord) -> SpeechUsage:
    """Tokens in and out."""
    made = sum(answer.text_tokens + answer.audio_tokens for answer in run.answers)
    return SpeechUsage(input_tokens=record.prompt_tokens, output_tokens=made, total_tokens=record.prompt_tokens + made)


async def file_bytes(sound: Sound, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
    """The bytes of one file as they are made."""
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, AudioPiece) and (data := await sound.push(piece.samples)):
                yield data
    if data := await sound.finish():
        yield data


async def raw(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The file itself. After the start nothing can tell of an error but a connection that breaks."""
    try:
        async for data in parts:
            yield data
    except ApiError as error:
        raise UnfinishedResponse(error.message) from error


async def events(parts: AsyncGenerator[bytes, None], run: Run, record: RequestRecord) -> AsyncGenerator[bytes, None]:
    """Server-sent events: deltas in base64 and a last one with the usage. An error after the start is an event too."""
    try:
        async for data in parts:
            yield event(SpeechDelta(type="speech.audio.delta", audio=base64.b64encode(data).decode()))
    except ApiError as error:
        yield b"data: " + error.json() + b"\n\n"
        return
    reason = run.answers[0].finish_reason
    assert reason is not None
    yield event(SpeechDone(type="speech.audio.done", usage=make_usage(run, record), finish_reason=reason))


async def whole(parts: AsyncGenerator[bytes, None]) -> bytes:
    """The whole file."""
    async with aclosing(parts):
        return b"".join([data async for data in parts])


def router(state: ServerState) -> APIRouter:
    """``POST /v1/audio/speech``."""
    routes = APIRouter(tags=["speech"])

    @routes.post(
        "/v1/audio/speech",
        response_class=Response,
        responses={200: {"description": "The audio; with `stream_format: sse` as `text/event-stream`."}, **RESPONSES},
    )
    async def create_speech(body: SpeechRequest, request: Request) -> Response:
        """Speak a text."""
        plan = read_plan(body, state)
        streamed = is_streamed(body)
        sound = Sound(format_of(body), state.blueprint.front_end.sample_rate, body.sample_rate, body.speed, streaming=streamed)
        record = RequestRecord(f"speech-{uuid.uuid4().hex}", "speech", streamed)
        run = Run(plan, state, record)
        headers = {"X-Request-Id": record.req_id, "X-Sample-Rate": str(sound.sample_rate)}
        parts = file_bytes(sound, run.pieces())
        if not streamed:
            data = await unless_gone(request, whole(parts))
            headers["X-Finish-Reason"] = run.answers[0].finish_reason or ""
            return Response(data, headers=headers, media_type=sound.mime)
        # Whatever fails before the first sound is a status.
        begun = await unless_gone(request, primed(parts))
        if body.stream_format == "sse":
            return PiecesResponse(events(begun, run, record), begun, "text/event-stream", headers, state.settings.send_seconds)
        return PiecesResponse(raw(begun), begun, sound.mime, headers, state.settings.send_seconds)

    return routes
