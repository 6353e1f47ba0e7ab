"""A hook that returns the wrong thing is told so under its name, with both numbers (PC-6, PC-10)."""

import pytest
import torch

from stagevox.contract import OmniOutput, check_batch, check_mtp, check_mtp_inputs, check_output, check_row, check_update
from stagevox.errors import ContractError, HookCountError, HookShapeError

H = 4
SPAN = 3


def ids(n=SPAN):
    return torch.arange(n)


def rows(n=SPAN, width=H):
    return torch.zeros(n, width)


def row_result(**changes):
    good = {"ids": ids(), "embeds": rows(), "update": {}}
    return tuple({**good, **changes}.values())


def batch_result(**changes):
    good = {"ids": ids(), "embeds": rows(), "last": rows(), "text": rows(), "updates": [{}] * SPAN}
    return tuple({**good, **changes}.values())


def counts(caught):
    """Expected and found, from the error's fields and its words alike."""
    error = caught.value
    assert f"expected {error.expected} " in str(error)
    assert str(error).endswith(f"got {error.got}")
    return error.expected, error.got


@pytest.mark.covers("PC-10")
@pytest.mark.parametrize(
    ("result", "what", "got"),
    [
        (row_result(ids=ids(2)), "rows of input_ids", 2),
        (row_result(embeds=rows(1)), "rows of input_embeds", 1),  # would broadcast over the span
        (row_result(embeds=rows(2)), "rows of input_embeds", 2),
        (row_result(embeds=rows(4)), "rows of input_embeds", 4),
        (row_result(embeds=rows(0)), "rows of input_embeds", 0),
    ],
)
def test_row_counts(result, what, got):
    with pytest.raises(HookCountError, match=rf"^preprocess: .*{what}") as caught:
        check_row(result, SPAN, H)
    assert counts(caught) == (SPAN, got)


@pytest.mark.covers("PC-10")
def test_row_result_count():
    with pytest.raises(HookCountError, match=r"^preprocess: .*results") as caught:
        check_row((ids(), rows()), SPAN, H)
    assert counts(caught) == (3, 2)


@pytest.mark.covers("PC-10")
@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, r"returned a NoneType, not a tuple"),
        ([ids(), rows(), {}], r"returned a list, not a tuple"),
        (row_result(ids=None), r"input_ids is a NoneType, not a tensor"),
        (row_result(ids=rows()), r"input_ids has shape \[3, 4\], expected \[3\]"),
        (row_result(embeds=[0.0] * SPAN), r"input_embeds is a list, not a tensor"),
        (row_result(embeds=rows(SPAN, 5)), r"input_embeds has shape \[3, 5\], expected \[3, 4\]"),
        (row_result(embeds=torch.zeros(SPAN * H)), r"input_embeds has shape \[12\], expected \[3, 4\]"),
        (row_result(embeds=torch.zeros(1, SPAN, H)), r"input_embeds has shape \[1, 3, 4\], expected \[3, 4\]"),
        (row_result(update=None), r"update is a NoneType, not a mapping"),
    ],
)
def test_row_shapes(result, says):
    with pytest.raises(HookShapeError, match=rf"^preprocess: {says}"):
        check_row(result, SPAN, H)


def test_a_right_row_passes_through_untouched():
    result = row_result()
    checked = check_row(result, SPAN, H)
    assert all(a is b for a, b in zip(checked, result, strict=True))


@pytest.mark.covers("PC-6")
@pytest.mark.parametrize(
    ("result", "what", "got"),
    [
        (batch_result(ids=ids(2)), "rows of input_ids", 2),
        (batch_result(embeds=rows(1)), "rows of input_embeds", 1),
        (batch_result(last=rows(2)), "rows of last_hidden", 2),
        (batch_result(text=rows(4)), "rows of text_step", 4),
        (batch_result(updates=[{}] * 2), "updates", 2),
        (batch_result(updates=[]), "updates", 0),
    ],
)
def test_batch_counts(result, what, got):
    with pytest.raises(HookCountError, match=rf"^preprocess_decode_batch: .*{what}") as caught:
        check_batch(result, SPAN, H, mtp=True)
    assert counts(caught) == (SPAN, got)


@pytest.mark.covers("PC-6")
@pytest.mark.parametrize(("mtp", "expected", "got"), [(True, 5, 3), (False, 3, 5)])
def test_number_of_results_depends_on_mtp(mtp, expected, got):
    five = batch_result()
    three = (five[0], five[1], five[4])
    check_batch(five if mtp else three, SPAN, H, mtp=mtp)
    with pytest.raises(HookCountError, match=r"^preprocess_decode_batch: .*results") as caught:
        check_batch(three if mtp else five, SPAN, H, mtp=mtp)
    assert counts(caught) == (expected, got)


@pytest.mark.covers("PC-6")
@pytest.mark.parametrize(
    ("result", "says"),
    [
        (7, "returned a int, not a tuple"),
        (batch_result(embeds=rows(SPAN, 3)), r"input_embeds has shape \[3, 3\], expected \[3, 4\]"),
        (batch_result(last=rows(SPAN, 3)), r"last_hidden has shape \[3, 3\], expected \[3, 4\]"),
        (batch_result(text=None), "text_step is a NoneType, not a tensor"),
        (batch_result(updates={"a": 1}), "updates is a dict, not a sequence"),
        (batch_result(updates=[{}, None, {}]), "update is a NoneType, not a mapping"),
        (batch_result(updates=[{}, {1: 2}, {}]), "update has the key 1, which can't be a keyword"),
    ],
)
def test_batch_shapes(result, says):
    with pytest.raises(HookShapeError, match=rf"^preprocess_decode_batch: {says}"):
        check_batch(result, SPAN, H, mtp=True)


@pytest.mark.covers("PC-6", "PC-8")
@pytest.mark.parametrize(
    ("result", "kind", "says"),
    [
        ((rows(),), HookCountError, "expected 2 results, got 1"),
        ((rows(2), torch.zeros(SPAN, 4)), HookCountError, "expected 3 rows of embeds, got 2"),
        ((rows(), torch.zeros(2, 4)), HookCountError, "expected 3 rows of codes, got 2"),
        ((rows(SPAN, 9), torch.zeros(SPAN, 4)), HookShapeError, r"embeds has shape \[3, 9\], expected \[3, 4\]"),
        ((rows(), torch.zeros(SPAN)), HookShapeError, r"codes is not a tensor \[N, Q\]"),
        ((rows(), None), HookShapeError, r"codes is not a tensor \[N, Q\]"),
        (None, HookShapeError, "returned a NoneType, not a tuple"),
    ],
)
def test_mtp(result, kind, says):
    with pytest.raises(kind, match=rf"^talker_mtp: {says}"):
        check_mtp(result, SPAN, H)


@pytest.mark.covers("PC-4", "PC-8")
@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (rows(1), HookShapeError, "returned a Tensor, not a tuple"),
        ((rows(1),), HookCountError, "expected 2 results, got 1"),
        ((rows(2), rows(1)), HookCountError, r"expected 1 rows of mtp_inputs\[0\] \(last_hidden\), got 2"),
        ((rows(1), rows(0)), HookCountError, r"expected 1 rows of mtp_inputs\[1\] \(text_step\), got 0"),
        ((rows(1), torch.zeros(H)), HookShapeError, r"mtp_inputs\[1\] \(text_step\) has shape \[4\], expected \[1, 4\]"),
    ],
)
def test_mtp_inputs(value, kind, says):
    with pytest.raises(kind, match=rf"^preprocess: {says}"):
        check_mtp_inputs(value, H)


@pytest.mark.covers("EX-7")
@pytest.mark.parametrize("update", [None, 7, [("a", 1)]])
def test_a_single_update(update):
    assert check_update("postprocess", {"a": 1}) == {"a": 1}
    with pytest.raises(HookShapeError, match=rf"^postprocess: update is a {type(update).__name__}, not a mapping"):
        check_update("postprocess", update)


@pytest.mark.covers("EX-5", "EX-14")
@pytest.mark.parametrize(
    ("result", "kind", "says"),
    [
        (None, HookShapeError, "returned a NoneType, not an OmniOutput"),
        (rows(), HookShapeError, "returned a Tensor, not an OmniOutput"),
        (OmniOutput(None), HookShapeError, r"text_hidden_states is not a tensor \[num_tokens, H\]"),
        (OmniOutput(torch.zeros(SPAN)), HookShapeError, r"text_hidden_states is not a tensor \[num_tokens, H\]"),
        (OmniOutput(rows(3), [1]), HookShapeError, "multimodal_outputs is a list, not a mapping"),
        (OmniOutput(rows(2)), HookCountError, "expected 3 rows of text_hidden_states, got 2"),
    ],
)
def test_output(result, kind, says):
    with pytest.raises(kind, match=rf"^make_omni_output: {says}"):
        check_output(result, SPAN)


@pytest.mark.covers("EX-14")
@pytest.mark.parametrize("count", [SPAN, SPAN + 5])
def test_an_output_may_be_padded(count):
    result = OmniOutput(rows(count))
    assert check_output(result, SPAN) is result


def test_the_hook_can_be_read_from_the_error():
    with pytest.raises(ContractError) as caught:
        check_mtp(None, 1, H)
    assert caught.value.hook == "talker_mtp"
