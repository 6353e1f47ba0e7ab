"""Per-request state in a live engine: kept over preemption, gone at the end, whatever the end (EX-3, EX-6, F14, F19)."""

import pytest

from tests.engine.stage.harness import SMALL_POOL

MODES = [{}, {"async_scheduling": True}]
both = pytest.mark.parametrize("mode", MODES, ids=["sync", "async"])


@pytest.mark.covers("EX-6")
def test_a_second_execute_before_sampling_raises(engine, oracle, prompt, rows):
    stage = engine("ToyMTP")
    stage.add("a", prompt(20, 1), 8, rows=rows(1))
    runner, execute = stage.runner, stage.runner.execute_model
    caught = []

    def twice(scheduler_output, *args, **kwargs):
        result = execute(scheduler_output, *args, **kwargs)
        with pytest.raises(RuntimeError, match="sample_tokens") as error:
            execute(scheduler_output, *args, **kwargs)
        caught.append(error)
        return result

    runner.execute_model = twice
    try:
        stage.step()
    finally:
        del runner.execute_model
    assert len(caught) == 1
    stage.run()
    assert stage.codes["a"] == oracle.say(prompt(20, 1), 8, rows=rows(1), mtp=True).codes


@pytest.mark.covers("EX-3", "EX-7", "PC-14")
@pytest.mark.parametrize("budget", [16, 128])
@both
def test_state_survives_preemption(engine, oracle, prompt, rows, mode, budget):
    """While a request waits to be resumed its state stands; after that it goes on as if nothing had been.

    With a large budget a replay is one span across the boundary; with a small one it comes in chunks, the last of them replay tails.
    """
    stage = engine("ToyMTP", max_num_batched_tokens=budget, enable_prefix_caching=False, **SMALL_POOL, **mode)
    for seed, name in enumerate("abc"):
        stage.add(name, prompt(30, seed), 40, rows=rows(seed))
    kept = {}
    for _ in stage.steps():
        for request in stage.scheduler.waiting:
            if request.num_output_tokens:
                state = stage.runner.model_intermediate_buffer[request.request_id]
                kept.setdefault(stage.names[request.request_id], []).append(state["last_hidden"])
    assert set(kept) == stage.preempted() != set()
    assert all(len(states) > 1 for states in kept.values())
    for seed, name in enumerate("abc"):
        said = oracle.say(prompt(30, seed), 40, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)
    replay = [row for name in kept for row in stage.trace(name) if row.num_known > row.num_computed + 1 and row.num_known > 30]
    crossing = [row for row in replay if row.is_prefill and row.num_computed + row.span > row.prompt_len]
    tails = [row for row in replay if not row.is_prefill]
    assert crossing if budget == 128 else tails
    assert not any(row.used_mtp for row in replay)
    made = [(row.req_id, row.num_computed) for name in "abc" for row in stage.trace(name) if row.used_mtp]
    assert len(made) == len(set(made)) >= 3 * 39  # MTP once a position


@pytest.mark.covers("EX-3", "EX-7", "PC-14")
@pytest.mark.parametrize("model", ["ToyConditioned", "ToyMTP"])
@both
def test_postprocess_sees_each_position_once_and_in_order(engine, prompt, rows, model, mode):
    stage = engine(model, max_num_batched_tokens=16, **SMALL_POOL, **mode)
    for seed, name in enumerate("abc"):
        stage.add(name, prompt(30, seed), 40, rows=rows(seed))
    seen = {}
    for _ in stage.steps():
        for name, req_id in stage.ids.items():
            state = stage.runner.model_intermediate_buffer.get(req_id)
            if state and "seen" in state:
                seen[name] = state["seen"]
    assert stage.preempted()
    for name in "abc":
        assert seen[name] == list(range(len(seen[name])))
        assert len(seen[name]) >= 30 + 39


@pytest.mark.covers("EX-3")
@both
def test_state_is_dropped_at_every_kind_of_end(engine, prompt, rows, mode):
    stage = engine("ToyMTP", **mode)
    stage.add("length", prompt(20, 1), 3, rows=rows(1))
    stage.add("abort", prompt(20, 2), 50, rows=rows(2))
    stage.add("error", prompt(20, 3), 50, rows=rows(3), fault={"hook": "talker_mtp", "kind": "raise", "at": 22})
    for _ in range(3):
        stage.step()
    assert stage.engine.state_size()["states"] == 3
    assert stage.engine.state_size()["logs"] == 3
    stage.abort("abort")
    stage.run()
    assert stage.finish == {"length": "length", "error": "error"}
    stage.assert_idle()


@pytest.mark.covers("PC-14")
@both
def test_a_look_ahead_past_the_stop_leaves_nothing(engine, oracle, prompt, rows, mode):
    """Under async scheduling the step after the stop has been launched, MTP and all; its frame never comes out."""
    said = oracle.say(prompt(20, 4), 30, rows=rows(4), mtp=True)
    cut = next(n for n in range(5, 29) if said.tokens[n] not in said.tokens[:n])
    stage = engine("ToyMTP", **mode)
    stage.add(
        "a", prompt(20, 4), 60, rows=rows(4), salt="F14", sampling={"stop_token_ids": [said.tokens[cut]], "ignore_eos": True}
    )
    stage.run()
    assert stage.finish["a"] == "stop"
    assert stage.tokens["a"] == said.tokens[: cut + 1]
    assert stage.codes["a"] == said.codes[:cut]
    ahead = [row for row in stage.trace("a") if row.num_computed == 20 + cut]
    assert [row.used_mtp for row in ahead] == ([True] if mode else [])
    stage.assert_idle()
    stage.add("b", prompt(20, 4), 30, rows=rows(4), salt="F14")
    stage.run()
    assert (stage.tokens["b"], stage.codes["b"]) == (said.tokens, said.codes)


@pytest.mark.covers("PC-3", "EX-15")
@both
def test_rows_are_reordered_as_requests_leave(engine, oracle, prompt, rows, mode):
    """An early finish condenses the batch: the last row moves into the gap. Everyone's frames stay their own."""
    stage = engine("ToyMTP", **mode)
    counts = {"a": 4, "b": 25, "c": 9, "d": 30}
    for seed, (name, count) in enumerate(counts.items()):
        stage.add(name, prompt(10 + 3 * seed, seed), count, rows=rows(seed))
    orders = []
    for _ in stage.steps():
        orders.append([stage.names[row.req_id] for row in stage.engine.trace() if row.step == stage.runner.step_log.step])
    assert ["a", "b", "c", "d"] in orders
    assert any(order == ["d", "b", "c"] for order in orders)  # reordered: not the order of arrival
    for seed, (name, count) in enumerate(counts.items()):
        said = oracle.say(prompt(10 + 3 * seed, seed), count, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)


@pytest.mark.covers("PC-12", "PC-8")
@both
def test_a_one_token_prompt_tail_next_to_decoding_requests(engine, oracle, prompt, rows, mode):
    """Prompt = n * budget + 1 while another decodes: the tail is prefill, without MTP; the decode row has its own."""
    stage = engine("ToyMTP", max_num_batched_tokens=8, enable_prefix_caching=False, **mode)
    stage.add("n", prompt(5, 1), 40, rows=rows(1))
    for _ in range(3):
        stage.step()
    stage.add("a", prompt(2 * 7 + 1, 2), 10, rows=rows(2))
    stage.run()
    spans = [(row.num_computed, row.span, row.is_prefill, row.used_mtp) for row in stage.trace("a")][:4]
    assert spans == [(0, 7, True, False), (7, 7, True, False), (14, 1, True, False), (15, 1, False, True)]
    tail = stage.trace("a")[2].step
    assert [row.used_mtp for row in stage.trace("n") if row.step == tail] == [True]
    for name, length, seed, count in [("n", 5, 1, 40), ("a", 15, 2, 10)]:
        said = oracle.say(prompt(length, seed), count, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)


@pytest.mark.covers("PC-12")
@both
def test_one_token_prompts(engine, oracle, prompt, rows, mode):
    stage = engine("ToyMTP", **mode)
    for seed, name in enumerate("abc"):
        stage.add(name, prompt(1, 20 + seed), 12, rows=rows(seed))
    stage.run()
    for seed, name in enumerate("abc"):
        said = oracle.say(prompt(1, 20 + seed), 12, rows=rows(seed), mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes)
        first = stage.trace(name)[0]
        assert (first.span, first.is_prefill, first.used_mtp) == (1, True, False)
