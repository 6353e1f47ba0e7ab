"""From codes to latent vectors: a split residual vector quantizer, one codebook for the meaning and the rest for the sound."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EPSILON = 1e-5
"""The least use that an entry of a codebook is taken to have."""


class Codebook(nn.Module):
    """Entries as training leaves them: running sums, and how often each was used; an entry is their quotient."""

    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(entries))
        self.embedding_sum = nn.Parameter(torch.zeros(entries, size))
        self._table: torch.Tensor | None = None

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """``[...]`` to ``[..., size]``; the weights must not change after the first call."""
        if self._table is None:
            self._table = self.embedding_sum.data / self.cluster_usage.data.clamp(min=EPSILON)[:, None]
        return F.embedding(codes, self._table)


class _Layer(nn.Module):
    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self._codebook = Codebook(entries, size)


class _Layers(nn.Module):
    def __init__(self, count: int, entries: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(entries, size) for _ in range(count)])


class ResidualQuantizer(nn.Module):
    """A sum of codebooks' entries, projected."""

    def __init__(self, count: int, entries: int, size: int, size_out: int) -> None:
        super().__init__()
        self.vq = _Layers(count, entries, size)
        self.output_proj = nn.Conv1d(size, size_out, 1, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """``[B, count, T]`` to ``[B, size_out, T]``."""
        total: torch.Tensor | None = None
        for layer, group in zip(self.vq.layers, codes.unbind(1), strict=True):
            entries = layer._codebook(group)
            total = entries if total is None else total + entries
        assert total is not None
        out: torch.Tensor = self.output_proj(total.transpose(1, 2))
        return out


class SplitQuantizer(nn.Module):
    """The first group's quantizer beside that of all others."""

    def __init__(self, groups: int, entries: int, size: int, size_out: int) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(1, entries, size, size_out)
        self.rvq_rest = ResidualQuantizer(groups - 1, entries, size, size_out)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """``[B, Q, T]`` to ``[B, size_out, T]``."""
        total: torch.Tensor = self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])
        return total
