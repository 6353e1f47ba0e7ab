"""The border between a caller's words and the Thinker's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagevox.config.topology import text_of
from stagevox.errors import UnknownVoiceError
from stagevox.stage.payload import StageRequest

from .pieces import WEIGHTS
from .text import ThinkerTokenizer

SPEAKABLE_PIECES = 56
"""The longest text that is taken, counted at most. Of random words the Talker loses its way in few texts below 48 pieces, and in
every third to second above 54 (see :class:`.pieces.PieceTable`); what is counted at 56 is mostly shorter once it is words."""


class MiniFrontEnd:
    """Checks texts and voices before any engine works (:class:`stagevox.config.topology.FrontEnd`)."""

    voices: tuple[str, ...]
    sample_rate: int
    fields = ("text", "voice")

    def __init__(self, checkpoint: Path = WEIGHTS) -> None:
        self._tokenizer = ThinkerTokenizer(checkpoint / "thinker" / "tokens.json", SPEAKABLE_PIECES)
        self.voices = tuple(json.loads((checkpoint / "talker" / "config.json").read_text(encoding="utf-8"))["voices"])
        self.sample_rate = json.loads((checkpoint / "code2wav" / "config.json").read_text(encoding="utf-8"))["sample_rate"]

    def admit(self, req_id: str, prompt: Mapping[str, Any]) -> StageRequest:
        """The Thinker's request for a text; ``voice`` None is the first voice.

        Raises :class:`stagevox.errors.BadParameterError`, :class:`stagevox.errors.UnknownVoiceError`,
        :class:`stagevox.errors.EmptyTextError`, :class:`stagevox.errors.VocabularyError` or
        :class:`stagevox.errors.TextTooLongError`.
        """
        text, voice = text_of(prompt, self.voices)
        if voice is not None and voice not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        return StageRequest(
            req_id=req_id,
            prompt_token_ids=self._tokenizer.encode(text),
            options={"voice": voice or self.voices[0]},
        )

    def reply_text(self, token_ids: list[int], prompt: Mapping[str, Any]) -> str:
        """The Thinker's tokens as the words that are spoken."""
        return self._tokenizer.decode(token_ids)
