"""Server-sent events, and streams whose first piece is there already."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TypeVar

from .protocol.base import ResponseModel

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: ResponseModel) -> bytes:
    """One event."""
    return b"data: " + data.json_bytes() + b"\n\n"


async def primed(pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """``pieces``, once its first one has come; raises what it raises until then."""
    first: list[T] = []
    try:
        first.append(await anext(pieces))
    except StopAsyncIteration:
        pass
    except BaseException:
        await pieces.aclose()
        raise
    return _Primed(first, pieces)


class _Primed(AsyncGenerator[T, None]):
    """Not a generator function: one that was never started doesn't close what it was given."""

    def __init__(self, first: list[T], rest: AsyncGenerator[T, None]) -> None:
        self._first, self._rest = first, rest

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def asend(self, value: None) -> T:
        return await anext(self)

    async def athrow(self, *args: object, **kwargs: object) -> T:
        raise NotImplementedError

    async def aclose(self) -> None:
        self._first.clear()
        await self._rest.aclose()
