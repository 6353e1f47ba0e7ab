"""Merged decode over the toy models: what each kind of hook and output sees, and who fails (MS-2, MS-8 to MS-11)."""

import dataclasses

import pytest
import torch
from vllm import _custom_ops as ops

from stagevox.contract import RowsAt
from stagevox.stage.multi_step.integrity import check_integrity
from stagevox.stage.multi_step.layout import DecodeLayout
from stagevox.stage.wait import WaitState
from tests.engine.stage.toy_models import ToyNotified, ToyStopping

LENGTHS = {"a": (17, 30), "b": (9, 44), "c": (33, 21)}
"""Prompt length and tokens."""


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def ahead(request):
    return request.param


@pytest.fixture
def merged(engine):
    """``merged(model, K)``: a harness with windows of K steps, its books checked after every step."""

    stages = []

    def get(model, steps=8, *, spec=None, background=False, **overrides):
        where = {"output_materialisation": "background"} if background else {}
        extras = {"engine_extras": {"multi_step_decode_steps": steps, **where}}
        if not steps:
            overrides = {"enable_prefix_caching": False, **overrides}
        stage = engine(model, spec={**(spec or {}), **extras}, **overrides)
        step = type(stage).step.__get__(stage)

        def checked():
            outputs = step()
            check_integrity(stage.scheduler, len(stage.engine._core.batch_queue or ()))
            return outputs

        stage.step = checked
        stage.before = stage.engine.multi_step()
        stages.append(stage)
        return stage

    yield get
    for stage in stages:
        stage.runner.materialiser.close()  # its thread; the next step of a lent engine starts another


def gained(stage, key):
    before, after = stage.before, stage.engine.multi_step()
    return after[key] - before[key] if key in after else after["refusals"].get(key, 0) - before["refusals"].get(key, 0)


@pytest.mark.covers("MS-2", "MS-8", "MS-9", "MS-13")
@pytest.mark.parametrize("steps", [2, 8, 16])
@pytest.mark.parametrize("model", ["ToyConditioned", "ToyScalar", "ToyMTP"])
def test_tokens_and_codes_are_the_oracle_s(merged, oracle, prompt, rows, model, steps, ahead):
    mtp = model == "ToyMTP"
    stage = merged(model, steps, async_scheduling=ahead)
    for seed, (name, (length, count)) in enumerate(LENGTHS.items()):
        stage.add(name, prompt(length, seed), count, rows=rows(seed))
    stage.run()
    for seed, (name, (length, count)) in enumerate(LENGTHS.items()):
        said = oracle.say(prompt(length, seed), count, rows=rows(seed), mtp=mtp)
        assert stage.tokens[name] == said.tokens
        if mtp:
            assert stage.codes[name] == said.codes
    assert gained(stage, "executed_windows") >= 40 // steps
    assert gained(stage, "executed_steps") >= 42
    assert gained(stage, "shortened_windows") or steps == 2


@pytest.mark.covers("MS-9")
def test_postprocess_sees_each_position_once(merged, prompt, rows, ahead, monkeypatch):
    stage = merged("ToyMTP", async_scheduling=ahead)
    stage.add("a", prompt(17, 1), 30, rows=rows(1))
    seen = []
    while stage.engine.has_work():
        state = stage.runner.model_intermediate_buffer.get(stage.ids["a"])
        seen = list(state["seen"]) if state and "seen" in state else seen
        stage.step()
    assert seen == list(range(len(seen))) and len(seen) >= 17 + 20


@pytest.mark.covers("MS-8", "MS-9")
@pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])
def test_exported_rows_go_out_once_and_in_order(merged, prompt, ahead, background):
    """Token-aligned rows joined, a value a request: the last one."""
    single = merged("ToyExporting", 0, async_scheduling=ahead)
    stage = merged("ToyExporting", 8, async_scheduling=ahead, background=background)
    hidden = {}
    for each in (single, stage):
        rows = hidden[each] = {}
        emit = each.scheduler._emit

        def noting(req_id, tokens, client, onward, reason, *, emit=emit, rows=rows, each=each):
            if "hidden" in onward:
                rows.setdefault(each.names[req_id], []).append(onward["hidden"])
            emit(req_id, tokens, client, onward, reason)

        for seed, (name, (length, count)) in enumerate(LENGTHS.items()):
            each.add(name, prompt(length, seed), count, who=name)
        each.scheduler._emit = noting
        each.run()
        del each.scheduler._emit
    assert gained(stage, "executed_windows") >= 4
    for name, (length, count) in LENGTHS.items():
        assert stage.tokens[name] == single.tokens[name]
        assert stage.named(name, "position").tolist() == list(range(length + count - 1))
        assert {out.multimodal["who"] for out in stage.outputs[name] if out.multimodal} == {name}
        ours, theirs = torch.cat(hidden[stage][name]), torch.cat(hidden[single][name])
        assert torch.equal(ours, theirs) and len(ours) == length + count - 1


@pytest.mark.covers("MS-9")
@pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])
def test_rows_from_storage_that_every_step_writes_anew(merged, prompt, ahead, background):
    """Each step of a window copies what is its own before the next one runs."""
    told = {}
    for steps in (0, 8):
        stage = merged("ToyStatic", steps, async_scheduling=ahead, background=background and bool(steps))
        for seed, (name, (length, count)) in enumerate(LENGTHS.items()):
            stage.add(name, prompt(length, seed), count)
        stage.run()
        told[steps] = {(name, key): stage.named(name, key) for name in LENGTHS for key in ("position", "row", "given")}
        assert steps == 0 or gained(stage, "executed_windows") >= 4
    assert all(torch.equal(rows, told[0][where]) for where, rows in told[8].items())


@pytest.mark.covers("MS-9")
@pytest.mark.parametrize("background", [False, True], ids=["inline", "background"])
def test_rows_that_change_their_shape_within_a_window_fail_their_request(merged, prompt, ahead, background):
    stage = merged("ToyStatic", async_scheduling=ahead, background=background)
    for seed, name in enumerate("ab"):
        stage.add(name, prompt(9, seed), 30, at=9 + 12)
    stage.run()
    assert stage.finish == {"a": "error", "b": "error"}
    assert all("make_omni_output: returned rows that don't join" in error for error in stage.error.values())
    assert [len(stage.tokens[name]) for name in "ab"] == [9, 9], "the prompt's and a whole window"
    stage.add("c", prompt(9, 3), 20)
    stage.run()
    assert stage.finish["c"] == "length"


@pytest.mark.covers("MS-9")
@pytest.mark.parametrize("at", range(9, 19))
@pytest.mark.parametrize("hook", ["preprocess_decode_batch", "talker_mtp", "postprocess"])
def test_one_that_fails_within_a_window_fails_there(merged, oracle, prompt, rows, ahead, hook, at):
    """What came before is delivered, as step by step; the others are right."""
    kind = "raise"
    told = {}
    for steps in (0, 8):
        stage = merged("ToyMTP", steps, async_scheduling=ahead)
        stage.add("bad", prompt(9, 5), 30, rows=rows(5), fault={"hook": hook, "kind": kind, "at": at})
        stage.add("good", prompt(9, 2), 40, rows=rows(2))
        stage.run()
        told[steps] = stage.tokens["bad"], stage.codes["bad"], stage.finish["bad"], stage.error["bad"]
        said = oracle.say(prompt(9, 2), 40, rows=rows(2), mtp=True)
        assert (stage.tokens["good"], stage.codes["good"], stage.finish["good"]) == (said.tokens, said.codes, "length")
        if steps:
            assert gained(stage, "executed_windows") >= 3
    assert told[8] == told[0]
    assert told[8][2] == "error" and hook in told[8][3]


@pytest.mark.covers("MS-9")
def test_one_that_fails_before_its_window_is_the_runner_s_refusal(merged, prompt, rows, ahead):
    stage = merged("ToyMTP", async_scheduling=ahead)
    stage.add("bad", prompt(9, 5), 30, rows=rows(5), fault={"hook": "preprocess_decode_batch", "kind": "raise", "at": 9})
    stage.add("good", prompt(9, 2), 40, rows=rows(2))
    stage.run()
    assert gained(stage, "failed") == 1


@pytest.mark.covers("MS-10")
def test_the_model_hears_who_has_ended_on_the_window_path_too(merged, prompt, rows, ahead):
    """A retires while B has windows; B's end comes with an empty round."""
    stage = merged("ToyNotified", async_scheduling=ahead)
    ToyNotified.told.clear()
    stage.add("a", prompt(9, 1), 4, rows=rows(1))
    stage.add("b", prompt(9, 2), 40, rows=rows(2))
    heard = []
    execute = stage.runner.execute_model

    def noting(output, *args):
        before = len(ToyNotified.told)
        result = execute(output, *args)
        heard.extend((ids, bool(getattr(output, "multi_step_plan", None))) for ids in ToyNotified.told[before:])
        return result

    stage.runner.execute_model = noting
    stage.run()
    del stage.runner.execute_model
    assert [ids for ids, _ in heard] == [{stage.ids["a"]}, {stage.ids["b"]}]
    assert heard[0][1], "that round was a window of b's"


@pytest.mark.covers("MS-10")
def test_a_model_that_fails_to_hear_of_an_end_harms_nobody(merged, oracle, prompt, rows, ahead, monkeypatch, caplog):
    stage, told = merged("ToyNotified", async_scheduling=ahead), []

    def deaf(self, finished_req_ids):
        told.append(finished_req_ids)
        raise ZeroDivisionError("no")

    monkeypatch.setattr(ToyNotified, "on_requests_finished", deaf)
    stage.add("a", prompt(9, 1), 4, rows=rows(1))
    stage.add("b", prompt(9, 2), 40, rows=rows(2))
    with caplog.at_level("ERROR", "stagevox.stage"):
        stage.run()
    assert told == [{stage.ids["a"]}, {stage.ids["b"]}] and stage.finish == {"a": "length", "b": "length"}
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == ["on_requests_finished: ZeroDivisionError: no"] * 2
    assert stage.tokens["b"] == oracle.say(prompt(9, 2), 40, rows=rows(2), mtp=True).tokens


@pytest.mark.covers("MS-5", "MS-10")
def test_a_fully_fenced_round_still_tells_the_model(merged, prompt, rows):
    stage = merged("ToyNotified", async_scheduling=True)
    ToyNotified.told.clear()
    stage.add("a", prompt(9, 1), 40, rows=rows(1))
    stage.add("b", prompt(9, 2), 40, rows=rows(2))
    while not stage.scheduler.windows.outstanding:
        stage.step()
    stage.abort("a")
    assert stage.scheduler.has_requests(), "b is fenced, but somebody has ended"
    stage.step()
    assert {stage.ids["a"]} in ToyNotified.told
    stage.run()


@pytest.mark.covers("MS-5", "MS-6")
def test_a_window_ends_where_the_conditioning_does(merged, oracle, prompt, ahead):
    """Rows come in pieces: no window runs past them, and the request is parked with its window's end."""
    rows = torch.randn(60, 64, generator=torch.Generator().manual_seed(4)) * 0.1
    spec = {"input_adapter": "tests.engine.stage.toy_models:ToyAdapter"}
    stage = merged("ToyMTP", spec=spec, async_scheduling=ahead)
    stage.add("a", None, 45)
    stage.add("b", prompt(9, 2), 45, rows=rows)
    stage.deliver("a", ids=prompt(10, 1), payload={"rows": RowsAt(0, rows[:13])}, ready=13)
    ends, known = [], 13
    for piece in (16, 17, 30, 60):
        for _ in range(6 if ahead else 3):
            stage.step()
        if known < 60:
            assert stage.scheduler.wait_room.get(stage.ids["a"]) is WaitState.WAITING_FOR_CHUNK
            assert stage.scheduler.requests[stage.ids["a"]].num_computed_tokens == known
        ends.append(len(stage.tokens["a"]))
        stage.deliver(
            "a", payload={"rows": RowsAt(known, rows[known:piece])}, ready=None if piece == 60 else piece, end=piece == 60
        )
        known = piece
    stage.run()
    for name, seed, length in (("a", 1, 10), ("b", 2, 9)):
        said = oracle.say(prompt(length, seed), 45, rows=rows, mtp=True)
        assert (stage.tokens[name], stage.codes[name]) == (said.tokens, said.codes), name
    assert ends == [4, 7, 8, 21]
    assert gained(stage, "executed_windows") >= 4 and gained(stage, "outstanding" if ahead else "budget") >= 1


@pytest.mark.covers("MS-2", "MS-6")
def test_a_logit_bias_counts_in_every_step(merged, prompt, rows, ahead):
    told = {}
    for steps in (0, 8):
        stage = merged("ToyMTP", steps, async_scheduling=ahead)
        for seed, name in enumerate("ab"):
            sampling = {"logit_bias": {3: 2.0 + seed, 11: 1.5}, "min_p": 0.05, "temperature": 0.8, "seed": seed}
            stage.add(name, prompt(9, seed), 30, rows=rows(seed), sampling=sampling)
        stage.run()
        told[steps] = dict(stage.tokens), dict(stage.codes)
    assert told[8] == told[0]
    assert gained(stage, "executed_windows") >= 3


@pytest.mark.covers("MS-9")
def test_attention_metadata_is_what_the_runner_would_build(merged, prompt, rows, ahead, monkeypatch):
    """Each step of each window against vLLM's own builder call, across block boundaries."""
    stage = merged("ToyMTP", 12, async_scheduling=ahead)
    compared, asked, advance, partition = [], [], DecodeLayout.advance, ops.cpu_attn_get_scheduler_metadata

    def noting(**kwargs):
        asked.append({key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()})
        return partition(**kwargs)

    monkeypatch.setattr(ops, "cpu_attn_get_scheduler_metadata", noting)

    def checked(layout, step):
        asked.clear()
        advance(layout, step)
        runner, count = layout._runner, layout._reqs
        runner.input_batch.num_computed_tokens_cpu[:count] += step
        mappings, _ = runner._get_slot_mappings(num_tokens_padded=count, num_reqs_padded=count, num_tokens_unpadded=count)
        ours = {name: table.slot_mapping.gpu[:count].clone() for name, table in enumerate(runner.input_batch.block_table)}
        runner.input_batch.block_table.compute_slot_mapping(
            count, runner.query_start_loc.gpu[: count + 1], runner.positions[:count]
        )
        for name, table in enumerate(runner.input_batch.block_table):
            assert torch.equal(ours[name], table.slot_mapping.gpu[:count])
        expected, _ = runner._build_attention_metadata(
            num_tokens=count, num_reqs=count, max_query_len=1, logits_indices=torch.arange(count), slot_mappings=mappings
        )
        runner.input_batch.num_computed_tokens_cpu[:count] -= step
        assert len(asked) == 2 and asked[0] == asked[1], "the work partition is made anew, from the same lengths"
        assert expected.keys() == layout._context.attn_metadata.keys()
        for layer, metadata in expected.items():
            found = layout._context.attn_metadata[layer]
            for item in dataclasses.fields(metadata):
                if item.name == "scheduler_metadata":
                    continue  # what was asked above, in memory that isn't all written
                one, other = getattr(found, item.name), getattr(metadata, item.name)
                assert type(one) is type(other), item.name
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, item.name
        compared.append(count)

    monkeypatch.setattr(DecodeLayout, "advance", checked)
    for seed, (name, (length, count)) in enumerate(LENGTHS.items()):
        stage.add(name, prompt(length, seed), count + 20, rows=rows(seed))
    stage.run()
    assert len(compared) > 40 and set(compared) == {1, 2, 3}


@pytest.fixture
def stopping(merged, prompt):
    def run(steps, *, sure=True, ahead=False, **sampling):
        stage = merged("ToyStopping", steps, async_scheduling=ahead)
        for seed, (name, limit) in enumerate({"a": 60, "b": 150, "c": 220}.items()):
            length = 9 + seed
            fields = {"stop_token_ids": [ToyStopping.STOP], "max_tokens": 80, **sampling}
            stage.add(name, prompt(length, seed), sampling=fields, length=length, limit=limit, sure=sure)
        stage.run()
        codes = {name: stage.named(name, "code").tolist() for name in "abc"}
        ends = {name: [out.multimodal["meta.turn_end"] for out in stage.outputs[name]] for name in "abc"}
        return stage, dict(stage.tokens), codes, dict(stage.finish), ends

    return run


@pytest.mark.covers("MS-9", "MS-10", "MS-11")
def test_derived_tokens_are_those_that_are_sampled(stopping, ahead):
    _, tokens, codes, finish, _ = stopping(0, ahead=ahead)
    assert set(finish.values()) == {"stop"} and len({len(ids) for ids in tokens.values()}) == 3
    stage, *merged, ends = stopping(8, ahead=ahead)
    assert merged == [tokens, codes, finish]
    windows, steps = gained(stage, "executed_windows"), gained(stage, "executed_steps")
    assert windows >= 2 and gained(stage, "derived_steps") == steps - windows, "all but each window's first step"
    for marks in ends.values():
        assert marks[-1] is True and not any(marks[:-1]), "the mark of the step within the window in which the turn ended"


@pytest.mark.covers("MS-9", "MS-11")
@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.7, "seed": 3}, {"logit_bias": {ToyStopping.GO: 0.5}}, {"sure": False}],
    ids=["sampling", "bias", "unsure"],
)
def test_tokens_are_sampled_where_anything_else_has_a_say(stopping, ahead, fields):
    _, *single = stopping(0, ahead=ahead, **fields)
    stage, *merged = stopping(8, ahead=ahead, **fields)
    assert merged[:3] == single[:3]
    assert gained(stage, "executed_windows") >= 2
    assert gained(stage, "derived_steps") == 0


@pytest.mark.covers("MS-11")
def test_min_tokens_counts_each_request_s_own_output(stopping, ahead):
    """The stop is masked up to 30 tokens, by the sampler; then it is derived again."""
    _, *single = stopping(0, ahead=ahead, min_tokens=30)
    stage, *merged = stopping(8, ahead=ahead, min_tokens=30)
    assert merged[:3] == single[:3]
    assert min(len(ids) for ids in merged[0].values()) == 31, "the first stop after the mask"
    derived, steps = gained(stage, "derived_steps"), gained(stage, "executed_steps")
    assert 0 < derived < steps - gained(stage, "executed_windows")


@pytest.mark.covers("MS-11")
def test_a_hook_that_names_too_few_tokens(merged, prompt, ahead):
    """It was asked for all of them, so all fail, after what the window's first step made; the engine lives on."""
    stage = merged("ToyStopping", async_scheduling=ahead)
    for seed, name in enumerate("ab"):
        stage.add(name, prompt(9, seed), sampling={"max_tokens": 40}, length=9, limit=999, short=True)
    stage.run()
    assert stage.finish == {"a": "error", "b": "error"}
    assert set(stage.error.values()) == {"HookCountError: derive_engine_tokens: expected 2 tokens, got 1"}
    assert [len(stage.tokens[name]) for name in "ab"] == [2, 2]
    stage.add("c", prompt(9, 3), sampling={"max_tokens": 20}, length=9, limit=999)
    stage.run()
    assert stage.finish["c"] == "length" and gained(stage, "derived_steps")
