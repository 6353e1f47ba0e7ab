"""The Talker (a causal LM over codec frames, one text row a step) and its code predictor.

The input that carries frame f is the sum of the embeddings of its four codes and of text row 5 + f; the hidden state there
predicts frame f + 1. The prompt is the speaker's row, text rows 0 to 3 under codec PAD and row 4 under codec BOS. Parameters
carry the names of the checkpoint: ``talker.`` and ``code_predictor.`` are the two parts of ``Voice``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FIRST_CODES = 512
RESIDUAL_CODES = 256
GROUPS = 4
CODEC_EOS, CODEC_BOS, CODEC_PAD = FIRST_CODES, FIRST_CODES + 1, FIRST_CODES + 2
PROMPT_ROWS = 4  # text rows before the BOS row
PROMPT = PROMPT_ROWS + 2  # positions before the first frame: speaker, rows under PAD, row under BOS
HEAD_DIM = 32
ROPE_THETA = 2000.0
NORM_EPS = 1e-6
MAX_FRAMES = 170
PREDICTOR_LAYERS = 2


class TextTable:
    """Words -> text rows: the pieces of the words, one EOS row, then PAD rows for ever."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        self.words: dict[str, list[int]] = data["words"]
        self.eos_id: int = data["eos_id"]
        self.pad_id: int = data["pad_id"]

    def encode(self, text: str) -> list[int]:
        return [i for word in text.split() for i in self.words[word]] + [self.eos_id]

    def rows(self, ids: Sequence[int], count: int) -> Tensor:
        """Rows 0 to count - 1."""
        out = torch.full((count,), self.pad_id)
        known = min(count, len(ids))
        out[:known] = torch.as_tensor(ids[:known])
        return out


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + NORM_EPS).to(x.dtype) * weight


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary positions, halves split."""
    half = x.shape[-1] // 2
    angle = position[:, None].float() / ROPE_THETA ** (torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)


def _table(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * 0.05)


Cache = list[Tensor]  # empty, or [keys, values], each [B, heads, T, head_dim]


class Layer(nn.Module):
    """Pre-norm attention and a SiLU-gated feed-forward."""

    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = hidden // HEAD_DIM
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = _matrix(3 * hidden, hidden)
        self.o = _matrix(hidden, hidden, 0.4)
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = _matrix(2 * feed_forward, hidden)
        self.down = _matrix(hidden, feed_forward, 0.4)

    def forward(self, x: Tensor, position: Tensor, cache: Cache | None, want_attention: bool) -> tuple[Tensor, Tensor | None]:
        batch, length, hidden = x.shape
        qkv = F.linear(rms_norm(x, self.input_norm), self.qkv)
        q, k, v = qkv.view(batch, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, position), rotate(k, position)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        scores = (q * HEAD_DIM**-0.5) @ k.transpose(2, 3)
        if length > 1:
            keys = k.shape[2]
            scores = scores + torch.full((length, keys), -1e9, dtype=scores.dtype).triu(keys - length + 1)
        attention = scores[:, 0].float().log_softmax(-1) if want_attention else None
        y = scores.softmax(-1).to(v.dtype) @ v
        x = x + F.linear(y.transpose(1, 2).reshape(batch, length, hidden), self.o)
        gate, up = F.linear(rms_norm(x, self.post_norm), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down), attention


class Talker(nn.Module):
    """Embeddings, layers and the head of group 0."""

    def __init__(self, text_rows: int, hidden: int = 192, layers: int = 5, feed_forward: int = 512) -> None:
        super().__init__()
        self.text_embedding = _table(text_rows, hidden)
        self.speaker = nn.Parameter(torch.randn(hidden) * 0.02)
        sizes = [FIRST_CODES + 3] + [RESIDUAL_CODES] * (GROUPS - 1)
        self.codec_embedding = nn.ParameterList(_table(size, hidden) for size in sizes)
        self.layers = nn.ModuleList(Layer(hidden, feed_forward) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.lm_head = _matrix(FIRST_CODES + 1, hidden)

    def first_embedding(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.codec_embedding[0])

    def residual_embedding(self, codes: Tensor) -> Tensor:
        """Of groups 1 to 3 of ``codes [..., 4]``."""
        total = F.embedding(codes[..., 1], self.codec_embedding[1])
        for q in range(2, GROUPS):
            total = total + F.embedding(codes[..., q], self.codec_embedding[q])
        return total

    def inputs(self, rows: Tensor, frames: Tensor) -> Tensor:
        """Text rows ``[B, 5 + T]`` and frame embeddings ``[B, T, H]`` -> a whole sequence ``[B, 6 + T, H]``."""
        batch = rows.shape[0]
        codec = self.first_embedding(torch.tensor([CODEC_PAD] * PROMPT_ROWS + [CODEC_BOS]))
        codec = torch.cat([codec.expand(batch, -1, -1), frames], 1)
        body = F.embedding(rows, self.text_embedding) + codec
        return torch.cat([self.speaker.expand(batch, 1, -1), body], 1)

    def forward(
        self, x: Tensor, position: Tensor, caches: list[Cache] | None = None, guided: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the log attention of head 0 of layer ``guided``."""
        attention = None
        for i, layer in enumerate(self.layers):
            x, seen = layer(x, position, None if caches is None else caches[i], guided == i)
            attention = attention if seen is None else seen
        return rms_norm(x, self.norm), attention

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head)


class PredictorBlock(nn.Module):
    """A residual two-layer perceptron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.fc1 = nn.Linear(hidden, 2 * hidden)
        self.fc2 = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.silu(self.fc1(rms_norm(x, self.norm))))


class CodePredictor(nn.Module):
    """Groups 1 to 3 of a frame, one after the other, from the hidden state that predicted group 0."""

    def __init__(self, hidden: int = 192) -> None:
        super().__init__()
        self.add_module("in", nn.Linear(hidden, hidden))  # the checkpoint's name, a keyword in Python
        sizes = [FIRST_CODES + 1] + [RESIDUAL_CODES] * (GROUPS - 2)
        self.embedding = nn.ParameterList(_table(size, hidden) for size in sizes)
        self.group_bias = _matrix(GROUPS - 1, hidden)
        self.blocks = nn.ModuleList(PredictorBlock(hidden) for _ in range(PREDICTOR_LAYERS))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = nn.ModuleList(nn.Linear(hidden, RESIDUAL_CODES) for _ in range(GROUPS - 1))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def start(self, hidden: Tensor) -> Tensor:
        return self.get_submodule("in")(hidden)

    def group(self, state: Tensor, q: int) -> Tensor:
        """Logits of group q + 1."""
        z = state + self.group_bias[q]
        for block in self.blocks:
            z = block(z)
        return self.head[q](rms_norm(z, self.norm))

    def forward(self, hidden: Tensor, codes: Tensor) -> list[Tensor]:
        """Logits of groups 1 to 3 ``[N, 256]`` for hidden states ``[N, H]``, the true codes ``[N, 4]`` given."""
        state, out = self.start(hidden), []
        for q in range(GROUPS - 1):
            state = state + F.embedding(codes[:, q], self.embedding[q])
            out.append(self.group(state, q))
        return out

    def greedy(self, hidden: Tensor, first: Tensor) -> Tensor:
        """The whole frame ``[B, 4]``."""
        state, codes = self.start(hidden), [first]
        for q in range(GROUPS - 1):
            state = state + F.embedding(codes[-1], self.embedding[q])
            codes.append(self.group(state, q).argmax(-1))
        return torch.stack(codes, -1)


class Voice(nn.Module):
    """Talker and code predictor: the state dict is the checkpoint of ``weights/talker``."""

    def __init__(self, table: TextTable, hidden: int = 192, layers: int = 5, feed_forward: int = 512) -> None:
        super().__init__()
        self.table = table
        self.talker = Talker(table.pad_id + 1, hidden, layers, feed_forward)
        self.code_predictor = CodePredictor(hidden)

    @torch.no_grad()
    def generate(self, text: str, max_frames: int = MAX_FRAMES) -> Tensor:
        """Greedy codes ``[T, 4]``."""
        rows = self.table.rows(self.table.encode(text), PROMPT_ROWS + 1 + max_frames)[None]
        hidden_size = self.talker.norm.shape[0]
        caches: list[Cache] = [[] for _ in self.talker.layers]
        x = self.talker.inputs(rows[:, : PROMPT_ROWS + 1], torch.zeros(1, 0, hidden_size))
        frames: list[Tensor] = []
        position = torch.arange(PROMPT)
        while len(frames) < max_frames:
            hidden, _ = self.talker(x, position, caches)
            first = self.talker.logits(hidden[:, -1]).argmax(-1)
            if first.item() == CODEC_EOS:
                break
            frames.append(self.code_predictor.greedy(hidden[:, -1], first))
            row = rows[:, PROMPT_ROWS + len(frames)]
            x = self.talker.first_embedding(frames[-1][..., 0]) + self.talker.residual_embedding(frames[-1])
            x = (x + F.embedding(row, self.talker.text_embedding))[:, None]
            position = torch.tensor([PROMPT + len(frames) - 1])
        return torch.cat(frames) if frames else torch.zeros(0, GROUPS, dtype=torch.long)
