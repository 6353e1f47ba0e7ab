"""Outputs made in the step or later, by another thread, from nothing but what the step left them (RT-7)."""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from stagevox.config.deploy import Extras
from stagevox.contract import CODES, OwnedBatchTensor, RowPhase
from stagevox.errors import HookCountError, HookRaisedError
from stagevox.stage.materialise import MODES, Materialiser
from stagevox.stage.outputs import OutputMemory, plan_outputs
from stagevox.stage.wire import OmniAsyncOutput
from tests.unit.stage.toy import BatchMTPModel, Steps

pytestmark = pytest.mark.covers("RT-7")

CHUNKS = [
    [("a", 0, 3, 7, 7), ("b", 5, 1, 4, 6)],  # the first chunk of a prompt, and a decode row
    [("b", 6, 1, 4, 7), ("a", 3, 4, 7, 7)],  # reordered; the prompt's last chunk
    [("a", 0, 2, 7, 8), ("b", 7, 1, 4, 8)],  # a was preempted: a replay
    [("a", 2, 6, 7, 8), ("b", 8, 1, 4, 9)],
]
EXPECTED = [
    {"b": [5]},
    {"b": [6], "a": [0, 1, 2, 3, 4, 5, 6]},
    {"b": [7]},
    {"a": [7], "b": [8]},
]


def rows_of(spans):
    rows, start = [], 0
    for req_id, computed, span, prompt, known in spans:
        rows.append(RowPhase(req_id, start, span, computed, prompt, known))
        start += span
    return rows


def play(*, snapshot):
    """The steps of CHUNKS over one piece of storage, each copied before the next if not a snapshot; nothing is made yet."""
    memory, storage, steps = OutputMemory(), torch.zeros(16, dtype=torch.int64), []
    for spans in CHUNKS:
        rows = rows_of(spans)
        storage.fill_(-1)
        for row in rows:
            storage[row.start : row.end] = torch.arange(row.num_computed, row.num_computed + row.span)
        single = [storage[row.start : row.start + 1] for row in rows]
        values = {"x": storage, "y": OwnedBatchTensor(storage.clone()), "first": single}
        step = plan_outputs(rows, values, rows[-1].end, memory, snapshot=snapshot)
        if not snapshot:
            step.copy()
        steps.append(step)
    storage.fill_(-2)
    return memory, steps


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("snapshot", [False, True], ids=["inline", "background"])
def test_steps_are_booked_in_their_order_whenever_they_are_made(snapshot, order):
    memory, steps = play(snapshot=snapshot)
    assert memory.taken == {"a": 8, "b": 9} and not memory.held
    made = {index: steps[index].result() for index in order}
    for index, expected in enumerate(EXPECTED):
        outputs = made[index]
        assert {req_id: named["x"].tolist() for req_id, named in outputs.items()} == expected
        assert {req_id: named["y"].tolist() for req_id, named in outputs.items()} == expected
    assert made[1]["a"]["first"].tolist() == [3] and made[3]["a"]["first"].tolist() == [2]


def test_a_request_that_is_dropped_meanwhile_leaves_nothing():
    memory, steps = play(snapshot=True)
    memory.drop("a")
    made = steps[1].result()
    assert made["a"]["x"].tolist() == EXPECTED[1]["a"]
    assert "a" not in memory.taken and not memory.held


def test_what_cannot_be_cut_books_nothing():
    memory, rows = OutputMemory(), rows_of(CHUNKS[0])
    with pytest.raises(HookCountError):
        plan_outputs(rows, {"x": torch.zeros(4), "y": torch.zeros(3)}, 4, memory)
    assert not memory.taken and not memory.held


@pytest.mark.covers("RT-6")
def test_a_step_that_samples_nobody_makes_nothing():
    memory = OutputMemory()
    assert plan_outputs(rows_of([("a", 0, 3, 7, 7)]), {"x": torch.arange(3)}, 3, memory) is None
    assert [part.tolist() for part in memory.held["a"]["x"]] == [[0, 1, 2]]


def test_request_ids_are_those_that_were_copied_already():
    ids = [f"request {name}" for name in "ab"]
    rows = [RowPhase(req_id, index, 1, 4, 4, 5) for index, req_id in enumerate(ids)]
    step = plan_outputs(rows, {"x": torch.arange(2)}, 2, snapshot=True)
    assert all(one is other for one, other in zip(step.result(), ids, strict=True))
    assert all(one is other for one, other in zip(step.req_ids, ids, strict=True))


@pytest.fixture(params=[False, True], ids=["inline", "background"])
def materialiser(request):
    made = Materialiser(background=request.param)
    yield made
    made.close()


def planned(materialiser, values=None):
    rows = [RowPhase(name, index, 1, 4, 4, 5) for index, name in enumerate("ab")]
    return plan_outputs(rows, values or {"x": torch.tensor([[4], [40]])}, 2, snapshot=materialiser.background)


def test_both_ways_give_the_same(materialiser):
    outputs, failed = materialiser.start(planned(materialiser)).join()
    assert outputs["a"]["x"].tolist() == [[4]] and outputs["b"]["x"].tolist() == [[40]] and not failed


@pytest.mark.parametrize("where", ["copy", "result"])
def test_what_fails_there_fails_the_requests_of_its_step_by_name(materialiser, where):
    step = planned(materialiser)

    def broken():
        raise ValueError("no memory left")

    setattr(step, where, broken)
    if materialiser.background:
        step.result = broken  # both halves are one there
    outputs, failed = materialiser.start(step).join()
    assert outputs == {} and set(failed) == {"a", "b"}
    assert all(type(error) is HookRaisedError for error in failed.values())
    assert str(failed["a"]) == "outputs: ValueError: no memory left"
    outputs, failed = materialiser.start(planned(materialiser)).join()
    assert set(outputs) == {"a", "b"} and not failed  # the thread lives on


def test_closing_while_one_is_made_and_one_waits():
    materialiser = Materialiser(background=True)
    gate, entered = threading.Event(), threading.Event()
    first, second = planned(materialiser), planned(materialiser)
    make = first.result

    def held_up():
        entered.set()
        assert gate.wait(30)
        return make()

    first.result = held_up
    pending = [materialiser.start(first), materialiser.start(second)]
    assert entered.wait(30)
    closer = threading.Thread(target=materialiser.close)
    closer.start()
    outputs, failed = pending[1].join()  # dropped, not waited for
    assert not outputs and set(failed) == {"a", "b"}
    gate.set()
    closer.join(30)
    assert not closer.is_alive()
    assert set(pending[0].join()[0]) == {"a", "b"}
    assert not any(thread.name.startswith("stagevox-outputs") for thread in threading.enumerate())


def test_outputs_that_nobody_joins_are_freed(materialiser):
    step = planned(materialiser)
    seen = weakref.ref(step)
    materialiser.start(step)
    del step
    materialiser.close()  # the thread has ended
    gc.collect()
    assert seen() is None


class Late(Materialiser):
    """Holds every step back until it is joined."""

    def start(self, step):
        gate, make = threading.Event(), step.result

        def held_up():
            assert gate.wait(30)
            return make()

        step.result = held_up
        pending = super().start(step)
        join = pending.join

        def opened():
            gate.set()
            return join()

        pending.join = opened
        return pending


class StaticModel(BatchMTPModel):
    """Exports from storage that the next step writes anew."""

    omni_pooler_payload_include_hidden = True


def test_the_runners_next_step_runs_before_the_outputs_of_the_last_are_made():
    """Deterministic: step n's are made only after step n + 1 has overwritten what they were made of."""
    steps = Steps(StaticModel())
    steps.runner.materialiser = Late(background=True)
    steps.decoding("n", 9, 2, 20)
    storage = torch.full((64, 4), -5.0)
    late = []
    for _ in range(3):
        steps.run(("n", 1))
        runner = steps.runner
        storage[:1] = runner.inputs_embeds.gpu[:1]
        runner.execute_model_state = state_of(storage)
        late.append(runner.sample_tokens(None))
        steps.computed["n"] += 1
        steps.known["n"] = steps.computed["n"] + 1
    assert all(isinstance(output, OmniAsyncOutput) for output in late)
    assert storage[0, 1] == 22.0  # what the third step wrote
    for position, output in zip(range(20, 23), late, strict=True):
        made = output.get_output()
        assert made.inter_stage_outputs["n"]["hidden"][0, 1] == position
        assert made.inter_stage_outputs["n"][CODES].tolist() == [[900 + position, 9, position - 1]]
        assert made.multimodal_outputs["n"].keys() == {CODES}
    steps.runner.materialiser.close()


def state_of(hidden):
    return SimpleNamespace(hidden_states=hidden, scheduler_output=SimpleNamespace(scheduled_spec_decode_tokens={}))


def test_a_deploy_file_knows_the_same_ways():
    choices = get_args(get_args(Extras.model_fields["output_materialisation"].annotation)[0])
    assert choices == MODES
