"""Merged decode says what step by step says, bit by bit: the packaged voice in every serving mode (MS-2, MS-13)."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from mini_reference import TinyOmni

from stagevox.stage.multi_step.executor import reentrant_loop
from support.merged import check_books, merged_talker, play, runner_of
from support.talker_stage import count_cases

TEXTS = (
    "five six five one seven nine",
    "zero nine five",
    "the answer is thirty five",
    "sixty two minus nineteen equals forty three",
    "fifty seven minus thirty is twenty seven",
    "thirty one plus nineteen is fifty",
    "go to the small pink chair on the left",
    "seven three seven zero three",
)
STEPS = (2, 4, 8, 12, 16)
SMALL_POOL = {"num_gpu_blocks_override": 8}
"""Seven blocks to use, for eight requests of one to four blocks each."""

ARRIVE = {"r4": 9, "r5": 17, "r6": 30, "r7": 31}
ABORT = {"r2": 13, "r5": 22}


@pytest.fixture(scope="module")
def reference() -> TinyOmni:
    torch.set_num_threads(1)
    return TinyOmni()


@pytest.fixture(scope="module")
def ids(reference: TinyOmni) -> dict[str, list[int]]:
    return {f"r{i}": reference.tokenize(text) for i, text in enumerate(TEXTS)}


SEEDED = {f"r{i}": {"temperature": 0.9, "top_k": 50, "seed": 11 + i} for i in range(len(TEXTS))}


@pytest.fixture(scope="module")
def plain(ids: dict[str, list[int]], reference: TinyOmni) -> dict[str, dict[str, Any]]:
    """Each request's tokens and codes step by step: ``greedy``, ``seeded``, ``long`` (min_tokens beyond any stop, to the context's end)."""
    engine = merged_talker(0)
    found = {
        "greedy": play(engine, ids),
        "seeded": play(engine, ids, SEEDED),
        "long": play(engine, ids, {name: {"min_tokens": 140 + 4 * i, "max_tokens": 1000} for i, name in enumerate(ids)}),
    }
    assert engine.multi_step()["executed_windows"] == 0
    engine.close()
    for text, told in zip(TEXTS, found["greedy"].values(), strict=True):
        assert torch.equal(told.codes, reference.generate(text)), text
    return found


def same(told: dict[str, Any], expected: dict[str, Any], *, aborted: Any = ()) -> None:
    for name, one in told.items():
        want = expected[name]
        if name in aborted:
            assert one.tokens == want.tokens[: len(one.tokens)], name
            assert torch.equal(one.codes, want.codes[: len(one.codes)]), name
            continue
        assert (one.tokens, one.finish) == (want.tokens, want.finish), name
        assert torch.equal(one.codes, want.codes), name


def since(engine: Any, before: dict[str, Any]) -> Counter[str]:
    """What the counters gained."""
    after = engine.multi_step()
    gained = Counter({key: after[key] - before[key] for key in after if key not in ("refusals", "steps")})
    return gained + Counter(after["refusals"]) - Counter(before["refusals"])


@pytest.mark.covers("MS-2", "MS-3", "MS-5", "MS-9", "MS-13")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("steps", STEPS)
def test_codes_are_those_of_single_steps(steps: int, ahead: bool, ids: Any, plain: Any) -> None:
    engine = merged_talker(steps, async_scheduling=ahead)
    for requests, sampling in itertools.product((1, 4, 8), ({}, SEEDED)):
        before = engine.multi_step()
        chosen = dict(list(ids.items())[:requests])
        told = play(engine, chosen, sampling)
        same(told, plain["seeded" if sampling else "greedy"])
        gained = since(engine, before)
        assert gained["executed_windows"] >= 3, gained
        assert gained["tokens_saved"] > sum(len(one.tokens) for one in told.values()) * (steps - 1) // steps * 0.8
        assert gained["prefill"], "the round of the prompts is refused"
        several = [output for one in told.values() for output in one.outputs if len(output.new_token_ids) > 1]
        assert max(len(output.new_token_ids) for output in several) == steps
    assert engine.multi_step()["shortened_windows"], "no window was cut by a stop"
    engine.close()


@pytest.mark.covers("MS-4", "MS-5", "MS-6", "MS-10", "MS-13")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("steps", STEPS)
def test_with_arrivals_aborts_and_a_pool_that_preempts(steps: int, ahead: bool, ids: Any, plain: Any) -> None:
    engine = merged_talker(steps, async_scheduling=ahead, **SMALL_POOL)
    for sampling in ({}, SEEDED):
        before, begin = engine.multi_step(), len(engine.trace())
        told = play(engine, ids, sampling, arrive=ARRIVE, abort=ABORT)
        same(told, plain["seeded" if sampling else "greedy"], aborted=ABORT)
        assert {told[name].finish for name in ABORT} == {"abort"}
        gained = since(engine, before)
        cases = count_cases(engine.trace()[begin:])
        assert cases["replay"], "nobody was preempted"
        assert gained["executed_windows"] >= 3, gained
        assert {"prefill", "waiting"} <= gained.keys(), gained
    assert engine.multi_step()["shortened_windows"]
    engine.close()


@pytest.mark.covers("MS-5", "MS-6", "MS-11")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("steps", STEPS)
def test_min_tokens_and_the_end_of_the_context(steps: int, ahead: bool, ids: Any, plain: Any) -> None:
    """Stops are masked up to 140 tokens and more, so that some requests run into the end of the context."""
    engine = merged_talker(steps, async_scheduling=ahead)
    sampling = {name: {"min_tokens": 140 + 4 * i, "max_tokens": 1000} for i, name in enumerate(ids)}
    told = play(engine, ids, sampling)
    same(told, plain["long"])
    assert all(len(one.tokens) >= 140 + 4 * i for i, one in enumerate(told.values()))
    assert {one.finish for one in told.values()} == {"length", "stop"}
    gained = Counter(engine.multi_step()["refusals"])
    assert gained["prefill"]
    engine.close()


@pytest.mark.covers("MS-9")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_the_tight_loop_is_the_ordinary_step_again_and_again(ahead: bool, ids: Any, plain: Any) -> None:
    """The same windows through the base runner's own step: same outputs, same rows of the step log."""
    logs, tolds = [], []
    for loop in (None, reentrant_loop):
        engine = merged_talker(8, async_scheduling=ahead, **SMALL_POOL)
        if loop is not None:
            runner_of(engine).window_loop = loop
        tolds.append(play(engine, ids, SEEDED, arrive=ARRIVE))
        assert engine.multi_step()["executed_windows"] > 3
        logs.append([row._replace(step=0, window_step=0) for row in engine.trace()])
        engine.close()
    same(tolds[0], plain["seeded"])
    same(tolds[1], plain["seeded"])
    assert logs[0] == logs[1]


@pytest.mark.covers("MS-9", "MS-11")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_tokens_that_are_read_once_at_the_window_s_end(ahead: bool, ids: Any, plain: Any, monkeypatch: Any) -> None:
    """As on a device with a queue: rows that have stopped run on to the window's end, and ship nothing of it."""
    import stagevox.stage.multi_step.executor as executor

    begin = executor.WindowRun.__init__

    def queued(run: Any, *args: Any) -> None:
        begin(run, *args)
        run.on_host = False

    monkeypatch.setattr(executor.WindowRun, "__init__", queued)
    engine = merged_talker(16, async_scheduling=ahead, **SMALL_POOL)
    same(play(engine, ids, SEEDED, arrive=ARRIVE), plain["seeded"])
    positions = {name: {row.num_computed for row in engine.trace() if row.req_id == name and not row.is_prefill} for name in ids}
    assert any(len(positions[name]) > len(plain["seeded"][name].tokens) for name in ids), "no row ran on after its stop"
    sampling = {name: {"min_tokens": 140 + 4 * i, "max_tokens": 1000} for i, name in enumerate(ids)}
    same(play(engine, ids, sampling), plain["long"])
    engine.close()


@pytest.mark.covers("MS-4", "MS-5", "MS-7")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_windows_that_the_runner_refuses(ahead: bool, ids: Any, plain: Any, monkeypatch: Any) -> None:
    import stagevox.stage.multi_step.executor as executor

    validate, turn = executor.validate_multi_step_plan, itertools.count()

    def moody(runner: Any, plan: Any) -> Any:
        match next(turn) % 3:
            case 0:
                return executor.Refusal.BATCH
            case 1:
                raise ValueError("the gate itself fails")
        return validate(runner, plan)

    monkeypatch.setattr(executor, "validate_multi_step_plan", moody)
    engine = merged_talker(8, async_scheduling=ahead)
    same(play(engine, ids, SEEDED), plain["seeded"])
    found = engine.multi_step()
    assert found["executed_windows"] and found["refusals"]["batch"] and found["refusals"]["runner_error"], found
    assert found["planned_windows"] == found["executed_windows"] + found["refusals"]["batch"] + found["refusals"]["runner_error"]
    engine.close()


@pytest.mark.covers("MS-4")
def test_aborted_while_its_window_is_out(ids: Any, plain: Any) -> None:
    """With async scheduling a round is made and not yet answered."""
    engine = merged_talker(8, async_scheduling=True)
    from stagevox.stage.payload import StageRequest

    for name in ("r0", "r1"):
        payload = {"text_rows": torch.tensor(ids[name]), "voice": "slt"}
        engine.add(StageRequest(name, [514] * 5 + [513], {"temperature": 0.0, "max_tokens": 171}, payload))
    outputs = []
    while not engine._scheduler.windows.outstanding:
        outputs += engine.step()[0]
    assert engine._core.batch_queue
    engine.abort(["r0"])
    while engine.has_work():
        outputs += engine.step()[0]
        check_books(engine)
    found = [token for output in outputs if output.req_id == "r1" for token in output.new_token_ids]
    assert found == plain["greedy"]["r1"].tokens
    assert sum(len(output.new_token_ids) for output in outputs if output.req_id == "r0") <= 1
    assert engine.num_requests == 0 and not any(engine.state_size().values())
    engine.close()


@pytest.mark.covers("MS-12")
def test_windows_in_the_trace(ids: Any) -> None:
    engine = merged_talker(8)
    play(engine, {"r1": ids["r1"]})
    steps = [row.window_step for row in engine.trace()]
    assert steps[:18] == [0, *range(1, 9), *range(1, 9), 1]
    assert [row.num_computed for row in engine.trace()] == [0, *range(6, 6 + len(steps) - 1)]
    engine.close()


@pytest.mark.covers("MS-6")
def test_what_a_request_asks_for_makes_its_company_go_step_by_step(ids: Any, plain: Any) -> None:
    """A penalty is never dropped: while its request runs nobody has windows, then they are back."""
    engine, single = merged_talker(8), merged_talker(0)
    penal = {"r1": {"repetition_penalty": 1.3}}
    chosen = {name: ids[name] for name in ("r0", "r1")}
    told, expected = play(engine, chosen, penal), play(single, chosen, penal)
    same(told, expected)
    assert told["r1"].tokens != plain["greedy"]["r1"].tokens, "the penalty did something"
    found = engine.multi_step()
    assert found["refusals"]["penalties"] >= len(told["r1"].tokens) - 2
    assert found["executed_windows"]
    engine.close()
    single.close()
