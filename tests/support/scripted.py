"""A model without weights and its engine without vLLM, for tests of what stands around engines: processes, servers, life and death.

A text of n letters becomes n tokens, 2 n frames of codes ``[serial of the letter, its half]`` and 20 n samples, each saying which it is:
sample ``10 f + i`` of the letters of a text is ``(f % 100) / 100``. Options of a request script what goes wrong: see :data:`FAULTS`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from stagevox.config.blueprint import Blueprint
from stagevox.config.effective import merge
from stagevox.config.topology import StageSpec, Topology, text_of
from stagevox.connectors.chunks import FrameChunks, WholeReply
from stagevox.contract import CODES, SAMPLE_RATE, WAVEFORM, StageExecutionType
from stagevox.errors import BadParameterError, CapabilityError, EmptyTextError, UnknownVoiceError
from stagevox.stage.messages import Gauges
from stagevox.stage.payload import StageOutput, StageRequest

STAGES = ("thinker", "talker", "code2wav")
SAMPLES = 10
"""Samples of a frame."""
RATE = 1000
ENGINE = "tests.support.scripted:ScriptedEngine"

FAULTS = ("refuse", "raise", "break", "exit", "hang", "mute")
"""``fault = "kind@stage"``: refuse when added; fail the request by name after a row; raise in step; end the process; never return from
a step; never serve it."""


class ScriptedFrontEnd:
    voices = ("slt", "kal")
    sample_rate = RATE
    fields = ("text", "voice", "fault", "pace")

    def __init__(self, checkpoint):
        pass

    def admit(self, req_id, prompt):
        text, voice = text_of(prompt, self.voices)
        if not text.strip():
            raise EmptyTextError("text", "empty")
        if voice is not None and voice not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        options = {"voice": voice or "slt", "fault": prompt.get("fault", ""), "pace": prompt.get("pace", 0.0)}
        return StageRequest(req_id, [ord(letter) for letter in text], options=options)

    def reply_text(self, token_ids, prompt):
        return "".join(map(chr, token_ids))


class ScriptedEngine:
    """Makes one row a step for up to ``slots`` requests.

    ``overrides`` may hold ``slots``, ``pace`` (seconds a step), ``no_start``, ``load`` (seconds).
    """

    def __init__(self, spec, overrides=None, *, record=False):
        overrides = overrides or {}
        time.sleep(overrides.get("load", 0.0))
        if overrides.get("no_start"):
            raise CapabilityError(f"{spec.name}.no_start", "as the script says", ["false"])
        self.name, self.slots, self.pace = spec.name, overrides.get("slots", 4), overrides.get("pace", 0.0)
        self.processor = {"thinker": WholeReply, "talker": lambda: FrameChunks("frames", (2, 4, 8))}.get(
            spec.name, lambda: None
        )()
        self.requests: dict[str, SimpleNamespace] = {}
        self.held: set[str] = set()
        self.rows = []

    def add(self, request):
        if self._fault(request) == "refuse":
            raise BadParameterError("seed", "as the script says", ["1", "2"])
        ids = request.prompt_token_ids
        state = SimpleNamespace(request=request, input=[], end=False, made=0)
        if ids is not None:
            state.input, state.end = list(ids), True
        self.requests[request.req_id] = state

    def deliver(self, chunk):
        state = self.requests.get(chunk.req_id)
        if state is None:
            return
        if "token_ids" in chunk.data:
            state.input += [half for letter in chunk.data["token_ids"] for half in ((letter, 0), (letter, 1))]
        if "frames" in chunk.data:
            state.input += chunk.data["frames"].tolist()
        state.end = chunk.end

    def abort(self, req_ids):
        for req_id in req_ids:
            self._forget(req_id)

    def hold(self, req_ids):
        self.held = req_ids

    def _forget(self, req_id):
        self.requests.pop(req_id, None)
        if self.processor is not None:
            self.processor.drop(req_id)

    def _fault(self, request):
        kind, _, stage = str(request.options.get("fault", "")).partition("@")
        return kind if stage == self.name else None

    def _ready(self):
        return [
            req_id
            for req_id, state in self.requests.items()
            if req_id not in self.held
            and self._fault(state.request) != "mute"
            and (state.end or (state.made < len(state.input) and self.name == "code2wav"))
        ][: self.slots]

    def has_work(self):
        return bool(self._ready())

    def step(self):
        outputs, chunks = [], []
        for req_id in self._ready():
            state = self.requests[req_id]
            fault = self._fault(state.request)
            time.sleep(self.pace + state.request.options.get("pace", 0.0))
            if fault and state.made:
                if fault == "break":
                    raise RuntimeError("as the script says")
                if fault == "exit":
                    os._exit(7)
                if fault == "hang":
                    time.sleep(3600)
            output, payload = self._samples(req_id, state) if self.name == "code2wav" else self._row(req_id, state)
            if fault == "raise" and state.made > 1:
                output, payload = StageOutput(req_id, [], {}, "error", "HookRaisedError: as the script says"), {}
            outputs.append(output)
            if self.processor is not None:
                chunks += self.processor.push(req_id, output.new_token_ids, payload, output.finish_reason)
            if output.finish_reason:
                self._forget(req_id)
        return outputs, chunks

    def _row(self, req_id, state):
        cap = state.request.sampling.get("max_tokens", 1 << 30)
        if state.made >= min(len(state.input), cap):
            return StageOutput(req_id, [], {}, "length" if state.made < len(state.input) else "stop"), {}
        row = state.input[state.made]
        state.made += 1
        if self.name == "thinker":
            return StageOutput(req_id, [row], {}), {}
        frame = torch.tensor([row])
        return StageOutput(req_id, [row[0]], {CODES: frame}), {"frames": frame}

    def _samples(self, req_id, state):
        first, new = state.made, state.input[state.made :]
        state.made += len(new)
        samples = (torch.arange(first, state.made) % 100 / 100).repeat_interleave(SAMPLES)
        named = {WAVEFORM: samples, SAMPLE_RATE: RATE} if new else {}
        return StageOutput(req_id, [], named, "stop" if state.end else None, positions=len(new)), {}

    def gauges(self):
        ready = len(self._ready())
        kv_usage = min(1.0, len(self.requests) / self.slots)
        return Gauges(running=ready, parked=len(self.requests) - ready, kv_usage=kv_usage)

    def trace(self):
        return self.rows

    def clear_trace(self):
        self.rows = []

    @property
    def num_requests(self):
        return len(self.requests)

    def state_size(self):
        return {"states": len(self.requests), "chunks": self.processor.num_open if self.processor is not None else 0}

    def close(self):
        pass


def samples_of(text):
    """What a text sounds like."""
    return (torch.arange(2 * len(text)) % 100 / 100).repeat_interleave(SAMPLES).numpy()


def blueprint(**overrides):
    """The scripted model; ``overrides`` by stage."""
    specs = tuple(StageSpec(name, StageExecutionType.AR, Path("/nowhere")) for name in STAGES)
    topology = Topology("scripted", specs, "tests.support.scripted:ScriptedFrontEnd", Path("/nowhere"), text_stage="thinker")
    return Blueprint(topology, ScriptedFrontEnd(None), overrides, merge(topology, [], None), topology, {})
