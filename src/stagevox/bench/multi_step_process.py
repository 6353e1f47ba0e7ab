"""The same engine behind vLLM's core process: what merging saves where every round crosses to another process and back.

A model without conditioning, since a bare vLLM front-end carries no stage payloads; scheduler, worker and runner are the stage's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from stagevox.contract import StageExecutionType
from stagevox.stage.wire import StageSettings
from stagevox.stage.worker import OmniCPUWorker, OmniGPUWorker

from .tiny import PLAIN_ARCHITECTURE, register_tiny, write_checkpoint

register_tiny()  # in the core process, too: it imports this file for the worker


class _Clock:
    """Times the runner's two calls, where they happen."""

    model_runner: Any
    bench_seconds = 0.0

    def bench_start(self) -> None:
        """Start from 0."""
        self.bench_seconds = 0.0
        for name in ("execute_model", "sample_tokens"):
            setattr(self.model_runner, name, self._timed(getattr(self.model_runner, name)))

    def bench_stop(self) -> float:
        """Seconds in both calls since the start."""
        for name in ("execute_model", "sample_tokens"):
            delattr(self.model_runner, name)
        return self.bench_seconds

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.bench_seconds += time.perf_counter() - begin

        return wrapped


class CPUWorker(_Clock, OmniCPUWorker):
    """The stage's worker, which makes this file's models known where it runs."""


class GPUWorker(_Clock, OmniGPUWorker):
    """The same on a GPU."""


class ProcessSide:
    """A tiny Talker's engine in a process of its own."""

    busy = 0.0
    """Not known on this side."""
    rounds: list[float]
    """Nor these."""

    def __init__(self, checkpoint: Path, steps: int, *, ahead: bool) -> None:
        from vllm.platforms import current_platform

        if not checkpoint.exists():
            write_checkpoint(checkpoint, PLAIN_ARCHITECTURE)
        settings = StageSettings("tiny", StageExecutionType.AR, async_scheduling=ahead, multi_step_decode_steps=steps)
        scheduler = "OmniAsyncARScheduler" if ahead else "OmniARScheduler"
        self._runs = 0
        self.rounds = []
        before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        try:
            self._llm = LLM(
                str(checkpoint),
                dtype="float32",
                enforce_eager=True,
                skip_tokenizer_init=True,
                block_size=32,
                kv_cache_memory_bytes=32 << 20,
                gpu_memory_utilization=0.02,
                max_num_seqs=8,
                max_model_len=256,
                max_num_batched_tokens=256,
                enable_prefix_caching=False,
                async_scheduling=ahead,
                disable_log_stats=True,
                worker_cls=f"{__name__}.{'CPUWorker' if current_platform.is_cpu() else 'GPUWorker'}",
                scheduler_cls=f"stagevox.stage.ar_scheduler.{scheduler}",
                distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
                additional_config=settings.to_config(),
            )
        finally:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before or "0"

    def run(self, batch: int, tokens: int) -> float:
        """Seconds a token of each request, seen from this side."""
        self._runs += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        prompts: Any = [{"prompt_token_ids": [(7 * i + j + self._runs) % 1000 for j in range(8)]} for i in range(batch)]
        engine, made, begin = self._llm.llm_engine, 0, time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{self._runs}-{i}", prompt, params)
        while engine.has_unfinished_requests():
            made += sum(len(output.outputs[0].token_ids) for output in engine.step())
        seconds = time.perf_counter() - begin
        assert made == batch * tokens, f"{made} tokens, not {batch * tokens}"
        return seconds / tokens

    def counters(self) -> dict[str, Any]:
        """Nothing: they are in the other process's log."""
        return {}

    def loop_share(self, batch: int, tokens: int) -> float:
        """p, from the worker's own clock: the share of the wall time outside ``execute_model`` and ``sample_tokens``."""
        self._llm.collective_rpc("bench_start")
        whole = self.run(batch, tokens) * tokens
        inside: float = self._llm.collective_rpc("bench_stop")[0]
        return 1 - inside / whole

    def close(self) -> None:
        """Stop the process."""
        self._llm.llm_engine.engine_core.shutdown()
