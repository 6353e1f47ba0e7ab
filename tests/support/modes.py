"""Serving modes: what of an engine's settings must not change a single code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stagevox.omni import Omni
from stagevox.stage.payload import StepRow
from support.talker_stage import count_cases


class Mode(NamedTuple):
    """Settings of a stage that has a KV cache; 0 leaves one as it is."""

    budget: int = 0
    """Tokens a step."""
    blocks: int = 0
    """Blocks of 32 positions in the KV pool."""
    prefix: bool = False
    asynchronous: bool = False

    @property
    def overrides(self) -> dict[str, Any]:
        """As engine arguments."""
        made: dict[str, Any] = {"enable_prefix_caching": self.prefix, "async_scheduling": self.asynchronous}
        if self.budget:
            made["max_num_batched_tokens"] = self.budget
        if self.blocks:
            made["num_gpu_blocks_override"] = self.blocks
        return made

    def __str__(self) -> str:
        parts = [f"budget{self.budget}" if self.budget else "", f"blocks{self.blocks}" if self.blocks else ""]
        parts += ["prefix" if self.prefix else "", "async" if self.asynchronous else "sync"]
        return "-".join(filter(None, parts))


def shown(model: Omni, stage: str, since: int = 0) -> Counter[str]:
    """How often the step log of a stage shows each hard case, from its row ``since`` on."""
    return count_cases(rows_of(model, stage)[since:])


def rows_of(model: Omni, stage: str) -> Sequence[StepRow]:
    """The step log of a stage."""
    return model.trace()[stage]


def marks(model: Omni) -> Mapping[str, int]:
    """How long the step logs are now."""
    return {stage: len(rows) for stage, rows in model.trace().items()}
