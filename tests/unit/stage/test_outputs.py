"""A step's tensors by request."""

import pytest
import torch

from stagevox.contract import OwnedBatchTensor, RowPhase
from stagevox.errors import HookCountError, HookShapeError
from stagevox.stage.outputs import owned
from tests.unit.stage.slices import slice_outputs
from tests.unit.stage.toy import MTP, PROMPT_HOOK, BatchMTPModel, ScalarModel, Steps, row

SPANS = {"a": 3, "b": 1, "c": 5}


def rows_of(spans, unsampled=()):
    rows, start = [], 0
    for name, span in spans.items():
        rows.append(RowPhase(name, start, span, 0, span, span + (name in unsampled)))
        start += span
    return rows


def token_axis(rows):
    """``[num_tokens, 2]``: which request (as a letter's code) and which of its rows."""
    return torch.tensor([[ord(one.req_id), offset] for one in rows for offset in range(one.span)])


@pytest.mark.covers("EX-4", "EX-5", "EX-15")
@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_unequal_spans_are_cut_by_offset(order):
    rows = rows_of({name: SPANS[name] for name in order})
    outputs = slice_outputs(rows, {"x": token_axis(rows)}, 9)
    assert list(outputs) == list(order)
    for name in order:
        assert outputs[name]["x"].tolist() == [[ord(name), offset] for offset in range(SPANS[name])]


@pytest.mark.covers("EX-5", "EX-14")
def test_padding_reaches_nobody():
    rows = rows_of(SPANS)
    padded = torch.cat([token_axis(rows), torch.full((7, 2), -1)])
    outputs = slice_outputs(rows, {"x": padded, "y": token_axis(rows)}, 9)
    for name, span in SPANS.items():
        assert len(outputs[name]["x"]) == span
        assert outputs[name]["x"].equal(outputs[name]["y"])
        assert (outputs[name]["x"] >= 0).all()


@pytest.mark.covers("EX-5", "EX-14")
def test_padded_hidden_beside_unpadded_fields():
    """The true axis comes from the scheduled counts, in the runner's own collection too."""

    class Model(BatchMTPModel):
        omni_pooler_payload_include_hidden = True

    steps = Steps(Model())
    steps.add("a", 1, 3)
    steps.decoding("n", 9, 2, 20)
    steps.run(("a", 3), ("n", 1), pad=4)
    out = steps.finish()
    assert out.inter_stage_outputs["a"]["hidden"].tolist() == [row(1, position, PROMPT_HOOK) for position in range(3)]
    assert out.inter_stage_outputs["n"]["hidden"].tolist() == [row(9, 20, 2.0 + MTP)]
    assert out.inter_stage_outputs["n"]["codes.audio"].tolist() == [[920, 9, 19]]
    assert set(out.multimodal_outputs) == {"n"}
    assert set(out.multimodal_outputs["n"]) == {"codes.audio"}


@pytest.mark.covers("PC-14")
def test_rows_that_are_not_sampled_get_nothing():
    rows = rows_of(SPANS, unsampled="b")
    outputs = slice_outputs(rows, {"x": token_axis(rows), "one": ["A", "B", "C"]}, 9)
    assert list(outputs) == ["a", "c"]
    assert outputs["c"]["x"][0].tolist() == [ord("c"), 0]
    assert (outputs["a"]["one"], outputs["c"]["one"]) == ("A", "C")


@pytest.mark.parametrize("values", [None, {}])
@pytest.mark.covers("RT-6")
def test_no_values_no_outputs(values):
    assert slice_outputs(rows_of(SPANS), values, 9) == {}


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (torch.zeros(8, 2), HookCountError, "make_omni_output: expected 9 rows of x, got 8"),
        ([1, 2], HookCountError, "make_omni_output: expected 3 values of x, got 2"),
        (7, HookShapeError, "make_omni_output: x is a int, not a tensor or a sequence"),
    ],
)
def test_what_does_not_fit_is_named(value, kind, says):
    with pytest.raises(kind) as caught:
        slice_outputs(rows_of(SPANS), {"x": value}, 9)
    assert str(caught.value) == says


@pytest.mark.covers("EX-10")
def test_storage_is_copied_unless_it_is_handed_over():
    mine = torch.ones(2)
    assert owned(OwnedBatchTensor(mine)) is mine
    copy = owned(mine)
    mine.zero_()
    assert copy.tolist() == [1.0, 1.0]
    assert owned("text") == "text"


@pytest.mark.covers("EX-10")
def test_outputs_outlive_the_models_reused_storage():
    rows = rows_of(SPANS)
    reused, given = token_axis(rows), token_axis(rows)
    outputs = slice_outputs(rows, {"x": reused, "list": [reused[:1]] * 3, "y": OwnedBatchTensor(given)}, 9)
    reused.fill_(-1)
    assert outputs["b"]["x"].tolist() == [[ord("b"), 0]]
    assert outputs["b"]["list"].tolist() == [[ord("a"), 0]]
    assert outputs["b"]["y"].data_ptr() == given[3:].data_ptr()


@pytest.mark.covers("EX-5")
def test_the_two_roads_are_built_apart():
    """What one side does to its dictionary, the other doesn't see."""
    steps = Steps(BatchMTPModel())
    steps.decoding("n", 9, 2, 20)
    steps.run(("n", 1))
    out = steps.finish()
    assert out.inter_stage_outputs["n"] is not out.multimodal_outputs["n"]
    out.multimodal_outputs["n"].clear()
    assert out.inter_stage_outputs["n"]["codes.audio"].tolist() == [[920, 9, 19]]


@pytest.mark.covers("RT-6")
def test_nothing_is_built_where_there_is_nothing(monkeypatch):
    """No hidden, no multimodal payload: the slicing isn't entered, and upstream's own output object comes back unwrapped."""
    import stagevox.stage.runner as runner
    import stagevox.stage.wire as wire

    def never(*args, **kwargs):
        raise AssertionError("built a payload")

    monkeypatch.setattr(runner, "plan_outputs", never)
    monkeypatch.setattr(wire.OmniModelRunnerOutput, "wrap", never)
    steps = Steps(ScalarModel())
    steps.add("a", 1, 3)
    steps.run(("a", 3))
    out = steps.finish()
    assert type(out).__name__ == "ModelRunnerOutput"
    assert steps.state("a")["last_hidden"].tolist() == [row(1, 2, PROMPT_HOOK)]  # pending postprocess ran all the same
    with pytest.raises(AssertionError, match="built a payload"):  # the guard would have seen it
        steps = Steps(BatchMTPModel())
        steps.decoding("n", 9, 2, 20)
        steps.run(("n", 1))
        steps.finish()


@pytest.mark.parametrize("value", [torch.tensor(1.0), OwnedBatchTensor(torch.tensor(1)), OwnedBatchTensor(None)])
def test_a_value_without_a_token_axis_is_named(value):
    with pytest.raises(HookShapeError, match="^make_omni_output: x has no token axis$"):
        slice_outputs(rows_of(SPANS), {"x": value}, 9)
