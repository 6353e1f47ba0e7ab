"""What windows did: for metrics, and as one line in the log (MS-12)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .gates import Refusal

logger = logging.getLogger("stagevox.multi_step")

LOG_INTERVAL = 10.0
"""Seconds between two lines."""


class WindowCounters:
    """Windows that ran, their steps, and why others did not. An empty plan counts nothing."""

    def __init__(self, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.stage = stage
        self.planned_windows = 0
        self.executed_windows = 0
        self.executed_steps = 0
        self.shortened_windows = 0
        """Planned for less than the setting says, or ended before their plan for one of their requests."""
        self.derived_steps = 0
        """Steps whose token was derived from the requests' state."""
        self.tokens_saved = 0
        """Tokens that took no scheduling round of their own."""
        self.refusals: Counter[Refusal] = Counter()
        self._clock = clock
        self._next_line = clock() + LOG_INTERVAL
        self._logged: str | None = None

    def plan(self, *, shortened: bool) -> None:
        """Count a window that was planned."""
        self.planned_windows += 1
        self.shortened_windows += shortened

    def execute(self, planned: int, steps: int, tokens: int, rows: int, derived: int, *, shortened: bool) -> None:
        """Count a window of ``rows`` requests that ran ``steps`` of ``planned`` steps and shipped ``tokens``."""
        self.executed_windows += 1
        self.executed_steps += steps
        self.shortened_windows += tokens < rows * planned and not shortened
        self.derived_steps += derived
        self.tokens_saved += max(0, tokens - rows)

    def refuse(self, reason: Refusal) -> None:
        """Count a round that could have merged steps and did not."""
        self.refusals[reason] += 1

    def line(self) -> str:
        """The line for the log."""
        refusals = {reason.value: count for reason, count in sorted(self.refusals.items())}
        return (
            f"Multi-step counters: executed_windows={self.executed_windows} executed_steps={self.executed_steps} "
            f"refusals={refusals}"
        )

    def log(self, *, now: bool = False) -> None:
        """Write the line at INFO if an interval has passed, or ``now``; never the same line twice."""
        if not now and self._clock() < self._next_line:
            return
        self._next_line = self._clock() + LOG_INTERVAL
        line = self.line()
        if line != self._logged and (self.executed_windows or self.refusals):
            self._logged = line
            logger.info("%s: %s", self.stage, line)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for metrics."""
        return {
            "planned_windows": self.planned_windows,
            "executed_windows": self.executed_windows,
            "executed_steps": self.executed_steps,
            "shortened_windows": self.shortened_windows,
            "derived_steps": self.derived_steps,
            "tokens_saved": self.tokens_saved,
            "refusals": {reason.value: count for reason, count in self.refusals.items()},
        }
