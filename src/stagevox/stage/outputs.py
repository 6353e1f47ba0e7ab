"""From a step's tensors to outputs by request (EX-5, EX-14, RT-6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stagevox.contract import OwnedBatchTensor, RowPhase
from stagevox.errors import HookCountError, HookShapeError

Outputs = dict[str, dict[str, Any]]
"""``req_id`` to named values of this step."""


def owned(value: Any) -> Any:
    """The tensor of an :class:`OwnedBatchTensor`; any other tensor copied, since its storage may be reused."""
    if isinstance(value, OwnedBatchTensor):
        return value.tensor
    return value.clone() if isinstance(value, torch.Tensor) else value


class RowLedger(dict[str, int]):
    """``req_id`` to the number of positions whose rows have been taken, so that a replay doesn't hand them out again.

    ``held`` keeps the rows of prompt chunks until their request is sampled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, dict[str, list[torch.Tensor]]] = {}

    def drop(self, req_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self.pop(req_id, None)
        self.held.pop(req_id, None)

    def take(self, row: RowPhase, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The rows of ``tensor [num_tokens, ...]`` that this request hands out now: those held and the fresh ones of its span."""
        fresh = tensor[min(row.start + max(0, self.get(row.req_id, 0) - row.num_computed), row.end) : row.end]
        if row.is_sampled:
            held = self.held.get(row.req_id, _NOTHING).get(name)
            return torch.cat([*held, fresh]) if held else fresh
        if len(fresh):
            self.held.setdefault(row.req_id, {}).setdefault(name, []).append(fresh)
        return None

    def close(self, rows: list[RowPhase]) -> None:
        """End a step: the rows of its spans are taken."""
        for row in rows:
            self[row.req_id] = max(self.get(row.req_id, 0), row.num_computed + row.span)
            if row.is_sampled:
                self.held.pop(row.req_id, None)


_NOTHING: Mapping[str, list[torch.Tensor]] = {}


def slice_outputs(
    rows: list[RowPhase], values: Mapping[str, Any] | None, num_tokens: int, ledger: RowLedger | None = None
) -> Outputs:
    """Hand each request its share of a step's ``multimodal_outputs``.

    A tensor is cut along its first axis, the token axis (rows past ``num_tokens`` are padding); a sequence holds one value a
    request. Requests that are not sampled in this step get nothing; a ``ledger`` keeps their rows for the step that samples them,
    and leaves out rows that have been handed out before. Nothing at all is built when there are no values.
    """
    if not values:
        return {}
    ledger = RowLedger() if ledger is None else ledger
    sampled = [(index, row) for index, row in enumerate(rows) if row.is_sampled]
    outputs: Outputs = {row.req_id: {} for _, row in sampled}
    for name, value in values.items():
        if isinstance(value, torch.Tensor | OwnedBatchTensor):
            tensor = owned(value)
            if tensor.shape[0] < num_tokens:
                raise HookCountError("make_omni_output", f"rows of {name}", num_tokens, tensor.shape[0])
            for row in rows:
                taken = ledger.take(row, name, tensor)
                if taken is not None:
                    outputs[row.req_id][name] = taken
        elif isinstance(value, list | tuple):
            if len(value) != len(rows):
                raise HookCountError("make_omni_output", f"values of {name}", len(rows), len(value))
            for index, row in sampled:
                outputs[row.req_id][name] = owned(value[index])
        else:
            raise HookShapeError("make_omni_output", f"{name} is a {type(value).__name__}, not a tensor or a sequence")
    ledger.close(rows)
    return outputs
