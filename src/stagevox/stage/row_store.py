"""Exported rows of cached positions: what a prefix hit spares the model, the next stage still needs (RT-9).

Rows lie where their position's key and value lie, block by block, so they live and die with the block: whoever computes a slot
writes its rows, and whoever adopts the block finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stagevox.contract import OwnedBatchTensor, RowPhase
from stagevox.errors import MissingStateError

from .outputs import OutputMemory


class RowStore:
    """``name`` to rows by KV slot. Holds ``num_slots`` rows of each exported tensor, on the tensor's device, from its first step on."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._rows: dict[str, torch.Tensor] = {}

    def put(self, values: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        """Keep the rows of one step; ``slots [num_tokens]`` says where each token's key and value went."""
        for name, value in values.items():
            kept = self._rows.get(name)
            if kept is None:
                kept = self._rows[name] = value.new_zeros((self.num_slots, *value.shape[1:]))
            kept[slots] = value[: len(slots)]

    def get(self, name: str, slots: Sequence[int]) -> torch.Tensor:
        """A copy of the rows at ``slots``, in their order; raises :class:`MissingStateError` for a name that is new."""
        kept = self._rows.get(name)
        if kept is None:
            raise MissingStateError("make_omni_output", f"{name} was not exported when cached positions were computed")
        return kept[torch.tensor(slots, device=kept.device)]

    def hold(self, names: Iterable[str], rows: Sequence[RowPhase], table: Any, memory: OutputMemory) -> None:
        """Hold for each request, before its rows of this step, those of cached positions that it never computed.

        ``table`` is vLLM's block table of the batch, in the order of ``rows``.
        """
        for index, row in enumerate(rows):
            first = memory.taken.get(row.req_id, 0)
            if first < row.num_computed:
                slots = missing_slots(table.block_table.np[index], table.block_size, first, row.num_computed)
                held = memory.held.setdefault(row.req_id, {})
                for name in names:
                    held.setdefault(name, []).append(self.get(name, slots))


def rows_along(values: Mapping[str, Any], count: int) -> dict[str, torch.Tensor]:
    """What of a step's ``values`` is kept: tensors along its ``count`` tokens."""
    plain = ((name, value.tensor if isinstance(value, OwnedBatchTensor) else value) for name, value in values.items())
    # What has fewer rows is for plan_outputs to complain of.
    return {name: value for name, value in plain if isinstance(value, torch.Tensor) and value.dim() and len(value) >= count}


def missing_slots(blocks: Sequence[int], block_size: int, first: int, end: int) -> list[int]:
    """The KV slots of the positions ``first .. end - 1`` of a request whose ``blocks`` hold them."""
    return [blocks[position // block_size] * block_size + position % block_size for position in range(first, end)]
