"""A family's reference as a program that speaks on demand: ``speak.py FAMILY CHECKPOINT [THREADS]``, for benchmarks.

Each line of standard input is a JSON list of prompts, as our front end takes them, with ``frames``, the most that are wanted. Each
answer is a line that starts with ``@``: the seconds that the reference's own generate took, waveforms included, and the codes of
each prompt. ``together`` in place of a list's first prompt asks for one batch; else prompts are spoken one by one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent


def outside(family: str, checkpoint: str, threads: str) -> None:
    """Become the reference's interpreter."""
    import environment  # type: ignore[import-not-found]
    from run import ORACLES  # type: ignore[import-not-found]

    oracle = ORACLES[family]
    python = str(environment.ensure(oracle.environment, oracle.pins)) if oracle.environment else sys.executable
    settings = {**os.environ, "OMP_NUM_THREADS": threads}
    for name in ("PYTHONPATH", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # what our side has set for itself
        settings.pop(name, None)
    os.execve(python, [python, str(Path(__file__).resolve()), family, checkpoint, threads, "inside"], settings)


def inside(family: str, checkpoint: str, threads: str) -> None:
    """Answer until the input ends."""
    speak = import_module(family).speaker(checkpoint)
    import_module("torch").set_num_threads(int(threads))
    print("@ready", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        together = prompts[0] == "together"
        groups = [prompts[1:]] if together else [[prompt] for prompt in prompts]
        begin = time.perf_counter()
        codes = [each for group in groups for each in speak(group)]
        seconds = time.perf_counter() - begin
        print("@" + json.dumps({"seconds": seconds, "codes": codes}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    family, checkpoint, threads = [*sys.argv[1:4], "1"][:3]
    (inside if "inside" in sys.argv[4:] else outside)(family, checkpoint, threads)
