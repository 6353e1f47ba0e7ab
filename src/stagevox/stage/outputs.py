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


def slice_outputs(rows: list[RowPhase], values: Mapping[str, Any] | None, num_tokens: int) -> Outputs:
    """Hand each request its share of a step's ``multimodal_outputs``.

    A tensor is cut along its first axis, the token axis (rows past ``num_tokens`` are padding); a sequence holds one value a
    request. Requests that are not sampled in this step get nothing. Nothing at all is built when there are no values.
    """
    if not values:
        return {}
    sampled = [(index, row) for index, row in enumerate(rows) if row.is_sampled]
    outputs: Outputs = {row.req_id: {} for _, row in sampled}
    for name, value in values.items():
        if isinstance(value, torch.Tensor | OwnedBatchTensor):
            tensor = owned(value)
            if tensor.shape[0] < num_tokens:
                raise HookCountError("make_omni_output", f"rows of {name}", num_tokens, tensor.shape[0])
            for _, row in sampled:
                outputs[row.req_id][name] = tensor[row.start : row.end]
        elif isinstance(value, list | tuple):
            if len(value) != len(rows):
                raise HookCountError("make_omni_output", f"values of {name}", len(rows), len(value))
            for index, row in sampled:
                outputs[row.req_id][name] = owned(value[index])
        else:
            raise HookShapeError("make_omni_output", f"{name} is a {type(value).__name__}, not a tensor or a sequence")
    return outputs
