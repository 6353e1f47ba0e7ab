"""The teacher's audio -> text pieces, codebooks and coded utterances.

    python prepare.py DATA_FOLDER

Reads train, held and more (.pcm, .txt); writes ``tokenizer.json`` (the pieces of every word), ``codebooks.pt`` and
``encoded.pt``. Pieces and codebooks are fitted on train and held; ``more`` is only coded with them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from alignment import Alignment, Utterance, align, load
from codebooks import Codebooks, fit
from corpus import VOCABULARY
from features import frame_features
from torch import Tensor

FRAMES_PER_SECOND = 25
FRAMES_PER_PIECE = 2.5


def word_pieces(utterances: list[Utterance], alignments: list[Alignment]) -> tuple[dict[str, list[int]], list[str]]:
    """Cut every word into as many pieces as it lasts, about 2.5 frames each; a piece's name marks its letters: ``f[i]ve``."""
    frames: dict[str, list[float]] = {}
    for utterance, alignment in zip(utterances, alignments, strict=True):
        if alignment.complete(utterance):
            for index, (start, end) in alignment.spans.items():
                frames.setdefault(utterance.words[index], []).append((end - start) * FRAMES_PER_SECOND)
    missing = [word for word in VOCABULARY if word not in frames]
    if missing:
        print(f"{len(missing)} words were never spoken; their length is guessed from their letters")
    per_letter = np.mean([np.mean(v) / len(word) for word, v in frames.items()])
    table: dict[str, list[int]] = {}
    names: list[str] = []
    for word in VOCABULARY:
        length = np.mean(frames[word]) if word in frames else per_letter * len(word)
        count = max(1, min(len(word), round(length / FRAMES_PER_PIECE)))
        cut = [round(i * len(word) / count) for i in range(count + 1)]
        table[word] = list(range(len(names), len(names) + count))
        names += [f"{word[: cut[i]]}[{word[cut[i] : cut[i + 1]]}]{word[cut[i + 1] :]}" for i in range(count)]
    return table, names


def record(utterance: Utterance, alignment: Alignment, codes: Tensor, table: dict[str, list[int]]) -> dict[str, object]:
    """What training needs of one utterance; without an alignment only Code2Wav uses it."""
    complete = alignment.complete(utterance)
    pieces = (
        alignment.pieces([table[w] for w in utterance.words]) if complete else torch.full((len(codes),), -1, dtype=torch.int16)
    )
    return {
        "text": utterance.text,
        "codes": codes.to(torch.int16),
        "pieces": pieces,
        "words": torch.tensor(alignment.word, dtype=torch.int16),
        "wave": torch.tensor(utterance.wave),
        "aligned": complete,
    }


def encode(utterance: Utterance, alignment: Alignment, books: Codebooks) -> Tensor:
    return books.encode(books.project(*frame_features(utterance.wave)), alignment.phone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    train, held, more = (load(a.folder / name) for name in ("train", "held", "more"))
    utterances = train + held
    alignments = [align(u) for u in utterances]
    table, names = word_pieces(utterances, alignments)
    tokenizer = {"type": "closed-vocabulary word pieces", "words": table, "pieces": names}
    tokenizer |= {"eos_id": len(names), "pad_id": len(names) + 1}
    (a.folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    features = [frame_features(u.wave) for u in utterances]
    phones = [p for alignment in alignments for p in alignment.phone]
    books = fit(torch.cat([m for m, _ in features]), torch.cat([p for _, p in features]), phones)
    torch.save(asdict(books), a.folder / "codebooks.pt")
    coded = [
        record(u, al, books.encode(books.project(*f), al.phone), table)
        for u, al, f in zip(utterances, alignments, features, strict=True)
    ]
    second = [(u, align(u)) for u in more]
    batches = {
        "train": coded[: len(train)],
        "held": coded[len(train) :],
        "more": [record(u, al, encode(u, al, books), table) for u, al in second if al.complete(u)],
    }
    torch.save(batches, a.folder / "encoded.pt")
    frames = sum(len(r["codes"]) for r in coded)  # type: ignore[arg-type]
    print(f"{len(names)} pieces, {frames / len(coded):.1f} frames an utterance", {k: len(v) for k, v in batches.items()})


if __name__ == "__main__":
    main()
