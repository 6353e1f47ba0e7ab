"""Make the references' golden values anew: ``run.py [FAMILY ...]``, all of them if none is named.

For each family: its tiny checkpoint, the environment of its reference, then the reference's script, which writes to
``tests/oracles/golden/FAMILY``. The script is called with the checkpoint, that folder and the checkpoint's digest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import environment  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TRANSFORMERS_4 = ("transformers==4.57.3", "tokenizers==0.22.1", "huggingface_hub==0.36.0")


class Oracle(NamedTuple):
    """The environment that a family's reference runs in, "" for this one; its script is ``FAMILY.py`` beside this file."""

    environment: str
    pins: tuple[str, ...]


ORACLES = {
    "qwen2_5_omni": Oracle("transformers4", TRANSFORMERS_4),
    "qwen3_omni": Oracle("", ()),
    "qwen3_tts": Oracle("qwen_tts", (*TRANSFORMERS_4, "qwen-tts==0.1.1")),
}


def regenerate(family: str, folder: Path) -> None:
    """Make the checkpoint under ``folder`` and run the family's reference on it."""
    from stagevox.bench.checkpoints.weights import digest

    oracle = ORACLES[family]
    start = time.perf_counter()
    checkpoint = import_module(f"stagevox.bench.checkpoints.{family}").write(folder / family)
    golden = REPOSITORY / "tests" / "oracles" / "golden" / family
    golden.mkdir(parents=True, exist_ok=True)
    python = environment.ensure(oracle.environment, oracle.pins) if oracle.environment else Path(sys.executable)
    environment.run(python, str(HERE / f"{family}.py"), str(checkpoint), str(golden), digest(checkpoint))
    print(f"{family}: {time.perf_counter() - start:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(sorted(ORACLES)))
    names = parser.parse_args().families or sorted(ORACLES)
    for name in names:
        if name not in ORACLES:
            parser.error(f"no family {name!r}; there are {', '.join(sorted(ORACLES))}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            regenerate(name, Path(folder))


if __name__ == "__main__":
    main()
