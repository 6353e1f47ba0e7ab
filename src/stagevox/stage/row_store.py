"""Exported rows of cached positions: what a prefix hit spares the model, the next stage still needs (RT-9).

Rows lie where their position's key and value lie, block by block, so they live and die with the block: whoever computes a slot
writes its rows, and whoever adopts the block finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stagevox.errors import MissingStateError


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


def missing_slots(blocks: Sequence[int], block_size: int, first: int, end: int) -> list[int]:
    """The KV slots of the positions ``first .. end - 1`` of a request whose ``blocks`` hold them."""
    return [blocks[position // block_size] * block_size + position % block_size for position in range(first, end)]
