"""Train the Talker and its code predictor, in two stages.

    python train_talker.py DATA_FOLDER --stage 1 --minutes 17.6
    torchrun --nproc-per-node 2 train_talker.py DATA_FOLDER --stage 2 --minutes 28

Stage 1 learns from train.txt's utterances. Stage 2 starts from stage 1 with a narrower feed-forward (the weakest neurons go),
adds the second batch and lets the model's own choices into the history (scheduled sampling). Writes the running average of the
weights, ``talker1.pt`` or ``talker2.pt``.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from talker_data import Batch, Item, Sampler, batches
from talker_model import CODEC_EOS, FIRST_CODES, PROMPT, TextTable, Voice
from torch import Tensor

VALIDATION_ITEMS = 80
REPORT_EVERY, VALIDATE_EVERY = 50, 500


@dataclass(frozen=True)
class Recipe:
    """``horizon`` (minutes) is the cosine's length; stage 1 of the shipped voice stopped long before its end."""

    feed_forward: int
    rate: float
    positions: int
    horizon: float
    average: float
    splice_share: float
    warmup: int = 100
    layers: int = 5
    guide_weight: float = 0.3
    guided_layer: int = 2
    residual_drop: float = 0.25
    predictor_weight: float = 0.4
    predictor_frames: int = 500  # frames a step that the code predictor learns from
    own_share: float = 0.0
    own_temperature: float = 0.7


RECIPES = {
    1: Recipe(feed_forward=512, rate=2e-3, positions=1800, horizon=50, average=0.995, splice_share=0.5),
    2: Recipe(feed_forward=416, rate=1.6e-3, positions=1400, horizon=28, average=0.997, splice_share=0.4, own_share=0.2),
}


class PhoneClasses(NamedTuple):
    """Of every code of group 0: where its phoneme's codes begin and how many there are."""

    start: Tensor
    count: Tensor

    @classmethod
    def of(cls, phones: dict[str, tuple[int, int]]) -> PhoneClasses:
        start, count = torch.zeros(FIRST_CODES, dtype=torch.long), torch.ones(FIRST_CODES, dtype=torch.long)
        for offset, size in phones.values():
            start[offset : offset + size], count[offset : offset + size] = offset, size
        return cls(start, count)


class History(NamedTuple):
    """What the model is told of the frames so far: codes of group 0, and which embeddings it sees."""

    first: Tensor
    keep_first: Tensor
    keep_residual: Tensor


class Losses(NamedTuple):
    """Cross entropy of group 0 and of groups 1 to 3, the guide (how little the guided head looks where it should), accuracy."""

    first: Tensor
    groups: list[Tensor]
    guide: Tensor
    accuracy: Tensor

    def total(self, recipe: Recipe) -> Tensor:
        return self.first + recipe.predictor_weight * torch.stack(self.groups).sum() + recipe.guide_weight * self.guide


def true_history(batch: Batch) -> History:
    everything = torch.ones_like(batch.real)
    return History(batch.codes[..., 0], everything, everything)


def noisy_history(batch: Batch, recipe: Recipe, classes: PhoneClasses) -> History:
    """Stage 1: 8 % of the codes become another of the same phoneme, 3 % any code, 3 % of the frames vanish; residual dropout."""
    first = batch.codes[..., 0]
    dice = torch.rand(first.shape)
    similar = classes.start[first] + (torch.rand(first.shape) * classes.count[first]).long()
    anything = torch.randint(FIRST_CODES, first.shape)
    noisy = torch.where(dice < 0.08, similar, torch.where(dice > 0.97, anything, first))
    keep_first = (dice < 0.08) | (dice > 0.11)
    return History(noisy, keep_first, (torch.rand(first.shape) > recipe.residual_drop) & (dice > 0.11))


def own_history(model: Voice, batch: Batch, recipe: Recipe) -> History:
    """Stage 2: the model's own samples replace part of the codes (their residual codes vanish), 2 % any code, 3 % vanish."""
    first = batch.codes[..., 0]
    dice = torch.rand(first.shape)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model.talker(sequence(model, batch, true_history(batch)), torch.arange(PROMPT + first.shape[1]))
        logits = model.talker.logits(hidden[:, PROMPT - 1 : -1]).float()[..., :FIRST_CODES]
        gumbel = torch.empty_like(logits).exponential_().log()
        own = (logits - gumbel * recipe.own_temperature).argmax(-1)
    rows = len(first)
    replaced = dice < recipe.own_share * torch.rand(rows, 1) * 2
    anything = torch.randint(FIRST_CODES, first.shape)
    mixed = torch.where(replaced, own, torch.where(dice > 0.98, anything, first))
    gone = (dice > 0.95) & (dice < 0.98)
    kept = torch.rand(first.shape) > recipe.residual_drop * torch.rand(rows, 1) * 2
    return History(mixed, ~gone, ~gone & ~replaced & kept)


def sequence(model: Voice, batch: Batch, history: History) -> Tensor:
    """The Talker's inputs ``[B, 6 + T, H]``."""
    frames = model.talker.first_embedding(history.first) * history.keep_first[..., None]
    frames = frames + model.talker.residual_embedding(batch.codes) * history.keep_residual[..., None]
    return model.talker.inputs(batch.rows, frames)


def guide_loss(attention: Tensor, batch: Batch) -> Tensor:
    """The position that predicts frame f should look at the text row of f's piece, give or take one."""
    width = batch.real.shape[1]
    rows = attention[:, PROMPT - 1 : PROMPT - 1 + width]
    own_position = torch.arange(width)[None] + PROMPT - 1
    key = batch.pieces + 1  # text row k stands at position k + 1
    looked = [
        rows.gather(2, torch.minimum((key + offset).clamp(min=1), own_position).unsqueeze(2))[..., 0] for offset in (-1, 0, 1)
    ]
    mass = torch.stack(looked, -1).logsumexp(-1).clamp(max=0)
    return -mass[batch.real & (batch.pieces >= 0)].mean()


def losses(model: Voice, batch: Batch, recipe: Recipe, history: History, training: bool) -> Losses:
    width = batch.real.shape[1]
    x = sequence(model, batch, history)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, attention = model.talker(x, torch.arange(PROMPT + width), guided=recipe.guided_layer)
        hidden = hidden[:, PROMPT - 1 :]
        logits = model.talker.logits(hidden)
        first = F.cross_entropy(logits.float().reshape(-1, CODEC_EOS + 1), batch.target.reshape(-1), ignore_index=-100)
        states, codes = hidden[:, :width][batch.real], batch.codes[batch.real]
        if training and len(states) > recipe.predictor_frames:
            chosen = torch.randperm(len(states))[: recipe.predictor_frames]
            states, codes = states[chosen], codes[chosen]
        predicted = model.code_predictor(states, codes)
        groups = [F.cross_entropy(p.float(), codes[:, q + 1]) for q, p in enumerate(predicted)]
    assert attention is not None
    asked = batch.target >= 0
    accuracy = ((logits.argmax(-1) == batch.target) & asked).float().sum() / asked.float().sum()
    return Losses(first, groups, guide_loss(attention, batch), accuracy)


def prune(state: dict[str, Tensor], feed_forward: int) -> dict[str, Tensor]:
    """Keep the ``feed_forward`` neurons of every layer with the largest product of weight norms."""
    out = dict(state)
    for name in [n for n in state if n.endswith(".down")]:
        gate_up_name = name.removesuffix("down") + "gate_up"
        gate_up, down = state[gate_up_name], state[name]
        width = down.shape[1]
        if width > feed_forward:
            strength = gate_up.norm(dim=1).view(2, width).prod(0) * down.norm(dim=0)
            keep = strength.topk(feed_forward).indices.sort().values
            out[gate_up_name], out[name] = gate_up[torch.cat([keep, keep + width])], down[:, keep]
    return out


def optimiser_of(model: Voice, rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices other than embeddings."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "embedding" not in name else free).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def average_over_workers(parameters: Sequence[Tensor], clock: float) -> float:
    """Mean gradients in place; returns the mean clock, so that every worker has the same learning rate."""
    if not dist.is_initialized():
        return clock
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None] + [torch.tensor([clock])])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in parameters:
        assert p.grad is not None
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
    return float(flat[-1])


@torch.no_grad()
def validate(model: Voice, sampler: Sampler, items: list[Item], recipe: Recipe) -> str:
    parts = []
    for at in range(0, len(items), 20):
        batch = sampler.collate(items[at : at + 20])
        parts.append(losses(model, batch, recipe, true_history(batch), training=False))
    first, accuracy, guide = (torch.stack([getattr(p, n) for p in parts]).mean() for n in ("first", "accuracy", "guide"))
    groups = torch.stack([torch.stack(p.groups) for p in parts]).mean(0)
    return f"loss {first:.3f} accuracy {accuracy:.3f} groups {[round(g, 2) for g in groups.tolist()]} guide {guide:.3f}"


class Trainer:
    """One stage of training."""

    def __init__(self, model: Voice, sampler: Sampler, held: list[Item], recipe: Recipe, classes: PhoneClasses) -> None:
        self.model, self.sampler, self.held, self.recipe, self.classes = model, sampler, held, recipe, classes
        self.average = copy.deepcopy(model)
        self.parameters = list(model.parameters())
        self.optimiser = optimiser_of(model, recipe.rate)
        self.chief = not dist.is_initialized() or dist.get_rank() == 0
        self.step = 0

    def run(self, minutes: float) -> None:
        """Train by the clock."""
        start = time.time()
        while True:
            for items in batches(self.sampler.epoch(self.recipe.splice_share), self.recipe.positions):
                found = self._gradients(items)
                clock = average_over_workers(self.parameters, (time.time() - start) / 60)
                if clock >= minutes:
                    return
                self._update(clock / self.recipe.horizon)
                if self.chief and self.step % REPORT_EVERY == 0:
                    groups = " ".join(f"{g:.2f}" for g in found.groups)
                    line = f"loss {found.first:.3f} accuracy {found.accuracy:.3f} groups {groups} guide {found.guide:.3f}"
                    print(f"{self.step} {clock:.1f} min {line}", flush=True)
                if self.chief and self.step % VALIDATE_EVERY == 0:
                    print("  held out:", validate(self.average, self.sampler, self.held, self.recipe), flush=True)

    def _gradients(self, items: list[Item]) -> Losses:
        batch = self.sampler.collate(items)
        if self.recipe.own_share:
            history = own_history(self.model, batch, self.recipe)
        else:
            history = noisy_history(batch, self.recipe, self.classes)
        found = losses(self.model, batch, self.recipe, history, training=True)
        self.optimiser.zero_grad(set_to_none=True)
        found.total(self.recipe).backward()
        return found

    def _update(self, done: float) -> None:
        recipe = self.recipe
        for group in self.optimiser.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * min(1, done))) * 0.98 + 0.02
            group["lr"] = recipe.rate * min(1, (self.step + 1) / recipe.warmup) * cosine
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimiser.step()
        self.step += 1
        with torch.no_grad():
            weight = 1 - min(recipe.average, (self.step + 1) / (self.step + 10))
            torch._foreach_lerp_(list(self.average.parameters()), self.parameters, weight)


def load_rows(folder: Path, stage: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Aligned utterances to train on and to watch."""
    data = torch.load(folder / "encoded.pt")
    train = [r for r in data["train"] if r["aligned"]] + (data["more"] if stage == 2 else [])
    return train, [r for r in data["held"] if r["aligned"]][:VALIDATION_ITEMS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, choices=(1, 2), required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--horizon", type=float, help="minutes of the cosine (stage 1: 50; stage 2: as many as --minutes)")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    recipe = replace(RECIPES[a.stage], horizon=a.horizon or (a.minutes if a.stage == 2 else RECIPES[1].horizon))
    table = TextTable(a.folder / "tokenizer.json")
    model = Voice(table, layers=recipe.layers, feed_forward=recipe.feed_forward)
    if a.stage == 2:
        model.load_state_dict(prune(torch.load(a.folder / "talker1.pt"), recipe.feed_forward))
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank if a.stage == 2 else 0)
    random.seed(100 + rank if a.stage == 2 else 0)
    train, held = load_rows(a.folder, a.stage)
    sampler = Sampler(train, table)
    watched = sorted(Sampler(held, table).items, key=lambda item: item.positions)
    classes = PhoneClasses.of(torch.load(a.folder / "codebooks.pt")["phones"])
    print(
        f"{sum(p.numel() for p in model.parameters())} weights, {len(train)} utterances, {len(sampler.spans)} to splice",
        flush=True,
    )
    trainer = Trainer(model, sampler, watched, recipe, classes)
    trainer.run(a.minutes)
    if trainer.chief:
        torch.save(trainer.average.state_dict(), a.folder / f"talker{a.stage}.pt")
        print(f"{trainer.step} steps", validate(trainer.average, sampler, watched, recipe))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
