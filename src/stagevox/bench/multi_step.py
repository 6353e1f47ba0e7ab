"""Merged decode over K: milliseconds a token of a Talker stage, against single steps in the same run.

Engines of all K live side by side and take turns within a round, so whatever else the machine does hits all of them; what is
printed is the median over the rounds, and the ratio to K = 0 is taken round by round. Beside it, for a machine that others use too: the
fastest tenth of all full scheduling rounds, and processor time.

``voice`` is the packaged Talker with its code predictor, ``tiny`` a 2-layer Talker with conditioning, ``deep`` a 20-layer, 768-wide one
with random weights. ``p`` is the share of a single step that is spent outside ``execute_model`` and ``sample_tokens``; ``bound`` is
``1 / (p / K + 1 - p)``, the speed-up if merging saved that share only.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagevox.config.env import hush_libraries, prepare_inline_process

prepare_inline_process()
hush_libraries()

import torch  # noqa: E402  - the environment must be set before

from stagevox.config.multi_step import FIELD  # noqa: E402
from stagevox.config.topology import StageSpec  # noqa: E402
from stagevox.contract import StageExecutionType  # noqa: E402
from stagevox.models.registry import resolve_topology  # noqa: E402
from stagevox.stage.ar_scheduler import OmniARScheduler  # noqa: E402
from stagevox.stage.engine import StageEngine  # noqa: E402
from stagevox.stage.payload import StageRequest  # noqa: E402
from stagevox.stage.scheduler import OmniSchedulerMixin  # noqa: E402

from . import report  # noqa: E402
from .multi_step_process import ProcessSide  # noqa: E402
from .tiny import ARCHITECTURE, ROWS, register_tiny, write_checkpoint  # noqa: E402

STEPS = (0, 2, 4, 8, 12, 16)
TOKENS = {"voice": 160, "tiny": 160, "deep": 33}
"""Tokens of a request in one timed run."""


def main() -> None:
    """Run the sweep, then the comparison with the feature off, and print a line each."""
    options = report.parser(__doc__)
    options.add_argument("--models", nargs="+", default=["voice", "tiny", "deep"], choices=["voice", "tiny", "deep"])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options.add_argument("--steps", type=int, nargs="+", default=list(STEPS), help="values of K; 0 is always among them")
    options.add_argument("--scheduling", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    options.add_argument("--no-process", action="store_true", help="skip the engines in core processes of their own")
    options.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG of ratio over K here")
    args = options.parse_args()
    torch.set_num_threads(1)
    register_tiny()
    steps = sorted({0, *args.steps})
    legs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        specs = {name: _spec(name, Path(folder)) for name in args.models}
        for name, spec in specs.items():
            for scheduling in args.scheduling:
                sides = {k: InlineSide(name, spec, k, ahead=scheduling == "async") for k in steps}
                legs += [_leg(name, "inline", scheduling, batch, sides, args.rounds) for batch in args.batch]
                for side in sides.values():
                    side.close()
        off = {
            f"batch_{batch}": _off(specs.get("tiny") or _spec("tiny", Path(folder)), batch, args.rounds) for batch in args.batch
        }
        if not args.no_process:
            for scheduling in args.scheduling:
                checkpoint = Path(folder) / "plain"
                served = {k: ProcessSide(checkpoint, k, ahead=scheduling == "async") for k in steps}
                legs += [_leg("tiny", "process", scheduling, batch, served, args.rounds) for batch in args.batch]
                for each in served.values():
                    each.close()
    for batch, ratio in off.items():
        print(f"off: {batch}: ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})", flush=True)
    report.write(args.json, {"rounds": args.rounds, "legs": legs, "off": off})
    if args.plot is not None:
        args.plot.write_text(plot(legs))


class InlineSide:
    """A Talker's engine in this process."""

    def __init__(self, model: str, spec: StageSpec, steps: int, *, ahead: bool) -> None:
        self._model = model
        extras = {FIELD: steps}
        overrides = {"async_scheduling": ahead, "enable_prefix_caching": False} if not steps else {"async_scheduling": ahead}
        self.engine = StageEngine(dataclasses.replace(spec, engine_extras=extras), overrides)
        self._runs = 0
        self.steps = steps
        self.rounds: list[float] = []
        """Seconds a token of each full round so far."""
        self.busy = 0.0
        """Seconds of processor time a token in the last run: what a shared machine disturbs least."""

    def run(self, batch: int, tokens: int) -> float:
        """Seconds a token of each request: ``batch`` requests, prompts included."""
        self._runs += 1
        for i in range(batch):
            self.engine.add(_request(self._model, f"{self._runs}-{i}", i, tokens))
        made, begin, busy = 0, time.perf_counter(), time.process_time()
        since, told = begin, 0
        while self.engine.has_work():
            counts = [len(output.new_token_ids) for output in self.engine.step()[0]]
            made += sum(counts)
            if counts:
                now = time.perf_counter()
                told += 1
                # A full round of all; running ahead, the first two are made before the first is told.
                if told > 2 and len(counts) == batch and max(counts) == max(1, self.steps):
                    self.rounds.append((now - since) / max(counts))
                since = now
        seconds, self.busy = time.perf_counter() - begin, (time.process_time() - busy) / tokens
        assert made == batch * tokens, f"{made} tokens, not {batch * tokens}"
        return seconds / tokens

    def counters(self) -> dict[str, Any]:
        """What merged decode did."""
        return self.engine.multi_step()

    def loop_share(self, batch: int, tokens: int) -> float:
        """p: the share of a step outside ``execute_model`` and ``sample_tokens``."""
        executor, inside = self.engine.executor, 0.0

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                begin = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    inside += time.perf_counter() - begin

            return wrapped

        names = ("execute_model", "sample_tokens")
        for name in names:
            setattr(executor, name, timed(getattr(executor, name)))
        try:
            whole = self.run(batch, tokens) * tokens
        finally:
            for name in names:
                delattr(executor, name)
        return 1 - inside / whole

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def _spec(name: str, folder: Path) -> StageSpec:
    if name == "voice":
        talker = {spec.name: spec for spec in resolve_topology("mini").stages}["talker"]
        return dataclasses.replace(talker, input_adapter=None, chunk_processor=None, constraints={})
    layers, hidden = (2, 128) if name == "tiny" else (20, 768)
    checkpoint = write_checkpoint(folder / name, ARCHITECTURE, layers=layers, hidden=hidden)
    args: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": 32,
        "kv_cache_memory_bytes": (32 if name == "tiny" else 512) << 20,
        "gpu_memory_utilization": 0.02,
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    }
    return StageSpec(name, StageExecutionType.AR, checkpoint, engine_args=args)


def _request(model: str, req_id: str, seed: int, tokens: int) -> StageRequest:
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    if model == "voice":
        payload = {"text_rows": (torch.arange(30) * 7 + seed) % 570, "voice": "slt"}
        return StageRequest(req_id, [514] * 5 + [513], sampling, payload)
    hidden = 128 if model == "tiny" else 768
    rows = torch.randn(7, hidden, generator=torch.Generator().manual_seed(seed)) * 0.05
    return StageRequest(req_id, [(7 * seed + j) % 1000 for j in range(8)], sampling, {ROWS: rows.unbind()})


def _leg(
    model: str, where: str, scheduling: str, batch: int, sides: Mapping[int, InlineSide | ProcessSide], rounds: int
) -> dict[str, Any]:
    """Run all K in turn; milliseconds a token, ratios to K = 0 round by round, and the bound."""
    tokens = TOKENS[model]
    for side in sides.values():
        side.run(batch, tokens)
        side.rounds.clear()
    times: dict[int, list[float]] = {k: [] for k in sides}
    busy: dict[int, list[float]] = {k: [] for k in sides}
    for _ in range(rounds):
        for k, side in sides.items():
            times[k].append(side.run(batch, tokens) * 1e3)
            busy[k].append(side.busy * 1e3)
    share = statistics.median(sides[0].loop_share(batch, tokens) for _ in range(3))
    rows: dict[int, dict[str, Any]] = {}
    for k, values in times.items():
        ratio = report.spread([one / single for one, single in zip(values, times[0], strict=True)])
        bound = 1 / (share / k + 1 - share) if k else 1.0
        rows[k] = {
            "ms": statistics.median(values),
            "ratio": ratio,
            "bound": bound,
            "speedup_over_bound": 1 / ratio["median"] / bound,
            "floor_ms": _floor(sides[k].rounds) * 1e3,
            "floor_ratio": _floor(sides[k].rounds) / _floor(sides[0].rounds) if sides[0].rounds else None,
            "cpu_ms": statistics.median(busy[k]),
            "cpu_ratio": statistics.median(busy[k]) / statistics.median(busy[0]) if busy[0][0] else None,
        }
    best = min(rows, key=lambda k: rows[k]["ratio"]["median"])
    head = f"{model:5} {where:7} {scheduling:5} batch {batch}"
    for k, row in rows.items():
        spread = row["ratio"]
        print(
            f"{head} K {k:2}: {row['ms']:7.3f} ms a token, ratio {spread['median']:.3f} ({spread['min']:.3f} to {spread['max']:.3f}), "
            f"bound {row['bound']:.3f}, speed-up over bound {row['speedup_over_bound']:.2f}"
            + (f", fastest tenth {row['floor_ms']:.3f} ms, ratio {row['floor_ratio']:.3f}" if row["floor_ratio"] else "")
            + (f", processor time ratio {row['cpu_ratio']:.3f}" if row["cpu_ratio"] else ""),
            flush=True,
        )
    print(f"{head}: p {share:.3f}, best K {best}", flush=True)
    counters = {k: side.counters() for k, side in sides.items()}
    return {
        "model": model,
        "where": where,
        "scheduling": scheduling,
        "batch": batch,
        "p": share,
        "best": best,
        "rows": rows,
        "counters": counters,
    }


def _floor(rounds: list[float]) -> float:
    """The tenth percentile: what a round takes while nobody else wants the machine."""
    return statistics.quantiles(rounds, n=10)[0] if len(rounds) > 1 else math.nan


class _WithoutWindows(OmniARScheduler):
    """The scheduler as it would be without merged decode."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """No windows."""
        return OmniSchedulerMixin.schedule(self, *args, **kwargs)

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing to settle."""
        return OmniSchedulerMixin.update_from_output(self, *args, **kwargs)

    def get_num_unfinished_requests(self) -> int:
        """No fence."""
        return OmniSchedulerMixin.get_num_unfinished_requests(self)


def _off(spec: StageSpec, batch: int, rounds: int) -> dict[str, float]:
    """The feature off over the scheduler without it, step by step in turn."""
    sides = [InlineSide("tiny", spec, 0, ahead=False) for _ in range(2)]
    sides[1].engine.scheduler.__class__ = _WithoutWindows
    tokens = TOKENS["tiny"]
    ratios = []
    for turn in range(max(rounds, 7)):
        for side in sides:
            for i in range(batch):
                side.engine.add(_request("tiny", f"off-{turn}-{i}", i, tokens))

        def step(side: InlineSide) -> float:
            begin = time.perf_counter()
            side.engine.step()
            return time.perf_counter() - begin

        ours, theirs = report.interleave(lambda: step(sides[0]), lambda: step(sides[1]), tokens - 5)
        ratios.append(ours / theirs)
        for side in sides:
            while side.engine.has_work():
                side.engine.step()
    for side in sides:
        side.close()
    return report.spread(ratios)


def _shown(row: Mapping[str, Any]) -> float:
    """Processor time where it is known, else wall time, over that of K = 0."""
    return float(row["cpu_ratio"] or row["ratio"]["median"])


def plot(legs: list[dict[str, Any]]) -> str:
    """Ratio to single steps over K, a line a leg, as SVG: processor time inline, wall time in processes."""
    width, height, left, top = 720, 400, 60, 20
    colours = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22")
    inner, tall = width - left - 240, height - top - 50
    last = max(max(leg["rows"]) for leg in legs)

    def x(k: float) -> float:
        return left + inner * k / last

    def y(ratio: float) -> float:
        return top + tall * (1.1 - min(ratio, 1.1)) / 0.7

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for tick in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        parts.append(f'<line x1="{left}" x2="{left + inner}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for k in sorted({k for leg in legs for k in leg["rows"]}):
        parts.append(f'<text x="{x(k):.1f}" y="{top + tall + 18}" text-anchor="middle">{k}</text>')
    parts.append(f'<text x="{left + inner / 2}" y="{height - 8}" text-anchor="middle">K; time a token over that of K = 0</text>')
    for number, leg in enumerate(legs):
        colour, dash = colours[number // 2 % len(colours)], "" if number % 2 == 0 else ' stroke-dasharray="5 3"'
        points = " ".join(f"{x(k):.1f},{y(_shown(row)):.1f}" for k, row in sorted(leg["rows"].items()))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        label, at = f"{leg['model']} {leg['where']} {leg['scheduling']} batch {leg['batch']}", top + 16 * number + 10
        parts.append(
            f'<line x1="{width - 230}" x2="{width - 205}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(f'<text x="{width - 200}" y="{at + 4}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
