"""What a pipeline says about one choice, as pieces of text and sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stagevox.audio.check import Samples, as_samples
from stagevox.contract import CODES, WAVEFORM
from stagevox.errors import ClosedError, RequestFailedError, SamplesError
from stagevox.pipeline.events import ClientEvent, EmitOutput, FinishRequest

FinishReason = Literal["stop", "length"]

ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}

UNFINISHED = "\ufffd"
"""How a decoder shows the first bytes of a character whose last ones are not there yet."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the reply's text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class AudioPiece:
    """More of its speech."""

    index: int
    samples: Samples


@dataclass(frozen=True, slots=True)
class EndPiece:
    """The last of a choice."""

    index: int
    finish_reason: FinishReason


Piece = TextPiece | AudioPiece | EndPiece


class Answer:
    """One choice: events in, pieces out.

    ``text_stage`` writes the text, None if there is none; ``speaker`` makes the samples, None if nothing is to be spoken.
    ``read`` turns all token ids so far into text. ``stops`` end the text before they are said.
    """

    def __init__(
        self,
        index: int,
        text_stage: str | None,
        speaker: str | None,
        read: Callable[[list[int]], str],
        stops: Sequence[str] = (),
    ) -> None:
        self.index = index
        self.text = ""
        """What was handed out."""
        self.text_tokens = 0
        self.audio_tokens = 0
        self.num_samples = 0
        self.finish_reason: FinishReason | None = None
        """``stop`` or ``length`` once it is over."""
        self._text_stage, self._speaker, self._read = text_stage, speaker, read
        self._stops = tuple(stops)
        self._token_ids: list[int] = []

    @property
    def done(self) -> bool:
        """True once it is over."""
        return self.finish_reason is not None

    def take(self, event: ClientEvent) -> list[Piece]:
        """The pieces that an event completes.

        Raises:
            StagevoxError: what the request failed of.
        """
        if self.done:
            return []
        match event:
            case EmitOutput():
                return self._output(event)
            case FinishRequest(_, reason, error):
                return self._finish(reason, error)

    def _output(self, event: EmitOutput) -> list[Piece]:
        stage, output = event
        pieces: list[Piece] = []
        if stage == self._text_stage and output.new_token_ids:
            self._token_ids += output.new_token_ids
            self.text_tokens += len(output.new_token_ids)
            pieces += self._more_text(self._read(self._token_ids), last=False)
        if CODES in output.multimodal:
            self.audio_tokens += len(output.multimodal[CODES])
        if stage == self._speaker and WAVEFORM in output.multimodal:
            try:
                samples = as_samples(output.multimodal[WAVEFORM])
            except SamplesError as error:
                raise RequestFailedError(f"{stage}: {error}") from error
            self.num_samples += len(samples)
            if len(samples):
                pieces.append(AudioPiece(self.index, samples))
        return pieces

    def _finish(self, reason: str, error: Exception | None) -> list[Piece]:
        if error is not None:
            raise error
        finish_reason = ENDS.get(reason)
        if finish_reason is None:
            raise ClosedError("the server is shutting down")
        pieces = self._more_text(self._read(self._token_ids), last=True) if self._token_ids else []
        return pieces if self.done else [*pieces, self._end(finish_reason)]

    def _end(self, reason: FinishReason) -> EndPiece:
        self.finish_reason = reason
        return EndPiece(self.index, reason)

    def _more_text(self, text: str, *, last: bool) -> list[Piece]:
        """What is new in all the text so far, up to where later tokens can't change it."""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        stopped = bool(found)
        if stopped:
            text = text[: min(found)]
        elif not last:
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - self._held_back(text)]
        pieces: list[Piece] = []
        if len(text) > len(self.text) and text.startswith(self.text):
            pieces.append(TextPiece(self.index, text[len(self.text) :]))
            self.text = text
        if stopped:
            pieces.append(self._end("stop"))
        return pieces

    def _held_back(self, text: str) -> int:
        """Characters at the end that may be the beginning of a stop."""
        lengths = (length for stop in self._stops for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length]))
        return max(lengths, default=0)
