"""From plain counts to rows, and which hook each row goes to. The one place that tells a decode row (PC-2, PC-3, PC-5, PC-14)."""

from __future__ import annotations

from collections.abc import Iterable

from stagevox.contract import RowPhase


def build_rows(
    req_ids: Iterable[str],
    starts: Iterable[int],
    ends: Iterable[int],
    num_computed: Iterable[int],
    prompt_lens: Iterable[int],
    num_known: Iterable[int],
) -> list[RowPhase]:
    """One row a scheduled request, in the order of the current input batch.

    ``starts`` and ``ends`` bound each span on the flattened token axis. Everything is read anew each step: nothing is latched.
    """
    return [
        RowPhase(req_id, start, end - start, computed, prompt, known)
        for req_id, start, end, computed, prompt, known in zip(
            req_ids, starts, ends, num_computed, prompt_lens, num_known, strict=True
        )
    ]


def is_decode_row(row: RowPhase, *, in_log: bool) -> bool:
    """True for a single fresh position past the prompt: the only kind of row for the batch hook and for MTP.

    A one-token prompt tail is prefill. A one-token replay tail is not sampled, or its position is in the request's log already.
    """
    return row.span == 1 and not row.is_prefill and row.is_sampled and not in_log


def request_token_spans(rows: Iterable[RowPhase]) -> list[tuple[int, int]]:
    """``[start, end)`` of each request on the flattened token axis, in batch order (EX-4)."""
    return [(row.start, row.end) for row in rows]
