"""Checks of what a hook returned, raised under the hook's name (PC-6, PC-10).

They compare counts and shapes only: no data is read, so no device is synchronised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stagevox.errors import HookCountError, HookShapeError

from .hooks import BatchResult, MTPBatchResult, RowResult, Update
from .outputs import OmniOutput


def _rows(hook: str, what: str, tensor: Any, rows: int, width: int | None) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise HookShapeError(hook, f"{what} is a {type(tensor).__name__}, not a tensor")
    shape = tensor.shape
    if width is None:
        if len(shape) != 1:
            raise HookShapeError(hook, f"{what} has shape {list(shape)}, expected [{rows}]")
    elif len(shape) != 2 or shape[1] != width:
        raise HookShapeError(hook, f"{what} has shape {list(shape)}, expected [{rows}, {width}]")
    if shape[0] != rows:
        raise HookCountError(hook, f"rows of {what}", rows, shape[0])


def _tuple(hook: str, result: Any, length: int) -> None:
    if not isinstance(result, tuple):
        raise HookShapeError(hook, f"returned a {type(result).__name__}, not a tuple")
    if len(result) != length:
        raise HookCountError(hook, "results", length, len(result))


def check_row(result: Any, span: int, hidden_size: int) -> RowResult:
    """Check what ``preprocess`` returned for a span of ``span`` rows."""
    hook = "preprocess"
    _tuple(hook, result, 3)
    ids, embeds, update = result
    _rows(hook, "input_ids", ids, span, None)
    _rows(hook, "input_embeds", embeds, span, hidden_size)
    return ids, embeds, check_update(hook, update)


def check_update(hook: str, update: Any) -> Update:
    """Check a single update, such as ``postprocess`` returns."""
    if not isinstance(update, Mapping):
        raise HookShapeError(hook, f"update is a {type(update).__name__}, not a mapping")
    for key in update:
        if not isinstance(key, str):
            raise HookShapeError(hook, f"update has the key {key!r}, which can't be a keyword")
    return update


def check_batch(result: Any, requests: int, hidden_size: int, *, mtp: bool) -> BatchResult | MTPBatchResult:
    """Check what ``preprocess_decode_batch`` returned for ``requests`` rows; five results with ``mtp``, else three."""
    hook = "preprocess_decode_batch"
    _tuple(hook, result, 5 if mtp else 3)
    _rows(hook, "input_ids", result[0], requests, None)
    _rows(hook, "input_embeds", result[1], requests, hidden_size)
    if mtp:
        _rows(hook, "last_hidden", result[2], requests, hidden_size)
        _rows(hook, "text_step", result[3], requests, hidden_size)
    updates = result[-1]
    if not isinstance(updates, Sequence):
        raise HookShapeError(hook, f"updates is a {type(updates).__name__}, not a sequence")
    if len(updates) != requests:
        raise HookCountError(hook, "updates", requests, len(updates))
    for update in updates:
        check_update(hook, update)
    checked: BatchResult | MTPBatchResult = result
    return checked


def check_mtp(result: Any, requests: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check what ``talker_mtp`` returned: ``(embeds [N, H], codes [N, Q])``."""
    hook = "talker_mtp"
    _tuple(hook, result, 2)
    embeds, codes = result
    _rows(hook, "embeds", embeds, requests, hidden_size)
    if not isinstance(codes, torch.Tensor) or codes.dim() != 2:
        raise HookShapeError(hook, "codes is not a tensor [N, Q]")
    if codes.shape[0] != requests:
        raise HookCountError(hook, "rows of codes", requests, codes.shape[0])
    return embeds, codes


def check_mtp_inputs(value: Any, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the ``mtp_inputs`` of a decode row's update: ``(last_hidden [1, H], text_step [1, H])``."""
    hook = "preprocess"
    _tuple(hook, value, 2)
    last_hidden, text_step = value
    _rows(hook, "mtp_inputs[0] (last_hidden)", last_hidden, 1, hidden_size)
    _rows(hook, "mtp_inputs[1] (text_step)", text_step, 1, hidden_size)
    return last_hidden, text_step


def check_output(result: Any, num_tokens: int) -> OmniOutput:
    """Check what ``make_omni_output`` returned for a step of ``num_tokens`` rows; rows past them are padding."""
    hook = "make_omni_output"
    if not isinstance(result, OmniOutput):
        raise HookShapeError(hook, f"returned a {type(result).__name__}, not an OmniOutput")
    hidden = result.text_hidden_states
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        raise HookShapeError(hook, "text_hidden_states is not a tensor [num_tokens, H]")
    if hidden.shape[0] < num_tokens:
        raise HookCountError(hook, "rows of text_hidden_states", num_tokens, hidden.shape[0])
    values = result.multimodal_outputs
    if not (values is None or isinstance(values, Mapping)):
        raise HookShapeError(hook, f"multimodal_outputs is a {type(values).__name__}, not a mapping")
    return result
