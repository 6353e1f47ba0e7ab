"""The packaged Talker's maths and its hooks against the oracle, in fp32; the row law in bf16 too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mini_reference import TinyOmni
from safetensors.torch import load_file

from stagevox.contract import (
    IS_PREFILL,
    MTP_INPUTS,
    NUM_COMPUTED_TOKENS,
    check_batch,
    check_mtp,
    check_row,
)
from stagevox.contract import (
    PROMPT_LEN as PROMPT_LEN_FIELD,
)
from stagevox.errors import CheckpointError, ContractError, MissingStateError
from stagevox.models.mini.layers import linear
from stagevox.models.mini.pieces import WEIGHTS
from stagevox.models.mini.talker import MiniTalkerForCausalLM
from stagevox.models.mini.topology import stages
from stagevox.stage.vllm_config import make_config
from support.talker_stage import PROMPT_LEN, speak, talker_engine

TEXT = "seven plus three is ten"
TEXTS = ("zero nine five", "five six five one seven nine", "go to the small pink chair on the left")


def build(**overrides: Any) -> MiniTalkerForCausalLM:
    """The model alone, without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = make_config(stages()[1], overrides)
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        return MiniTalkerForCausalLM(vllm_config=config)


def loaded(**overrides: Any) -> MiniTalkerForCausalLM:
    model = build(**overrides)
    model.load_weights(load_file(WEIGHTS / "talker" / "model.safetensors").items())
    return model


@pytest.fixture(scope="module")
def oracle() -> TinyOmni:
    return TinyOmni()


@pytest.fixture(scope="module")
def model() -> MiniTalkerForCausalLM:
    return loaded()


@pytest.fixture(scope="module")
def bf16() -> MiniTalkerForCausalLM:
    return loaded(dtype="bfloat16")


@pytest.fixture(scope="module")
def codes(oracle: TinyOmni) -> torch.Tensor:
    return oracle.generate(TEXT)


def info(oracle: TinyOmni, computed: int, **state: Any) -> dict[str, Any]:
    """A request's state and phase, as hooks get them."""
    return {
        "text_rows": torch.tensor(oracle.tokenize(TEXT)),
        "voice": "slt",
        "last_hidden": torch.zeros(1, 192),
        **state,
        IS_PREFILL: computed < PROMPT_LEN,
        NUM_COMPUTED_TOKENS: computed,
        PROMPT_LEN_FIELD: PROMPT_LEN,
    }


def rows(model: MiniTalkerForCausalLM, oracle: TinyOmni, start: int, end: int, **state: Any) -> torch.Tensor:
    """The conditioning of positions ``start .. end - 1``."""
    ids = torch.zeros(end - start, dtype=torch.long)
    result = model.preprocess(ids, model.embed_input_ids(ids), **info(oracle, start, **state))
    return check_row(result, end - start, 192)[1]


def expected_rows(oracle: TinyOmni, end: int) -> torch.Tensor:
    """The oracle's prompt, then its text rows without frames."""
    ids = oracle.tokenize(TEXT)
    text = oracle.w["talker.text_embedding"][oracle.row_ids(ids, PROMPT_LEN - 1, end - PROMPT_LEN)]
    return torch.cat([oracle.prompt(ids), text])


# -- the row law ------------------------------------------------------------------------------------------------------

LENGTH = 40  # the text has 21 rows: positions from 22 on are PAD
SPANS = [(0, 6), (0, 5), (5, 6), (0, 9), (4, 8), (5, 40), (6, 7), (19, 25), (30, 40), (39, 40)]


@pytest.mark.covers("TK-1", "TK-3", "TK-6")
@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_go_by_absolute_position(request, oracle, span, dtype):
    model = request.getfixturevalue("model" if dtype == "fp32" else "bf16")
    reply = torch.tensor(oracle.tokenize(TEXT))
    want = expected_rows(oracle, LENGTH)[slice(*span)]
    tolerance = {"fp32": 0, "bf16": 1e-2}[dtype] * want.abs().max()
    for _ in range(2):  # asked again, as a replay does
        got = rows(model, oracle, *span, text_rows=reply)
        assert (got.float() - want).abs().max() <= tolerance
    assert reply.tolist() == oracle.tokenize(TEXT), "the reply is never consumed"


@pytest.mark.covers("TK-1", "TK-6")
@pytest.mark.parametrize("chunk", [1, 4, 7, 40])
def test_any_split_gives_the_same_rows(model, oracle, chunk):
    parts = [rows(model, oracle, start, min(start + chunk, LENGTH)) for start in range(0, LENGTH, chunk)]
    assert torch.equal(torch.cat(parts), expected_rows(oracle, LENGTH))


@pytest.mark.covers("TK-1", "TK-6", "PC-5")
def test_the_batch_hook_gives_the_rows_of_the_single_one(model, oracle):
    positions = [6, 7, 20, 21, 22, 39]
    hidden = torch.randn(len(positions), 192)
    infos = [info(oracle, p, last_hidden=hidden[i : i + 1]) for i, p in enumerate(positions)]
    ids = torch.arange(len(positions))
    result = check_batch(model.preprocess_decode_batch(input_ids=ids, req_infos=infos), len(positions), 192, mtp=True)
    assert result[0] is ids
    assert torch.equal(result[2], hidden)
    for i, p in enumerate(positions):
        _, embeds, update = model.preprocess(ids[:1], torch.zeros(1, 192), **infos[i])
        assert torch.equal(result[3][i], embeds[0]) and torch.equal(embeds, rows(model, oracle, p, p + 1))
        last_hidden, text_step = update[MTP_INPUTS]
        assert torch.equal(last_hidden, hidden[i : i + 1]) and torch.equal(text_step, embeds)


@pytest.mark.covers("PC-8")
def test_a_prompt_row_never_asks_for_mtp(model, oracle):
    ids = torch.zeros(1, dtype=torch.long)
    for position in range(PROMPT_LEN):
        assert model.preprocess(ids, torch.zeros(1, 192), **info(oracle, position))[2] == {}


@pytest.mark.covers("TK-2", "TK-6", "EX-7")
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("text_rows", None, MissingStateError),
        ("voice", None, MissingStateError),
        ("voice", "bob", MissingStateError),
        (PROMPT_LEN_FIELD, 7, ContractError),
    ],
)
def test_missing_or_mismatching_conditioning_raises(model, oracle, field, value, error):
    for start in (0, 9):
        given = {**info(oracle, start), field: value}
        with pytest.raises(error, match=r"^preprocess: "):
            model.preprocess(torch.zeros(1, dtype=torch.long), torch.zeros(1, 192), **given)
    with pytest.raises(error, match=r"^preprocess_decode_batch: "):
        model.preprocess_decode_batch(input_ids=torch.zeros(1, dtype=torch.long), req_infos=[given])


@pytest.mark.covers("EX-7")
def test_a_decode_row_without_its_hidden_state_raises(model, oracle):
    given = info(oracle, 9)
    del given["last_hidden"]
    with pytest.raises(MissingStateError, match="last_hidden"):
        model.preprocess_decode_batch(input_ids=torch.zeros(1, dtype=torch.long), req_infos=[given])
    with pytest.raises(MissingStateError, match="last_hidden"):
        model.preprocess(torch.zeros(1, dtype=torch.long), torch.zeros(1, 192), **given)


@pytest.mark.covers("EX-7")
def test_postprocess_keeps_a_copy_of_the_last_row(model):
    hidden = torch.randn(5, 192)
    kept = model.postprocess(hidden)["last_hidden"]
    want = hidden[-1:].clone()
    hidden.zero_()
    assert torch.equal(kept, want)


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("EX-8", "PC-8")
@pytest.mark.parametrize("count", [1, 2, 8])
def test_mtp_completes_the_oracles_frames(model, oracle, codes, count):
    ids = oracle.tokenize(TEXT)
    inputs = torch.cat([oracle.prompt(ids), oracle.step_inputs(ids, codes, 0)])
    hidden = oracle.talker(inputs, oracle.new_kv())[PROMPT_LEN - 1 : -1]
    text = oracle.w["talker.text_embedding"][oracle.row_ids(ids, PROMPT_LEN - 1, len(codes))]
    for start in range(0, len(codes), count):
        where = slice(start, start + count)
        result = model.talker_mtp(codes[where, 0].contiguous(), text[where], hidden[where].contiguous(), text[where])
        embeds, got = check_mtp(result, len(codes[where]), 192)
        assert torch.equal(got, codes[where])
        assert (embeds - oracle.step_inputs(ids, codes, 0)[where]).abs().max() < 1e-5


@pytest.mark.covers("PC-12")
def test_logits_are_the_oracles_and_prompt_ids_cannot_be_sampled(model, oracle):
    hidden = torch.randn(9, 192)
    logits = model.compute_logits(hidden)
    assert logits.shape == (9, 515)
    assert (logits[:, :513] - F.linear(hidden, oracle.w["talker.lm_head"])).abs().max() < 1e-4
    assert (logits[:, 513:] == -torch.inf).all()


# -- layers, in an engine ---------------------------------------------------------------------------------------------


class Seen:
    """The hidden states that an engine's Talker made, by position."""

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, module: Any, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        self.steps.append((args[0].clone(), result.clone()))


def watch(engine: Any) -> Seen:
    """Look at what an engine's Talker computes from now on."""
    seen = Seen()
    engine._core.collective_rpc(lambda worker: worker.model_runner.model.talker.register_forward_hook(seen) and None)
    return seen


@pytest.mark.covers("EX-8", "PC-13")
@pytest.mark.parametrize("budget", [5, 64])
def test_hidden_states_are_the_oracles(oracle, budget):
    engine = talker_engine(max_num_seqs=4, max_num_batched_tokens=budget)
    seen = watch(engine)
    for text in TEXTS:
        seen.steps.clear()
        ids, codes = oracle.tokenize(text), oracle.generate(text)
        spoken = speak(engine, {text: ids})[text]
        assert torch.equal(spoken.codes, codes)
        inputs = torch.cat([oracle.prompt(ids), oracle.step_inputs(ids, codes, 0)])
        want = oracle.talker(inputs, oracle.new_kv())
        got = torch.cat([hidden for _, hidden in seen.steps])
        positions = torch.cat([positions for positions, _ in seen.steps])
        assert positions.tolist() == list(range(len(inputs)))
        assert (got - want).abs().max() < 2e-5, text
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_works_in_every_type_an_operator_may_choose(dtype):
    """oneDNN has no float16 product on most CPUs."""
    weight, bias, x = torch.randn(8, 16).to(dtype), torch.randn(8).to(dtype), torch.randn(3, 16).to(dtype)
    torch.testing.assert_close(linear(weight, bias)(x), F.linear(x, weight, bias), atol=0.1, rtol=0.1)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen", "nan"])
@pytest.mark.parametrize("key", ["talker.layers.2.qkv", "talker.codec_embedding.1", "code_predictor.in.weight"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_key(fault, key):
    tensors = load_file(WEIGHTS / "talker" / "model.safetensors")
    if fault == "missing":
        del tensors[key]
    elif fault == "extra":
        key += ".extra"
        tensors[key] = torch.zeros(1)
    elif fault == "nan":
        tensors[key][-1, -1] = torch.nan
    else:
        tensors[key] = tensors[key].t().contiguous()[:-1]
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        build().load_weights(itertools.chain(tensors.items()))
