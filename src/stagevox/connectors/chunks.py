"""Chunk processors that any model can use or subclass: the whole output at the end, or frames in growing chunks.

What they ship is a function of a request's rows, not of how steps delivered them: one step of eight rows and eight
steps of one row make the same chunks, but for an empty last one if the end comes alone. Rows are opaque here: they
need ``len``, slicing and the injected ``concat``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .base import Chunk, ChunkProcessor

TOKEN_IDS = "token_ids"
"""Key of a chunk's token ids, a list."""

PROMPT_LENGTH = "prompt_length"
"""Key of the number of a reply's first rows that are its prompt's."""

LEFT_CONTEXT = "left_context_size"
"""Key of the number of leading rows of a chunk that were shipped before and only give context (EX-9)."""

Concat = Callable[[Sequence[Any]], Any]
"""Joins row blocks along their first axis."""

FAILED = frozenset({"error", "abort"})
"""Finish reasons of requests that ship nothing more."""


def torch_concat(blocks: Sequence[Any]) -> Any:
    """Join tensors along the first axis; a single block is returned as it is."""
    if len(blocks) == 1:
        return blocks[0]
    import torch

    return torch.cat(list(blocks))


class _Reply:
    """What has come of one request and not gone on."""

    __slots__ = ("blocks", "prompt_length", "seq", "token_ids")

    def __init__(self, seq: int = 0, prompt_length: int | None = None) -> None:
        self.seq = seq
        self.prompt_length = prompt_length
        self.token_ids: list[int] = []
        self.blocks: dict[str, list[Any]] = {}


class ReplyRows(ChunkProcessor):
    """Ships a reply: its token ids and, per payload key, all rows in order. In one chunk at the end, or with ``stream`` as made.

    Rows come of the prompt and of every token that was fed, not of the one that ended the reply. The first chunk says under
    :data:`PROMPT_LENGTH` how many of them are the prompt's; without any rows it lacks that key.
    """

    requires_token_updates = True

    def __init__(self, checkpoint: Path | None = None, *, stream: bool = False, concat: Concat = torch_concat) -> None:
        self._stream = stream
        self._concat = concat
        self._open: dict[str, _Reply] = {}

    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Keep one step's output, and ship what is due."""
        if finish_reason in FAILED:
            self.drop(req_id)
            return []
        reply = self._open.setdefault(req_id, _Reply())
        if payload and reply.prompt_length is None:
            # The first step that samples: all its rows but those of tokens that were fed in it are the prompt's.
            reply.prompt_length = len(next(iter(payload.values()))) - max(0, len(token_ids) - 1)
        reply.token_ids += token_ids
        for key, rows in payload.items():
            reply.blocks.setdefault(key, []).append(rows)
        if finish_reason is None and not (self._stream and reply.blocks):
            return []
        data = {TOKEN_IDS: reply.token_ids, **{key: self._concat(rows) for key, rows in reply.blocks.items()}}
        if reply.seq == 0 and reply.prompt_length is not None:
            data[PROMPT_LENGTH] = reply.prompt_length
        chunk = Chunk(req_id, reply.seq, finish_reason is not None, data)
        if chunk.end:
            self.drop(req_id)
        else:
            self._open[req_id] = _Reply(reply.seq + 1, reply.prompt_length)
        return [chunk]

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)

    @property
    def num_open(self) -> int:
        """Requests that still hold rows here."""
        return len(self._open)


class WholeReply(ReplyRows):
    """The same for a consumer that takes whole replies only."""

    def __init__(self, checkpoint: Path | None = None, *, concat: Concat = torch_concat) -> None:
        super().__init__(checkpoint, concat=concat)


class _Frames:
    """The rows of one request that wait for their chunk, and those kept as context."""

    __slots__ = ("blocks", "context", "seq", "waiting")

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.context: Any = None
        self.seq = 0
        self.waiting = 0


class FrameChunks(ChunkProcessor):
    """Cuts the rows under one payload key into chunks of growing size.

    ``sizes`` gives the rows of the first, second, ... chunk; the last size repeats. A small first size gives early sound, large
    later ones fewer calls downstream. With ``context`` each chunk starts with up to that many rows that were shipped
    before, counted by :data:`LEFT_CONTEXT`. The last chunk has what is left; with nothing left it lacks the key.
    """

    def __init__(self, key: str, sizes: Sequence[int], context: int = 0, concat: Concat = torch_concat) -> None:
        if not sizes or min(sizes) < 1 or context < 0:
            raise ValueError(f"chunk sizes must be positive and context not negative, got {list(sizes)} and {context}")
        self.key = key
        self.sizes = tuple(sizes)
        self.context = context
        self._concat = concat
        self._open: dict[str, _Frames] = {}

    def push(self, req_id: str, token_ids: list[int], payload: Mapping[str, Any], finish_reason: str | None) -> list[Chunk]:
        """Keep one step's rows and ship the chunks they complete."""
        if finish_reason in FAILED:
            self.drop(req_id)
            return []
        frames = self._open.get(req_id)
        if frames is None:
            frames = self._open[req_id] = _Frames()
        rows = payload.get(self.key)
        if rows is not None and len(rows):
            frames.blocks.append(rows)
            frames.waiting += len(rows)
        chunks: list[Chunk] = []
        while frames.waiting > (size := self._size(frames.seq)) or (frames.waiting == size and finish_reason is None):
            chunks.append(self._cut(req_id, frames, size, end=False))
        if finish_reason is not None:
            chunks.append(self._cut(req_id, frames, frames.waiting, end=True))
            self.drop(req_id)
        return chunks

    def rows_to_first_chunk(self, req_id: str) -> int | None:
        """How many rows the first chunk still lacks."""
        frames = self._open.get(req_id)
        if frames is None:
            return self.sizes[0]
        return None if frames.seq else self.sizes[0] - frames.waiting

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self._open.pop(req_id, None)

    @property
    def num_open(self) -> int:
        """Requests that still hold rows here."""
        return len(self._open)

    def _size(self, seq: int) -> int:
        return self.sizes[min(seq, len(self.sizes) - 1)]

    def _cut(self, req_id: str, frames: _Frames, size: int, *, end: bool) -> Chunk:
        """Take ``size`` waiting rows as the next chunk."""
        data: dict[str, Any] = {LEFT_CONTEXT: 0}
        if size:
            waiting = self._concat(frames.blocks)
            new, rest = waiting[:size], waiting[size:]
            frames.blocks, frames.waiting = [rest] if len(rest) else [], len(rest)
            if frames.context is not None:
                data[LEFT_CONTEXT] = len(frames.context)
                new = self._concat([frames.context, new])
            if self.context:
                frames.context = new[-self.context :]
            data[self.key] = new
        chunk = Chunk(req_id, frames.seq, end, data)
        frames.seq += 1
        return chunk
