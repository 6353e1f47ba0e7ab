"""Qwen3-Omni's oracle cases as prompts, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oracles.qwen3_omni import CASES, Case, make_media
from stagevox.config.topology import Topology
from stagevox.omni import Omni, OmniResult
from support.families import Golden


def streamed(topology: Topology) -> Topology:
    """The stages as they are with ``thinker.chunk_options.stream=true``."""
    thinker, *others = topology.stages
    return replace(topology, stages=(replace(thinker, chunk_options={"stream": True}), *others))


IM_END = 642
"""The id that ends a reply in the tiny checkpoint."""

WAVE_TOLERANCE = 1e-5
"""Convolutions over another number of chunks at once add up in another order; in float32 that is about 1e-6 here."""


def prompt(case: Case) -> dict[str, Any]:
    """The case as a caller of Omni asks it."""
    media = {{"audio": "audios"}.get(kind, kind): value for kind, value in make_media(case).items()}
    return {"messages": case.messages, "voice": case.speaker, **media}


def was_cut(golden: Golden, name: str) -> bool:
    """True if the reference's reply was ended by its length."""
    return golden.cases[name]["text_ids"][-1] != IM_END


def params(golden: Golden, name: str) -> dict[str, Any]:
    """Greedy, and as long as the reference's.

    The reference leaves the last token of a cut reply unspoken: its reply to n + 1 tokens is ours to n. Its n layer-0 tokens
    make n - 1 frames: that is our n - 1 tokens.
    """
    case = CASES[name]
    tokens = case.text_tokens - was_cut(golden, name)
    return {"temperature": 0.0, "max_tokens": case.codes - 1, "thinker": {"temperature": 0.0, "max_tokens": tokens}}


def expected_ids(golden: Golden, name: str) -> list[int]:
    """The ids that the Thinker returns."""
    ids: list[int] = golden.cases[name]["text_ids"]
    return ids[:-1] if was_cut(golden, name) else ids


def ask(
    model: Omni, golden: Golden, names: Sequence[str], on_event: Callable[[Any], None] | None = None
) -> dict[str, OmniResult]:
    """Ask all of them at once; afterwards nothing may be left behind."""
    results = model.generate([prompt(CASES[name]) for name in names], [params(golden, name) for name in names], on_event=on_event)
    model.assert_idle()
    return dict(zip(names, results, strict=True))


def check_codes(golden: Golden, results: Mapping[str, OmniResult], names: Iterable[str]) -> None:
    """All groups of all frames are the reference's."""
    for name in names:
        assert results[name].error is None, (name, results[name].error)
        wanted = np.array(golden.cases[name]["codes"], dtype=np.int64)
        assert np.array_equal(results[name].codes.reshape(-1), wanted.reshape(-1)), name


def check_waveform(golden: Golden, results: Mapping[str, OmniResult], names: Iterable[str]) -> None:
    """All samples that the golden values kept are there, and the length is the reference's."""
    for name in names:
        audio = results[name].audio
        assert len(audio) == golden.cases[name]["samples"], name
        kept = audio[:: golden.facts["stride"]]
        np.testing.assert_allclose(kept, golden.waveforms[name], atol=WAVE_TOLERANCE, rtol=0, err_msg=name)
