"""Small layers and the strict loader that the packaged model's stages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from stagevox.errors import CheckpointError


def weight(*shape: int) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * gain``; on a CPU one call of vLLM's kernel, where its own layer makes six."""
    if not x.is_cpu:
        return F.rms_norm(x, gain.shape, gain, eps)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, gain, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``x`` to ``residual`` **in place** and return the sum normalised; may overwrite ``x``."""
    if not x.is_cpu:
        return F.rms_norm(residual.add_(x), gain.shape, gain, eps)
    torch.ops._C.fused_add_rms_norm(x, residual, gain, eps)
    return x


def load_strict(field: str, weights: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy each weight into the target of its name.

    Raises :class:`CheckpointError` about ``field`` with the key if a weight is missing, unknown or of another shape.
    """
    missing = dict(targets)
    with torch.no_grad():
        for name, tensor in weights:
            target = missing.pop(name, None)
            if target is None:
                raise CheckpointError(field, f"unexpected tensor {name}")
            if target.shape != tensor.shape:
                raise CheckpointError(field, f"tensor {name} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            target.copy_(tensor)
    if missing:
        raise CheckpointError(field, f"missing tensors: {', '.join(sorted(missing))}")
