"""Chunked prefill, end to end: a prompt split down to a one-token tail gives the codes of a prompt in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from mini_reference import TinyOmni

from stagevox import Omni, OmniResult
from stagevox.stage.payload import StepRow
from support.margins import least_margin
from support.talker_stage import PROMPT_LEN

pytestmark = pytest.mark.covers("PC-13")

TEXTS = [
    "the number is thirty eight",
    "what is twenty two plus eight",
    "the answer is thirty five",
    "five six five one seven nine",
    "zero nine five",
    "sixty two minus five is fifty seven",
]
"""As long as 45 to 86 frames; no greedy choice of the oracle is nearer to a tie than 1e-3 (asserted)."""


@pytest.fixture(scope="module")
def expected(oracle: TinyOmni) -> list[torch.Tensor]:
    codes = [oracle.generate(text) for text in TEXTS]
    for text, each in zip(TEXTS, codes, strict=True):
        assert least_margin(oracle, text, each) > 1e-3, text
    return codes


@pytest.fixture(scope="module")
def chunked() -> Iterator[Omni]:
    """The Talker takes 5 tokens a step: no prompt of 6 fits, not even alone."""
    with Omni("mini", {"talker": {"max_num_batched_tokens": PROMPT_LEN - 1, "max_num_seqs": 4}}) as omni:
        yield omni


def spoken(omni: Omni, texts: Sequence[str]) -> tuple[list[OmniResult], list[StepRow]]:
    """Results, and the Talker's step log of this call."""
    begin = len(omni.trace()["talker"])
    results = omni.generate(texts)
    return results, omni.trace()["talker"][begin:]


def prefill_spans(rows: Sequence[StepRow]) -> list[list[int]]:
    """Each request's prompt as it was scheduled."""
    spans: dict[str, list[int]] = {}
    for row in rows:
        assert row.prompt_len == PROMPT_LEN and row.is_prefill == (row.num_computed < PROMPT_LEN)
        assert not row.is_resumed, "preemption is another test's case"
        if row.is_prefill:
            assert row.num_computed == sum(spans.setdefault(row.req_id, []))
            spans[row.req_id].append(row.span)
    assert all(sum(each) == PROMPT_LEN for each in spans.values())
    return list(spans.values())


def assert_equal(results: Sequence[OmniResult], others: Sequence[OmniResult], expected: Sequence[torch.Tensor]) -> None:
    for result, other, codes in zip(results, others, expected, strict=True):
        assert result.finish_reason == other.finish_reason == "stop"
        np.testing.assert_array_equal(result.codes, codes.numpy())
        np.testing.assert_array_equal(result.codes, other.codes)
        assert len(result.audio) == 640 * len(codes) > 0
        assert np.isfinite(result.audio).all() and np.abs(result.audio).max() > 0.1
        np.testing.assert_allclose(result.audio, other.audio, rtol=0, atol=1e-5)


def test_alone(omni: Omni, chunked: Omni, expected: list[torch.Tensor]) -> None:
    for text, codes in zip(TEXTS, expected, strict=True):
        results, rows = spoken(chunked, [text])
        assert prefill_spans(rows) == [[5, 1]]
        assert [row.used_mtp for row in rows if row.is_prefill] == [False, False]
        others, rows = spoken(omni, [text])
        assert prefill_spans(rows) == [[6]]
        assert_equal(results, others, [codes])


def test_among_others(omni: Omni, chunked: Omni, expected: list[torch.Tensor]) -> None:
    results, rows = spoken(chunked, TEXTS)
    splits = prefill_spans(rows)
    assert len(splits) == len(TEXTS) and all(len(spans) > 1 for spans in splits)
    assert len(set(map(tuple, splits))) > 1, "one split only"
    assert not any(row.used_mtp for row in rows if row.is_prefill)
    assert all(row.used_mtp for row in rows if not row.is_prefill)

    tails = [row for row in rows if row.is_prefill and row.span == 1 and row.num_computed == PROMPT_LEN - 1]
    assert tails, "no one-token tail"
    decoding = {row.step for row in rows if row.used_mtp}
    assert any(tail.step in decoding for tail in tails), "no tail in a step that also completes frames"

    others, rows = spoken(omni, TEXTS)
    assert prefill_spans(rows) == [[6]] * len(TEXTS)
    assert_equal(results, others, expected)
