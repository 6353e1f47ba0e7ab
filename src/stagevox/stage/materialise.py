"""Where a step's outputs are made: in the step, or on a thread of their own while the next step runs (RT-7)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from stagevox.errors import ContractError, HookRaisedError

from .outputs import Outputs, StepOutputs

INLINE, BACKGROUND = "inline", "background"
MODES = (INLINE, BACKGROUND)
"""Values of the setting ``output_materialisation``."""


class _Result(Protocol):
    def result(self) -> Outputs: ...


class PendingOutputs:
    """A step's outputs on their way."""

    def __init__(self, req_ids: Sequence[str], made: _Result) -> None:
        self._req_ids = req_ids
        self._made = made

    def join(self) -> tuple[Outputs, dict[str, BaseException]]:
        """Wait; the outputs by request, or the error of each request of the step if they could not be made."""
        try:
            return self._made.result(), {}
        except ContractError as error:
            return {}, dict.fromkeys(self._req_ids, error)
        except Exception as error:
            raised = HookRaisedError("outputs", f"{type(error).__name__}: {error}")
            raised.__cause__ = error
            return {}, dict.fromkeys(self._req_ids, raised)


class Materialiser:
    """Makes the outputs of one runner's steps.

    Inline the copies to the host start at once, and slicing is left to whoever joins. In the background both are the work of one thread,
    which takes the steps in their order; the thread starts with the first of them.
    """

    def __init__(self, *, background: bool = False) -> None:
        self.background = background
        self._worker: ThreadPoolExecutor | None = None

    def start(self, step: StepOutputs) -> PendingOutputs:
        """Begin; a step for the background was planned with ``snapshot``."""
        if self.background:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="stagevox-outputs")
            return PendingOutputs(step.req_ids, self._worker.submit(step.result))
        try:
            step.copy()
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return PendingOutputs(step.req_ids, failed)
        return PendingOutputs(step.req_ids, step)

    def close(self) -> None:
        """End the thread. The step it is at is finished; those that wait are dropped, and fail should anyone join them."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(cancel_futures=True)
