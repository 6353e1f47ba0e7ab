"""What each step of a runner held, row by row: the trace that tests and ``--trace`` read."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from stagevox.contract import RowPhase

from .payload import StepRow

LOG_ROWS = 1 << 18
"""Rows that are kept, the newest; tens of MB at most."""


class StepLog(deque[StepRow]):
    """The newest rows of a runner's steps. ``step`` is the current one's number, from 0; rows are noted while ``recording``."""

    def __init__(self, *, recording: bool) -> None:
        super().__init__(maxlen=LOG_ROWS)
        self.recording = recording
        self.step = -1

    def begin(self) -> None:
        """Count a step."""
        self.step += 1

    def note(self, rows: Iterable[RowPhase], completed: Container[str], resumed: Container[str], window_step: int = 0) -> None:
        """Note the step's rows; ``completed`` got a frame's residual codes in it, ``resumed`` come back from preemption."""
        if not self.recording:
            return
        self.extend(
            StepRow(
                self.step,
                row.req_id,
                row.num_computed,
                row.span,
                row.prompt_len,
                row.num_known,
                row.is_prefill,
                row.req_id in completed,
                row.req_id in resumed,
                window_step,
            )
            for row in rows
        )

    def clear(self) -> None:
        """Forget all rows; steps count from 0 again."""
        super().clear()
        self.step = -1
