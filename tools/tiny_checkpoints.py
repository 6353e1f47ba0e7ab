"""Make a tiny random checkpoint of a model family in its published layout: ``tiny_checkpoints.py FAMILY OUT``."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

FAMILIES = {
    "qwen2_5_omni": "stagevox.bench.checkpoints.qwen2_5_omni",
    "qwen3_omni": "stagevox.bench.checkpoints.qwen3_omni",
    "qwen3_tts": "stagevox.bench.checkpoints.qwen3_tts",
}
"""Modules with ``write(folder, seed) -> folder``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        parser.error(f"{options.out} is there already")
    from stagevox.bench.checkpoints.weights import digest

    made = import_module(FAMILIES[options.family]).write(options.out, options.seed)
    print(f"{made}: {digest(made)}")


if __name__ == "__main__":
    main()
