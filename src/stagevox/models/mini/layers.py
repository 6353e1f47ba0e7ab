"""Small layers and the strict loader that the packaged model's stages share.

The nets are so small that a step costs as much in Python and dispatch as in arithmetic. So each layer is one or two calls of a
kernel, and modules only hold parameters: their tensors are looked up once (``linear``, ``_plan``), not at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops

from stagevox.errors import CheckpointError


def weight(*shape: int) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Affine(nn.Module):
    """A weight of any shape and a bias per channel."""

    def __init__(self, size: int, *shape: int) -> None:
        super().__init__()
        self.weight = weight(size, *shape)
        self.bias = weight(size)


class Dense(Affine):
    """The parameters of ``x @ weight.T + bias``; :func:`linear` applies them."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_out, size_in)


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function ``[n, in] -> [n, out]``.

    On a CPU it packs the weight for vLLM's oneDNN kernel, which is 2 to 3 times as fast for a few rows as torch's and
    as fast for one; it has none for float16 on most CPUs. The weight must not change afterwards.
    """
    if not (weight.is_cpu and hasattr(torch.ops._C, "onednn_mm") and weight.dtype is not torch.float16):
        return lambda x: F.linear(x, weight, bias)
    handler = ops.create_onednn_mm(weight.detach().t(), 32)
    size_out, kernel, packed = handler.n, torch.ops._C.onednn_mm.default, handler.handler_tensor

    def apply(x: torch.Tensor, handler: object = handler) -> torch.Tensor:  # the handler owns what ``packed`` points to
        out = x.new_empty(x.shape[0], size_out)
        kernel(out, x, bias, packed)
        return out

    return apply


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
