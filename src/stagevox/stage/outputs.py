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


class OutputMemory:
    """Which positions' rows were taken already, and rows that wait until their request is sampled."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.held: dict[str, dict[str, list[torch.Tensor]]] = {}

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self.taken.pop(req_id, None)
        self.held.pop(req_id, None)


def slice_outputs(
    rows: list[RowPhase],
    values: Mapping[str, Any] | None,
    num_tokens: int,
    memory: OutputMemory | None = None,
    *,
    hook: str = "make_omni_output",
) -> Outputs:
    """Hand each request its share of a step's ``multimodal_outputs``, which ``hook`` returned.

    A tensor is cut along its first axis, the token axis (rows past ``num_tokens`` are padding). Each position's row goes out once:
    rows of a request that is not sampled in this step wait for the step in which it is, and a replay's rows were taken
    before. A sequence holds one value a request, and goes out if the request is sampled. Nothing at all is built when
    there are no values.
    """
    if not values:
        return {}
    memory = OutputMemory() if memory is None else memory
    outputs: Outputs = {row.req_id: {} for row in rows if row.is_sampled}
    for name, value in values.items():
        if isinstance(value, torch.Tensor | OwnedBatchTensor):
            _cut(rows, name, owned(value), num_tokens, memory, outputs, hook)
        elif isinstance(value, list | tuple):
            if len(value) != len(rows):
                raise HookCountError(hook, f"values of {name}", len(rows), len(value))
            for row, one in zip(rows, value, strict=True):
                if row.is_sampled:
                    outputs[row.req_id][name] = owned(one)
        else:
            raise HookShapeError(hook, f"{name} is a {type(value).__name__}, not a tensor or a sequence")
    for row in rows:
        memory.taken[row.req_id] = max(memory.taken.get(row.req_id, 0), row.num_computed + row.span)
    return outputs


def _cut(
    rows: list[RowPhase],
    name: str,
    tensor: torch.Tensor,
    num_tokens: int,
    memory: OutputMemory,
    outputs: Outputs,
    hook: str,
) -> None:
    """Cut one token-aligned tensor ``[>= num_tokens, ...]`` into ``outputs``, rows held from earlier steps first."""
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise HookShapeError(hook, f"{name} has no token axis")
    if tensor.shape[0] < num_tokens:
        raise HookCountError(hook, f"rows of {name}", num_tokens, tensor.shape[0])
    for row in rows:
        fresh = max(0, memory.taken.get(row.req_id, 0) - row.num_computed)
        part = tensor[row.start + min(fresh, row.span) : row.end]
        if not row.is_sampled:
            memory.held.setdefault(row.req_id, {}).setdefault(name, []).append(part)
            continue
        held = memory.held.get(row.req_id, {}).pop(name, None)
        if held or len(part):
            outputs[row.req_id][name] = torch.cat([*held, part]) if held else part
