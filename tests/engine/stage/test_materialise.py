"""Outputs made in the step or on a thread of their own: the same, in every way of serving (RT-7)."""

import threading

import pytest
import torch

from stagevox.contract import WAVEFORM
from stagevox.errors import ConfigError
from stagevox.stage.materialise import Materialiser
from stagevox.stage.vllm_config import make_config
from tests.engine.stage.harness import SMALL_POOL, Harness, spec_of
from tests.engine.stage.test_speculation import BUDGET, SPECULATION, drafts, repetitive

pytestmark = pytest.mark.covers("RT-7")

BACKGROUND = {"output_materialisation": "background"}
MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"max_num_batched_tokens": 16, "enable_prefix_caching": False, **SMALL_POOL},
    "async": {"async_scheduling": True},
    "async-preempted": {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **SMALL_POOL},
}
REQUESTS = {"a": (33, 30), "b": (17, 44), "c": (45, 40)}


class Catcher:
    """A chunk processor's view: what goes to the next stage, and on which thread it was served."""

    requires_token_updates = False

    def __init__(self):
        self.onward, self.threads = {}, set()

    def push(self, req_id, token_ids, payload, finish_reason):
        self.threads.add(threading.current_thread())
        self.onward.setdefault(req_id, []).append(dict(payload))
        return []

    def drop(self, req_id):
        pass


class Late(Materialiser):
    """Holds every step's outputs back until they are joined; notes the runner's step when they were planned and when they were made."""

    def __init__(self, runner):
        super().__init__(background=True)
        self.runner = runner
        self.made = []
        self.gates = []

    def start(self, step):
        gate, make, planned = threading.Event(), step.result, self.runner.step_log.step
        self.gates.append(gate)

        def held_up():
            assert gate.wait(60)
            self.made.append((planned, self.runner.step_log.step, threading.current_thread()))
            return make()

        step.result = held_up
        pending = super().start(step)
        join = pending.join

        def opened():
            gate.set()
            return join()

        pending.join = opened
        return pending

    @property
    def overtaken(self):
        """Steps whose outputs were made after a later step had run."""
        return [planned for planned, ran, _ in self.made if ran > planned]

    def close(self):
        for gate in self.gates:
            gate.set()
        super().close()


@pytest.fixture
def served(engine, monkeypatch):
    """``served(model, background, **overrides)``: a stage, and what its next stage gets. In the background everything is late."""
    used = []

    def get(model, background, *, spec=None, **overrides):
        extras = BACKGROUND if background else {}
        stage = engine(model, spec={**(spec or {}), "engine_extras": extras}, **overrides)
        assert stage.runner.materialiser.background == background
        stage.late = None
        if background:
            stage.late = Late(stage.runner)
            monkeypatch.setattr(stage.runner, "materialiser", stage.late)
        stage.catcher = Catcher()
        monkeypatch.setattr(stage.scheduler, "_chunks", stage.catcher)
        used.append(stage)
        return stage

    yield get
    for stage in used:
        stage.run()
        if stage.late is not None:
            stage.late.close()


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def everything(stage):
    """All that came out of a stage, output by output, and on both roads."""
    return {
        name: {
            "client": [
                (out.new_token_ids, {key: plain(value) for key, value in out.multimodal.items()}, out.finish_reason, out.error)
                for out in stage.outputs[name]
            ],
            "onward": [{key: plain(value) for key, value in part.items()} for part in stage.catcher.onward.get(req_id, [])],
            "rows": [row[:1] + row[2:] for row in stage.trace(name)],
        }
        for name, req_id in stage.ids.items()
    }


def rebased(heard):
    """The same with steps counted from the first one."""
    first = min(row[0] for one in heard.values() for row in one["rows"])
    return {name: {**one, "rows": [(row[0] - first, *row[1:]) for row in one["rows"]]} for name, one in heard.items()}


def alike(one, other):
    """Compares output by output: a diff of all of it would take minutes."""
    assert one.keys() == other.keys()
    for name in one:
        for road, parts in one[name].items():
            assert len(parts) == len(other[name][road]), (name, road)
            differ = [index for index, pair in enumerate(zip(parts, other[name][road], strict=True)) if pair[0] != pair[1]]
            assert not differ, (name, road, differ)


def is_right(stage):
    """In the background: nobody but the one thread made outputs, and chunks were served on the main thread."""
    assert stage.late is None or {thread.name for *_, thread in stage.late.made} == {"stagevox-outputs_0"}
    assert stage.catcher.threads == {threading.main_thread()}


@pytest.mark.covers("EX-10")
@pytest.mark.parametrize("model", ["ToyExporting", "ToyStatic", "ToyMTP"])
@pytest.mark.parametrize("mode", MODES)
def test_inline_and_background_give_the_same(served, oracle, prompt, rows, mode, model):
    heard = []
    for background in (False, True):
        stage = served(model, background, **MODES[mode])
        for seed, (name, (length, count)) in enumerate(REQUESTS.items()):
            stage.add(name, prompt(length, seed), count, who=name, rows=rows(seed))
        stage.run()
        assert bool(stage.preempted()) == ("preempted" in mode)
        is_right(stage)
        heard.append(rebased(everything(stage)))
        if background:
            assert bool(stage.late.overtaken) == ("async" in mode)
        if model == "ToyMTP":
            assert all(len(stage.codes[name]) >= count - 1 for name, (_, count) in REQUESTS.items())
            continue
        for seed, (name, (length, count)) in enumerate(REQUESTS.items()):
            said, onward = oracle.say(prompt(length, seed), count), stage.catcher.onward[stage.ids[name]]
            assert stage.tokens[name] == said.tokens
            hidden = torch.cat([part["hidden"] for part in onward])
            torch.testing.assert_close(hidden, said.hidden, atol=1e-5, rtol=1e-4)
            assert torch.cat([part["position"] for part in onward]).tolist() == list(range(length + count - 1))
            if model == "ToyStatic":
                torch.testing.assert_close(torch.cat([part["row"] for part in onward]), said.hidden, atol=1e-5, rtol=1e-4)
                assert torch.cat([part["given"] for part in onward]).tolist() == list(range(0, 2 * (length + count - 1), 2))
                for part in onward:
                    assert "last" not in part or not len(part["row"]) or part["last"].equal(part["row"][-1])
    alike(*heard)


@pytest.mark.covers("EX-10")
def test_the_next_step_overwrites_what_outputs_are_made_of_before_they_are_made(served, oracle, prompt):
    """Forced: in every step but the last the model's storage holds a later step's values when the outputs are made."""
    stage = served("ToyStatic", True, async_scheduling=True)
    seen = []
    start = stage.late.start

    def watched(step):
        model = stage.runner.model
        make, then = step.result, model.storage["position"].clone()

        def looked():
            seen.append(not model.storage["position"].equal(then))
            return make()

        step.result = looked
        return start(step)

    stage.late.start = watched
    ids = prompt(20, 3)
    stage.add("a", ids, 12)
    stage.run()
    assert len(seen) >= 12 and all(seen[:-1])
    assert stage.late.overtaken
    said, onward = oracle.say(ids, 12), stage.catcher.onward[stage.ids["a"]]
    assert stage.tokens["a"] == said.tokens
    torch.testing.assert_close(torch.cat([part["row"] for part in onward]), said.hidden, atol=1e-5, rtol=1e-4)


@pytest.mark.covers("RT-9")
@pytest.mark.parametrize(
    "mode", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 16}], ids=["sync", "async", "chunked"]
)
def test_rows_of_cached_positions(served, oracle, prompt, mode):
    """Two at a time, so that a hit's rows are read while others' outputs are on their way."""
    for background in (False, True):
        stage = served("ToyStatic", background, **mode)
        for turn in ("one", "two"):
            for seed in (4, 5):
                stage.add(f"{turn} {seed}", prompt(70, seed), 6, salt=f"shared {background} {mode}")
            stage.run()
        for seed in (4, 5):
            assert [stage.trace(f"{turn} {seed}")[0].num_computed for turn in ("one", "two")] == [0, 64]
            said = oracle.say(prompt(70, seed), 6)
            for turn in ("one", "two"):
                onward = stage.catcher.onward[stage.ids[f"{turn} {seed}"]]
                assert torch.cat([part["position"] for part in onward]).tolist() == list(range(75))
                torch.testing.assert_close(torch.cat([part["row"] for part in onward]), said.hidden, atol=1e-5, rtol=1e-4)


@pytest.mark.covers("RT-8")
@pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type that is scheduled for deprecation")
def test_speculation(served, oracle, prompt):
    heard = []
    for background in (False, True):
        stage = served("ToyExporting", background, speculative_config=SPECULATION, **BUDGET)
        stage.add("a", repetitive(prompt, 2), 40, who="a")
        stage.run()
        assert any(advanced < span for span, advanced in drafts(stage, "a")), "no draft was rejected"
        assert stage.tokens["a"] == oracle.say(repetitive(prompt, 2), 40).tokens
        is_right(stage)
        heard.append(rebased(everything(stage)))
    alike(*heard)


@pytest.mark.covers("EX-10")
@pytest.mark.parametrize("faulty", [False, True])
def test_a_generation_stage(served, faulty):
    """With a fault each request runs alone in the same storage, one after the other."""
    codes = {
        name: [1 + (7 * seed + 3 * n) % 50 for n in range(length)]
        for seed, (name, length) in enumerate({"a": 11, "b": 7}.items())
    }
    heard = []
    for background in (False, True):
        stage = served(
            "ToyStaticVocoder",
            background,
            spec={"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"},
            max_num_batched_tokens=64,
        )
        for name in codes:
            stage.add(name, None)
            stage.deliver(name, ids=codes[name], end=True)
        if faulty:
            stage.add("bad", None)
            stage.deliver("bad", ids=[1, 2], end=True, payload={"fault": {"hook": "forward", "kind": "raise", "at": 0}})
        stage.run()
        for name, frames in codes.items():
            expected = [1000.0 * before + now for before, now in zip([0, *frames], frames, strict=False)]
            assert stage.named(name, WAVEFORM).tolist() == expected
        assert stage.error.get("bad") == ("HookRaisedError: forward: Boom: marked request" if faulty else None)
        assert {row.step for name in stage.ids for row in stage.trace(name)} == {stage.runner.step_log.step}  # one step
        heard.append({name: {"client": one["client"]} for name, one in everything(stage).items()})
        if background:
            assert len(stage.late.made) == (2 if faulty else 1)
    alike(*heard)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_error_there_fails_the_requests_of_its_step(served, oracle, prompt, async_scheduling):
    """A prompt's chunks whose rows don't fit together: found when they are joined, in both ways alike."""
    options = {"async_scheduling": async_scheduling, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    heard = []
    for background in (False, True):
        stage = served("ToyStatic", background, **options)
        stage.add("before", prompt(9, 1), 3)
        stage.run()
        stage.add("bad", prompt(30, 2), 9, at=10)
        stage.add("near", prompt(5, 3), 2)
        stage.run()
        stage.add("after", prompt(30, 2), 9)
        stage.run()
        assert (stage.finish["bad"], stage.error["bad"].split(": ")[:2]) == ("error", ["HookRaisedError", "outputs"])
        assert "Tensors must have same number of dimensions" in stage.error["bad"]
        for name, seed, length, count in [("before", 1, 9, 3), ("after", 2, 30, 9)]:
            assert stage.tokens[name] == oracle.say(prompt(length, seed), count).tokens
        stage.assert_idle()
        heard.append(rebased(everything(stage)))
    alike(*heard)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_abort_while_outputs_are_on_their_way(served, oracle, prompt, async_scheduling):
    stage = served("ToyStatic", True, async_scheduling=async_scheduling, max_num_batched_tokens=16)
    stage.add("goes", prompt(40, 1), 50)
    stage.add("stays", prompt(9, 2), 20)
    waiting = []
    for step in stage.steps():
        waiting.append(sum(not gate.is_set() for gate in stage.late.gates))
        if step == 9:
            stage.abort("goes")
    assert (waiting[9] > 0) == async_scheduling  # a step's outputs, "goes" among them, were not made yet
    assert stage.tokens["stays"] == oracle.say(prompt(9, 2), 20).tokens
    onward = stage.catcher.onward[stage.ids["stays"]]
    assert torch.cat([part["position"] for part in onward]).tolist() == list(range(28))
    memory = stage.runner.model_intermediate_buffer.outputs
    stage.run().assert_idle()
    assert not memory.held and not memory.taken
    assert all(gate.is_set() for gate in stage.late.gates)


def test_close_while_outputs_are_on_their_way(checkpoints, engine, oracle, prompt):
    other = engine("Qwen2ForCausalLM")  # the last engine's end would take the process groups along
    stage = Harness(spec_of(checkpoints["ToyStatic"], engine_extras=BACKGROUND), {"async_scheduling": True})
    stage.runner.materialiser = late = Late(stage.runner)
    stage.add("a", prompt(9), 20)
    for _ in range(4):
        stage.step()
    worker = late._worker
    assert not late.gates[-1].is_set() and worker is not None
    stage.engine.close()
    assert not any(thread.is_alive() for thread in worker._threads)
    other.add("a", prompt(9), 5)
    assert other.run().tokens["a"] == oracle.say(prompt(9), 5).tokens


@pytest.mark.covers("RT-6")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_to_hand_out_starts_no_thread(engine, prompt, async_scheduling):
    stage = engine("ToyConditioned", spec={"engine_extras": BACKGROUND}, async_scheduling=async_scheduling)
    stage.add("a", prompt(9), 5, rows=torch.zeros(3, 64))
    stage.run()
    assert stage.runner.materialiser.background and stage.runner.materialiser._worker is None


def test_another_way_is_refused(checkpoints):
    with pytest.raises(
        ConfigError, match=r"^toy\.engine_extras\.output_materialisation: not 'later' \(allowed: inline, background\)$"
    ):
        make_config(spec_of(checkpoints["ToyMTP"], engine_extras={"output_materialisation": "later"}), {})
