"""The codec: four codes a frame. Group 0 is clustered within each phoneme, groups 1 to 3 code what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FIRST_CODES = 512
RESIDUAL_CODES = 256
RESIDUAL_GROUPS = 3
MEL_COMPONENTS = 64
PITCH_WEIGHT = 14.0
SAMPLE_FRAMES = 160_000
PCA_FRAMES = 30_000


@dataclass
class Codebooks:
    """``phones[name]`` is the (offset, count) of the phoneme's codes in group 0."""

    mean: Tensor
    components: Tensor
    phones: dict[str, tuple[int, int]]
    first: Tensor
    residual: list[Tensor]

    def project(self, mel: Tensor, log_pitch: Tensor) -> Tensor:
        """Frame features -> the space that is clustered ``[N, 65]``."""
        return torch.cat([(mel - self.mean) @ self.components, PITCH_WEIGHT * log_pitch[:, None]], 1)

    def encode_first(self, points: Tensor, phones: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Group 0's codes and what they leave over."""
        codes, names = torch.zeros(len(points), dtype=torch.long), np.array(phones)
        for name in set(phones):
            rows = torch.tensor(np.where(names == name)[0])
            offset, count = self.phones.get(name, self.phones["pau"])
            codes[rows] = offset + nearest(points[rows], self.first[offset : offset + count])
        return codes, points - self.first[codes]

    def encode(self, points: Tensor, phones: Sequence[str]) -> Tensor:
        """``[N, 4]``."""
        first, rest = self.encode_first(points, phones)
        codes = [first]
        for book in self.residual:
            codes.append(nearest(rest, book))
            rest = rest - book[codes[-1]]
        return torch.stack(codes, 1)

    def phone_of_code(self) -> dict[int, str]:
        return {code: name for name, (offset, count) in self.phones.items() for code in range(offset, offset + count)}


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    parts = points.split(8192)
    squares = centres.pow(2).sum(1)
    return torch.cat([(x.pow(2).sum(1, keepdim=True) - 2 * x @ centres.T + squares).argmin(1) for x in parts])


def kmeans(points: Tensor, count: int, iterations: int = 20, seed: int = 0) -> Tensor:
    """``count`` centres; an empty cluster restarts at a random point."""
    generator = torch.Generator().manual_seed(seed)
    if len(points) <= count:
        return torch.cat([points, points[-1:].repeat(count - len(points), 1)])
    centres = points[torch.randperm(len(points), generator=generator)[:count]].clone()
    for _ in range(iterations):
        owner = nearest(points, centres)
        size = torch.bincount(owner, minlength=count).float()
        total = torch.zeros_like(centres).index_add_(0, owner, points)
        centres = torch.where(size[:, None] > 0, total / size.clamp(min=1)[:, None], centres)
        dead = size == 0
        if dead.any():
            centres[dead] = points[torch.randint(len(points), (int(dead.sum()),), generator=generator)]
    return centres


def _codes_per_phone(counts: np.ndarray) -> np.ndarray:
    """At least two each, the rest by frequency to the power 0.7; no more than an eighth of a phoneme's frames."""
    share = counts**0.7
    out = np.maximum(2, np.floor(share / share.sum() * (FIRST_CODES - 2 * len(counts))).astype(int) + 2)
    out = np.minimum(out, np.maximum(1, counts // 8))
    while out.sum() > FIRST_CODES:
        out[out.argmax()] -= 1
    return out


def fit(mel: Tensor, log_pitch: Tensor, phones: Sequence[str]) -> Codebooks:
    """PCA of the mel part, then k-means per phoneme, then three rounds of k-means on the residuals."""
    sample = torch.randperm(len(mel))[:SAMPLE_FRAMES]
    mean = mel[sample].mean(0)
    _, _, axes = torch.linalg.svd((mel - mean)[sample[:PCA_FRAMES]], full_matrices=False)
    books = Codebooks(mean, axes[:MEL_COMPONENTS].T.contiguous(), {}, torch.empty(0), [])
    points = books.project(mel[sample], log_pitch[sample])
    names = np.array(phones)[sample.numpy()]
    kinds, counts = np.unique(names, return_counts=True)
    offset, first = 0, []
    for name, count in zip(kinds, _codes_per_phone(counts), strict=True):
        books.phones[str(name)] = (offset, int(count))
        first.append(kmeans(points[torch.tensor(np.where(names == name)[0])], int(count)))
        offset += int(count)
    books.first = torch.cat(first)
    _, rest = books.encode_first(points, list(names))
    print(f"group 0: {offset} codes, {rest.var(0).sum() / points.var(0).sum():.3f} of the variance left")
    for _ in range(RESIDUAL_GROUPS):
        book = kmeans(rest, RESIDUAL_CODES, iterations=14)
        books.residual.append(book)
        rest = rest - book[nearest(rest, book)]
    print(f"all groups: {rest.var(0).sum() / points.var(0).sum():.3f} of the variance left")
    return books
