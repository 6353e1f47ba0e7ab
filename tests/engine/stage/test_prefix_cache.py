"""Cache key = tokens + conditioning: what a prefix hit may and may not share (RT-8)."""

import pytest

from tests.engine.stage.harness import NO_SALT

pytestmark = pytest.mark.covers("RT-8")

MODES = [{}, {"async_scheduling": True}]


@pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])
def test_same_ids_with_other_conditioning_get_their_own_output(engine, oracle, prompt, rows, mode):
    stage = engine("ToyMTP", **mode)
    for name, seed, salt in [("a", 1, "one"), ("b", 2, "two"), ("a2", 1, "one")]:
        stage.add(name, prompt(70, 3), 8, rows=rows(seed), salt=f"{mode}{salt}")
        stage.run()
    first, second = (oracle.say(prompt(70, 3), 8, rows=rows(seed), mtp=True) for seed in (1, 2))
    assert first.tokens != second.tokens
    assert (stage.tokens["a"], stage.codes["a"]) == (first.tokens, first.codes)
    assert (stage.tokens["b"], stage.codes["b"]) == (second.tokens, second.codes)
    assert (stage.tokens["a2"], stage.codes["a2"]) == (first.tokens, first.codes)
    assert [stage.trace(name)[0].num_computed for name in ("a", "b", "a2")] == [0, 0, 64]


def test_without_a_salt_nothing_is_shared(engine, oracle, prompt, rows):
    stage = engine("ToyMTP")
    for name, seed in (("a", 1), ("b", 2)):
        stage.add(name, prompt(70, 3), 8, rows=rows(seed), salt=NO_SALT)
        stage.run()
        said = oracle.say(prompt(70, 3), 8, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)
    assert [stage.trace(name)[0].num_computed for name in ("a", "b")] == [0, 0]


def test_the_salt_of_the_input_counts(engine, prompt, rows):
    """A salt given with the request is used when its input brings none."""
    stage = engine("ToyMTP", spec={"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"})
    for name in ("a", "b"):
        stage.add(name, None, 3, salt="theirs")
        stage.deliver(name, ids=prompt(70, 3), payload={"rows": rows(1)}, end=True)
        stage.run()
    assert [stage.trace(name)[0].num_computed for name in ("a", "b")] == [0, 64]


def test_the_same_request_four_times(engine, oracle, prompt, rows):
    stage = engine("ToyMTP")
    said = oracle.say(prompt(65, 9), 20, rows=rows(5), mtp=True)
    for turn in range(4):
        stage.add(f"r{turn}", prompt(65, 9), 20, rows=rows(5), salt="four times")
        stage.run()
        assert (stage.tokens[f"r{turn}"], stage.codes[f"r{turn}"]) == (said.tokens, said.codes)
    first = [stage.trace(f"r{turn}")[0] for turn in range(4)]
    assert [(row.num_computed, row.span, row.is_prefill, row.used_mtp) for row in first] == [(0, 65, True, False)] + [
        (64, 1, True, False)  # what is left of the prompt is a one-token tail
    ] * 3
