"""From plain counts to rows."""

import ast
from pathlib import Path

import pytest

from stagevox.contract import RowPhase
from stagevox.stage.rows import build_rows, is_decode_row, request_token_spans

SRC = Path(__file__).resolve().parents[3] / "src" / "stagevox"


@pytest.mark.covers("PC-3")
def test_one_row_a_request_in_batch_order():
    rows = build_rows(["b", "a"], [0, 5], [5, 6], [3, 9], [8, 4], [8, 10])
    assert rows == [
        RowPhase("b", start=0, span=5, num_computed=3, prompt_len=8, num_known=8),
        RowPhase("a", start=5, span=1, num_computed=9, prompt_len=4, num_known=10),
    ]


@pytest.mark.covers("EX-4")
def test_spans_are_those_of_the_rows_unequal_ones_included():
    rows = build_rows(list("abc"), [0, 5, 6], [5, 6, 13], [0, 9, 2], [5, 4, 9], [5, 10, 9])
    assert request_token_spans(rows) == [(0, 5), (5, 6), (6, 13)]


@pytest.mark.covers("PC-5", "PC-8", "PC-14")
@pytest.mark.parametrize(
    ("computed", "span", "prompt", "known", "in_log", "decode"),
    [
        (4, 1, 4, 5, False, True),  # the first decode position
        (9, 1, 4, 10, False, True),
        (3, 1, 4, 4, False, False),  # one-token prompt tail
        (0, 1, 1, 1, False, False),  # one-token prompt
        (5, 1, 4, 8, False, False),  # one known position of a replay
        (7, 1, 4, 8, True, False),  # the newest position, but decided before
        (7, 2, 4, 8, False, False),  # drafts
        (0, 4, 4, 4, False, False),
        (2, 6, 4, 8, False, False),  # a replay across the boundary
    ],
)
def test_what_a_decode_row_is(computed, span, prompt, known, in_log, decode):
    assert is_decode_row(RowPhase("r", 0, span, computed, prompt, known), in_log=in_log) is decode


@pytest.mark.covers("PC-1", "TK-3")
def test_phase_is_never_decided_by_span_length():
    """No comparison in ``src`` tests a span or a count of ids against 1 but the one function that tells a decode row."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(side, ast.Constant) and side.value == 1 for side in node.comparators
            ):
                text = ast.unparse(node)
                if "span" in text or "input_ids" in text or "numel" in text:
                    found.append((path.relative_to(SRC).as_posix(), text))
    assert [path for path, _ in found] == ["stage/rows.py"], found
