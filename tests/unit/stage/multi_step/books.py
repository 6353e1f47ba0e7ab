"""Schedulers without an engine, and a runner that only keeps book of which KV slots it has written."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from stagevox.config.topology import StageSpec
from stagevox.contract import StageExecutionType
from stagevox.models.mini.pieces import WEIGHTS
from stagevox.stage.ar_scheduler import OmniARScheduler, OmniAsyncARScheduler
from stagevox.stage.multi_step.gates import Refusal
from stagevox.stage.vllm_config import make_config
from stagevox.stage.wire import OmniModelRunnerOutput, StageSettings, WindowReport

BLOCK = 32
STOP = 7
"""The id that ends a request."""

_base = {}


def config_of(asynchronous, context=128, seqs=4, budget=256):
    """A vLLM config without an engine; made once and copied."""
    key = asynchronous, context, seqs, budget
    if key not in _base:
        args = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "block_size": BLOCK,
            "max_model_len": context,
            "max_num_seqs": seqs,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": False,
            "async_scheduling": asynchronous,
            "gpu_memory_utilization": 0.02,
        }
        spec = StageSpec("toy", StageExecutionType.AR, Path(WEIGHTS) / "talker", engine_args=args)
        _base[key] = make_config(spec, {})
    return copy.copy(_base[key])


def scheduler_of(steps, *, asynchronous=False, blocks=40, stock=False, settings=None, **sizes):
    """Ours with windows of ``steps``, or vLLM's own."""
    config = config_of(asynchronous, **sizes)
    config.additional_config = StageSettings(
        "toy", StageExecutionType.AR, multi_step_decode_steps=steps, **(settings or {})
    ).to_config()
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    kinds = (Scheduler, AsyncScheduler) if stock else (OmniARScheduler, OmniAsyncARScheduler)
    return kinds[asynchronous](
        vllm_config=config, kv_cache_config=kv, structured_output_manager=Grammars(), block_size=BLOCK, hash_block_size=BLOCK
    )


class Grammars:
    """No structured output here."""

    def accept_tokens(self, request, ids):
        return True


def request_of(name, prompt=6, count=20, **fields):
    params = SamplingParams(
        max_tokens=count, temperature=0.0, detokenize=False, **{"stop_token_ids": [STOP], "ignore_eos": True, **fields}
    )
    return Request(name, list(range(100, 100 + prompt)), params, None)


def token(name, index, stop_every=47):
    """A request's ``index``-th token, whatever else runs."""
    draw = random.Random(f"{name}/{index}").randrange(stop_every)
    return STOP if draw == 0 and index else 10 + draw


def story(name, count):
    """All of a request's tokens."""
    told = []
    while len(told) < count and STOP not in told:
        told.append(token(name, len(told)))
    return told


@dataclass
class Held:
    """What the runner holds of one request."""

    blocks: list[int]
    prompt: int
    known: int
    stops: frozenset[int]
    written: int = 0
    told: list[int] = field(default_factory=list)


class BookRunner:
    """Writes slots, samples from :func:`token`, and refuses or cuts windows when told to."""

    def __init__(self):
        self.held: dict[str, Held] = {}
        self.refuse = lambda plan: None
        self.cut = lambda steps: steps
        self.windows = []

    def execute(self, output):
        for req_id in output.finished_req_ids:
            self.held.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            length, stops = len(new.prompt_token_ids), frozenset(new.sampling_params.stop_token_ids or ())
            self.held[new.req_id] = Held(list(new.block_ids[0]), length, length, stops)
            assert new.num_computed_tokens == 0
        cached = output.scheduled_cached_reqs
        for req_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            held = self.held[req_id]
            if req_id in cached.resumed_req_ids:
                held.blocks, held.written = list(ids[0]), 0
            elif ids is not None:
                held.blocks += ids[0]
            assert held.written == computed, f"{req_id}: {held.written} slots written, scheduled from {computed} on"
        plan = getattr(output, "multi_step_plan", {})
        reason = self.refuse(plan) if plan else None
        ids, tokens = list(output.num_scheduled_tokens), []
        for req_id in ids:
            if req_id not in plan:
                tokens.append(self._step(req_id, output.num_scheduled_tokens[req_id]))
            else:
                tokens.append(self._window(req_id, 1 if reason else self.cut(plan[req_id])))
        index = {req_id: row for row, req_id in enumerate(ids)}
        base = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)
        if not plan:
            return base
        self.windows.append((dict(plan), reason))
        return OmniModelRunnerOutput.of_window(base, tokens, WindowReport(max(map(len, tokens)), refusal=reason))

    def _step(self, req_id, count):
        held = self.held[req_id]
        self._write(req_id, count)
        return self._sample(req_id) if held.written == held.known else []

    def _window(self, req_id, steps):
        held, said = self.held[req_id], []
        for _ in range(steps):
            assert held.written == held.known - 1, "a window's row is a fresh position"
            self._write(req_id, 1)
            said += self._sample(req_id)
            if said[-1] in held.stops:
                break
        return said

    def _write(self, req_id, count):
        held = self.held[req_id]
        held.written += count
        assert held.written <= held.known, f"{req_id}: a slot was written before its token was known"
        assert held.written <= len(held.blocks) * BLOCK, f"{req_id}: no slot for position {held.written - 1}"

    def _sample(self, req_id):
        held = self.held[req_id]
        held.told.append(token(req_id, len(held.told)))
        held.known += 1
        return [held.told[-1]]


class Drive:
    """Steps a scheduler over the book runner as vLLM's engine core does, in turn or one step ahead."""

    def __init__(self, scheduler, runner=None, check=None):
        self.scheduler, self.runner = scheduler, runner or BookRunner()
        self.ahead = isinstance(scheduler, AsyncScheduler)
        self.flight, self.tokens, self.ended = [], {}, {}
        self.check = check or (lambda drive: None)
        self.rounds = []

    def add(self, request):
        self.tokens[request.request_id] = []
        self.scheduler.add_request(request)

    def schedule(self):
        output = self.scheduler.schedule()
        self.rounds.append(output)
        self.flight.append((output, self.runner.execute(output)))
        return output

    def update(self):
        output, result = self.flight.pop(0)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for out in outputs.outputs:
                self.tokens[out.request_id] += out.new_token_ids
                if out.finish_reason is not None:
                    assert out.request_id not in self.ended
                    self.ended[out.request_id] = str(out.finish_reason)

    def step(self):
        """One turn of the engine: a step is scheduled if there is one, and answered unless there is room to run ahead."""
        if self.scheduler.has_requests():
            output = self.schedule()
            if self.ahead and len(self.flight) < 2 and (output.total_num_scheduled_tokens or self.scheduler.has_requests()):
                self.check(self)
                return
        if self.flight:
            self.update()
        self.check(self)

    def runner_story(self, name):
        """All that the runner has sampled for a request that it still holds, or would have without a stop."""
        return [token(name, index) for index in range(len(self.tokens[name]))]

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.flight and not self.scheduler.has_requests():
                return self
            self.step()
        raise AssertionError("the schedule never came to rest")


REASONS = {reason.value for reason in Refusal}
