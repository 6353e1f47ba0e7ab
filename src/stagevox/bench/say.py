"""Speech from the packaged voice: real-time factor, batches, time to first audio, memory, cold start.

``rtf`` is wall time over audio time (below 1 is faster than speech), ``reference_rtf`` the same of the reference;
``speed_over_reference`` above 1 means faster than it. ``first_audio_share`` is the time to the first sample over the whole.

The reference is the voice's plain-torch implementation, one stream on one core, given the words to speak (it has no Thinker).
Both sides speak the same texts in turn, and the codes are compared before anything is timed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stagevox.config.env import hush_libraries, prepare_inline_process

prepare_inline_process()
hush_libraries()

import numpy as np  # noqa: E402  - the environment must be set before
import torch  # noqa: E402

from stagevox.omni import Omni  # noqa: E402

from . import report  # noqa: E402
from .oracle import load_reference  # noqa: E402
from .serve.prompts import BUILT_IN  # noqa: E402

TEXTS = BUILT_IN
"""Speech of 60 to 108 frames."""


def main() -> None:
    """Run the comparison, then one cold start, and print what they gave."""
    options = report.parser(__doc__)
    options.add_argument("--no-cold", action="store_true", help="skip the cold start in a process of its own")
    args = options.parse_args()
    torch.set_num_threads(1)
    reference = load_reference()
    numbers: dict[str, Any] = {"rounds": args.rounds}
    with Omni("mini") as omni:
        for text, result in zip(TEXTS, omni.generate(list(TEXTS)), strict=True):
            assert result.text == text and np.array_equal(result.codes, reference.generate(text).numpy()), text
        rounds = [_round(omni, reference, TEXTS[i % len(TEXTS)]) for i in range(args.rounds)]
    for key in rounds[0]:
        numbers[key] = report.spread([one[key] for one in rounds])
        figures = numbers[key]
        print(f"{key}: {figures['median']:.3f} ({figures['min']:.3f} to {figures['max']:.3f})", flush=True)
    if not args.no_cold:
        numbers |= _cold()
        print(f"cold_start_seconds: {numbers['cold_start_seconds']:.1f}\npeak_rss_mib: {numbers['peak_rss_mib']:.0f}")
    report.write(args.json, numbers)


def _round(omni: Omni, reference: Any, text: str) -> dict[str, float]:
    """One text on each side, then eight at once on ours."""
    begin = time.perf_counter()
    samples = reference.code2wav(reference.generate(text))
    reference_seconds = time.perf_counter() - begin
    audio = len(samples) / omni.sample_rate
    (one,) = omni.generate(text)
    eight = omni.generate(list(TEXTS))
    assert one.first_audio_seconds is not None
    batch_seconds = max(result.seconds for result in eight)
    rate = sum(len(result.audio) for result in eight) / omni.sample_rate / batch_seconds
    return {
        "rtf": one.seconds / audio,
        "reference_rtf": reference_seconds / audio,
        "speed_over_reference": reference_seconds / one.seconds,
        "batch_8_audio_seconds_per_second": rate,
        "batch_8_over_reference": rate * reference_seconds / audio,
        "first_audio_share": one.first_audio_seconds / one.seconds,
    }


def _cold() -> dict[str, float]:
    """``stagevox say`` in a new process: from command to speech, and the most memory it held."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stagevox.cli.main", "say", TEXTS[0], "-o", str(Path(folder) / "cold.wav"), "--json"]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=True, env=os.environ)
        seconds = time.perf_counter() - begin
    assert json.loads(done.stdout)["finish_reason"] == "stop"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"cold_start_seconds": seconds, "peak_rss_mib": peak}


if __name__ == "__main__":
    main()
