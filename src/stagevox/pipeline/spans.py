"""What a stage did when: told to whoever watches a pipeline, such as metrics and timelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stagevox.stage.messages import Gauges, Rest


class StepSpan(NamedTuple):
    """One step of a stage. Times are seconds of ``time.monotonic``, which all processes of a host share."""

    stage: str
    began: float
    ended: float
    rests: Sequence[Rest]
    """What it waited for since its last step, oldest first; empty if its driver doesn't know."""
    rows: int
    """Requests that the step had outputs for."""
    tokens: int
    """Token ids, and positions of a generation stage, in its outputs: what :class:`.request.StageStats` counts."""
    gauges: Gauges
    """How the stage stood afterwards."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


Watcher = Callable[[StepSpan], None]
"""Called after every step in the thread of the pipeline's event loop, or of the inline driver; must be quick, and not raise."""
