"""One decode step with hooks over a stock vLLM step, both eager, in turn, in one process.

The stock side is vLLM's own engine core with its own scheduler, worker and model. The other side is the same model with a
batched decode hook (no MTP) in a stage. Steps alternate, so whatever else the machine does hits both.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from stagevox.config.env import hush_libraries, prepare_inline_process

prepare_inline_process()
hush_libraries()

import torch  # noqa: E402  - the environment must be set before
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402

from stagevox.config.topology import StageSpec  # noqa: E402
from stagevox.contract import StageExecutionType  # noqa: E402
from stagevox.stage.engine import StageEngine  # noqa: E402
from stagevox.stage.payload import StageRequest  # noqa: E402

from . import report  # noqa: E402
from .tiny import ARCHITECTURE, ROWS, register_tiny, write_checkpoint  # noqa: E402

PROMPT = 8
WARM_UP = 5


def main() -> None:
    """Run the comparison and print a line a batch size."""
    options = report.parser(__doc__)
    options.add_argument("--pairs", type=int, default=40, help="steps of each side in a round (default 40)")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    args = options.parse_args()
    engine_args: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.05,
        "max_num_seqs": max(args.batch),
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    }
    numbers: dict[str, Any] = {"rounds": args.rounds, "pairs": args.pairs}
    with tempfile.TemporaryDirectory() as folder:
        stock = _Stock(write_checkpoint(Path(folder) / "stock", "Qwen2ForCausalLM"), engine_args)
        hooked = _Hooked(write_checkpoint(Path(folder) / "hooked", ARCHITECTURE), engine_args)
        for batch in args.batch:
            steps = PROMPT + WARM_UP + args.rounds * args.pairs + 8
            stock.start(batch, steps)
            hooked.start(batch, steps)
            for _ in range(WARM_UP):
                stock.step(), hooked.step()
            rounds = [report.interleave(stock.step, hooked.step, args.pairs) for _ in range(args.rounds)]
            stock.stop()
            hooked.stop()
            ratio = report.spread([ours / theirs for theirs, ours in rounds])
            stock_ms, hooked_ms = (report.spread([side[i] * 1e3 for side in rounds])["median"] for i in (0, 1))
            numbers |= {
                f"ratio_batch_{batch}": ratio["median"],
                f"ratio_batch_{batch}_spread": [ratio["min"], ratio["max"]],
                f"stock_ms_batch_{batch}": stock_ms,
                f"hooked_ms_batch_{batch}": hooked_ms,
            }
            print(
                f"batch {batch:3}: stock {stock_ms:.3f} ms, with hooks {hooked_ms:.3f} ms, "
                f"ratio {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})",
                flush=True,
            )
        hooked.engine.close()
        stock.core.shutdown()
    report.write(args.json, numbers)


class _Stock:
    def __init__(self, checkpoint: Path, engine_args: dict[str, Any]) -> None:
        executor = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        config = EngineArgs(model=str(checkpoint), distributed_executor_backend=executor, **engine_args).create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.ids: list[str] = []

    def start(self, batch: int, steps: int) -> None:
        """Prefill ``batch`` requests that decode for ``steps`` steps."""
        self.ids = [f"s{batch}-{i}" for i in range(batch)]
        for i, req_id in enumerate(self.ids):
            params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
            request = EngineCoreRequest(req_id, _prompt(i), None, params, None, time.time(), None, None, None)
            self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        _, executed = self.core.step_fn()
        self.core.post_step(executed)
        return time.perf_counter() - begin

    def stop(self) -> None:
        """Abort what runs."""
        self.core.abort_requests(self.ids)
        self.core.step_fn()


class _Hooked:
    def __init__(self, checkpoint: Path, engine_args: dict[str, Any]) -> None:
        register_tiny()
        self.engine = StageEngine(StageSpec("tiny", StageExecutionType.AR, checkpoint, engine_args=engine_args))
        self.ids: list[str] = []

    def start(self, batch: int, steps: int) -> None:
        """As the stock side, with conditioning."""
        self.ids = [f"h{batch}-{i}" for i in range(batch)]
        for i, req_id in enumerate(self.ids):
            rows = torch.randn(7, 128, generator=torch.Generator().manual_seed(i)) * 0.05
            self.engine.add(
                StageRequest(
                    req_id, _prompt(i), {"temperature": 0, "max_tokens": steps, "ignore_eos": True}, {ROWS: rows.unbind()}
                )
            )

    def step(self) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - begin

    def stop(self) -> None:
        """Abort what runs."""
        self.engine.abort(self.ids)
        self.engine.step()


def _prompt(i: int) -> list[int]:
    return [(7 * i + j) % 1000 for j in range(PROMPT)]


if __name__ == "__main__":
    main()
