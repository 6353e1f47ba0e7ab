"""How well the Talker says what the teacher said, without a recogniser.

    python evaluate.py DATA_FOLDER --count 48 [--wav FOLDER]

Greedy codes of held-out texts (no random word strings) against the teacher's: edit distance of the runs of phonemes that the
codes of group 0 belong to. ``--wav`` writes the first four as audio.
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import torch
from code2wav_model import Code2Wav
from codebooks import Codebooks
from corpus import RANDOM_WORDS
from features import SAMPLE_RATE
from talker_model import TextTable, Voice
from torch import Tensor


def edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def phoneme_runs(codes: Tensor, phones: dict[int, str]) -> list[str]:
    names = [phones.get(code, "?") for code in codes[:, 0].tolist()]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def write_wav(path: Path, samples: Tensor) -> None:
    assert torch.isfinite(samples).all()
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes((samples.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--wav", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [int(k) for k in (a.folder / "held_kinds.txt").read_text().split()]
    held = torch.load(a.folder / "encoded.pt")["held"]
    rows = [row for row, kind in zip(held, kinds, strict=True) if kind != RANDOM_WORDS][: a.count]
    phones = Codebooks(**torch.load(a.folder / "codebooks.pt")).phone_of_code()
    state = torch.load(a.folder / "talker2.pt")
    voice = Voice(TextTable(a.folder / "tokenizer.json"), feed_forward=state["talker.layers.0.down"].shape[1]).eval()
    voice.load_state_dict(state)
    code2wav = Code2Wav().eval()
    code2wav.load_state_dict(torch.load(a.folder / "code2wav.pt"))
    wrong = total = 0
    for i, row in enumerate(rows):
        codes = voice.generate(row["text"])
        truth = phoneme_runs(row["codes"], phones)
        errors = edit_distance(truth, phoneme_runs(codes, phones))
        wrong, total = wrong + errors, total + len(truth)
        print(f"{errors:3d} of {len(truth):3d} {len(codes):4d} frames  {row['text']}")
        if a.wav and i < 4:
            a.wav.mkdir(parents=True, exist_ok=True)
            write_wav(a.wav / f"{i}.wav", code2wav.decode(codes))
    print(f"phoneme error {wrong / total:.3f} on {len(rows)} texts")


if __name__ == "__main__":
    main()
