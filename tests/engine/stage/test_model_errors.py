"""A hook that fails ends its own request, by name, and nothing else (EX-16, F11)."""

import pytest

from tests.engine.stage.toy_models import HIDDEN

pytestmark = pytest.mark.covers("EX-16")

LENGTH, COUNT = 70, 12
"""Two full blocks and more of prompt, so that there is something in the prefix cache to be wrong."""

MODES = [{}, {"async_scheduling": True}]
BATCH = {"hook": "preprocess_decode_batch", "at": LENGTH + 4}

FAULTS = [
    ({"hook": "preprocess", "kind": "raise", "at": 0}, "HookRaisedError: preprocess: Boom: marked request"),
    ({"hook": "preprocess", "kind": "rows", "at": 0}, "HookCountError: preprocess: expected 32 rows of input_embeds, got 31"),
    (
        {"hook": "preprocess", "kind": "shape", "at": 40},
        f"HookShapeError: preprocess: input_embeds has shape [32, {HIDDEN - 1}], expected [32, {HIDDEN}]",
    ),
    ({"hook": "preprocess", "kind": "updates", "at": 64}, "HookShapeError: preprocess: update is a int, not a mapping"),
    ({**BATCH, "kind": "raise"}, "HookRaisedError: preprocess_decode_batch: Boom: marked request"),
    ({**BATCH, "kind": "rows"}, "HookCountError: preprocess_decode_batch: expected 1 rows of input_embeds, got 0"),
    (
        {**BATCH, "kind": "shape"},
        f"HookShapeError: preprocess_decode_batch: input_embeds has shape [1, {HIDDEN - 1}], expected [1, {HIDDEN}]",
    ),
    ({**BATCH, "kind": "updates"}, "HookCountError: preprocess_decode_batch: expected 1 updates, got 2"),
    ({"hook": "talker_mtp", "kind": "raise", "at": LENGTH}, "HookRaisedError: talker_mtp: Boom: marked request"),
    ({"hook": "talker_mtp", "kind": "rows", "at": LENGTH + 3}, "HookCountError: talker_mtp: expected 1 rows of embeds, got 0"),
    (
        {"hook": "talker_mtp", "kind": "shape", "at": LENGTH + 3},
        f"HookShapeError: talker_mtp: embeds has shape [1, {HIDDEN - 1}], expected [1, {HIDDEN}]",
    ),
    ({"hook": "postprocess", "kind": "raise", "at": 40}, "HookRaisedError: postprocess: Boom: marked request"),
    ({"hook": "postprocess", "kind": "type", "at": LENGTH + 2}, "HookShapeError: postprocess: update is a int, not a mapping"),
]


def name_of(fault):
    return f"{fault['hook']}-{fault['kind']}"


def first_span(stage, name):
    row = stage.trace(name)[0]
    return row.num_computed, row.span


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=[name_of(fault) for fault, _ in FAULTS])
def test_the_guilty_one_ends_by_name_and_the_others_are_right(engine, oracle, prompt, rows, mode, fault, reason):
    stage = engine("ToyMTP", max_num_batched_tokens=34, **mode)
    others = {"a": (17, 1), "b": (9, 2)}
    ids, conditioning = prompt(LENGTH, 5), rows(5)
    for name, (length, seed) in others.items():
        stage.add(name, prompt(length, seed), 30, rows=rows(seed))
    for _ in range(6):
        stage.step()
    stage.add("bad", ids, COUNT, salt=f"{mode}-{name_of(fault)}", rows=conditioning, fault=fault)
    stage.run()
    assert (stage.finish["bad"], stage.error["bad"]) == ("error", reason)
    assert first_span(stage, "bad") == (0, 32)  # next to two decode rows; its first block was hashed
    for name, (length, seed) in others.items():
        said = oracle.say(prompt(length, seed), 30, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)
        assert stage.finish[name] == "length"
    stage.assert_idle()

    stage.add("again", ids, COUNT, salt=f"{mode}-{name_of(fault)}", rows=conditioning)
    stage.run()
    said = oracle.say(ids, COUNT, rows=conditioning, mtp=True)
    assert (stage.tokens["again"], stage.codes["again"]) == (said.tokens, said.codes)
    kept = min(fault["at"], LENGTH) // 32 * 32  # what earlier steps had computed is right
    assert first_span(stage, "again") == (kept, min(34, LENGTH - kept))  # nothing else of the failed one was left to adopt

    stage.add("cached", ids, COUNT, salt=f"{mode}-{name_of(fault)}", rows=conditioning)
    stage.run()
    assert first_span(stage, "cached") == (64, LENGTH - 64)  # and yet this engine does cache: eviction was needed
    assert stage.tokens["cached"] == said.tokens


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
def test_what_was_said_before_the_fault_stands(engine, oracle, prompt, rows, mode):
    """Outputs that left in earlier steps are right; the error is the last word."""
    stage = engine("ToyMTP", **mode)
    fault = {"hook": "talker_mtp", "kind": "raise", "at": 12 + 4}
    stage.add("bad", prompt(12, 6), 20, rows=rows(6), fault=fault)
    stage.run()
    said = oracle.say(prompt(12, 6), 20, rows=rows(6), mtp=True)
    assert stage.tokens["bad"] == said.tokens[:5]
    assert stage.codes["bad"] == said.codes[:4]
    assert stage.finish["bad"] == "error"


def test_who_adopted_a_failed_ones_blocks_fails_with_it(engine, prompt, rows):
    """Blocks are hashed as they are scheduled: the second request adopts the first one's before they were computed."""
    stage = engine("ToyConditioned")
    fault = {"hook": "preprocess", "kind": "raise", "at": 0}
    stage.add("bad", prompt(LENGTH, 8), 5, salt="shared", rows=rows(8), fault=fault)
    stage.add("heir", prompt(LENGTH, 8), 5, salt="shared", rows=rows(8))
    stage.add("apart", prompt(20, 9), 5, rows=rows(9))
    stage.run()
    if stage.trace("heir")[0].num_computed == 0:
        pytest.fail("the heir adopted nothing: the case did not happen")
    assert stage.error["heir"] == stage.error["bad"] == "HookRaisedError: preprocess: Boom: marked request"
    assert stage.finish["apart"] == "length"


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
@pytest.mark.parametrize("hook", ["preprocess_decode_batch", "talker_mtp", "postprocess"])
def test_who_shares_blocks_that_were_right_lives_on(engine, oracle, prompt, rows, mode, hook):
    """Owner, guilty one and heir of the same prompt: it was computed long before the fault."""
    stage = engine("ToyMTP", **mode)
    said = oracle.say(prompt(LENGTH, 8), 30, rows=rows(8), mtp=True)
    salt = f"{mode}-{hook}-right"
    stage.add("owner", prompt(LENGTH, 8), 30, salt=salt, rows=rows(8))
    for _ in range(3):
        stage.step()
    stage.add("bad", prompt(LENGTH, 8), 30, salt=salt, rows=rows(8), fault={"hook": hook, "kind": "raise", "at": LENGTH + 5})
    stage.add("heir", prompt(LENGTH, 8), 30, salt=salt, rows=rows(8))
    stage.run()
    assert first_span(stage, "bad") == first_span(stage, "heir") == (64, LENGTH - 64)
    assert stage.finish["bad"] == "error"
    for name in ("owner", "heir"):
        assert stage.finish[name] == "length"
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
def test_a_forward_that_raises_ends_those_of_its_step_only(engine, oracle, prompt, rows, mode, monkeypatch):
    stage = engine("ToyMTP", **mode)
    salt = f"{mode}-forward"
    for name in ("a", "b"):
        stage.add(name, prompt(LENGTH, 8), 9, salt=salt, rows=rows(8))

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage.runner.model, "forward", broken)
        stage.step()
        stage.step()
    stage.run()
    assert stage.error == dict.fromkeys("ab", "HookRaisedError: forward: RuntimeError: out of memory")
    stage.assert_idle()
    stage.add("again", prompt(LENGTH, 8), 9, salt=salt, rows=rows(8))
    stage.run()
    assert first_span(stage, "again") == (0, LENGTH)
    said = oracle.say(prompt(LENGTH, 8), 9, rows=rows(8), mtp=True)
    assert (stage.tokens["again"], stage.codes["again"]) == (said.tokens, said.codes)


@pytest.mark.covers("EX-7")
def test_missing_state_ends_the_request_by_name(engine, prompt, rows):
    stage = engine("ToyMTP")
    stage.add("bare", prompt(12), 5)
    stage.add("fine", prompt(12), 5, rows=rows(0))
    stage.run()
    assert stage.error["bare"] == "MissingStateError: preprocess: rows was never stored"
    assert stage.finish["fine"] == "length"


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raise", "HookRaisedError: make_omni_output: Boom: marked request"),
        ("type", "HookShapeError: make_omni_output: returned a NoneType, not an OmniOutput"),
        ("rows", "HookCountError: make_omni_output: expected {n} rows of position, got {less}"),
        ("hidden", "HookCountError: make_omni_output: expected {n} rows of text_hidden_states, got 0"),
    ],
)
def test_make_omni_output_fails_those_of_its_step_and_nobody_after(engine, oracle, prompt, mode, kind, reason):
    """It works on the whole batch, so nobody can tell whose rows are right; the engine and the next requests live on."""
    stage = engine("ToyExporting", **mode)
    salt = f"{mode}-{kind}"
    stage.add("bad", prompt(40, 5), 6, salt=salt, fault=kind)
    stage.add("near", prompt(9, 6), 6, salt=salt + "near")
    stage.run()
    reason = reason.format(n=49, less=48)
    assert stage.error == {"bad": reason, "near": reason}
    stage.assert_idle()
    for name, length, seed in [("bad2", 40, 5), ("near2", 9, 6)]:
        stage.add(name, prompt(length, seed), 6, salt=salt if seed == 5 else salt + "near")
    stage.run()
    assert stage.tokens["bad2"] == oracle.say(prompt(40, 5), 6).tokens
    assert stage.tokens["near2"] == oracle.say(prompt(9, 6), 6).tokens
    assert first_span(stage, "bad2") == (0, 40)
