"""Frames a second of the model families on their tiny checkpoints, against each reference's own generate.

Both sides are given the same checkpoint and prompts, take turns, and must make the same codes before anything is timed. ``alone``:
one request after the other on both sides. ``eight``: eight requests at once on ours; the reference speaks them one by one and, where
its generate takes batches, as one batch (``over_batch``). Our stages share one thread, and the reference has one; with ``--processes``
each stage has a process, as under the server. (A reference with ``--reference-threads 2`` is slower on two cores.) The references run in
environments of their own, which ``tools/oracles`` makes: run this from the repository's root, or without a reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from stagevox.config.env import hush_libraries, prepare_inline_process

prepare_inline_process()
hush_libraries()

import numpy as np  # noqa: E402  - the environment must be set before
import torch  # noqa: E402

from . import report  # noqa: E402
from .sides import Inline, Processes, Prompt, Side, Spoken  # noqa: E402

ALL = 8


class Family(NamedTuple):
    """What is spoken, and with how much room."""

    prompts: tuple[Prompt, ...]
    """Eight; the first is spoken alone, too."""
    frames: int
    """The most of each."""
    overrides: Mapping[str, Mapping[str, Any]]
    batches: bool
    """The reference's generate takes several prompts."""
    tokens: int | None = None
    """The most of a Thinker's reply; None for a family without one."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Greedy, and no longer than that."""
        thinker = {} if self.tokens is None else {"thinker": {"temperature": 0.0, "max_tokens": self.tokens}}
        return {"temperature": 0.0, "max_tokens": self.frames, **thinker}

    def asked(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt as the reference is given it."""
        return {**prompt, "frames": self.frames} | ({} if self.tokens is None else {"tokens": self.tokens})


_ROOM = {"max_model_len": 256, "max_num_seqs": 8}
_THINKING = {**_ROOM, "dtype": "float32"}
FAMILIES = {
    "qwen2_5_omni": Family(
        prompts=tuple(
            {"text": text, "voice": voice}
            for text, voice in (
                ("jumps hear quick stage the hear the quick speak runtime", "Ethan"),
                ("the of jumps hear hello this lazy slowly please jumps fox a test you of lazy stage", "Chelsie"),
                ("stage over dog what stage jumps of is please hear test jumps do", "Ethan"),
                ("you fox", "Ethan"),
                ("jumps hear quick stage the hear the quick speak runtime", "Chelsie"),
                ("the of jumps hear hello this lazy slowly please jumps fox a test you of lazy stage", "Ethan"),
                ("stage over dog what stage jumps of is please hear test jumps do", "Chelsie"),
                ("test picture runtime brown picture you is omni do is", "Chelsie"),
            )
        ),
        frames=60,
        overrides={"thinker": _THINKING, "talker": _THINKING, "code2wav": _ROOM},
        batches=False,
        tokens=24,
    ),
    "qwen3_omni": Family(
        prompts=tuple(
            {"text": text, "voice": voice}
            for text, voice in (
                ("slowly speak of over omni of this the sound brown", "Aiden"),
                ("runtime", "Ethan"),
                ("hello world this is a test of the stage", "Chelsie"),
                ("slowly speak of over omni of this the sound brown", "Ethan"),
                ("lazy", "Ethan"),
                ("test this the hear over in brown the do you hello slowly", "Aiden"),
                ("the quick brown fox jumps over the lazy dog", "Chelsie"),
                ("what do you see in the picture", "Aiden"),
            )
        ),
        frames=40,
        overrides={"thinker": _THINKING, "talker": _THINKING, "code2wav": _ROOM},
        batches=False,
        tokens=16,
    ),
    "qwen3_tts": Family(
        prompts=tuple(
            {"text": text, "voice": voice, "language": "English", "instruct": None, "streaming_text": False}
            for text, voice in (
                ("hello world this is a tiny test", "Vivian"),
                ("the stage runtime", "Eric"),
                ("tiny test of the omni stage", "Vivian"),
                ("the quick brown fox jumps over the lazy dog. what do you see in the picture", "Ryan"),
                ("speak slowly please", "Serena"),
                ("what do you hear in the picture", "Dylan"),
                ("this is a test", "Serena"),
                ("the lazy dog", "Vivian"),
            )
        ),
        frames=40,
        overrides={"talker": _ROOM, "code2wav": _ROOM},
        batches=True,
    ),
}


class Reference:
    """The reference as a child process; see ``tools/oracles/speak.py``."""

    def __init__(self, script: Path, family: str, checkpoint: Path, threads: int = 1) -> None:
        command = [sys.executable, str(script), family, str(checkpoint), str(threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        raise RuntimeError("the reference ended")

    def speak(self, family: Family, count: int, *, together: bool = False) -> tuple[float, list[Any]]:
        """Seconds, and codes by prompt, of the first ``count``."""
        asked = [*(["together"] if together else []), *map(family.asked, family.prompts[:count])]
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(asked) + "\n")
        self._child.stdin.flush()
        answer = json.loads(self._line())
        return answer["seconds"], [np.array(codes) for codes in answer["codes"]]

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(BrokenPipeError):  # it ended before it had read all
            self._child.stdin.close()
        self._child.wait(timeout=60)
        self._child.stdout.close()


def main() -> None:
    """Measure the families that are named, or all, and print frames a second, ratios and each stage's ms a token."""
    options = report.parser(__doc__ or "")
    options.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; all if none is named")
    options.add_argument("--oracles", type=Path, default=Path("tools/oracles"), help="where speak.py is (default tools/oracles)")
    options.add_argument("--no-reference", action="store_true", help="measure ours alone")
    options.add_argument("--processes", action="store_true", help="a process a stage")
    options.add_argument("--reference-threads", type=int, default=1, metavar="N", help="threads of the reference (default 1)")
    args = options.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {"rounds": args.rounds}
    for name in args.families or FAMILIES:
        if name not in FAMILIES:
            options.error(f"no family {name!r}; there are {', '.join(FAMILIES)}")
        script = None if args.no_reference else args.oracles / "speak.py"
        numbers[name] = measure(name, FAMILIES[name], script, args.rounds, args.reference_threads, processes=args.processes)
        for key, figures in numbers[name].items():
            print(f"{name}.{key}: {figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})", flush=True)
    report.write(args.json, numbers)


def measure(
    name: str, family: Family, script: Path | None, rounds: int, threads: int = 1, *, processes: bool = False
) -> dict[str, dict[str, float]]:
    """Figures of one family, each over ``rounds``."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = import_module(f"stagevox.bench.checkpoints.{name}").write(Path(folder) / name)
        with (Processes if processes else Inline)(checkpoint, family.overrides) as ours:
            if script is None:
                found = [_ours(ours, family) for _ in range(rounds + 1)]
            else:
                with Reference(script, name, checkpoint, threads) as reference:
                    _check(ours, family, reference)
                    found = [_both(ours, family, reference) for _ in range(rounds + 1)]
    found = found[1:]  # the first one warms up
    return {key: report.spread([one[key] for one in found]) for key in found[0]}


def _speak(side: Side, family: Family, count: int) -> Spoken:
    return side.speak(family.prompts[:count], family.sampling)


def _check(side: Side, family: Family, reference: Reference) -> None:
    """Both sides say the same."""
    for ours, theirs in zip(_speak(side, family, ALL).codes, reference.speak(family, ALL)[1], strict=True):
        assert np.array_equal(ours, theirs), "codes differ from the reference's: nothing to compare"


def _ours(side: Side, family: Family) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, count in (("alone", 1), ("eight", ALL)):
        seconds, codes, stages = _speak(side, family, count)
        figures[f"{key}.frames_per_second"] = sum(map(len, codes)) / seconds
        for stage in stages:
            if stage.tokens:
                figures[f"{key}.{stage.name}.ms_per_token"] = stage.ms_per_token
            figures[f"{key}.{stage.name}.share"] = stage.seconds / seconds
    return figures


def _both(side: Side, family: Family, reference: Reference) -> dict[str, float]:
    alone, codes = reference.speak(family, 1)
    figures = {"alone.reference_frames_per_second": sum(map(len, codes)) / alone}
    eight, codes = reference.speak(family, ALL)
    figures["eight.reference_frames_per_second"] = sum(map(len, codes)) / eight
    if family.batches:
        batch, codes = reference.speak(family, ALL, together=True)
        figures["eight.reference_batch_frames_per_second"] = sum(map(len, codes)) / batch
    figures |= _ours(side, family)
    for key in ("alone", "eight"):
        figures[f"{key}.over_reference"] = figures[f"{key}.frames_per_second"] / figures[f"{key}.reference_frames_per_second"]
    if family.batches:
        figures["eight.over_batch"] = figures["eight.frames_per_second"] / figures["eight.reference_batch_frames_per_second"]
    return figures


if __name__ == "__main__":
    main()
