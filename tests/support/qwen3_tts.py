"""The tiny Qwen3-TTS checkpoint, the golden values of its reference, and what tests say with both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from stagevox import Omni, OmniResult
from stagevox.stage.payload import StepRow

GOLDEN = Path(__file__).parents[1] / "oracles" / "golden" / "qwen3_tts"
FRAME = 1920
"""Samples of a frame."""

TOLERANCE = 1e-5
"""Of samples. The decoder is bit-equal to the reference over the same frames; decoded in other pieces or beside others, sums of
float32 are taken in another order, which was seen to cost 4e-6 at a loudness of 0.2. A sample of a wrong frame is off by 1e-1."""

_folders: list[tempfile.TemporaryDirectory] = []  # they live as long as the process


@cache
def checkpoint() -> Path:
    """The checkpoint that the golden values were made with, written once a process."""
    from stagevox.bench.checkpoints.qwen3_tts import write

    _folders.append(tempfile.TemporaryDirectory(prefix="qwen3_tts"))
    return write(Path(_folders[-1].name) / "checkpoint")


@cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))


@cache
def waves() -> dict[str, torch.Tensor]:
    """Every ``stride``-th sample, by case; ``whole`` has all samples of one."""
    return load_file(GOLDEN / "waves.safetensors")


def case(name: str) -> dict[str, Any]:
    return golden()["cases"][name]


def prompt(name: str) -> dict[str, Any]:
    """A case's prompt as our front end takes it."""
    return {key: case(name)[key] for key in ("text", "voice", "language", "instruct", "streaming_text")}


def greedy(name: str) -> dict[str, Any]:
    """Its parameters. The reference's limit counts one token more than it gives frames."""
    return {"temperature": 0.0, "max_tokens": case(name)["max_new_tokens"] - 1}


def load(overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Omni:
    """The checkpoint, with room for the longest case and no more."""
    stages = {"talker": {"max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}, "code2wav": {"max_model_len": 128}}
    for stage, given in (overrides or {}).items():
        stages[stage] |= given
    return Omni(str(checkpoint()), stages)


def speak(omni: Omni, names: Sequence[str]) -> tuple[list[OmniResult], list[StepRow]]:
    """All cases at once; results, and the talker's step log of the call."""
    begin = len(omni.trace()["talker"])
    results = omni.generate([prompt(name) for name in names], [greedy(name) for name in names])
    return results, omni.trace()["talker"][begin:]


def assert_golden(name: str, result: OmniResult) -> None:
    """Codes of all groups, and the samples, are the reference's."""
    wanted = case(name)
    assert result.error is None, (name, result.error)
    np.testing.assert_array_equal(result.codes, np.array(wanted["codes"]), err_msg=name)
    assert result.finish_reason == ("stop" if wanted["ended"] else "length"), name
    assert result.text == wanted["text"] and result.sample_rate == 24000
    assert len(result.audio) == FRAME * len(wanted["codes"]) == wanted["wave"]["samples"], name
    kept = torch.from_numpy(np.ascontiguousarray(result.audio[:: golden()["stride"]]))
    torch.testing.assert_close(kept, waves()[name], atol=TOLERANCE, rtol=0, msg=lambda text: f"{name}: {text}")


def assert_all_golden(names: Iterable[str], results: Iterable[OmniResult]) -> None:
    for name, result in zip(names, results, strict=True):
        assert_golden(name, result)
