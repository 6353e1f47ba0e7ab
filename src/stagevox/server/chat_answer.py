"""A chat's answer, whole or as the chunks of a stream."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from .answer import AudioPiece, EndPiece, FinishReason, Piece, TextPiece
from .generate import Run
from .protocol.chat import (
    AnswerMessage,
    Audio,
    AudioOptions,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChunkChoice,
    CompletionDetails,
    Delta,
    DeltaAudio,
    PromptDetails,
    Usage,
)
from .record import RequestRecord
from .sound import Sound
from .state import ServerState


class ChatAnswer:
    """What all choices of one request have in common."""

    def __init__(self, body: ChatRequest, state: ServerState) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = body.model or state.names[0]
        self.modalities = tuple(body.modalities or ("text",))
        self.spoken = "audio" in self.modalities
        self.written = "text" in self.modalities
        options = body.audio or AudioOptions()
        rate = state.blueprint.front_end.sample_rate
        count = body.n or 1
        self.sounds = [
            Sound(options.format, rate, options.sample_rate, None, streaming=bool(body.stream)) if self.spoken else None
            for _ in range(count)
        ]
        self.audio_ids = [f"audio-{uuid.uuid4().hex}" for _ in range(count)]


class ChatWhole:
    """Pieces in, one completion out."""

    def __init__(self, answer: ChatAnswer, run: Run, state: ServerState) -> None:
        self._answer, self._run, self._state = answer, run, state
        self._files = [bytearray() for _ in run.answers]

    async def collect(self, pieces: AsyncGenerator[Piece, None]) -> None:
        """Take all pieces; their text the answers keep."""
        async with aclosing(pieces):
            async for piece in pieces:
                sound = self._answer.sounds[piece.index]
                if sound is not None and isinstance(piece, AudioPiece):
                    self._files[piece.index] += await sound.push(piece.samples)
                elif sound is not None and isinstance(piece, EndPiece):
                    self._files[piece.index] += await sound.finish()

    def completion(self, usage: Usage) -> ChatCompletion:
        """The answer."""
        return ChatCompletion(
            id=self._answer.id,
            object="chat.completion",
            created=self._answer.created,
            model=self._answer.model,
            choices=[self._choice(index) for index in range(len(self._files))],
            usage=usage,
        )

    def _choice(self, index: int) -> Choice:
        answer, one = self._answer, self._run.answers[index]
        assert one.finish_reason is not None
        message = AnswerMessage(role="assistant", content=one.text if answer.written else None, refusal=None)
        if answer.spoken:
            message.audio = Audio(
                id=answer.audio_ids[index],
                data=base64.b64encode(self._files[index]).decode(),
                expires_at=self._state.transcripts.keep(answer.audio_ids[index], one.text),
                transcript=one.text,
            )
        return Choice(index=index, message=message, finish_reason=one.finish_reason, logprobs=None)


class ChatStream:
    """Pieces in, chunks out: one with the role first, one with a finish reason last, for each choice."""

    def __init__(self, answer: ChatAnswer, run: Run, state: ServerState, with_usage: bool) -> None:
        self._answer, self._run, self._state = answer, run, state
        self._with_usage = with_usage

    def first(self) -> list[ChatChunk]:
        """What opens each choice."""
        delta = {"role": "assistant", "content": ""} if self._answer.written else {"role": "assistant"}
        return [self._chunk(answer.index, Delta.model_validate(delta)) for answer in self._run.answers]

    async def take(self, piece: Piece) -> list[ChatChunk]:
        """The chunks that a piece makes."""
        answer, index = self._answer, piece.index
        sound = answer.sounds[index]
        match piece:
            case TextPiece(_, text):
                delta = Delta(content=text) if answer.written else Delta()
                if answer.spoken:
                    delta.audio = DeltaAudio(id=answer.audio_ids[index], transcript=text)
                return [self._chunk(index, delta)]
            case AudioPiece(_, samples):
                data = await sound.push(samples) if sound is not None else b""
                return [self._chunk(index, Delta(audio=self._audio(index, data)))] if data else []
            case EndPiece(_, reason):
                chunks = []
                if sound is not None:
                    audio = self._audio(index, await sound.finish())
                    text = self._run.answers[index].text
                    audio.expires_at = self._state.transcripts.keep(answer.audio_ids[index], text)
                    chunks.append(self._chunk(index, Delta(audio=audio)))
                return [*chunks, self._chunk(index, Delta(), reason)]

    def usage(self, usage: Usage) -> ChatChunk:
        """The chunk after the last choice's."""
        chunk = self._bare()
        chunk.usage = usage
        return chunk

    def _audio(self, index: int, data: bytes) -> DeltaAudio:
        return DeltaAudio(id=self._answer.audio_ids[index], data=base64.b64encode(data).decode())

    def _chunk(self, index: int, delta: Delta, reason: FinishReason | None = None) -> ChatChunk:
        chunk = self._bare(ChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=None))
        if self._with_usage:
            chunk.usage = None  # set, so that it is sent
        return chunk

    def _bare(self, *choices: ChunkChoice) -> ChatChunk:
        answer = self._answer
        return ChatChunk(
            id=answer.id,
            object="chat.completion.chunk",
            created=answer.created,
            model=answer.model,
            choices=list(choices),
        )


def make_usage(run: Run, record: RequestRecord) -> Usage:
    """Of all choices together."""
    text = sum(answer.text_tokens for answer in run.answers)
    audio = sum(answer.audio_tokens for answer in run.answers)
    return Usage(
        prompt_tokens=record.prompt_tokens,
        completion_tokens=text + audio,
        total_tokens=record.prompt_tokens + text + audio,
        prompt_tokens_details=PromptDetails(audio_tokens=0, cached_tokens=0),
        completion_tokens_details=CompletionDetails(
            text_tokens=text,
            audio_tokens=audio,
            reasoning_tokens=0,
            accepted_prediction_tokens=0,
            rejected_prediction_tokens=0,
        ),
    )
