"""The contract itself allocates nothing that stays, and no tensor at all, on the hot path (PC-11).

Two measures over steady decode steps of a model whose hooks return tensors they already hold. The operators that torch dispatches inside
``_preprocess``: views and copies into existing buffers only, so no tensor storage is made for rows, phase, routing or writing back.
And Python's own memory after each step: what a step makes (rows, the infos handed to hooks) is gone when it ends. With MTP the frame
log keeps two tensors a step, its frames, and nothing else.
"""

import tracemalloc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stagevox.contract import NUM_COMPUTED_TOKENS
from tests.unit.stage.toy import HIDDEN, BatchModel, ScalarModel, Steps

pytestmark = pytest.mark.covers("PC-11")

NAMES = ["a", "b", "c"]
IN_PLACE = {"aten.slice.Tensor", "aten.copy_.default", "aten.fill_.Tensor", "aten.zero_.default"}


class Operators(TorchDispatchMode):
    """The names of all operators that run while it is on."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Held:
    """Hooks that answer with what they were given and what they hold."""

    def __init__(self):
        super().__init__()
        self.row, self.rows = torch.ones(1, HIDDEN), torch.ones(len(NAMES), HIDDEN)
        self.codes = torch.zeros(len(NAMES), 2, dtype=torch.int64)
        self.updates = [{}] * len(NAMES)
        self.asked = self.batched = self.completed = 0

    def embed_input_ids(self, input_ids):
        return self.row

    def preprocess(self, input_ids, input_embeds, **info):
        self.asked += 1
        return input_ids, self.row, {}

    def postprocess(self, hidden, **info):
        return {}


class HeldScalar(Held, ScalarModel):
    pass


class HeldBatch(Held, BatchModel):
    def preprocess_decode_batch(self, *, input_ids, req_infos):
        self.batched += 1
        assert [info[NUM_COMPUTED_TOKENS] > 0 for info in req_infos] == [True] * 3
        return input_ids, self.rows, self.updates


class HeldMTP(HeldBatch):
    def preprocess_decode_batch(self, *, input_ids, req_infos):
        self.batched += 1
        return input_ids, self.rows, self.rows, self.rows, self.updates

    def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
        self.completed += 1
        return self.rows, self.codes


def decoding(kind):
    steps = Steps(kind(), record=False)
    for tag, name in enumerate(NAMES, start=1):
        steps.add(name, tag, 2, cached=2, known=3)
    return steps


def advance(steps):
    """The next step's counts, set in place as vLLM does."""
    batch = steps.runner.input_batch
    batch.num_computed_tokens_cpu[: len(NAMES)] += 1
    batch.num_tokens_no_spec[: len(NAMES)] += 1


def again(steps):
    return steps.runner._preprocess(steps.output, len(NAMES), None)


@pytest.mark.parametrize("kind", [HeldScalar, HeldBatch])
def test_no_tensor_is_made_without_mtp(kind):
    steps = decoding(kind)
    steps.run(*((name, 1) for name in NAMES))
    advance(steps)
    with Operators() as operators:
        again(steps)
    model = steps.model
    assert (model.asked, model.batched) == ((6, 0) if kind is HeldScalar else (0, 2))
    assert "aten.copy_.default" in operators.names
    assert set(operators.names) <= IN_PLACE, operators.names


def test_with_mtp_only_the_logged_frames_are_made():
    steps = decoding(HeldMTP)
    steps.run(*((name, 1) for name in NAMES))
    advance(steps)
    with Operators() as operators:
        again(steps)
    assert (steps.model.batched, steps.model.completed) == (2, 2)
    made = [name for name in operators.names if name not in IN_PLACE]
    assert made == ["aten.clone.default"] * 2


@pytest.mark.parametrize("kind", [HeldScalar, HeldBatch])
def test_python_memory_stands_still(kind):
    steps = decoding(kind)
    steps.run(*((name, 1) for name in NAMES))

    def play(count):
        for _ in range(count):
            advance(steps)
            again(steps)

    play(50)
    tracemalloc.start()
    try:
        play(5)
        before = tracemalloc.get_traced_memory()[0]
        play(100)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert steps.model.asked + 3 * steps.model.batched == 3 * 156
    assert grown < 1000  # not a dictionary's worth in a hundred steps


@pytest.mark.parametrize("kind", [HeldScalar, HeldBatch, HeldMTP])
def test_buffers_stay_where_they_are(kind):
    steps = decoding(kind)
    runner = steps.runner
    where = {id(runner.input_ids.gpu), id(runner.inputs_embeds.gpu), id(runner.model_intermediate_buffer), id(runner._router)}
    spots = runner.input_ids.gpu.data_ptr(), runner.inputs_embeds.gpu.data_ptr()
    steps.run(*((name, 1) for name in NAMES))
    for _ in range(20):
        advance(steps)
        result = again(steps)
        assert result[1].data_ptr() == spots[1]
    assert (runner.input_ids.gpu.data_ptr(), runner.inputs_embeds.gpu.data_ptr()) == spots
    assert where == {
        id(runner.input_ids.gpu),
        id(runner.inputs_embeds.gpu),
        id(runner.model_intermediate_buffer),
        id(runner._router),
    }
