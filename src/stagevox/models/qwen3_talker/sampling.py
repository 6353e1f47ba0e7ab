"""Which codes may be sampled, and how the residual ones are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLING

CONTROL_IDS = 1024
"""The last ids of the layer-0 vocabulary are control ids: speakers, languages, marks. Of these only the end may be sampled."""

RESIDUAL = "residual"
"""State: how a request's residual codes are drawn, a mapping with ``temperature`` (0: the likeliest), ``top_k`` (0: all) and
``top_p``. A request without it takes the likeliest, and so does one that takes the likeliest layer-0 codes."""


def suppressed(vocab_size: int, end: int) -> torch.Tensor:
    """A mask ``[vocab_size]`` of the layer-0 ids that are never sampled."""
    mask = torch.arange(vocab_size) >= vocab_size - CONTROL_IDS
    mask[end] = False
    return mask


def placeholder(vocab_size: int, end: int) -> int:
    """The id that holds the prompt's places: it is never sampled, so that no penalty on prompt ids changes what is."""
    last = vocab_size - 1
    return last if last != end else last - 1


class ResidualSampling(NamedTuple):
    """How the residual codes of ``N`` frames are drawn.

    The draw of a code is a pure function of its request's seed, its position and its group: it doesn't know of the batch, and a
    second call gives the same.
    """

    temperature: torch.Tensor
    """``[N, 1]``; 0 takes the likeliest code."""
    top_k: torch.Tensor
    """``[N, 1]``; 0 means all."""
    top_p: torch.Tensor
    """``[N, 1]``"""
    seeds: torch.Tensor
    """``[N]``, int64."""
    positions: torch.Tensor
    """``[N]``, absolute."""
    greedy: bool
    """Nothing is drawn in any row."""
    widest: int
    """The largest ``top_k``, 0 if a row takes all."""

    @classmethod
    def of(cls, infos: Sequence[Mapping[str, Any]], device: torch.device) -> ResidualSampling:
        """Read the requests' states, one a frame."""
        rows: list[Mapping[str, Any]] = [info.get(RESIDUAL) or {} for info in infos]
        tokens: list[Mapping[str, Any]] = [info.get(SAMPLING) or {} for info in infos]
        temperature = [
            float(row.get("temperature", 0.0)) if token.get("temperature") else 0.0
            for row, token in zip(rows, tokens, strict=True)
        ]
        top_k = [int(row.get("top_k", 0)) for row in rows]
        return cls(
            temperature=torch.tensor(temperature, device=device)[:, None],
            top_k=torch.tensor(top_k, device=device)[:, None],
            top_p=torch.tensor([float(row.get("top_p", 1.0)) for row in rows], device=device)[:, None],
            seeds=torch.tensor([int(token.get("seed") or 0) for token in tokens], device=device),
            positions=torch.tensor([int(info[NUM_COMPUTED_TOKENS]) for info in infos], device=device),
            greedy=not any(temperature),
            widest=max(top_k) if all(top_k) else 0,
        )

    def pick(self, logits: torch.Tensor, group: int) -> torch.Tensor:
        """Codes ``[N]`` of ``group`` from ``logits [N, V]``: temperature, then top-k, then top-p."""
        if self.greedy:
            return logits.argmax(-1)
        width = min(self.widest or logits.shape[1], logits.shape[1])
        scores, codes = logits.float().topk(width, dim=-1)
        drawn = self.temperature > 0
        scores = scores / torch.where(drawn, self.temperature, 1.0)
        rank = torch.arange(width, device=logits.device)
        scores = scores.masked_fill((rank >= self.top_k) & (self.top_k > 0), -torch.inf)
        weights = scores.softmax(-1)
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(before >= self.top_p, 0.0).double()
        reached = weights.cumsum(-1)
        target = uniform(self.seeds, self.positions, group)[:, None] * reached[:, -1:]
        index = (reached <= target).sum(-1, keepdim=True)
        index = torch.where(drawn, index, 0)
        return codes.gather(1, index)[:, 0]


def uniform(seeds: torch.Tensor, positions: torch.Tensor, group: int) -> torch.Tensor:
    """Numbers in ``[0, 1)`` of 53 bits, one for each of ``seeds [N]`` and ``positions [N]`` (both int64).

    Three rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014) over seed, position and group.
    """
    state = _mix(seeds)
    state = _mix(state ^ positions)
    state = _mix(state ^ group)
    return _shift(state, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
