"""Questions to stages and who waits for the answer."""

from __future__ import annotations

import asyncio

from stagevox.stage.messages import Answer


class Answers:
    """Futures of what was asked, by stage and question; all that ask the same get the next answer."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], list[asyncio.Future[Answer]]] = {}

    def expect(self, stage: str, what: str) -> asyncio.Future[Answer]:
        """A future for the answer to a question that is asked now."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((stage, what), []).append(future)
        return future

    def give(self, stage: str, answer: Answer) -> None:
        """Hand an answer to all who wait for it."""
        for future in self._waiting.pop((stage, answer.what), ()):
            if not future.done():
                future.set_result(answer)

    def fail(self, stage: str, error: Exception) -> None:
        """The stage won't answer any more."""
        for key in [key for key in self._waiting if key[0] == stage]:
            for future in self._waiting.pop(key):
                if not future.done():
                    future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """No stage will answer any more."""
        for stage in {stage for stage, _ in self._waiting}:
            self.fail(stage, error)
