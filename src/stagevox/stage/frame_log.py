"""What was decided at each generated position of a request, so that a replay reads it instead of recomputing it (PC-14)."""

from __future__ import annotations

import torch


class FrameLog:
    """Codes and conditioned embeddings of one request's generated positions.

    Positions enter in order, each at most once, from ``prompt_len`` on; one whose model handed nothing to MTP is left out. A
    step's rows are kept as references into the step's own tensors, so logging copies nothing.
    """

    __slots__ = ("_entries", "prompt_len")

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self._entries: list[tuple[torch.Tensor, torch.Tensor, int] | None] = []

    @property
    def end(self) -> int:
        """One past the last logged position."""
        return self.prompt_len + len(self._entries)

    def __contains__(self, position: int) -> bool:
        return self.prompt_len <= position < self.end and self._entries[position - self.prompt_len] is not None

    def append(self, position: int, embeds: torch.Tensor, codes: torch.Tensor, index: int) -> None:
        """Log row ``index`` of a step's ``embeds [N, H]`` and ``codes [N, Q]``, which nobody may write again."""
        assert position >= self.end, f"position {position} logged out of order, expected {self.end}"
        self._entries += [None] * (position - self.end)
        self._entries.append((embeds, codes, index))

    def fill(self, out: torch.Tensor, first: int) -> None:
        """Overwrite the rows of ``out [span, H]``, which starts at position ``first``, that are in the log."""
        begin = max(first, self.prompt_len)
        for position in range(begin, min(first + out.shape[0], self.end)):
            entry = self._entries[position - self.prompt_len]
            if entry is not None:
                embeds, _, index = entry
                out[position - first] = embeds[index]

    def codes(self) -> torch.Tensor:
        """All frames so far, ``[frames, Q]``; only for tests and debugging."""
        return torch.stack([entry[1][entry[2]] for entry in self._entries if entry is not None])
