"""Where a request stands in a step, and the three fields a model sees of it."""

import pytest

from stagevox.contract import IS_PREFILL, NUM_COMPUTED_TOKENS, PHASE_FIELDS, PROMPT_LEN, RowPhase


def row(computed, span, prompt, known=None, start=0):
    return RowPhase("r", start, span, computed, prompt, prompt if known is None else known)


@pytest.mark.covers("PC-1")
def test_field_names_are_stable():
    assert (IS_PREFILL, NUM_COMPUTED_TOKENS, PROMPT_LEN) == ("_omni_is_prefill", "_omni_num_computed_tokens", "_omni_prompt_len")
    assert PHASE_FIELDS == ("_omni_is_prefill", "_omni_num_computed_tokens", "_omni_prompt_len")


@pytest.mark.covers("PC-1", "PC-2")
@pytest.mark.parametrize(
    ("computed", "span", "prompt", "prefill"),
    [
        (0, 1, 1, True),  # a one-token prompt
        (0, 9, 9, True),
        (8, 1, 9, True),  # the one-token tail of a chunked prompt
        (9, 1, 9, False),
        (9, 4, 9, False),  # a longer span past the prompt
        (5, 8, 9, True),  # a span across the boundary
    ],
)
def test_prefill_follows_progress_never_span_length(computed, span, prompt, prefill):
    phase = row(computed, span, prompt)
    assert phase.is_prefill is prefill
    assert phase.fields() == {
        "_omni_is_prefill": prefill,
        "_omni_num_computed_tokens": computed,
        "_omni_prompt_len": prompt,
    }
    assert type(phase.fields()["_omni_is_prefill"]) is bool


@pytest.mark.covers("PC-14")
@pytest.mark.parametrize(
    ("computed", "span", "known", "sampled"),
    [
        (0, 8, 9, False),  # a prompt chunk
        (8, 1, 9, True),  # its tail
        (10, 1, 12, False),  # one known position of a replay
        (11, 1, 12, True),
        (0, 12, 12, True),
        (10, 4, 11, True),  # drafts reach past what is known
    ],
)
def test_a_row_is_sampled_when_it_reaches_the_newest_known_position(computed, span, known, sampled):
    assert row(computed, span, 9, known).is_sampled is sampled


def test_known_count_stays_inside_the_runner():
    assert set(row(3, 1, 9, 12).fields()) == set(PHASE_FIELDS)


def test_span_on_the_token_axis():
    phase = row(3, 4, 9, start=6)
    assert (phase.start, phase.end) == (6, 10)
