"""Write held-out pairs for the tests, as users would type them.

    python make_heldout.py ../../../tests/data/thinker_heldout.jsonl

The pairs come from the grammar, not from the model.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from data import disguise, held_out, held_out_set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-category", type=int, default=75)
    arguments = parser.parse_args()
    r = random.Random(0)
    with arguments.out.open("w", encoding="utf-8") as out:
        for e in held_out_set(arguments.per_category, seed=4):
            assert held_out(e)
            row = {"category": e.category, "text": disguise(e.written, r), "spoken": " ".join(e.spoken)}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
