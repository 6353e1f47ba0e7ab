"""How far the oracle's greedy choices are from a tie."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def least_margin(oracle, text: str, codes: torch.Tensor) -> float:
    """The least top1-top2 logit gap over all greedy choices, all groups, that led to ``codes [frames, Q]``."""
    ids = oracle.tokenize(text)
    inputs = torch.cat([oracle.prompt(ids), *([oracle.step_inputs(ids, codes, 0)] if len(codes) else [])])
    hidden = oracle.talker(inputs, oracle.new_kv())[oracle.P + 1 :]
    gaps: list[float] = []

    def pick(logits: torch.Tensor) -> int:
        top = logits.topk(2).values
        gaps.append(float(top[0] - top[1]))
        return int(logits.argmax())

    for logits in F.linear(hidden, oracle.w["talker.lm_head"]):
        pick(logits)
    for frame, row in zip(codes, hidden, strict=False):
        chosen = oracle.predict_groups(row, int(frame[0]), pick)
        assert chosen == frame.tolist()
    return min(gaps)
