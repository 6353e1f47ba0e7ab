"""Train the Thinker, measure it on texts it has never seen, export it.

    python train.py --minutes 18 --out ../../../src/stagevox/models/mini/weights/thinker

One core is enough. The exported folder is an ordinary ``LlamaForCausalLM`` checkpoint: config.json, model.safetensors (fp16),
tokens.json (the front end's table, copied) and metrics.json (what this script measured, with the weights rounded to fp16).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from atoms import words
from model import Shape, Thinker
from safetensors.torch import load_file, save_file
from torch import Tensor

from data import PROMPTS, TOKENIZER, Example, build, examples, exhaustive, held_out, held_out_set, word_strings

GUIDED_LAYER = 1


def collate(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids ``[B, T]``; every position's target, -100 outside the spoken part; the position each target is read from, or -1."""
    width = max(len(e.ids) + len(e.spoken) for e in batch) + 3
    ids = torch.full((len(batch), width), TOKENIZER.pad_id)
    target = torch.full((len(batch), width), -100)
    source = torch.full((len(batch), width), -1)
    for row, e in enumerate(batch):
        spoken = [TOKENIZER.word_ids[w] for w in e.spoken] + [TOKENIZER.eos_id]
        line = [TOKENIZER.bos_id, *e.ids, TOKENIZER.sep_id, *spoken]
        ids[row, : len(line)] = torch.tensor(line)
        start = len(e.ids) + 1
        target[row, start : start + len(spoken)] = torch.tensor(spoken)
        source[row, start : start + len(e.sources)] = torch.tensor(e.sources) + 1
    return ids, target, source


def batches(seed: int, positions: int) -> Iterator[list[Example]]:
    """Batches of examples of similar length, about ``positions`` tokens each."""
    stream = examples(seed, held=False)
    while True:
        pool = sorted(itertools.islice(stream, 4096), key=lambda e: len(e.ids) + len(e.spoken))
        cut: list[list[Example]] = [[]]
        for e in pool:
            assert not held_out(e)
            if (len(cut[-1]) + 1) * (len(e.ids) + len(e.spoken) + 3) > positions:
                cut.append([])
            cut[-1].append(e)
        order = torch.randperm(len(cut))
        yield from (cut[i] for i in order)


def loss_of(model: Thinker, batch: Sequence[Example]) -> tuple[Tensor, Tensor, float]:
    """Cross entropy; how little head 0 of one layer looks at the token it should read; the share of right words."""
    ids, target, source = collate(batch)
    logits, attention = model(ids)
    ask = target >= 0
    picked = logits[ask]
    entropy = F.cross_entropy(picked, target[ask])
    look = source >= 0
    guide = -attention[GUIDED_LAYER][look].gather(1, source[look][:, None]).mean()
    return entropy, guide, float((picked.argmax(-1) == target[ask]).float().mean())


@torch.no_grad()
def exact(model: Thinker, rows: Sequence[Example], size: int = 250) -> list[bool]:
    """Is the greedy output of each example right as a whole?

    Teacher forcing answers that: greedy decoding is right exactly if every step's arg max is, given the right words before it.
    """
    out: dict[int, bool] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids) + len(rows[i].spoken))
    for at in range(0, len(order), size):
        part = order[at : at + size]
        ids, target, _ = collate([rows[i] for i in part])
        right = (model(ids)[0].argmax(-1) == target) | (target < 0)
        out |= dict(zip(part, right.all(1).tolist(), strict=True))
    return [out[i] for i in range(len(rows))]


def train(model: Thinker, minutes: float, rate: float, positions: int, seed: int) -> Thinker:
    """Cosine by the clock; returns the running average of the weights."""
    average = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    watch = held_out_set(40, seed=2)
    start = time.time()
    for step, batch in enumerate(batches(seed, positions), 1):
        done = (time.time() - start) / (minutes * 60)
        if done >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, step / 200) * (0.5 * (1 + math.cos(math.pi * done)) * 0.99 + 0.01)
        entropy, guide, share = loss_of(model, batch)
        optimiser.zero_grad(set_to_none=True)
        (entropy + 0.2 * guide).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - min(0.997, (step + 1) / (step + 10)))
        if step % 100 == 0:
            print(f"{step} {time.time() - start:.0f}s loss {entropy:.4f} guide {guide:.3f} right {share:.4f}", flush=True)
        if step % 500 == 0:
            good = exact(average, watch)
            print(f"  held out: {sum(good)}/{len(good)} exact", flush=True)
    print(f"{step - 1} steps in {(time.time() - start) / 60:.1f} minutes", flush=True)
    return average


def round_to_half(model: Thinker) -> None:
    """Weights as they are stored: fp16, computed in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


def measure(model: Thinker, full: bool) -> dict[str, object]:
    """Exactness by category on held-out texts, on the voice's prompts and on the small closed sets as a whole."""
    held = held_out_set(400, seed=1)
    good = exact(model, held)
    categories: dict[str, list[bool]] = {}
    for e, ok in zip(held, good, strict=True):
        categories.setdefault(e.category, []).append(ok)
    for e in [e for e, ok in zip(held, good, strict=True) if not ok][:40]:
        print("  wrong:", e.category, "|", e.written)
    prompts = [build("prompts", words(p["text"])) for p in json.loads(PROMPTS.read_text())["prompts"]]
    report: dict[str, object] = {
        "held_out": {"n": len(good), "exact": sum(good) / len(good)},
        "held_out_by_category": {name: {"n": len(v), "exact": sum(v) / len(v)} for name, v in categories.items()},
        "voice_prompts": _score(model, [p for p in prompts if p]),
        "random_words_1_to_16": _score(model, word_strings(200 if full else 20)),
    }
    if full:
        report["exhaustive"] = {name: _score(model, rows) for name, rows in exhaustive().items()}
    return report


def _score(model: Thinker, rows: Sequence[Example]) -> dict[str, float]:
    good = exact(model, rows)
    for e in [e for e, ok in zip(rows, good, strict=True) if not ok][:5]:
        print("  wrong:", e.category, "|", e.written)
    return {"n": len(good), "exact": sum(good) / len(good)}


def export(model: Thinker, out: Path, metrics: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().half().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = model.shape.hf_config(TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    table = Path(os.environ.get("THINKER_TOKENS") or str(files("stagevox.models.mini") / "weights" / "thinker" / "tokens.json"))
    if table.resolve() != (out / "tokens.json").resolve():
        shutil.copyfile(table, out / "tokens.json")
    print(f"{out}: {sum(t.numel() for t in tensors.values())} weights, {(out / 'model.safetensors').stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=18, help="0 only measures and exports")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--positions", type=int, default=2048, help="tokens in a batch, padding included")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--feed-forward", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, nargs="+", help="go on from an exported folder, or from the mean of several")
    parser.add_argument("--quick", action="store_true", help="skip the exhaustive measurement")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    shape = Shape(TOKENIZER.vocab_size, hidden=a.hidden, layers=a.layers, heads=a.hidden // 32, feed_forward=a.feed_forward)
    model = Thinker(shape)
    if a.init:
        states = [load_file(folder / "model.safetensors") for folder in a.init]
        model.load_state_dict({name: torch.stack([s[name].float() for s in states]).mean(0) for name in states[0]})
    print(f"{sum(p.numel() for p in model.parameters())} weights", flush=True)
    if a.minutes:
        model = train(model, a.minutes, a.rate, a.positions, a.seed)
    round_to_half(model)
    metrics = measure(model, full=not a.quick)
    print(json.dumps(metrics, indent=1))
    export(model, a.out, metrics)


if __name__ == "__main__":
    main()
