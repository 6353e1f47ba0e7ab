"""What a model hands back, and how updates enter a request's state (EX-5, EX-10, EX-15)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stagevox.errors import MissingStateError


class OmniOutput(NamedTuple):
    """All that one forward produced.

    ``text_hidden_states [num_tokens, H]`` serves logits and sampling. ``multimodal_outputs`` maps a name to a tensor whose first
    axis is the token axis, or to a list of one value a request, in the order of the input batch; a request gets its share in
    steps that sample it. ``intermediate_tensors`` and ``next_token_ids [num_requests]`` are optional; no runner reads them yet.
    """

    text_hidden_states: torch.Tensor
    multimodal_outputs: Mapping[str, Any] | None = None
    intermediate_tensors: Any = None
    next_token_ids: torch.Tensor | None = None


class OwnedBatchTensor:
    """A tensor that its maker gives away: freshly made, written by nobody else, so the runner need not copy it.

    Anything not wrapped in this is taken for reused storage and copied before the next step can overwrite it.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowsAt:
    """Rows of a state tensor that comes in pieces: ``rows [n, ...]`` stand at ``first`` .. ``first + n - 1``.

    In a payload it extends the tensor under its key, which models see as one tensor of all rows so far. Pieces come in order,
    without gaps.
    """

    first: int
    rows: torch.Tensor

    def then(self, later: RowsAt) -> RowsAt:
        """Both pieces as one; raises :class:`MissingStateError` if ``later`` doesn't start where this one ends."""
        if later.first != self.first + len(self.rows):
            raise MissingStateError("payload", f"rows from {later.first} on after {self.first + len(self.rows)} rows")
        return RowsAt(self.first, torch.cat([self.rows, later.rows]))


def merge_update(state: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with ``update`` laid over it; neither argument is changed.

    Mappings present on both sides are merged field by field at any depth, so siblings survive; pieces of rows are joined; every
    other value of ``update`` replaces that of ``state``. Tensors are kept by reference.
    """
    merged = dict(state)
    for key, value in update.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merge_update(old, value)
        elif isinstance(value, RowsAt) and isinstance(old, RowsAt):
            merged[key] = old.then(value)
        else:
            merged[key] = value
    return merged
