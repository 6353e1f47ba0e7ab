"""A plain model under our scheduler and runner is the model under stock vLLM, step by step (RT-1, RT-8)."""

import pytest

from tests.engine.stage.harness import ENGINE_ARGS, SMALL_POOL

pytestmark = pytest.mark.covers("RT-1", "RT-8")

REQUESTS = {"a": (45, 30), "b": (17, 44), "c": (33, 40), "d": (64, 12)}
"""Prompt length and number of tokens."""

SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 20}

MODES = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"max_num_batched_tokens": 24, **SMALL_POOL},
    "no-cache": {"max_num_batched_tokens": 24, "enable_prefix_caching": False, **SMALL_POOL},
}


def scheduled(scheduler, names):
    """Makes ``scheduler`` note each step's ``{name: number of tokens}``; returns the list it fills."""
    steps, schedule = [], scheduler.schedule

    def noting(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            steps.append({names(req_id): count for req_id, count in output.num_scheduled_tokens.items()})
        return output

    scheduler.schedule = noting
    return steps


@pytest.fixture(scope="module")
def stock(checkpoints, prompt):
    """``stock(mode, **sampling)``: tokens by name, and the schedule, of stock ``vllm.LLM``."""
    import vllm

    llms, answers = {}, {}

    def get(mode, **sampling):
        key = mode, str(sampling)
        if key not in answers:
            answers[key] = generate(mode, sampling)
        return answers[key]

    def generate(mode, sampling):
        if mode not in llms:
            llm = vllm.LLM(str(checkpoints["Qwen2ForCausalLM"]), **{**ENGINE_ARGS, **MODES[mode]})
            core = llm.llm_engine.engine_core.engine_core
            llms[mode] = llm, scheduled(core.scheduler, lambda req_id: "abcd"[int(req_id.split("-")[0]) % 4])
        llm, steps = llms[mode]
        steps.clear()
        fields = [params(seed, name, **sampling) for seed, name in enumerate(REQUESTS)]
        prompts = [
            {"prompt_token_ids": prompt(length, seed), "cache_salt": str((sampling, seed))}
            for seed, (length, _) in enumerate(REQUESTS.values())
        ]
        outputs = llm.generate(prompts, [vllm.SamplingParams(**f) for f in fields], use_tqdm=False)
        return {name: list(out.outputs[0].token_ids) for name, out in zip(REQUESTS, outputs, strict=True)}, list(steps)

    yield get
    llms.clear()


def params(seed, name, **sampling):
    fields = {"temperature": 0.0, "max_tokens": REQUESTS[name][1], "ignore_eos": True, "detokenize": False, **sampling}
    return {**fields, "seed": 100 + seed} if sampling else fields


def play(stage, prompt, **sampling):
    steps = scheduled(stage.scheduler, lambda req_id: stage.names[req_id])
    for seed, (name, (length, _)) in enumerate(REQUESTS.items()):
        stage.add(name, prompt(length, seed), sampling=params(seed, name, **sampling))
    stage.run()
    del stage.scheduler.schedule
    return steps


def happened(stage, mode):
    chunks = [row for name in REQUESTS for row in stage.trace(name) if row.is_prefill and row.num_computed]
    assert bool(chunks) == (mode != "whole")
    assert bool(stage.preempted()) == (mode in ("preempted", "no-cache"))


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_and_schedule(engine, oracle, stock, prompt, mode):
    stage = engine("Qwen2ForCausalLM", **MODES[mode])
    steps = play(stage, prompt)
    happened(stage, mode)
    tokens, theirs = stock(mode)
    assert stage.tokens == tokens
    assert steps == theirs
    for seed, (name, (length, count)) in enumerate(REQUESTS.items()):
        assert stage.tokens[name] == oracle.say(prompt(length, seed), count).tokens


@pytest.mark.parametrize("mode", MODES)
def test_seeded_tokens_are_those_of_stock_whole_prompts(engine, stock, prompt, mode):
    """Stock vLLM can't run seeded chunked prompts on a CPU, nor replays in chunks; unchunked it can, and that is what it must be."""
    tokens, _ = stock("whole", **SEEDED)
    stage = engine("Qwen2ForCausalLM", **MODES[mode])
    play(stage, prompt, **SEEDED)
    happened(stage, mode)
    assert stage.tokens == tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_running_ahead_gives_the_same_tokens(engine, stock, prompt, mode, sampling):
    tokens, _ = stock("whole", **sampling)
    stage = engine("Qwen2ForCausalLM", async_scheduling=True, **MODES[mode])
    play(stage, prompt, **sampling)
    happened(stage, mode)
    assert stage.tokens == tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prefix_hit_changes_nothing(engine, oracle, prompt, async_scheduling):
    stage = engine("Qwen2ForCausalLM", async_scheduling=async_scheduling)
    for name in ("first", "second"):
        stage.add(name, prompt(70, 3), 10, salt=f"hit {async_scheduling}")
        stage.run()
        assert stage.tokens[name] == oracle.say(prompt(70, 3), 10).tokens
    assert [stage.trace(name)[0].num_computed for name in ("first", "second")] == [0, 64]


def test_a_seed_gives_the_same_tokens_alone_and_in_company(engine, prompt):
    stage = engine("Qwen2ForCausalLM")
    alone = {}
    for seed, (name, (length, _)) in enumerate(REQUESTS.items()):
        stage.add(name, prompt(length, seed), sampling=params(seed, name, **SEEDED))
        alone[name] = list(stage.run().tokens[name])
    stage.begin()
    play(stage, prompt, **SEEDED)
    assert stage.tokens == alone
    assert len({tuple(tokens[:12]) for tokens in alone.values()}) == 4


@pytest.mark.covers("RT-6", "RT-1")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_nothing_is_wrapped_where_there_is_nothing_to_add(engine, prompt, async_scheduling, monkeypatch):
    """Neither payloads on board nor outputs by request: upstream's own objects go through."""
    import stagevox.stage.runner as runner
    import stagevox.stage.scheduler as scheduler
    import stagevox.stage.wire as wire

    def never(*args, **kwargs):
        raise AssertionError("built a payload")

    stage = engine("Qwen2ForCausalLM", async_scheduling=async_scheduling)
    monkeypatch.setattr(runner, "plan_outputs", never)
    monkeypatch.setattr(runner, "OmniAsyncOutput", never)
    monkeypatch.setattr(wire.OmniModelRunnerOutput, "wrap", never)
    monkeypatch.setattr(scheduler.OmniSchedulerOutput, "wrap", never)
    stage.add("a", prompt(9), 5)
    stage.add("b", prompt(8), 5)
    stage.run()
    empty = scheduler.NOTHING
    assert len(stage.outputs["a"]) == len(stage.outputs["b"]) == 5
    assert all(out.multimodal is empty for outs in stage.outputs.values() for out in outs)
