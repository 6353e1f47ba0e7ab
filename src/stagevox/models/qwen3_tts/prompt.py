"""The talker's prompt as ids: which text token and which control code stand at each position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NO_CODE = -1
"""A position without a control code."""

ROLE = 3
"""Tokens of ``<|im_start|>assistant\\n`` before the text."""

CLOSING = 5
"""Tokens of ``<|im_end|>\\n<|im_start|>assistant\\n`` after it."""

AUTO = "auto"
"""The language that the model finds out by itself."""


class TTSTokens(NamedTuple):
    """Text tokens that mark a prompt."""

    pad: int
    bos: int
    eos: int


class Conditioning(NamedTuple):
    """All that conditions a request, as ids."""

    text: list[int]
    """Of the L prompt positions."""
    codec: list[int]
    """Of the L prompt positions, :data:`NO_CODE` where there is none."""
    trailing: list[int]
    """Text tokens of the first frames."""


def control_codes(talker: Mapping[str, Any], voice: str, language: str) -> list[int]:
    """The codes before the first frame: language, speaker, pad, and the start of speech.

    ``voice`` and ``language`` are keys of the talker's config, or ``auto``. A speaker of a dialect speaks it where the language is
    left open or is Chinese.
    """
    dialect = talker["spk_is_dialect"][voice]
    if dialect and language in (AUTO, "chinese"):
        language = dialect
    if language == AUTO:
        head = [talker["codec_nothink_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]]
    else:
        spoken = talker["codec_language_id"][language]
        head = [talker["codec_think_id"], talker["codec_think_bos_id"], spoken, talker["codec_think_eos_id"]]
    return [*head, talker["spk_id"][voice], talker["codec_pad_id"], talker["codec_bos_id"]]


def conditioning(
    text: Sequence[int], instruct: Sequence[int], codes: Sequence[int], tokens: TTSTokens, *, streaming_text: bool
) -> Conditioning:
    """Lay out a prompt.

    ``text`` are the tokens of the whole assistant turn, ``instruct`` those of the user's turn before it, or none. With
    ``streaming_text`` the prompt ends with the first token of the text and each frame brings another one; without, the whole text
    stands in the prompt.
    """
    role, body = list(text[:ROLE]), list(text[ROLE:-CLOSING])
    *lead, start = codes
    rows = [(token, NO_CODE) for token in [*instruct, *role]]
    rows += zip([tokens.pad] * (len(lead) - 1) + [tokens.bos], lead, strict=True)
    if streaming_text:
        rows.append((body[0], start))
        trailing = [*body[1:], tokens.eos]
    else:
        pad = lead[-1]
        rows += [(token, pad) for token in [*body, tokens.eos]] + [(tokens.pad, start)]
        trailing = [tokens.pad]
    return Conditioning([token for token, _ in rows], [code for _, code in rows], trailing)
