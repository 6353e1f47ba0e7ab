"""Golden cases of Qwen2.5-Omni as prompts, and results held against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stagevox.omni import Omni, OmniResult
from support.families import Golden

FAMILY = "qwen2_5_omni"

WAVE_TOLERANCE = 5e-5
"""Samples are below 1. The reference and ours run the same operations in fp32 in another order and version: about 4e-6 apart."""

BATCH_TOLERANCE = 1e-5
"""Of the same speech alone and among others: libraries add up in another order for another number of windows, about 5e-6 apart."""

END = 8292
"""Codes from here on are no frames."""

AR: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}

CONCURRENT = ("steady", "other_voice", "past_the_reply", "short")
"""Four requests of unequal length and two voices."""

KINDS = {"image": "images", "audio": "audios", "video": "videos"}


def media(kind: str) -> np.ndarray:
    """The picture, sound or film of the golden cases."""
    if kind == "image":
        return _picture()
    if kind == "video":
        return np.stack([_picture(40 * index) for index in range(4)])
    time = np.arange(20000) / 16000
    return (0.5 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 1234 * time)).astype(np.float32)


def _picture(shift: int = 0) -> np.ndarray:
    rows, columns = np.arange(56), np.arange(84)
    planes = [np.add.outer(rows, columns), np.add.outer(3 * rows, columns), np.add.outer(rows, 2 * columns)]
    return np.stack([(plane + shift) % 256 for plane in planes], -1).astype(np.uint8)


def prompt(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case as a prompt."""
    made: dict[str, Any] = {"voice": case["voice"]}
    if case.get("system", True):
        made["text"] = case["text"]
    else:
        made["messages"] = [{"role": "user", "content": case["text"]}]
    for kind in case.get("media", ()):
        made.setdefault(KINDS[kind], []).append(media(kind))
    return made


def greedy(case: Mapping[str, Any], **talker: Any) -> dict[str, Any]:
    """The sampling parameters of a case."""
    limits = {"max_tokens": case.get("max_codes", 150)}
    return {"temperature": 0.0, **limits, **talker, "thinker": {"temperature": 0.0, "max_tokens": case.get("max_text", 60)}}


def frames(case: Mapping[str, Any]) -> list[int]:
    """The codes of a case without the one that ended them."""
    return [code for code in case.get("codes", ()) if code < END]


class Answers:
    """What a model made of some cases, all at once."""

    def __init__(self, model: Omni, oracle: Golden, names: Sequence[str], **talker: Any) -> None:
        cases = [oracle.cases[name] for name in names]
        first = model._count + 1
        self.text_ids: dict[str, list[int]] = {name: [] for name in names}
        by_id = {f"omni-{first + index}": name for index, name in enumerate(names)}

        def note(event: Any) -> None:
            if getattr(event, "stage", None) == "thinker":
                self.text_ids[by_id[event.output.req_id]] += event.output.new_token_ids

        results = model.generate([prompt(case) for case in cases], [greedy(case, **talker) for case in cases], on_event=note)
        model.assert_idle()
        for stage in model._stages:
            assert not any(stage.state_size().values()), stage.name
        self.results = dict(zip(names, results, strict=True))


def codes_of(result: OmniResult) -> list[int]:
    """A result's codes, one a frame."""
    return [int(code) for code in result.codes.reshape(-1)]


def check(oracle: Golden, answers: Answers, names: Sequence[str] | None = None, *, waves: bool = True) -> None:
    """Text ids, codes and samples equal the reference's."""
    for name in names or answers.results:
        case, result = oracle.cases[name], answers.results[name]
        assert result.error is None, (name, result.error)
        assert answers.text_ids[name] == case["text_ids"], name
        assert codes_of(result) == frames(case), name
        if waves:
            check_wave(oracle, name, result)


def check_wave(oracle: Golden, name: str, result: OmniResult) -> None:
    """All samples are there, and equal the reference's; of some cases it kept every eighth."""
    samples = oracle.cases[name]["samples"]
    assert len(result.audio) == samples == 480 * len(frames(oracle.cases[name])), name
    wanted = oracle.waveforms[f"{name}.wave"]
    found = result.audio if len(wanted) == samples else result.audio[::8]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=WAVE_TOLERANCE, err_msg=name)


def check_same(result: OmniResult, alone: OmniResult, name: str = "") -> None:
    """The same codes, and samples as near as the size of a batch lets them be."""
    assert codes_of(result) == codes_of(alone), name
    np.testing.assert_allclose(result.audio, alone.audio, rtol=0, atol=BATCH_TOLERANCE, err_msg=name)


def tensor(oracle: Golden, name: str) -> torch.Tensor:
    """One of the reference's tensors."""
    return torch.from_numpy(oracle.waveforms[name])
