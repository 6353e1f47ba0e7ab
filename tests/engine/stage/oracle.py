"""What the toy models must say, from transformers' own Qwen2: whole sequences, no cache, no batching, no vLLM."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from transformers import Qwen2ForCausalLM

from tests.engine.stage.toy_models import BOOK

MARGIN = 1e-4
"""Greedy choices closer than this prove nothing: two right implementations differ by some 1e-6 in their logits."""


class Said(NamedTuple):
    tokens: list[int]
    codes: list[list[int]]
    hidden: torch.Tensor


class Oracle:
    def __init__(self, folder):
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def say(self, prompt, count, *, rows=None, mtp=False):
        """``count`` greedy tokens after ``prompt``; with ``mtp`` the frames of all of them but the last."""
        key = None if rows is None else tuple(map(tuple, rows.tolist()))
        return self._say(tuple(prompt), count, key, mtp)

    @functools.cache  # noqa: B019 - lives as long as the session
    def _say(self, prompt, count, rows, mtp):
        tokens, codes = [], []
        table = self.model.get_input_embeddings().weight
        embeds = self._embed(table[list(prompt)], 0, rows)
        with torch.no_grad():
            while True:
                out = self.model(inputs_embeds=embeds[None], output_hidden_states=True)
                hidden = out.hidden_states[-1][0]
                tokens.append(choose(out.logits[0, -1]))
                if len(tokens) == count:
                    return Said(tokens, codes, hidden)
                new = self._embed(table[tokens[-1:]], len(embeds), rows)
                if mtp:
                    codes.append([tokens[-1], choose(hidden[-1, :16])])
                    new = new + BOOK[codes[-1][1]]
                embeds = torch.cat([embeds, new])

    def _embed(self, embeds, first, rows):
        if rows is None:
            return embeds
        return torch.stack([one + torch.tensor(rows[(first + offset) % len(rows)]) for offset, one in enumerate(embeds)])


def choose(scores):
    """The best of ``scores``, if it is clearly the best."""
    best, second = scores.topk(2)[0].tolist()
    assert best - second > MARGIN, f"margin {best - second}: pick another seed"
    return int(scores.argmax())
