"""The phase contract on the production ``_preprocess`` and ``_talker_mtp_forward`` (PC-12): fields, routes, embeddings, codes."""

import itertools

import pytest
import torch

from stagevox.contract import IS_PREFILL, NUM_COMPUTED_TOKENS, PHASE_FIELDS, PROMPT_LEN
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

pytestmark = pytest.mark.covers("PC-12")


def fields(info):
    return tuple(info[name] for name in PHASE_FIELDS)


def prompt_rows(tag, first, count):
    return [row(tag, position, PROMPT_HOOK) for position in range(first, first + count)]


def decode_row(steps, tag, position):
    """The row of a fresh decode position under this kind of model."""
    source = BATCH_HOOK if isinstance(steps.model, BatchModel) else PROMPT_HOOK
    if has_mtp(steps):
        source += MTP
    return [row(tag, position, source)]


def has_mtp(steps):
    return hasattr(steps.model, "talker_mtp")


@pytest.mark.covers("PC-1", "PC-8")
def test_prompt_split_with_a_one_token_tail_then_decode(steps):
    """Prompt of 7 in chunks 3, 3, 1; a neighbour decodes all the while, so MTP runs in every step."""
    steps.add("a", 1, 7)
    steps.decoding("n", 9, 4, 20)
    for step, (first, span) in enumerate([(0, 3), (3, 3), (6, 1)]):
        rows = steps.step(("a", span), ("n", 1))
        assert rows["a"] == prompt_rows(1, first, span)
        assert rows["n"] == decode_row(steps, 9, 20 + step)
        if has_mtp(steps):
            assert steps.codes == {"n": [[900 + 20 + step, 9, 19 + step]]}
    for position in (7, 8):
        rows = steps.step(("a", 1), ("n", 1))
        assert rows["a"] == decode_row(steps, 1, position)
        if has_mtp(steps):
            assert steps.codes["a"] == [[100 + position, 1, position - 1]]

    seen = [
        fields(info)
        for hook, names, infos in steps.model.calls
        for info in infos or ()
        if names == ["a"] and hook == "preprocess"
    ]
    assert seen[:3] == [(True, 0, 7), (True, 3, 7), (True, 6, 7)]
    mtp = has_mtp(steps)
    assert steps.trace("a") == [
        (0, 3, 7, 7, False),
        (3, 3, 7, 7, False),
        (6, 1, 7, 7, False),
        (7, 1, 7, 8, mtp),
        (8, 1, 7, 9, mtp),
    ]
    assert [entry[-1] for entry in steps.trace("n")] == [mtp] * 5


@pytest.mark.covers("PC-1", "PC-4")
def test_fields_arrive_as_keywords_of_their_types(steps):
    steps.add("a", 1, 5)
    steps.step(("a", 5))
    (_, (info,)), *_ = steps.model.hook_calls("preprocess")
    assert type(info[IS_PREFILL]) is bool
    assert type(info[NUM_COMPUTED_TOKENS]) is int
    assert type(info[PROMPT_LEN]) is int


ROWS = {"chunk": 3, "tail": 1, "d1": 1, "d2": 1, "verify": 2}


def mixed(steps):
    """A prompt chunk, a one-token tail, two decode rows, and a decode span of two."""
    steps.add("chunk", 1, 8)
    steps.add("tail", 2, 5, cached=4)
    steps.decoding("d1", 3, 4, 6)
    steps.decoding("d2", 4, 2, 11)
    steps.add("verify", 5, 3, cached=9, known=10, last_hidden=torch.tensor([row(5, 8, 0)]))


@pytest.mark.covers("PC-3", "PC-5", "PC-8", "EX-15")
def test_mixed_batches_in_every_order(steps):
    """Each row keeps its own embedding and codes, wherever it stands and whoever stands next to it."""
    kind = type(steps.model)
    adjacent, apart = 0, 0
    for order in itertools.permutations(ROWS):
        steps = Steps(kind())
        mixed(steps)
        rows = steps.step(*((name, ROWS[name]) for name in order))
        assert rows["chunk"] == prompt_rows(1, 0, 3)
        assert rows["tail"] == prompt_rows(2, 4, 1)
        assert rows["d1"] == decode_row(steps, 3, 6)
        assert rows["d2"] == decode_row(steps, 4, 11)
        assert rows["verify"] == prompt_rows(5, 9, 2)
        if has_mtp(steps):
            assert steps.codes == {"d1": [[306, 3, 5]], "d2": [[411, 4, 10]]}
            assert len(steps.model.hook_calls("talker_mtp")) == 1
        near = abs(order.index("d1") - order.index("d2")) == 1
        adjacent, apart = adjacent + near, apart + (not near)
    assert adjacent and apart


@pytest.mark.covers("PC-5", "PC-6")
@pytest.mark.parametrize("order", list(itertools.permutations(ROWS))[::7])
def test_who_reaches_the_batch_hook_under_mtp(order):
    """All decode rows of the step in one call, aligned with their infos and ids, none of them in prefill."""
    steps = Steps(BatchMTPModel())
    mixed(steps)
    steps.step(*((name, ROWS[name]) for name in order))
    ((names, infos),) = steps.model.hook_calls("preprocess_decode_batch")
    assert names == [name for name in order if name in ("d1", "d2")]
    expected = {"d1": (False, 6, 4), "d2": (False, 11, 2)}
    assert [fields(info) for info in infos] == [expected[name] for name in names]
    assert [{"d1": 306, "d2": 411}[name] for name in names] in steps.model.given_ids
    alone = {name for (name,), _ in steps.model.hook_calls("preprocess")}
    assert alone == {"chunk", "tail", "verify"}


@pytest.mark.covers("PC-7")
@pytest.mark.parametrize("order", list(itertools.permutations(ROWS))[::5])
def test_without_mtp_a_batch_is_a_run_of_neighbours_flushed_before_any_other_span(order):
    steps = Steps(BatchModel())
    mixed(steps)
    steps.run(*((name, ROWS[name]) for name in order))
    expected = []
    for batched, group in itertools.groupby(order, key=lambda name: name in ("d1", "d2")):
        names = list(group)
        expected += [("preprocess_decode_batch", names)] if batched else [("preprocess", [name]) for name in names]
    assert [(hook, names) for hook, names, _ in steps.model.calls] == expected


@pytest.mark.covers("PC-6", "PC-8")
def test_adjacent_decode_requests_in_one_call_have_their_own_codes(mtp_steps):
    for index, name in enumerate("abcd"):
        mtp_steps.decoding(name, index + 1, 3, 5 + 2 * index)
    for extra in range(3):
        rows = mtp_steps.step(*((name, 1) for name in "abcd"))
        for index, name in enumerate("abcd"):
            position = 5 + 2 * index + extra
            assert mtp_steps.codes[name] == [[100 * (index + 1) + position, index + 1, position - 1]]
            assert rows[name] == decode_row(mtp_steps, index + 1, position)
    assert [tags for tags, _ in mtp_steps.model.hook_calls("talker_mtp")] == [[1, 2, 3, 4]] * 3
    assert mtp_steps.emitted["c"] == [[309, 3, 8], [310, 3, 9], [311, 3, 10]]


@pytest.mark.covers("PC-8")
def test_one_token_prompts_are_prefill(steps):
    steps.add("a", 1, 1)
    steps.add("b", 2, 1)
    steps.decoding("n", 9, 1, 3)
    rows = steps.step(("a", 1), ("n", 1), ("b", 1))
    assert (rows["a"], rows["b"]) == (prompt_rows(1, 0, 1), prompt_rows(2, 0, 1))
    assert rows["n"] == decode_row(steps, 9, 3)
    assert [fields(infos[0]) for (name,), infos in steps.model.hook_calls("preprocess") if name != "n"] == [(True, 0, 1)] * 2
    if has_mtp(steps):
        assert steps.codes == {"n": [[903, 9, 2]]}
    rows = steps.step(("a", 1), ("n", 1), ("b", 1))
    assert (rows["a"], rows["b"]) == (decode_row(steps, 1, 1), decode_row(steps, 2, 1))
    if has_mtp(steps):
        assert steps.codes == {"a": [[101, 1, 0]], "n": [[904, 9, 3]], "b": [[201, 2, 0]]}


@pytest.mark.covers("PC-1")
@pytest.mark.parametrize(("cached", "span"), [(4, 2), (5, 1)])
def test_cached_progress(steps, cached, span):
    """A prefix hit starts past 0; what is left of the prompt is prefill, though it be one token."""
    steps.add("a", 1, 6, cached=cached)
    steps.decoding("n", 9, 4, 20)
    rows = steps.step(("n", 1), ("a", span))
    assert rows["a"] == prompt_rows(1, cached, span)
    (info,) = (infos[0] for (name,), infos in steps.model.hook_calls("preprocess") if name == "a")
    assert fields(info) == (True, cached, 6)
    rows = steps.step(("n", 1), ("a", 1))
    assert rows["a"] == decode_row(steps, 1, 6)
    if has_mtp(steps):
        assert steps.trace("a") == [(cached, span, 6, 6, False), (6, 1, 6, 7, True)]


@pytest.mark.covers("PC-5", "PC-8")
@pytest.mark.parametrize("span", [2, 3, 5])
def test_decode_spans_longer_than_one_go_to_preprocess(steps, span):
    steps.decoding("n", 9, 4, 20)
    steps.add("v", 2, 3, cached=7, known=8, last_hidden=torch.tensor([row(2, 6, 0)]))
    rows = steps.step(("v", span), ("n", 1))
    assert rows["v"] == prompt_rows(2, 7, span)
    (info,) = (infos[0] for (name,), infos in steps.model.hook_calls("preprocess") if name == "v")
    assert fields(info) == (False, 7, 3)
    assert rows["n"] == decode_row(steps, 9, 20)
    if has_mtp(steps):
        assert steps.codes == {"n": [[920, 9, 19]]}


@pytest.mark.covers("PC-2")
def test_stale_fields_in_state_never_win(steps):
    """Neither from the payload, nor from a hook's own update, nor from what an earlier step left."""
    lies = {IS_PREFILL: False, NUM_COMPUTED_TOKENS: 77, PROMPT_LEN: 1}
    steps.add("a", 1, 4, **lies)
    steps.decoding("n", 9, 4, 20)
    steps.runner.model_intermediate_buffer.apply("n", {IS_PREFILL: True, NUM_COMPUTED_TOKENS: 0, PROMPT_LEN: 99})
    rows = steps.step(("a", 3), ("n", 1))
    assert rows["a"] == prompt_rows(1, 0, 3)
    assert rows["n"] == decode_row(steps, 9, 20)
    rows = steps.step(("a", 1), ("n", 1))
    assert rows["a"] == prompt_rows(1, 3, 1)
    seen = {}
    for hook, names, infos in steps.model.calls:
        if hook in ("preprocess", "preprocess_decode_batch"):
            for name, info in zip(names, infos, strict=True):
                seen.setdefault(name, []).append(fields(info))
    assert seen == {"a": [(True, 0, 4), (True, 3, 4)], "n": [(False, 20, 4), (False, 21, 4)]}
    posts = [fields(infos[0]) for (name,), infos in steps.model.hook_calls("postprocess") if name == "a"]
    assert posts == [(True, 0, 4), (True, 3, 4)]
    if has_mtp(steps):
        assert steps.emitted["n"] == [[920, 9, 19], [921, 9, 20]]


@pytest.mark.covers("PC-2")
def test_a_resumed_request_is_classified_from_where_it_stands(steps):
    steps.add("a", 1, 3)
    steps.decoding("n", 9, 4, 20)
    steps.step(("a", 3), ("n", 1))
    steps.step(("a", 1), ("n", 1))
    steps.preempt("a")
    before = len(steps.model.calls)
    steps.step(("a", 2), ("n", 1), resumed=["a"])
    (info,) = (infos[0] for hook, names, infos in steps.model.calls[before:] if hook == "preprocess" and names == ["a"])
    assert fields(info) == (True, 0, 3)
    assert [entry.is_resumed for entry in steps.runner.step_log if entry.req_id == "a"] == [False, False, True]
    if has_mtp(steps):
        assert [entry[-1] for entry in steps.trace("a")] == [False, True, False]
        assert [entry[-1] for entry in steps.trace("n")] == [True] * 3


@pytest.mark.covers("PC-2")
def test_a_grown_prompt_is_classified_from_the_current_prompt(steps):
    """A streaming request whose prompt grew is in prefill again: phase is not latched."""
    steps.decoding("n", 9, 4, 20)
    steps.add("a", 1, 3)
    steps.step(("a", 3), ("n", 1))
    steps.prompt_len["a"] = steps.known["a"] = 5
    rows = steps.step(("a", 1), ("n", 1))
    assert rows["a"] == prompt_rows(1, 3, 1)
    if has_mtp(steps):
        assert set(steps.codes) == {"n"}


@pytest.mark.covers("PC-3", "EX-3", "EX-4")
def test_rows_follow_the_input_batch_after_reordering(steps):
    """Three arrive as a, b, c; then the batch is reordered, then b leaves and the rest is condensed."""
    for index, name in enumerate("abc"):
        steps.decoding(name, index + 1, 2, 4)
    orders = [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a"), ("c", "a")]
    for extra, order in enumerate(orders):
        rows = steps.step(*((name, 1) for name in order))
        for name in order:
            tag = "abc".index(name) + 1
            assert rows[name] == decode_row(steps, tag, 4 + extra)
        extra_kwargs = steps.runner._build_model_kwargs_extra()
        assert [state["name"] for state in extra_kwargs["model_intermediate_buffer"]] == list(order)
        assert extra_kwargs["request_token_spans"] == [(index, index + 1) for index in range(len(order))]
    if has_mtp(steps):
        assert steps.emitted["a"] == [[100 + p, 1, p - 1] for p in (4, 5, 6, 7)]
        assert steps.emitted["b"] == [[200 + p, 2, p - 1] for p in (4, 5, 6)]


@pytest.mark.covers("PC-5")
def test_without_a_callable_batch_hook_decode_rows_go_to_preprocess():
    model = BatchModel()
    model.preprocess_decode_batch = None
    steps = Steps(model)
    steps.decoding("a", 1, 2, 5)
    assert steps.step(("a", 1))["a"] == prompt_rows(1, 5, 1)


@pytest.mark.covers("PC-5")
@pytest.mark.parametrize("kind", [BatchModel, ScalarModel])
def test_without_has_preprocess_nothing_is_touched(kind):
    model = kind()
    model.has_preprocess = False
    steps = Steps(model)
    steps.add("a", 1, 3)
    steps.run(("a", 3))
    assert steps.model.calls == []
    assert steps.result[1] is None
    assert steps.result[0].tolist() == [100, 101, 102]
    assert (steps.runner.inputs_embeds.gpu == -1).all()


@pytest.mark.covers("PC-7")
def test_embeddings_land_in_the_runners_own_buffer(steps):
    mixed(steps)
    buffer = steps.runner.inputs_embeds.gpu
    where = buffer.data_ptr()
    steps.run(*ROWS.items())
    ids, embeds, *_ = steps.result
    assert ids is None
    assert embeds.data_ptr() == where == steps.runner.inputs_embeds.gpu.data_ptr()
    assert embeds.shape == (8, HIDDEN)
    assert (buffer[8:] == -1).all()


@pytest.mark.covers("PC-7", "EX-14")
def test_padding_rows_are_not_touched(steps):
    steps.decoding("a", 1, 2, 5)
    steps.run(("a", 1), pad=3)
    assert steps.result[1].shape == (4, HIDDEN)
    assert (steps.result[1][1:] == -1).all()


@pytest.mark.covers("PC-7")
@pytest.mark.parametrize("hook", ["preprocess", "preprocess_decode_batch"])
@pytest.mark.parametrize(("change", "copies"), [("same", 0), ("equal", 1), ("changed", 1)])
def test_the_same_ids_object_skips_the_copy(hook, change, copies):
    """Counted by the version of the id buffer, which every write in place raises."""

    class Model(BatchModel):
        def answer(self, ids):
            return {"same": ids, "equal": ids.clone(), "changed": ids + 5}[change]

        def preprocess(self, input_ids, input_embeds, **info):
            _, embeds, update = super().preprocess(input_ids, input_embeds, **info)
            return self.answer(input_ids), embeds, update

        def preprocess_decode_batch(self, *, input_ids, req_infos):
            _, embeds, updates = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
            return self.answer(input_ids), embeds, updates

    steps = Steps(Model())
    if hook == "preprocess":
        steps.add("a", 1, 2)
        spans = [("a", 2)]
    else:
        steps.decoding("a", 1, 2, 5)
        steps.decoding("b", 2, 2, 5)
        spans = [("a", 1), ("b", 1)]
    steps.run(*spans)
    sent, filled = steps.runner.input_ids.gpu, len(spans)
    given = steps.model.given_ids[0]
    before = sent._version
    steps.run(*spans)
    assert [call[0] for call in steps.model.calls] == [hook, hook]
    assert sent._version - before - filled == copies  # the test itself fills the ids, one write a request
    assert sent[: len(given)].tolist() == [one + 5 if change == "changed" else one for one in given]


@pytest.mark.covers("PC-7", "EX-15")
def test_each_update_goes_to_its_own_request(batch_steps):
    for index, name in enumerate("abc"):
        batch_steps.decoding(name, index + 1, 2, 4 + index)
        batch_steps.runner.model_intermediate_buffer.apply(name, {"seen": {"mine": index}})
    batch_steps.add("p", 7, 3)
    batch_steps.step(("c", 1), ("p", 2), ("a", 1), ("b", 1))
    assert {name: batch_steps.state(name)["seen"] for name in "abc"} == {
        "a": {"mine": 0, "batch": 4},
        "b": {"mine": 1, "batch": 5},
        "c": {"mine": 2, "batch": 6},
    }
    assert batch_steps.state("p")["seen"] == {"preprocess": 0}


@pytest.mark.covers("PC-4", "PC-8")
def test_a_tails_mtp_inputs_are_dropped_not_kept(mtp_steps):
    """The model hands them over for a prompt tail too: they reach neither MTP nor the request's state."""
    mtp_steps.add("a", 1, 4, cached=3)
    mtp_steps.decoding("n", 9, 4, 20)
    rows = mtp_steps.step(("a", 1), ("n", 1))
    assert rows["a"] == prompt_rows(1, 3, 1)
    assert [tags for tags, _ in mtp_steps.model.hook_calls("talker_mtp")] == [[9]]
    assert "mtp_inputs" not in mtp_steps.state("a")
    assert "a" not in mtp_steps.runner.model_intermediate_buffer.logs


@pytest.mark.covers("PC-9")
def test_the_whole_batch_hook_comes_once_and_first():
    class Model(BatchMTPModel):
        def preprocess_batch(self, *, input_ids, req_infos):
            self.calls.append(("preprocess_batch", [info["name"] for info in req_infos], req_infos))
            self.whole = input_ids.tolist()

    steps = Steps(Model())
    mixed(steps)
    steps.run(("d2", 1), ("chunk", 3), ("tail", 1), ("d1", 1))
    hook, names, _ = steps.model.calls[0]
    assert (hook, names) == ("preprocess_batch", ["d2", "chunk", "tail", "d1"])
    assert len(steps.model.hook_calls("preprocess_batch")) == 1
    assert steps.model.whole == [411, 100, 101, 102, 204, 306]
    assert steps.codes == {"d1": [[306, 3, 5]], "d2": [[411, 4, 10]]}


def test_scalar_decode_rows_share_one_mtp_call_in_batch_order():
    steps = Steps(ScalarMTPModel())
    mixed(steps)
    steps.run(("d2", 1), ("chunk", 3), ("d1", 1))
    assert [tags for tags, _ in steps.model.hook_calls("talker_mtp")] == [[4, 3]]
