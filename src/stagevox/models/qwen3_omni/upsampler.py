"""The convolutions of ``transformers``' vocoder, over no more of the past than the wanted samples see.

Layer by layer the rate rises and the reach back shrinks: the layers that cost most need hardly any context. So each part's output is
cut to what the parts after it read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor], torch.Tensor]
"""``[B, channels, T]`` to ``[B, channels, T']``."""


class Part(NamedTuple):
    """A piece of the net. Of its output, position j and what follows see its input from ``(j - context) // rate`` on."""

    apply: Function
    rate: int
    context: int

    def input_from(self, start: int) -> int:
        """Where in its input that begins which its output from ``start`` on sees; before position 0 there are zeros."""
        return max(0, start - self.context) // self.rate


def parts_of(net: Any) -> list[Part]:
    """The parts of a ``Qwen3OmniMoeCode2Wav`` after its transformer, in order. Its weights must not change afterwards."""
    parts = [Part(_both(_upsampling(up), next_), up.conv.stride[0], _reach(next_.dwconv)) for up, next_ in net.upsample]
    first, *blocks, snake, last = net.decoder
    parts.append(Part(_conv(first), 1, _reach(first)))
    for block in blocks:
        bend, up, *units = block.block
        functions = [_snake(bend), _upsampling(up), *map(_unit, units)]
        parts.append(Part(_all(functions), up.conv.stride[0], sum(_reach(unit.conv1) for unit in units)))
    parts.append(Part(_both(_snake(snake), _conv(last)), 1, _reach(last)))
    return parts


class Rows(NamedTuple):
    """Latents ``[T, H]`` of one row from its window's beginning on, and the first sample of that window that is wanted."""

    latents: torch.Tensor
    start: int


def samples(parts: Sequence[Part], rows: Sequence[Rows]) -> list[torch.Tensor]:
    """The samples of each row from ``start`` on, in [-1, 1]. A shorter row is padded on the right and has samples too many."""
    needed = [_starts(parts, row.start) for row in rows]
    at = [starts[0] for starts in needed]  # where each row's x begins, at the rate of the part to come
    x = torch.nn.utils.rnn.pad_sequence([row.latents[first:] for row, first in zip(rows, at, strict=True)], batch_first=True)
    x = x.transpose(1, 2)
    for index, part in enumerate(parts, start=1):
        x = part.apply(x)
        at = [first * part.rate for first in at]
        spare = min(starts[index] - first for starts, first in zip(needed, at, strict=True))
        if spare > 0:
            x = x[..., spare:]
            at = [first + spare for first in at]
    made = x.clamp(min=-1, max=1)[:, 0].float()
    return [row[starts[-1] - first :] for row, starts, first in zip(made, needed, at, strict=True)]


def _starts(parts: Sequence[Part], start: int) -> list[int]:
    """Where the input of each part begins to matter, and at the end ``start``."""
    starts = [start]
    for part in reversed(parts):
        starts.append(part.input_from(starts[-1]))
    starts.reverse()
    assert all(later >= sooner * part.rate for (sooner, later), part in zip(pairwise(starts), parts, strict=True))
    return starts


def _reach(conv: Any) -> int:
    reach: int = (conv.conv.kernel_size[0] - 1) * conv.conv.dilation[0]
    return reach


def _both(first: Function, second: Function) -> Function:
    return lambda x: second(first(x))


def _all(functions: Sequence[Function]) -> Function:
    def apply(x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function(x)
        return x

    return apply


def _conv(module: Any) -> Function:
    """A causal convolution: zeros stand before the start."""
    conv, reach = module.conv, _reach(module)
    weight, bias, dilation = conv.weight, conv.bias, conv.dilation
    return lambda x: F.conv1d(F.pad(x, (reach, 0)) if reach else x, weight, bias, dilation=dilation)


def _upsampling(module: Any) -> Function:
    """A transposed convolution that trims both ends: output position j sees input ``j // rate`` and, if it trims, the next."""
    conv, left, right = module.conv, module.left_pad, module.right_pad
    weight, bias, stride = conv.weight, conv.bias, conv.stride

    def apply(x: torch.Tensor) -> torch.Tensor:
        out = F.conv_transpose1d(x, weight, bias, stride=stride)
        return out[..., left : out.shape[-1] - right]

    return apply


def _snake(module: Any) -> Function:
    """``x + sin^2(a x) / b``; a and b are kept as logarithms, of which the exponentials are taken once."""
    a = module.alpha.exp()[:, None]
    inverse = 1.0 / (module.beta.exp()[:, None] + module.no_div_by_zero)
    return lambda x: (x * a).sin_().square_().mul_(inverse).add_(x)


def _unit(module: Any) -> Function:
    bend1, conv1, bend2, conv2 = _snake(module.act1), _conv(module.conv1), _snake(module.act2), _conv(module.conv2)
    return lambda x: conv2(bend2(conv1(bend1(x)))).add_(x)
