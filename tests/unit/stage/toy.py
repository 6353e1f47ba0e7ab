"""A runner without an engine, and models whose every number names its request and position.

An embedding row of the toy models is ``[tag, position, source, 0]``: the request's ``tag``, the absolute position, and which hook made the
row. The toy forward is the identity, so the hidden state of a row says the same. Frames are ``[id, tag, position]``, taken from the
layer-0 code and from the hidden state that it was sampled from: at position ``p`` that is the hidden state of ``p - 1``.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.outputs import ModelRunnerOutput

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, StageExecutionType
from stagevox.stage.runner import OmniGPUModelRunner
from stagevox.stage.wire import StageSettings

HIDDEN = 4
MAX_TOKENS = 64
MAX_REQS = 8

PROMPT_HOOK, BATCH_HOOK, MTP = 1.0, 2.0, 100.0
"""Source of a row: ``preprocess``, ``preprocess_decode_batch``; ``talker_mtp`` adds its own to that of the row it completes."""


class UpstreamRunner:
    """The part of vLLM's runner that the mixin stands on, with buffers on the CPU."""

    def __init__(self, record):
        settings = StageSettings("toy", StageExecutionType.AR, record=record)
        self.vllm_config = SimpleNamespace(additional_config=settings.to_config())
        self.input_ids = SimpleNamespace(gpu=torch.zeros(MAX_TOKENS, dtype=torch.int64))
        self.inputs_embeds = SimpleNamespace(gpu=torch.full((MAX_TOKENS, HIDDEN), -1.0))
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.query_start_loc = SimpleNamespace(np=np.zeros(MAX_REQS + 1, dtype=np.int32))
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_reqs=0,
            num_computed_tokens_cpu=np.zeros(MAX_REQS, dtype=np.int32),
            num_prompt_tokens=np.zeros(MAX_REQS, dtype=np.int32),
            num_tokens_no_spec=np.zeros(MAX_REQS, dtype=np.int32),
        )
        self.execute_model_state = None

    def _update_states(self, scheduler_output):
        return None

    def _on_request_state_removed(self, req_id, req_state):
        pass

    def _preprocess(self, scheduler_output, num_input_tokens, intermediate_tensors=None):
        ids = self.input_ids.gpu[:num_input_tokens]
        return ids, None, self.positions[:num_input_tokens], intermediate_tensors, {}, None

    def sample_tokens(self, grammar_output):
        ids, self.execute_model_state = self.input_batch.req_ids, None
        index = {req_id: row for row, req_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=list(ids), req_id_to_index=index, sampled_token_ids=[[] for _ in ids])


class ToyRunner(OmniGPUModelRunner, UpstreamRunner):
    """The production mixin on that."""

    def __init__(self, model, *, record=True):
        super().__init__(record)
        self.model = model
        self._omni_bind(model)


class ScalarModel:
    """Hooks without a batch hook and without MTP. Keeps what it was called with in ``calls``: ``(hook, req_ids, infos)``."""

    has_preprocess = True
    has_postprocess = True

    def __init__(self):
        self.calls = []
        self.given_ids = []

    def embed_input_ids(self, input_ids):
        return torch.zeros(len(input_ids), HIDDEN)

    def preprocess(self, input_ids, input_embeds, **info):
        self.calls.append(("preprocess", [info["name"]], [info]))
        self.given_ids.append(input_ids.tolist())
        first = info[NUM_COMPUTED_TOKENS]
        embeds = torch.tensor([row(info["tag"], first + offset, PROMPT_HOOK) for offset in range(len(input_ids))])
        return input_ids, embeds, {"seen": {"preprocess": first}}

    def postprocess(self, hidden, **info):
        self.calls.append(("postprocess", [info["name"]], [info]))
        return {"last_hidden": hidden[-1:].clone()}

    def hook_calls(self, name):
        return [(req_ids, infos) for hook, req_ids, infos in self.calls if hook == name]


class BatchModel(ScalarModel):
    """With a batch hook, without MTP."""

    def preprocess_decode_batch(self, *, input_ids, req_infos):
        self.calls.append(("preprocess_decode_batch", [info["name"] for info in req_infos], list(req_infos)))
        self.given_ids.append(input_ids.tolist())
        embeds = torch.tensor([row(info["tag"], info[NUM_COMPUTED_TOKENS], BATCH_HOOK) for info in req_infos])
        return input_ids, embeds, [{"seen": {"batch": info[NUM_COMPUTED_TOKENS]}} for info in req_infos]


class MTPMixin:
    """Runner-managed MTP. Careless on purpose: hands ``mtp_inputs`` over for every span, prompt and replay included."""

    def preprocess(self, input_ids, input_embeds, **info):
        ids, embeds, update = super().preprocess(input_ids, input_embeds, **info)
        hidden = info.get("last_hidden", torch.full((1, HIDDEN), -7.0))
        return ids, embeds, {**update, MTP_INPUTS: (hidden, embeds[-1:])}

    def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
        self.calls.append(("talker_mtp", last_hidden[:, 0].tolist(), None))
        embeds = text_step + torch.tensor([0.0, 0.0, MTP, 0.0])
        codes = torch.stack([input_ids, last_hidden[:, 0].long(), last_hidden[:, 1].long()], dim=1)
        return embeds, codes


class ScalarMTPModel(MTPMixin, ScalarModel):
    """Scalar hooks with MTP."""


class BatchMTPModel(MTPMixin, BatchModel):
    """The batch hook's five results."""

    def preprocess_decode_batch(self, *, input_ids, req_infos):
        ids, embeds, updates = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        return ids, embeds, torch.cat([info["last_hidden"] for info in req_infos]), embeds, updates


def row(tag, position, source):
    return [float(tag), float(position), float(source), 0.0]


class Steps:
    """Plays the scheduler and the forward: sets the input batch, calls the production methods, keeps what came of it.

    A request's token at position ``p`` has the id ``100 * tag + p``.
    """

    def __init__(self, model, *, record=True):
        self.model = model
        self.runner = ToyRunner(model, record=record)
        self.prompt_len, self.tag, self.computed, self.known = {}, {}, {}, {}
        self.emitted = {}
        self.spans = {}

    def add(self, name, tag, prompt_len, *, cached=0, known=None, **payload):
        self.prompt_len[name], self.tag[name], self.computed[name] = prompt_len, tag, cached
        self.known[name] = prompt_len if known is None else known
        self.runner.model_intermediate_buffer.open(name, {"tag": tag, "name": name, **payload})

    def decoding(self, name, tag, prompt_len, position):
        """A request that is about to decode ``position``, with the hidden state of the position before."""
        self.add(
            name, tag, prompt_len, cached=position, known=position + 1, last_hidden=torch.tensor([row(tag, position - 1, 0)])
        )
        log = self.runner.model_intermediate_buffer.log(name, prompt_len)
        for logged in range(prompt_len, position):
            log.append(logged, torch.tensor([row(tag, logged, 0)]), torch.zeros(1, 3, dtype=torch.int64), 0)

    def preempt(self, name):
        self.computed[name] = 0

    def run(self, *spans, resumed=(), pad=0):
        """One step over ``(name, span)`` pairs in the order of the input batch; returns the embeddings by request."""
        runner, batch = self.runner, self.runner.input_batch
        batch.req_ids = [name for name, _ in spans]
        batch.num_reqs = len(spans)
        self.spans, start = {}, 0
        for index, (name, span) in enumerate(spans):
            first = self.computed[name]
            batch.num_computed_tokens_cpu[index] = first
            batch.num_prompt_tokens[index] = self.prompt_len[name]
            batch.num_tokens_no_spec[index] = self.known[name]
            ids = range(first, first + span)
            runner.input_ids.gpu[start : start + span] = torch.tensor([100 * self.tag[name] + p for p in ids])
            self.spans[name] = slice(start, start + span)
            start += span
            runner.query_start_loc.np[index + 1] = start
        self.output = SimpleNamespace(
            total_num_scheduled_tokens=start,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        )
        self.result = runner._preprocess(self.output, start + pad, None)
        return {name: runner.inputs_embeds.gpu[where].clone() for name, where in self.spans.items()}

    def finish(self):
        """Forward, sampling and what follows it; returns the step's output. Rows that reached the newest token get one more."""
        runner = self.runner
        runner.execute_model_state = SimpleNamespace(
            hidden_states=runner.inputs_embeds.gpu[: self.result[1].shape[0]].clone(),
            scheduler_output=SimpleNamespace(scheduled_spec_decode_tokens={}),
        )
        out = runner.sample_tokens(None)
        for name, where in self.spans.items():
            self.computed[name] += where.stop - where.start
            if self.computed[name] >= self.known[name]:
                self.known[name] = self.computed[name] + 1
        for name, named in getattr(out, "multimodal_outputs", {}).items():
            if "codes.audio" in named:
                self.emitted.setdefault(name, []).extend(named["codes.audio"].tolist())
        return out

    def step(self, *spans, **kwargs):
        """``run`` and ``finish``; returns the embeddings by request as lists."""
        embeds = self.run(*spans, **kwargs)
        self.finish()
        assert not self.failed
        return {name: rows.tolist() for name, rows in embeds.items()}

    @property
    def codes(self):
        """Codes made in this step, by request."""
        return {name: codes.tolist() for name, codes in self.runner._new_codes.items()}

    @property
    def failed(self):
        return self.runner.model_intermediate_buffer.failed

    def state(self, name):
        return self.runner.model_intermediate_buffer[name]

    def trace(self, name):
        """``(num_computed, span, prompt_len, num_known, used_mtp)`` of a request's rows so far."""
        return [
            (entry.num_computed, entry.span, entry.prompt_len, entry.num_known, entry.used_mtp)
            for entry in self.runner.step_log
            if entry.req_id == name
        ]
