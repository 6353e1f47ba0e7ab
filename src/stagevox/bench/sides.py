"""A model that speaks for a benchmark: all stages in this process, or each in one of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stagevox.config.blueprint import Blueprint
from stagevox.contract.keys import CODES
from stagevox.omni import Omni
from stagevox.pipeline.events import EmitOutput, FinishRequest
from stagevox.pipeline.process import ProcessClient
from stagevox.pipeline.request import OmniRequest, StageStats

Prompt = Mapping[str, Any]


class Spoken(NamedTuple):
    """What became of some prompts that were spoken at once."""

    seconds: float
    codes: list[NDArray[np.int64]]
    """``[T, Q]`` of each prompt."""
    stages: tuple[StageStats, ...]


class Side(Protocol):
    """Speaks; a context."""

    def speak(self, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> Spoken:
        """All prompts at once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Inline:
    """All stages in this process, a step of one after a step of the other."""

    def __init__(self, checkpoint: Path, overrides: Mapping[str, Any]) -> None:
        self._omni = Omni(str(checkpoint), overrides, record_trace=False)

    def speak(self, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> Spoken:
        """All prompts at once."""
        begin = time.perf_counter()
        results = self._omni.generate(list(prompts), sampling)
        seconds = time.perf_counter() - begin
        assert not any(result.error for result in results), [result.error for result in results]
        return Spoken(seconds, [result.codes for result in results], results[0].stages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._omni.close()


class Processes:
    """A process a stage, as the server runs them."""

    def __init__(self, checkpoint: Path, overrides: Mapping[str, Any]) -> None:
        self._blueprint = Blueprint.of(checkpoint, overrides)
        self._client = ProcessClient(self._blueprint)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._client.start())
        self._count = 0

    def speak(self, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> Spoken:
        """All prompts at once."""
        before = self._client.stats()
        self._count += len(prompts)
        begin = time.perf_counter()
        requests = [
            self._blueprint.admit(f"bench-{self._count}-{index}", prompt, sampling) for index, prompt in enumerate(prompts)
        ]
        codes = self._loop.run_until_complete(self._all(requests))
        seconds = time.perf_counter() - begin
        stages = tuple(after.since(was) for after, was in zip(self._client.stats(), before, strict=True))
        return Spoken(seconds, codes, stages)

    async def _all(self, requests: Sequence[OmniRequest]) -> list[NDArray[np.int64]]:
        return await asyncio.gather(*map(self._one, requests))

    async def _one(self, request: OmniRequest) -> NDArray[np.int64]:
        codes = []
        async for event in self._client.submit(request):
            match event:
                case EmitOutput(_, output) if CODES in output.multimodal:
                    codes.append(np.asarray(output.multimodal[CODES]).astype(np.int64))
                case FinishRequest(error=Exception() as error):
                    raise error
        return np.concatenate(codes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
