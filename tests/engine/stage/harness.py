"""Drives a stage engine and keeps what comes out, by the name a test gave the request."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

from stagevox.config.topology import StageSpec
from stagevox.connectors.base import Chunk
from stagevox.contract import CODES, StageExecutionType
from stagevox.stage.engine import StageEngine
from stagevox.stage.payload import StageRequest

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "block_size": 32,
    "max_model_len": 128,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 4 << 20,
    "gpu_memory_utilization": 0.02,
}
SMALL_POOL = {"num_gpu_blocks_override": 6}
"""Five blocks to use: one request of the full context, but not three of half of it."""

_serial = itertools.count()


def spec_of(checkpoint, *, kind=StageExecutionType.AR, **kwargs):
    args = dict(ENGINE_ARGS)
    if kind is StageExecutionType.GENERATION:
        args["load_format"] = "dummy"
    return StageSpec("toy", kind, checkpoint, engine_args=args, **kwargs)


NO_SALT = object()
"""For a request that comes without a salt; by default each gets its own."""


class Harness:
    """One engine for many tests; ``begin`` starts a test with fresh names."""

    def __init__(self, spec, overrides=None):
        self.engine = StageEngine(spec, overrides, record=True)
        self.begin()

    def begin(self):
        self.ids, self.names, self.seq = {}, {}, defaultdict(itertools.count)
        self.tokens, self.codes, self.finish, self.error = defaultdict(list), defaultdict(list), {}, {}
        self.outputs = defaultdict(list)

    @property
    def scheduler(self):
        return self.engine._scheduler

    @property
    def runner(self):
        return self.engine._core.model_executor.driver_worker.worker.model_runner

    def add(self, name, prompt, count=None, *, salt=None, sampling=None, **payload):
        req_id = self.ids[name] = f"{name}-{next(_serial)}"
        self.names[req_id] = name
        limits = {} if count is None else {"max_tokens": count, "ignore_eos": True}
        fields = {"temperature": 0.0, **limits, **(sampling or {})}
        prompt = None if prompt is None else list(prompt)
        self.engine.add(StageRequest(req_id, prompt, fields, payload, cache_salt=None if salt is NO_SALT else salt or req_id))

    def deliver(self, name, *, end=False, **data):
        self.engine.deliver(Chunk(self.ids[name], next(self.seq[name]), end, data))

    def abort(self, *names):
        self.engine.abort([self.ids[name] for name in names])

    def step(self):
        outputs, _ = self.engine.step()
        for out in outputs:
            name = self.names[out.req_id]
            assert name not in self.finish, f"{name} spoke after its end"
            self.tokens[name] += out.new_token_ids
            self.outputs[name].append(out)
            if CODES in out.multimodal:
                self.codes[name] += out.multimodal[CODES].tolist()
            if out.finish_reason is not None:
                self.finish[name], self.error[name] = out.finish_reason, out.error
        return outputs

    def run(self):
        """Step until there is nothing to do."""
        for _ in self.steps():
            pass
        return self

    def steps(self, limit=2000):
        """Step by step until there is nothing to do."""
        for step in range(limit):
            if not self.engine.has_work():
                return
            self.step()
            yield step
        raise AssertionError("the engine never came to rest")

    def trace(self, name):
        return [row for row in self.engine.trace() if row.req_id == self.ids[name]]

    def named(self, name, key):
        """A named tensor of all of a request's outputs, joined."""
        return torch.cat([out.multimodal[key] for out in self.outputs[name] if key in out.multimodal])

    def preempted(self):
        """Names of this test's requests that were resumed after a preemption."""
        return {self.names[row.req_id] for row in self.engine.trace() if row.is_resumed and row.req_id in self.names}

    def assert_idle(self):
        """Nothing of any request is left, on either side."""
        engine, scheduler = self.engine, self.scheduler
        assert not engine.has_work()
        assert engine.num_requests == 0
        assert engine.state_size() == {"states": 0, "logs": 0, "post_seen": 0, "failed": 0}
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert not scheduler.omni_requests and not scheduler.wait_room and not scheduler._payloads and not scheduler._inbox
        assert not getattr(scheduler, "_ended", None) and not scheduler._ready and not scheduler._left
        assert scheduler._adapter is None or not scheduler._adapter.held
        assert scheduler.kv_cache_manager.usage == 0
        assert self.runner.input_batch.num_reqs == 0 and not self.runner.requests
