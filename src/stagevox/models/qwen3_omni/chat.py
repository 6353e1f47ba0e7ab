"""What of a chat is spoken to the Talker: the users' turns, and where their positions stand."""

from __future__ import annotations

from itertools import pairwise

import torch

from .config import ChatIds


def user_mask(ids: torch.Tensor, chat: ChatIds) -> torch.Tensor:
    """Which positions of ``ids [n]`` belong to users' turns, bool ``[n]``: from ``<|im_start|>user`` up to the next turn."""
    starts = ids == chat.im_start
    turn = starts.cumsum(0)
    after = torch.cat([ids[1:], ids.new_full((1,), -1)])
    is_user = torch.cat([ids.new_zeros(1, dtype=torch.bool), (after == chat.user)[starts]])
    return is_user[turn]


def speech_positions(
    ids: torch.Tensor, axes: torch.Tensor, said: torch.Tensor, more: int, chat: ChatIds
) -> tuple[torch.Tensor, int]:
    """M-RoPE positions of the users' turns and ``more`` positions of text after them: ``([3, n], delta)``.

    ``axes [3, n]`` are the Thinker's. A turn begins and ends with text, where the axes agree, so taking a turn out moves all that
    follows back by as much as the turn is long in positions.
    """
    starts = [*(ids == chat.im_start).nonzero()[:, 0].tolist(), len(ids)]
    parts: list[torch.Tensor] = []
    at = 0
    for start, end in pairwise(starts):
        if said[start]:
            part = axes[:, start:end] - axes[0, start] + at
            at = int(part.max()) + 1
            parts.append(part)
    parts.append(torch.arange(at, at + more).expand(3, -1))
    positions = torch.cat(parts, dim=1)
    return positions, at + more - positions.shape[1]
