"""Which row each position of the Qwen2.5 Talker gets (TK-1, TK-2, TK-6): the real prompt helper, the real hooks."""

import pytest
import torch
from torch import nn

from stagevox.contract import IS_PREFILL, NUM_COMPUTED_TOKENS, PROMPT_LEN, RowPhase
from stagevox.errors import ContractError, MissingStateError
from stagevox.models.qwen2_5_omni.bridge import TalkerPrompts
from stagevox.models.qwen2_5_omni.config import read_ids
from stagevox.models.qwen2_5_omni.talker import PROMPT_ROWS, REPLY_ROWS, REPLY_WHOLE, Qwen2_5OmniTalker, rows_at

LENGTH, REPLY, E, H = 6, 3, 64, 8
"""Positions of the Thinker's prompt, so that the Talker's has 8; reply rows from its second token on; sizes."""

PROMPT = LENGTH + 2


@pytest.fixture(scope="module")
def prompts(tiny_qwen2_5_omni):
    return TalkerPrompts(tiny_qwen2_5_omni)


@pytest.fixture(scope="module")
def ids(tiny_qwen2_5_omni):
    return read_ids(tiny_qwen2_5_omni)


def state_of(prompts, dtype=torch.float32, voice="Ethan"):
    """A request's state, made by the helper that makes it in production; every row tells its place."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(LENGTH + 1 + REPLY, E, generator=generator).to(dtype)
    positions = torch.arange(LENGTH).expand(3, -1)
    prompt = prompts.prompt(rows[:LENGTH], rows[LENGTH : LENGTH + 1], positions, voice)
    reply = torch.cat([rows[LENGTH + 1 :], prompts.ending(rows)])
    return prompt, {PROMPT_ROWS: prompt.rows, REPLY_ROWS: reply, REPLY_WHOLE: True}


def info(state, computed, prompt_len=PROMPT):
    row = RowPhase("r", 0, 1, computed, prompt_len, computed + 1)
    return {**state, **row.fields()}


def expected(state, position):
    """The law, position by position."""
    if position < PROMPT:
        return state[PROMPT_ROWS][position]
    reply = state[REPLY_ROWS]
    return reply[min(position - PROMPT, len(reply) - 1)]


class Embedding(nn.Module):
    """Codec embeddings that tell their id."""

    def forward(self, codes):
        return codes[:, None].to(torch.float32).expand(-1, E) / 1000


class Talker(Qwen2_5OmniTalker):
    """The production hooks over a projection and embeddings of the test's own; no engine."""

    def __init__(self, device="cpu", dtype=torch.float32):
        nn.Module.__init__(self)
        self.model = nn.Module()
        self.model.embed_tokens = Embedding()
        self.projection = nn.Linear(E, H).to(device, dtype)
        self.thinker_to_talker_proj = _Replicated(self.projection)


class _Replicated(nn.Module):
    """Returns a pair, as vLLM's linear layers do."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight
        self._linear = [linear]

    def forward(self, x):
        return self._linear[0](x.to(self.weight.dtype)), None


@pytest.mark.covers("TK-6", "TK-1", "PC-12")
def test_a_one_token_tail_gets_its_own_row(prompts):
    """Prompt 8, computed 7, span 1: row 7."""
    _, state = state_of(prompts)
    assert torch.equal(rows_at("preprocess", info(state, 7), 1), state[PROMPT_ROWS][7:8])


@pytest.mark.covers("TK-6", "TK-1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 8), (0, 3), (3, 5), (7, 1), (0, 12), (6, 4), (7, 2), (8, 1), (8, 3), (9, 6), (10, 4), (13, 5), (40, 1), (40, 7)],
)
def test_every_span_is_the_same_rows(prompts, first, count, dtype):
    """Prompt chunks, tails, spans across the prompt's end, across EOS and PAD, wholly past the reply; asked twice."""
    _, state = state_of(prompts, dtype)
    before = state[REPLY_ROWS].clone()
    wanted = torch.stack([expected(state, position) for position in range(first, first + count)])
    for _ in range(2):
        found = rows_at("preprocess", info(state, first), count)
        assert found.dtype == dtype and torch.equal(found, wanted)
    assert torch.equal(state[REPLY_ROWS], before), "the reply was consumed"


@pytest.mark.covers("TK-6", "TK-1")
def test_the_end_of_a_reply_is_eos_then_pad_for_ever(prompts):
    _, state = state_of(prompts)
    eos, pad = prompts.ending(state[PROMPT_ROWS])
    rows = rows_at("preprocess", info(state, PROMPT + REPLY), 6)
    assert torch.equal(rows[0], eos) and not torch.equal(eos, pad)
    assert all(torch.equal(row, pad) for row in rows[1:])
    assert torch.equal(rows_at("preprocess", info(state, 5000), 1)[0], pad)


@pytest.mark.covers("TK-6", "TK-1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "count"), [(0, 8), (7, 1), (4, 8), (8, 1), (10, 5)])
def test_preprocess_adds_the_codec_embeddings(prompts, ids, first, count, dtype):
    """Of PAD and BOS at the prompt's last two positions, of its code at each generated one, of nothing before."""
    prompt, state = state_of(prompts, dtype)
    talker = Talker(dtype=dtype)
    sampled = torch.tensor([*prompt.token_ids, 11, 22, 33, 44, 55, 66, 77])
    tokens = sampled[first : first + count]
    rows = torch.stack([expected(state, position) for position in range(first, first + count)]).float()
    for offset, token in enumerate(tokens.tolist()):
        if first + offset >= LENGTH:
            rows[offset] += token / 1000
    before = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    given, embeds, update = talker.preprocess(tokens, torch.zeros(count, H), **info(state, first))
    assert given is tokens and not update
    torch.testing.assert_close(embeds.float(), talker.projection(rows.to(dtype)).float(), rtol=2e-2, atol=2e-2)
    if dtype is torch.float32:
        torch.testing.assert_close(embeds, talker.projection(rows), rtol=0, atol=1e-6)
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert prompt.token_ids == [ids.codec_mask] * LENGTH + [ids.codec_pad, ids.codec_bos]


@pytest.mark.covers("TK-6", "PC-5")
def test_decode_batches_equal_decode_rows(prompts):
    """Requests at unequal positions, in any order; rows of the batch hook are those of the other one."""
    talker = Talker()
    states = [state_of(prompts, voice=voice)[1] for voice in ("Ethan", "Chelsie", "Ethan")]
    computed, tokens = [8, 10, 4000], torch.tensor([5, 6, 7])
    infos = [info(state, at) for state, at in zip(states, computed, strict=True)]
    for order in ([0, 1, 2], [2, 0, 1]):
        ids = tokens[order]
        _, embeds, updates = talker.preprocess_decode_batch(input_ids=ids, req_infos=[infos[i] for i in order])
        assert len(updates) == 3
        for row, index in enumerate(order):
            one = talker.preprocess(tokens[index : index + 1], torch.zeros(1, H), **infos[index])[1]
            torch.testing.assert_close(embeds[row : row + 1], one, rtol=0, atol=1e-6)


@pytest.mark.covers("TK-6")
def test_rows_on_the_cpu_serve_a_model_elsewhere(prompts):
    """The payload's tensors stay where they came; what a step needs is moved."""
    _, state = state_of(prompts)
    talker = Talker(device="meta")
    tokens = torch.tensor([1, 2], device="meta")
    _, embeds, _ = talker.preprocess(tokens, torch.zeros(2, H), **info(state, 7))
    assert embeds.device.type == "meta" and state[PROMPT_ROWS].device.type == "cpu"


@pytest.mark.covers("TK-2", "TK-6")
@pytest.mark.parametrize("key", [PROMPT_ROWS, REPLY_ROWS, NUM_COMPUTED_TOKENS, PROMPT_LEN])
def test_missing_metadata_raises(prompts, key):
    _, state = state_of(prompts)
    given = {name: value for name, value in info(state, 3).items() if name != key}
    with pytest.raises(MissingStateError, match=key):
        Talker().preprocess(torch.tensor([1]), torch.zeros(1, H), **given)
    with pytest.raises(MissingStateError, match=key):
        Talker().preprocess_decode_batch(input_ids=torch.tensor([1]), req_infos=[given])


@pytest.mark.covers("TK-2", "TK-6")
@pytest.mark.parametrize("scheduled", [PROMPT - 1, PROMPT + 1])
def test_another_length_than_scheduled_raises(prompts, scheduled):
    _, state = state_of(prompts)
    says = f"the scheduled prompt has {scheduled} positions, the Talker's has {PROMPT}"
    with pytest.raises(ContractError, match=says):
        rows_at("preprocess", info(state, 0, scheduled), 1)


@pytest.mark.covers("TK-3")
@pytest.mark.parametrize("claims_prefill", [True, False])
def test_phase_flag_and_length_of_a_span_decide_nothing(prompts, claims_prefill):
    """Rows follow from absolute positions alone."""
    _, state = state_of(prompts)
    for first, count in [(7, 1), (8, 1), (6, 4)]:
        given = {**info(state, first), IS_PREFILL: claims_prefill}
        assert torch.equal(rows_at("preprocess", given, count), rows_at("preprocess", info(state, first), count))


@pytest.mark.covers("TK-2")
def test_a_reply_that_has_not_come_yet_is_no_pad(prompts):
    """While more may come, a position whose row is not there is an error, not the last row again."""
    _, state = state_of(prompts)
    state = {**state, REPLY_ROWS: state[REPLY_ROWS][:2], REPLY_WHOLE: False}
    assert len(rows_at("preprocess", info(state, PROMPT), 2)) == 2
    with pytest.raises(MissingStateError, match="has 2 rows so far, generated position 2"):
        rows_at("preprocess", info(state, PROMPT), 3)
