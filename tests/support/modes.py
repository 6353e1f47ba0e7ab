"""Serving modes: what of an engine's settings must not change a single code, and what a step log says of the hard cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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


def shown(model: Omni, stage: str) -> Counter[str]:
    """How often a stage's step log shows each hard case: those of ``count_cases``, ``replay_tail`` and ``prefix_hit``."""
    rows: Sequence[StepRow] = model.trace()[stage]
    found = count_cases(rows)
    found.update(_replay_tails(rows))
    seen: set[str] = set()
    for row in rows:
        found["prefix_hit"] += row.req_id not in seen and row.num_computed > 0
        seen.add(row.req_id)
    return +found


def _replay_tails(rows: Iterable[StepRow]) -> Iterable[str]:
    """Ends of replays that started in an earlier step, past the prompt; also where nothing but their phase tells them from decode."""
    replaying: set[str] = set()
    for row in rows:
        if row.is_resumed:
            replaying.add(row.req_id)
        if row.req_id not in replaying or row.num_computed + row.span < row.num_known:
            continue
        replaying.discard(row.req_id)
        if row.num_computed >= row.prompt_len and not row.is_resumed:
            yield "replay_tail"
            if row.span == 1:
                yield "one_token_replay_tail"
