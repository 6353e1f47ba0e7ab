"""A stage without an engine, for tests of what stands around stages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stagevox.config.topology import StageSpec, Topology, text_of
from stagevox.connectors.chunks import LEFT_CONTEXT, FrameChunks, WholeReply
from stagevox.contract import CODES, WAVEFORM, StageExecutionType
from stagevox.errors import EmptyTextError, UnknownModelError, UnknownVoiceError, VocabularyError
from stagevox.stage.messages import Gauges
from stagevox.stage.payload import StageOutput, StageRequest

AUDIO = WAVEFORM


def join(blocks):
    """Rows are plain lists here."""
    return [row for block in blocks for row in block]


class FakeStage:
    """Makes one row a step for up to ``slots`` requests.

    ``whole``: waits for all its input, then makes ``len(input) * factor`` rows ``(name, req_id, n)``, at most ``max_tokens``.
    Otherwise it passes on all rows on hand as samples, and ends when its input has ended.
    ``show`` makes the client's tensors of a step's rows.
    Faults: ``lose`` holds ``(req_id, seq)`` of chunks that never leave; ``fail`` request ids that end in an error after a row;
    ``refuse`` ids whose ``add`` raises; ``mute`` ids that are never served; ``die_at`` the step that raises ``death``.
    """

    def __init__(self, name, processor=None, *, whole=True, factor=1, slots=4, on_step=None, show=None):
        self.name = name
        self.processor = processor
        self.whole, self.factor, self.slots = whole, factor, slots
        self.held: dict[str, SimpleNamespace] = {}
        self.lose, self.fail, self.refuse, self.mute = set(), set(), set(), set()
        self.die_at, self.death = None, RuntimeError("out of memory")
        self.steps = 0
        self.closed = False
        self.on_step = on_step
        self.show = show or (lambda rows: {} if whole else {AUDIO: rows})

    def add(self, request: StageRequest):
        if request.req_id in self.refuse:
            raise ValueError("no such sampling parameter")
        assert request.req_id not in self.held
        rows = request.prompt_token_ids
        self.held[request.req_id] = SimpleNamespace(request=request, rows=list(rows or []), end=rows is not None, made=0)

    def deliver(self, chunk):
        if chunk.req_id in self.held:
            state = self.held[chunk.req_id]
            assert not state.end
            for rows in (value for key, value in chunk.data.items() if key in ("rows", "hidden")):
                state.rows += rows[chunk.data.get(LEFT_CONTEXT, 0) :]
            state.end = chunk.end

    def abort(self, req_ids):
        for req_id in req_ids:
            self.held.pop(req_id, None)
            if self.processor:
                self.processor.drop(req_id)

    def _ready(self):
        return [
            req_id
            for req_id, state in self.held.items()
            if req_id not in self.mute and (state.end or (state.rows and not self.whole))
        ][: self.slots]

    def has_work(self):
        return bool(self._ready())

    def step(self):
        self.steps += 1
        if self.on_step:
            self.on_step(self)
        if self.steps == self.die_at:
            raise self.death
        outputs, chunks = [], []
        for req_id in self._ready():
            state = self.held[req_id]
            output, payload = self._row(req_id, state) if self.whole else self._samples(req_id, state)
            if req_id in self.fail and state.made:
                output = StageOutput(req_id, [], {}, "error", "the hook raised")
            outputs.append(output)
            if self.processor:
                made = self.processor.push(req_id, output.new_token_ids, payload, output.finish_reason)
                chunks += [chunk for chunk in made if (req_id, chunk.seq) not in self.lose]
            if output.finish_reason:
                del self.held[req_id]
        return outputs, chunks

    def _row(self, req_id, state):
        total = len(state.rows) * self.factor
        cap = state.request.sampling.get("max_tokens", total + 1)
        if state.made >= min(total, cap):
            return StageOutput(req_id, [], {}, "length" if cap < total else "stop"), {}
        state.made += 1
        rows = [(self.name, req_id, state.made - 1)]
        return StageOutput(req_id, [state.made - 1], self.show(rows)), {"rows": rows}

    def _samples(self, req_id, state):
        rows, state.rows = state.rows, []
        state.made += len(rows)
        return StageOutput(req_id, [], self.show(rows) if rows else {}, "stop" if state.end else None), {}

    def trace(self):
        return []

    def clear_trace(self):
        pass

    def gauges(self):
        ready = len(self._ready())
        return Gauges(running=ready, parked=len(self.held) - ready)

    @property
    def num_requests(self):
        return len(self.held)

    def close(self):
        self.closed = True


def make_fake_stages(**options):
    """A Thinker, a Talker (3 rows a token) and a Code2Wav."""
    return [
        FakeStage("thinker", WholeReply(concat=join), **options),
        FakeStage("talker", FrameChunks("rows", (2, 4, 8), context=3, concat=join), factor=3, **options),
        FakeStage("code2wav", whole=False, **options),
    ]


@pytest.fixture
def fake_stages():
    return make_fake_stages


class Clock:
    """A clock that only sleeping and ``+=`` move."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


class FakeFrontEnd:
    """A token a letter; knows no digits, and no voice but two."""

    voices = ("slt", "kal")
    sample_rate = 100
    fields = ("text", "voice")

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def admit(self, req_id, prompt):
        text, voice = text_of(prompt, self.voices)
        if not text.strip():
            raise EmptyTextError("text", "empty")
        if voice is not None and voice not in self.voices:
            raise UnknownVoiceError("voice", f"no voice {voice!r}", self.voices)
        if any(letter.isdigit() for letter in text):
            raise VocabularyError("text", f"can't say {text!r}")
        return StageRequest(req_id, [ord(letter) for letter in text], options={"voice": voice or "slt"})

    def reply_text(self, token_ids, prompt):
        return f"{len(token_ids)} letters"


def make_fake_model(monkeypatch):
    """Make ``Omni("fake")`` run on stages without engines; returns them, and the names of those that were started."""
    stages = {stage.name: stage for stage in make_fake_stages()}
    stages["talker"].show = lambda rows: {CODES: [[n, n + 1] for _, _, n in rows]}
    stages["code2wav"].show = lambda rows: {AUDIO: [n / 100 for _, _, n in rows]}
    model = ModuleType("stagevox_fake_model")
    model.FrontEnd = FakeFrontEnd
    monkeypatch.setitem(sys.modules, "stagevox_fake_model", model)
    specs = tuple(StageSpec(name, StageExecutionType.AR, Path("/nowhere")) for name in stages)
    topology = Topology("fake", specs, "stagevox_fake_model:FrontEnd", Path("/nowhere"))

    def resolve(name):
        if name != "fake":
            raise UnknownModelError("model", f"no model {name!r}", ["fake"])
        return topology

    def start(spec, overrides, record):
        stages[spec.name].overrides, stages[spec.name].record = dict(overrides), record
        stages[spec.name].asked_steps = spec.multi_step_for_all
        started.append(spec.name)
        return stages[spec.name]

    started = []
    monkeypatch.setattr("stagevox.models.registry.resolve_topology", resolve, raising=False)
    monkeypatch.setattr("stagevox.omni.start_stage", start)
    monkeypatch.setattr("stagevox.omni.check_stages", lambda blueprint: None)
    return SimpleNamespace(stages=stages, started=started)


@pytest.fixture
def fake_model(monkeypatch):
    return make_fake_model(monkeypatch)
