"""Salts of the prefix cache: blocks are shared between requests only where all that conditions them is the same."""

from __future__ import annotations

import hashlib

import torch


def salt(named: object, *tensors: torch.Tensor) -> str:
    """A digest of all that a position's key and value depend on beside its token: what ``named`` prints as, and the tensors."""
    total = hashlib.sha256(repr(named).encode())
    for tensor in tensors:
        total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
