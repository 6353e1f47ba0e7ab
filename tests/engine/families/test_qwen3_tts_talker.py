"""The talker's rows: a function of request and position, computed here anew from the checkpoint's tensors."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from stagevox.config.blueprint import Blueprint
from stagevox.contract import (
    IS_PREFILL,
    MTP_INPUTS,
    NUM_COMPUTED_TOKENS,
    PROMPT_LEN,
    check_batch,
    check_row,
)
from stagevox.errors import ContractError, MissingStateError
from stagevox.models.qwen3_talker.hooks import LAST_HIDDEN
from stagevox.models.qwen3_tts.talker import Qwen3TTSTalkerForConditionalGeneration
from stagevox.models.qwen3_tts.topology import topology
from stagevox.stage.vllm_config import make_config
from support.qwen3_tts import case, checkpoint, prompt
from support.vllm_layers import one_rank, ready

NAMES = ["one token", "plain", "streaming", "instruct", "dialect chinese", "long streaming"]


@pytest.fixture(scope="module")
def weights():
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint().glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def config():
    return json.loads((checkpoint() / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def front_end():
    return Blueprint.of(str(checkpoint())).front_end


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, weights):
    from vllm.utils.torch_utils import set_default_torch_dtype

    made = make_config(topology(checkpoint()).stages[0], {"dtype": request.param, "max_model_len": 128})
    with one_rank(made):
        with set_default_torch_dtype(made.model_config.dtype):
            talker = Qwen3TTSTalkerForConditionalGeneration(vllm_config=made).requires_grad_(False)
        talker.load_weights(weights.items())
        ready(talker)
        yield talker


def expected_rows(name: str, weights: dict[str, torch.Tensor], config: dict[str, Any], frames: int) -> torch.Tensor:
    """Prompt rows, then text rows of frames, from the case's token ids as the reference made them."""
    w, talker, given = weights, config["talker_config"], case(name)

    def text(ids):
        x = w["talker.model.text_embedding.weight"][torch.tensor(ids)]
        x = F.silu(F.linear(x, w["talker.text_projection.linear_fc1.weight"], w["talker.text_projection.linear_fc1.bias"]))
        return F.linear(x, w["talker.text_projection.linear_fc2.weight"], w["talker.text_projection.linear_fc2.bias"])

    def code(*ids):
        return w["talker.model.codec_embedding.weight"][torch.tensor(ids)]

    pad, bos, eos = (config[f"tts_{kind}_token_id"] for kind in ("pad", "bos", "eos"))
    voice, language = given["voice"].lower(), given["language"].lower()
    dialect = talker["spk_is_dialect"][voice]
    spoken = talker["codec_language_id"].get(dialect if dialect and language in ("auto", "chinese") else language)
    if spoken is None:
        tags = [talker["codec_nothink_id"], talker["codec_think_bos_id"], talker["codec_think_eos_id"]]
    else:
        tags = [talker["codec_think_id"], talker["codec_think_bos_id"], spoken, talker["codec_think_eos_id"]]
    tags += [talker["spk_id"][voice], talker["codec_pad_id"]]
    ids = given["text_ids"]
    parts = [text(given["instruct_ids"])] if given["instruct_ids"] else []
    parts += [text(ids[:3]), text([pad] * (len(tags) - 1) + [bos]) + code(*tags)]
    if given["streaming_text"]:
        parts.append(text(ids[3:4]) + code(talker["codec_bos_id"]))
        trailing = [*ids[4:-5], eos]
    else:
        parts += [text([*ids[3:-5], eos]) + code(talker["codec_pad_id"]), text([pad]) + code(talker["codec_bos_id"])]
        trailing = [pad]
    return torch.cat([*parts, text((trailing + [pad] * frames)[:frames])])


def state_of(front_end, name):
    request = front_end.admit("a", prompt(name))
    return dict(request.payload), len(request.prompt_token_ids)


def rows(model, state, length, first, end):
    ids = torch.zeros(end - first, dtype=torch.long)
    phase = {NUM_COMPUTED_TOKENS: first, PROMPT_LEN: length, IS_PREFILL: first < length}
    result = model.preprocess(ids, model.embed_input_ids(ids), **state, **phase)
    return check_row(result, end - first, 64)[1], result[2]


FRAMES = 30


@pytest.mark.covers("TK-3", "TK-4", "TK-6")
@pytest.mark.parametrize("name", NAMES)
def test_rows_go_by_absolute_position(model, front_end, weights, config, name):
    state, length = state_of(front_end, name)
    wanted = expected_rows(name, weights, config, FRAMES)
    assert len(wanted) == length + FRAMES
    wide = next(model.parameters()).dtype == torch.float32
    tolerance = {"atol": 1e-5, "rtol": 0} if wide else {"atol": 0.2, "rtol": 0.02}  # rows differ by about 1
    before = copy.deepcopy(state)
    text_end = length + len(state["trailing_ids"])
    spans = [(0, length), (0, length - 1), (length - 1, length), (0, 1), (0, length + FRAMES)]
    spans += [(length - 2, length + 3), (length, length + 1), (text_end - 1, text_end + 3), (text_end + 2, text_end + 5)]
    for first, end in spans:
        for _ in range(2):  # a replay, also past the last text row
            made, update = rows(model, state, length, first, end)
            torch.testing.assert_close(made.float(), wanted[first:end], **tolerance)
            assert update == {}
    assert state.keys() == before.keys()
    assert all(
        torch.equal(state[key], was) if isinstance(was, torch.Tensor) else state[key] == was for key, was in before.items()
    )


@pytest.mark.covers("TK-4", "TK-6")
def test_the_batch_hook_gives_the_rows_of_the_single_one(model, front_end):
    infos, alone = [], []
    for index, name in enumerate(NAMES):
        state, length = state_of(front_end, name)
        state[LAST_HIDDEN] = torch.full((1, 64), float(index), dtype=next(model.parameters()).dtype)
        position = length + 3 * index
        infos.append(state | {NUM_COMPUTED_TOKENS: position, PROMPT_LEN: length, IS_PREFILL: False})
        made, update = rows(model, state, length, position, position + 1)
        assert update[MTP_INPUTS][0] is state[LAST_HIDDEN]
        alone.append(made)
    ids = torch.arange(len(infos))
    same, embeds, hidden, text, _ = check_batch(
        model.preprocess_decode_batch(input_ids=ids, req_infos=infos), len(infos), 64, mtp=True
    )
    assert same is ids and torch.equal(embeds, text)
    assert hidden[:, 0].tolist() == list(range(len(infos)))
    torch.testing.assert_close(text, torch.cat(alone), atol=1e-5 if text.dtype == torch.float32 else 0.1, rtol=0.02)


@pytest.mark.covers("TK-2", "TK-6", "EX-7")
def test_conditioning_that_is_not_whole_raises(model, front_end):
    state, length = state_of(front_end, "plain")
    for key in ("text_ids", "codec_ids", "trailing_ids", "pad_id"):
        less = {name: value for name, value in state.items() if name != key}
        with pytest.raises(MissingStateError, match=f"{key} was never stored"):
            rows(model, less, length, 0, 2)
    with pytest.raises(ContractError, match=f"the scheduled prompt has {length + 1} positions, its conditioning {length}"):
        rows(model, state, length + 1, 0, 2)
    with pytest.raises(ContractError, match="18 text ids, 2 control codes"):
        rows(model, state | {"codec_ids": state["codec_ids"][:2]}, length, 0, 2)
    for change, message in (
        ({"text_ids": [1000 + each for each in state["text_ids"]]}, "text ids .* outside 0 to 703"),
        ({"text_ids": [each - 1000 for each in state["text_ids"]]}, "text ids .* outside 0 to 703"),
        ({"codec_ids": [2000 + each for each in state["codec_ids"]]}, "codec_ids .* outside -1 to 1279"),
        ({"pad_id": 99999}, "text ids .* to 99999 outside"),
    ):
        with pytest.raises(ContractError, match=message):
            rows(model, state | change, length, 0, length + 5)


def test_control_codes_are_never_sampled(model):
    logits = model.compute_logits(torch.randn(3, 64).to(next(model.parameters()).dtype))
    assert logits.shape == (3, 1280)
    allowed = [*range(256), 358]
    assert logits[:, allowed].isfinite().all()
    logits[:, allowed] = -torch.inf
    assert (logits == -torch.inf).all()


def test_placeholders_are_never_sampled(model, front_end):
    ids = set(front_end.admit("a", prompt("plain")).prompt_token_ids)
    assert len(ids) == 1 and model.never[ids.pop()]


@pytest.mark.parametrize("name", list(NAMES))
def test_prompts_are_the_references(front_end, name):
    """Token ids of the reference's own processor, found again in our payload."""
    payload, given = front_end.admit("a", prompt(name)).payload, case(name)
    ids = [*payload["text_ids"], *payload["trailing_ids"]]
    assert ids[: len(given["instruct_ids"]) + 3] == [*given["instruct_ids"], *given["text_ids"][:3]]
    body = given["text_ids"][3:-5]
    assert any(ids[start : start + len(body)] == body for start in range(len(ids)))


def test_salts_tell_conditioning_apart(front_end):
    base = prompt("plain")
    changes = [{}, {"voice": "Ryan"}, {"language": "German"}, {"instruct": "slowly"}, {"streaming_text": True}, {"text": "hello"}]
    salts = [front_end.admit("a", base | change).cache_salt for change in changes]
    assert len(set(salts)) == len(salts) and None not in salts
    assert front_end.admit("b", dict(base)).cache_salt == salts[0]
    assert front_end.admit("b", base | {"voice": base["voice"].upper()}).cache_salt == salts[0]
