"""A hook that fails on the production ``_preprocess`` costs its own request, whose rows are zeroed; the others are right (EX-16)."""

import pytest
import torch

from stagevox.contract import NUM_COMPUTED_TOKENS
from stagevox.errors import HookCountError, HookRaisedError, HookShapeError
from tests.unit.stage.toy import (
    BATCH_HOOK,
    HIDDEN,
    MTP,
    PROMPT_HOOK,
    BatchModel,
    BatchMTPModel,
    ScalarModel,
    ScalarMTPModel,
    Steps,
    row,
)

pytestmark = pytest.mark.covers("EX-16")


def broken(base, hook, fault):
    """``base`` whose ``hook`` misbehaves for the request named ``bad``: ``fault`` changes what it returns, or raises."""

    class Model(base):
        def preprocess(self, input_ids, input_embeds, **info):
            result = super().preprocess(input_ids, input_embeds, **info)
            return fault(result) if hook == "preprocess" and info["name"] == "bad" else result

        def postprocess(self, hidden, **info):
            result = super().postprocess(hidden, **info)
            return fault(result) if hook == "postprocess" and info["name"] == "bad" else result

    if hook == "preprocess_decode_batch":

        def preprocess_decode_batch(self, *, input_ids, req_infos):
            result = base.preprocess_decode_batch(self, input_ids=input_ids, req_infos=req_infos)
            return fault(result) if any(info["name"] == "bad" for info in req_infos) else result

        Model.preprocess_decode_batch = preprocess_decode_batch
    if hook == "talker_mtp":

        def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
            result = base.talker_mtp(self, input_ids, input_embeds, last_hidden, text_step)
            return fault(result) if 6 in last_hidden[:, 0].tolist() else result

        Model.talker_mtp = talker_mtp
    return Steps(Model())


def boom(result):
    raise KeyError("no such voice")


def with_rows(change):
    return lambda result: (result[0], change(result[1]), *result[2:])


def short(embeds):
    return embeds[:-1]


def narrow(embeds):
    return embeds[:, :-1]


ZERO = [0.0] * HIDDEN


@pytest.mark.covers("PC-10")
@pytest.mark.parametrize("base", [ScalarModel, BatchMTPModel])
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (boom, HookRaisedError, "preprocess: KeyError: 'no such voice'"),
        (with_rows(short), HookCountError, "preprocess: expected 3 rows of input_embeds, got 2"),
        (with_rows(lambda embeds: embeds[:1]), HookCountError, "preprocess: expected 3 rows of input_embeds, got 1"),
        (with_rows(narrow), HookShapeError, "preprocess: input_embeds has shape [3, 3], expected [3, 4]"),
    ],
)
def test_preprocess(base, fault, kind, says):
    steps = broken(base, "preprocess", fault)
    steps.decoding("n", 9, 4, 20)
    steps.add("bad", 6, 8)
    steps.add("c", 3, 8)
    rows = steps.run(("c", 2), ("bad", 3), ("n", 1))
    assert set(steps.failed) == {"bad"}
    assert isinstance(steps.failed["bad"], kind)
    assert str(steps.failed["bad"]) == says
    assert rows["bad"].tolist() == [ZERO] * 3
    assert rows["c"].tolist() == [row(3, 0, PROMPT_HOOK), row(3, 1, PROMPT_HOOK)]
    source = BATCH_HOOK + MTP if base is BatchMTPModel else PROMPT_HOOK
    assert rows["n"].tolist() == [row(9, 20, source)]
    if base is BatchMTPModel:
        assert steps.codes == {"n": [[920, 9, 19]]}


@pytest.mark.covers("PC-6")
@pytest.mark.parametrize("base", [BatchModel, BatchMTPModel])
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (boom, HookRaisedError, "preprocess_decode_batch: KeyError: 'no such voice'"),
        (with_rows(short), HookCountError, "preprocess_decode_batch: expected 1 rows of input_embeds, got 0"),
        (with_rows(narrow), HookShapeError, "preprocess_decode_batch: input_embeds has shape [1, 3], expected [1, 4]"),
        (lambda result: (*result[:-1], [*result[-1], {}]), HookCountError, "preprocess_decode_batch: expected 1 updates, got 2"),
        (lambda result: result[:2], HookCountError, "preprocess_decode_batch: expected {} results, got 2"),
    ],
)
def test_preprocess_decode_batch(base, fault, kind, says):
    steps = broken(base, "preprocess_decode_batch", fault)
    for tag, name in [(1, "a"), (6, "bad"), (2, "b")]:
        steps.decoding(name, tag, 2, 10 + tag)
    rows = steps.run(("a", 1), ("bad", 1), ("b", 1))
    assert isinstance(steps.failed["bad"], kind)
    assert str(steps.failed["bad"]) == says.format(5 if base is BatchMTPModel else 3)
    assert set(steps.failed) == {"bad"}
    source = BATCH_HOOK + (MTP if base is BatchMTPModel else 0)
    assert rows["a"].tolist() == [row(1, 11, source)]
    assert rows["bad"].tolist() == [ZERO]
    assert rows["b"].tolist() == [row(2, 12, source)]
    if base is BatchMTPModel:
        assert steps.codes == {"a": [[111, 1, 10]], "b": [[212, 2, 11]]}


@pytest.mark.covers("PC-6", "PC-8")
@pytest.mark.parametrize("base", [ScalarMTPModel, BatchMTPModel])
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (boom, HookRaisedError, "talker_mtp: KeyError: 'no such voice'"),
        (with_rows(short), HookCountError, "talker_mtp: expected 1 rows of codes, got 0"),
        (lambda result: (narrow(result[0]), result[1]), HookShapeError, "talker_mtp: embeds has shape [1, 3], expected [1, 4]"),
    ],
)
def test_talker_mtp(base, fault, kind, says):
    steps = broken(base, "talker_mtp", fault)
    for tag, name in [(1, "a"), (6, "bad"), (2, "b")]:
        steps.decoding(name, tag, 2, 10 + tag)
    rows = steps.run(("a", 1), ("bad", 1), ("b", 1))
    assert set(steps.failed) == {"bad"}
    assert isinstance(steps.failed["bad"], kind)
    assert str(steps.failed["bad"]) == says
    assert rows["bad"].tolist() == [ZERO]
    assert steps.codes == {"a": [[111, 1, 10]], "b": [[212, 2, 11]]}
    source = (BATCH_HOOK if base is BatchMTPModel else PROMPT_HOOK) + MTP
    assert rows["b"].tolist() == [row(2, 12, source)]


@pytest.mark.covers("PC-4")
def test_misshapen_mtp_inputs_fail_their_request():
    class Model(ScalarMTPModel):
        def preprocess(self, input_ids, input_embeds, **info):
            ids, embeds, update = super().preprocess(input_ids, input_embeds, **info)
            if info["name"] == "bad":
                update["mtp_inputs"] = (torch.zeros(2, HIDDEN), embeds)
            return ids, embeds, update

    steps = Steps(Model())
    steps.decoding("a", 1, 2, 11)
    steps.decoding("bad", 6, 2, 16)
    steps.run(("bad", 1), ("a", 1))
    assert str(steps.failed["bad"]) == "preprocess: expected 1 rows of mtp_inputs[0] (last_hidden), got 2"
    assert steps.codes == {"a": [[111, 1, 10]]}


def test_postprocess():
    steps = broken(BatchMTPModel, "postprocess", boom)
    steps.add("bad", 6, 3)
    steps.add("a", 1, 3)
    steps.run(("bad", 3), ("a", 3))
    out = steps.finish()
    assert set(out.failed) == {"bad"}
    assert str(out.failed["bad"]) == "postprocess: KeyError: 'no such voice'"
    assert steps.state("a")["last_hidden"].tolist() == [row(1, 2, PROMPT_HOOK)]
    assert "last_hidden" not in steps.state("bad")


@pytest.mark.parametrize(("update", "kind"), [(7, "int"), (None, "NoneType"), ([1], "list")])
def test_postprocess_that_returns_no_mapping(update, kind):
    steps = broken(BatchMTPModel, "postprocess", lambda result: update)
    steps.add("bad", 6, 3)
    steps.add("a", 1, 3)
    steps.run(("bad", 3), ("a", 3))
    out = steps.finish()
    assert {name: str(error) for name, error in out.failed.items()} == {"bad": f"postprocess: update is a {kind}, not a mapping"}
    assert "last_hidden" in steps.state("a")


def test_a_failed_request_is_not_asked_again():
    """Its rows in later steps stay zero until the scheduler has ended it; then nothing of it is left."""
    steps = broken(BatchMTPModel, "preprocess", boom)
    steps.decoding("n", 9, 4, 20)
    steps.add("bad", 6, 8)
    steps.run(("bad", 3), ("n", 1))
    steps.finish()
    before = len(steps.model.calls)
    rows = steps.run(("bad", 3), ("n", 1))
    steps.finish()
    assert rows["bad"].tolist() == [ZERO] * 3
    assert rows["n"].tolist() == [row(9, 21, BATCH_HOOK + MTP)]
    assert ["bad"] not in [names for _, names, _ in steps.model.calls[before:]]
    steps.runner._on_request_state_removed("bad", None)
    buffer = steps.runner.model_intermediate_buffer
    assert all("bad" not in held for held in (buffer, buffer.logs, buffer.post_seen, buffer.failed))


def test_the_models_own_named_error_keeps_its_name():
    from stagevox.errors import MissingStateError

    class Model(ScalarModel):
        def preprocess(self, input_ids, input_embeds, **info):
            raise MissingStateError("preprocess", "prefill_consumed_text_tokens was never stored")

    steps = Steps(Model())
    steps.add("a", 1, 3)
    steps.run(("a", 3))
    assert type(steps.failed["a"]) is MissingStateError
    assert str(steps.failed["a"]) == "preprocess: prefill_consumed_text_tokens was never stored"


def test_the_whole_batch_hook_fails_the_step():
    class Model(BatchModel):
        def preprocess_batch(self, *, input_ids, req_infos):
            raise ValueError("no")

    steps = Steps(Model())
    steps.add("a", 1, 3)
    steps.decoding("b", 2, 2, 5)
    rows = steps.run(("a", 3), ("b", 1))
    assert {name: str(error) for name, error in steps.failed.items()} == dict.fromkeys("ab", "preprocess_batch: ValueError: no")
    assert steps.model.calls == []
    assert rows["a"].tolist() == [ZERO] * 3


@pytest.mark.covers("PC-4")
@pytest.mark.parametrize("key", ["name", "hook", "model"])
def test_state_may_use_any_keyword_of_ours(key):
    """Nothing the runner's own helpers call their arguments is reserved in a model's state."""

    class Model(ScalarModel):
        def preprocess(self, input_ids, input_embeds, **info):
            self.got = info[key]
            return input_ids, input_embeds, {}

        def postprocess(self, hidden, **info):
            return {"posted": info[key]}

    steps = Steps(Model())
    steps.add("a", 1, 3)
    steps.runner.model_intermediate_buffer.apply("a", {key: "mine"})
    steps.step(("a", 3))
    assert steps.model.got == "mine"
    assert steps.state("a")["posted"] == "mine"


@pytest.mark.covers("PC-14")
def test_a_decode_row_without_mtp_inputs_may_be_followed_by_one_with_them():
    """``mtp_inputs`` are optional: a position without a frame leaves no gap that a later one stumbles over."""

    class Model(ScalarMTPModel):
        def preprocess(self, input_ids, input_embeds, **info):
            ids, embeds, update = super().preprocess(input_ids, input_embeds, **info)
            if info[NUM_COMPUTED_TOKENS] == 3:
                del update["mtp_inputs"]
            return ids, embeds, update

    steps = Steps(Model())
    steps.add("a", 1, 3)
    steps.step(("a", 3))
    assert steps.step(("a", 1))["a"] == [row(1, 3, PROMPT_HOOK)]
    assert steps.codes == {}
    assert steps.step(("a", 1))["a"] == [row(1, 4, PROMPT_HOOK + MTP)]
    assert steps.codes == {"a": [[104, 1, 3]]}
    steps.preempt("a")
    steps.run(("a", 6))
    steps.finish()
    assert not steps.failed
    assert steps.runner.inputs_embeds.gpu[3:5].tolist() == [row(1, 3, PROMPT_HOOK), row(1, 4, PROMPT_HOOK + MTP)]


@pytest.mark.parametrize(
    ("hook", "place"),
    [("preprocess", 0), ("preprocess", 1), ("preprocess_decode_batch", 0), ("preprocess_decode_batch", 1), ("talker_mtp", 0)],
)
def test_what_cannot_be_copied_fails_its_request(hook, place):
    """A tensor without storage stands for all that a copy stumbles over."""

    def fault(result):
        return (*result[:place], result[place].to("meta"), *result[place + 1 :])

    steps = broken(ScalarMTPModel if hook == "preprocess" else BatchMTPModel, hook, fault)
    for tag, name in [(1, "a"), (6, "bad"), (2, "b")]:
        steps.decoding(name, tag, 2, 10 + tag)
    rows = steps.run(("a", 1), ("bad", 1), ("b", 1))
    assert set(steps.failed) == {"bad"}
    assert str(steps.failed["bad"]).startswith(f"{hook}: returned what can't be copied: ")
    assert rows["bad"].tolist() == [ZERO]
    assert steps.codes == {"a": [[111, 1, 10]], "b": [[212, 2, 11]]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("base", [ScalarMTPModel, BatchMTPModel])
def test_other_types_are_converted_wherever_the_rows_stand(base, dtype):
    """Neighbours and rows with a prompt between them, which are written in another way."""

    class Model(base):
        def preprocess(self, input_ids, input_embeds, **info):
            ids, embeds, update = super().preprocess(input_ids, input_embeds, **info)
            return ids.int(), embeds.to(dtype), update

        def talker_mtp(self, *args):
            embeds, codes = super().talker_mtp(*args)
            return embeds.to(dtype), codes

    if base is BatchMTPModel:

        def preprocess_decode_batch(self, *, input_ids, req_infos):
            ids, embeds, *rest = base.preprocess_decode_batch(self, input_ids=input_ids, req_infos=req_infos)
            return ids.int(), embeds.to(dtype), *rest

        Model.preprocess_decode_batch = preprocess_decode_batch
    for apart in (False, True):
        steps = Steps(Model())
        for tag, name in [(1, "a"), (2, "b")]:
            steps.decoding(name, tag, 2, 10 + tag)
        steps.add("p", 3, 4)
        rows = steps.run(("a", 1), ("p", 4), ("b", 1)) if apart else steps.run(("a", 1), ("b", 1), ("p", 4))
        assert not steps.failed
        source = (BATCH_HOOK if base is BatchMTPModel else PROMPT_HOOK) + MTP
        assert (rows["a"].tolist(), rows["b"].tolist()) == ([row(1, 11, source)], [row(2, 12, source)])
        assert rows["p"].tolist() == [row(3, position, PROMPT_HOOK) for position in range(4)]
        assert steps.codes == {"a": [[111, 1, 10]], "b": [[212, 2, 11]]}


@pytest.mark.covers("PC-6")
def test_rows_that_are_tried_alone_may_come_in_reused_storage():
    hidden, text = torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN)

    steps = broken(BatchMTPModel, "preprocess_decode_batch", boom)
    whole = type(steps.model).preprocess_decode_batch

    def preprocess_decode_batch(*, input_ids, req_infos):
        ids, embeds, last, rows, updates = whole(steps.model, input_ids=input_ids, req_infos=req_infos)
        return ids, text.copy_(embeds), hidden.copy_(last), text.copy_(rows), updates

    steps.model.preprocess_decode_batch = preprocess_decode_batch
    for tag, name in [(1, "a"), (6, "bad"), (2, "b")]:
        steps.decoding(name, tag, 2, 10 + tag)
    rows = steps.run(("a", 1), ("bad", 1), ("b", 1))
    assert set(steps.failed) == {"bad"}
    assert steps.codes == {"a": [[111, 1, 10]], "b": [[212, 2, 11]]}
    assert rows["a"].tolist() == [row(1, 11, BATCH_HOOK + MTP)]


@pytest.mark.covers("PC-10")
@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
@pytest.mark.parametrize("key", [1, None, ("a",)])
def test_a_key_that_no_hook_can_be_given_fails_its_request(hook, key):
    change = {"preprocess": lambda result: (*result[:2], {key: 1}), "postprocess": lambda result: {key: 1}}[hook]
    steps = broken(ScalarModel, hook, change)
    steps.add("bad", 6, 3)
    steps.add("a", 1, 3)
    steps.run(("bad", 3), ("a", 3))
    out = steps.finish()
    assert {name: str(error) for name, error in out.failed.items()} == {
        "bad": f"{hook}: update has the key {key!r}, which can't be a keyword"
    }
