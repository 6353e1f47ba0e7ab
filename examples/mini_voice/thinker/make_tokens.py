"""Write tokens.json, the Thinker's token table, from the voice's table of word pieces.

    python make_tokens.py VOICE_TOKENIZER.json OUT/tokens.json

``pieces`` holds, for every token, the most voice pieces that it can become when it is read: the border's measure of length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stagevox.models.mini.text import NUMBER_WORDS

SYMBOLS = {"+": "plus", "−": "minus", "×": "times", "=": "equals", "?": "what", "#": "number", ":": "", "th": "", "of": ""}
MAX_INPUT_TOKENS = 32
MAX_PIECES = 68  # the talker's 170 frames at 2.5 frames a piece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("voice", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    table = json.loads(arguments.voice.read_text())["words"]
    length = {word: len(pieces) for word, pieces in table.items()}
    special = ["<pad>", "<bos>", "<sep>", "<eos>"]
    digits = []
    for digit in range(10):
        tens = NUMBER_WORDS[18 + digit] if digit >= 2 else "zero"
        digits.append(max(length[NUMBER_WORDS[digit]], length[tens] if digit >= 2 else 0))
    written = [*SYMBOLS, *(f"_{d}" for d in range(10)), *map(str, range(10))]
    pieces = [0] * len(special) + [length[w] for w in table]
    pieces += [length[word] if word else 0 for word in SYMBOLS.values()] + digits * 2
    data = {
        "special": special, "words": list(table), "written": written, "pieces": pieces,
        "max_input_tokens": MAX_INPUT_TOKENS, "max_pieces": MAX_PIECES,
    }  # fmt: skip
    assert len(pieces) == len(special) + len(table) + len(written)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
