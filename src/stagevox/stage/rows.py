"""From plain counts to rows, and which hook each row goes to. The one place that tells a decode row (PC-2, PC-3, PC-5, PC-14)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from stagevox.contract import RowPhase


def build_rows(
    req_ids: Iterable[str],
    starts: Sequence[int],
    ends: Sequence[int],
    num_computed: Iterable[int],
    prompt_lens: Iterable[int],
    num_known: Iterable[int],
) -> list[RowPhase]:
    """One row a scheduled request, in the order of the current input batch.

    ``starts`` and ``ends`` bound each span on the flattened token axis. Everything is read anew each step: nothing is latched.
    """
    spans = map(operator.sub, ends, starts)
    return list(map(RowPhase, req_ids, starts, spans, num_computed, prompt_lens, num_known))


def is_decode_row(row: RowPhase, *, in_log: bool) -> bool:
    """True for a single fresh position past the prompt: the only kind of row for the batch hook and for MTP.

    A one-token prompt tail is prefill. A one-token replay tail is not sampled, or its position is in the request's log already.
    """
    _, _, span, computed, prompt_len, known = row  # unpacked once: this runs for every row of every step
    return span == 1 and computed >= prompt_len and computed + 1 >= known and not in_log


def request_token_spans(rows: Iterable[RowPhase]) -> list[tuple[int, int]]:
    """``[start, end)`` of each request on the flattened token axis, in batch order (EX-4)."""
    return [(row.start, row.end) for row in rows]
