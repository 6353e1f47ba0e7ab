"""BigVGAN over its own parameters: mel spectrograms of one length to samples, in few operations.

Most of its time goes into activations that are free of aliasing: twice the rate, SnakeBeta, half the rate. Their filters are the
same for all channels, so a filter over ``STRETCH`` places is one matrix, and filtering is a product with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..mini.layers import linear

STRETCH = 16
"""Places of a channel that a product makes (or, at twice the rate, is made of)."""


class _Filters:
    """An activation's filters, up and down, as matrices."""

    def __init__(self, up: Any, down: Any) -> None:
        ratio, stretch = up.ratio, STRETCH
        assert ratio == down.stride
        # Sample m of the higher rate is made of places from (m + first - size + 1) / ratio to (m + first) / ratio.
        first = up.pad_left - ratio * up.pad
        self.before = (up.kernel_size - 1 - first + ratio - 1) // ratio
        self.after = (ratio - 1 + first) // ratio
        width = self.before + stretch + self.after
        eye = torch.eye(width, device=up.filter.device).unsqueeze(1)
        whole = ratio * F.conv_transpose1d(eye, up.filter, stride=ratio).squeeze(1)
        start = ratio * self.before + first
        self.width, self.ratio = width, ratio
        self.up = linear(whole[:, start : start + ratio * stretch].T.contiguous())
        self.lower, self.upper = down.pad_left, down.pad_right
        self.wide = ratio * (stretch - 1) + down.kernel_size
        eye = torch.eye(self.wide, device=up.filter.device).unsqueeze(1)
        self.down = linear(F.conv1d(eye, down.filter, stride=ratio).squeeze(1).T.contiguous())


class _Activation:
    """SnakeBeta, ``x + sin(x a)^2 / b``, at twice the rate. What it returns is ``a`` times that: the next layer divides by it."""

    def __init__(self, activation: Any, filters: _Filters) -> None:
        self.filters = filters
        self.frequency = torch.exp(activation.act.alpha).unsqueeze(1)
        self.weight = self.frequency / (torch.exp(activation.act.beta).unsqueeze(1) + activation.act.no_div_by_zero)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, channels, T]`` to the same shape."""
        filters, (batch, channels, length) = self.filters, x.shape
        stretches = -(-length // STRETCH)
        padded = x.new_empty(batch, channels, (stretches - 1) * STRETCH + filters.width)
        first, last = filters.before, filters.before + length
        torch.mul(x, self.frequency, out=padded[..., first:last])
        _repeat_ends(padded, first, last)
        z = filters.up(padded.unfold(2, filters.width, STRETCH).contiguous().view(-1, filters.width)).view(batch, channels, -1)
        step = filters.ratio * STRETCH
        padded = x.new_empty(batch, channels, (stretches - 1) * step + filters.wide)
        first, last = filters.lower, filters.lower + filters.ratio * length
        torch.addcmul(z, torch.sin(z).square_(), self.weight, out=padded[..., first : first + z.shape[2]])
        _repeat_ends(padded, first, last)
        y = filters.down(padded.unfold(2, filters.wide, step).contiguous().view(-1, filters.wide))
        return y.view(batch, channels, -1)[..., :length]


def _repeat_ends(padded: torch.Tensor, first: int, last: int) -> None:
    """Fill what lies outside of ``[first, last)`` with the first and the last value."""
    padded[..., :first] = padded[..., first : first + 1]
    padded[..., last:] = padded[..., last - 1 : last]


class _Convolution:
    """A convolution of what an activation returned."""

    def __init__(self, convolution: Any, activation: _Activation) -> None:
        self.weight = convolution.weight / activation.frequency
        self.bias, self.padding, self.dilation = convolution.bias, convolution.padding, convolution.dilation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, self.weight, self.bias, padding=self.padding, dilation=self.dilation)


class _Block:
    """A residual block: twice activation and convolution, three times."""

    def __init__(self, block: Any, filters: _Filters) -> None:
        activations = [_Activation(activation, filters) for activation in block.activations]
        convolutions = [each for pair in zip(block.convs1, block.convs2, strict=True) for each in pair]
        steps = [(made, _Convolution(each, made)) for made, each in zip(activations, convolutions, strict=True)]
        self.steps = list(zip(steps[::2], steps[1::2], strict=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for (first, one), (second, two) in self.steps:
            x = two(second(one(first(x)))).add_(x)
        return x


class BigVGAN:
    """The net ``net``, ready to be evaluated; its weights must not change afterwards."""

    def __init__(self, net: Any) -> None:
        self._net = net
        post = net.activation_post
        filters = _Filters(post.upsample, post.downsample)
        blocks = [_Block(block, filters) for block in net.resblocks]
        count = net.num_residual_blocks
        ups: list[nn.ConvTranspose1d] = [each[0] for each in net.ups]
        self._levels = [(up, blocks[index * count : (index + 1) * count]) for index, up in enumerate(ups)]
        self._last = _Activation(post, filters)
        self._post = _Convolution(net.conv_post, self._last)

    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """``[n, mel, T]`` to samples ``[n, T * product of the rates]``."""
        x = self._net.conv_pre(self._net.process_mel_spectrogram(mel))
        for up, blocks in self._levels:
            x = up(x)
            total = blocks[0](x)
            for block in blocks[1:]:
                total.add_(block(x))
            x = total.div_(len(blocks))
        return self._post(self._last(x)).clamp_(-1, 1).squeeze(1)
