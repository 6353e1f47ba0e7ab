"""The parts that the talkers of Qwen3-Omni and Qwen3-TTS share, without an engine."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from stagevox.contract import IS_PREFILL, NUM_COMPUTED_TOKENS, PROMPT_LEN, SAMPLING
from stagevox.errors import CheckpointError, ContractError, MissingStateError
from stagevox.models.qwen3_talker.code_predictor import CodePredictor
from stagevox.models.qwen3_talker.hooks import LAST_HIDDEN, Qwen3TalkerHooks
from stagevox.models.qwen3_talker.sampling import RESIDUAL, ResidualSampling, placeholder, suppressed, uniform
from tests.support.vllm_layers import one_rank, randomise, ready

HIDDEN = 32


def config(**changes):
    fields = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "num_code_groups": 5,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture(scope="module")
def ranks():
    with one_rank():
        yield


@pytest.fixture(scope="module", params=[24, HIDDEN], ids=["same width", "projected"])
def predictor(request, ranks):
    module, plain = (CodePredictor(config(), request.param).requires_grad_(False) for _ in range(2))
    randomise(module)
    randomise(plain)
    ready(module)
    module.plain = [plain]  # with weights to look at; in a list, it is no part
    return module


def norm(x, layer):
    return layer.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x):
    """Rotary positions along the first axis of ``[T, heads, 8]``, halves paired."""
    angle = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.cat([angle, angle], -1)[:, None]
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angle.cos() + half * angle.sin()


def project(plain, x):
    layer = plain.small_to_mtp_projection
    return x if isinstance(layer, torch.nn.Identity) else x @ layer.weight.T + layer.bias


def last_hidden(predictor, x):
    """The predictor's hidden state at the end of the sequence ``x [T, 24]``, all positions computed anew."""
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)
    for layer in predictor.model.layers:
        attn = layer.self_attn
        q, k, v = (norm(x, layer.input_layernorm) @ attn.qkv_proj.weight.T).split([32, 16, 16], -1)
        q = rotate(norm(q.view(-1, 4, 8), attn.q_norm))
        k = rotate(norm(k.view(-1, 2, 8), attn.k_norm)).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5 + mask
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.view(-1, 2, 8).repeat_interleave(2, 1))
        x = x + mixed.reshape(len(x), -1) @ attn.o_proj.weight.T
        gate, up = (norm(x, layer.post_attention_layernorm) @ layer.mlp.gate_up_proj.weight.T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.mlp.down_proj.weight.T
    return norm(x, predictor.model.norm)[-1]


def test_groups_follow_from_the_whole_sequence(predictor):
    width = predictor.model.codec_embedding[0].embedding_dim
    hidden, first = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))
    codes, embeds = predictor(hidden, first, lambda logits, group: logits.argmax(-1))
    assert codes.shape == (3, 4)
    (plain,) = predictor.plain
    for row in range(3):
        sequence, total = [hidden[row], first[row]], first[row].clone()
        for group in range(4):
            last = last_hidden(plain, project(plain, torch.stack(sequence)))
            scores = plain.lm_head[group].weight @ last
            best = scores.topk(2).values
            assert best[0] - best[1] > 1e-3
            assert codes[row, group] == scores.argmax()
            sequence.append(predictor.model.codec_embedding[group].weight[codes[row, group]])
            total += sequence[-1]
        torch.testing.assert_close(embeds[row], total, atol=1e-5, rtol=0)
    assert len(set(codes.flatten().tolist())) > 4


def test_an_activation_that_is_not_there_is_refused(ranks):
    with pytest.raises(CheckpointError, match=r"code_predictor_config\.hidden_act is 'gelu'"):
        CodePredictor(config(hidden_act="gelu"), 24)


def info(position=9, seed=0, drawn=True, **residual):
    return {NUM_COMPUTED_TOKENS: position, RESIDUAL: residual, SAMPLING: {"temperature": 0.7 * drawn, "seed": seed}}


def test_a_draw_knows_its_request_and_position_only():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    infos = [info(9 + row // 2, temperature=0.9, top_k=20, seed=7 + row % 2) for row in range(6)]
    together = ResidualSampling.of(infos, logits.device).pick(logits, 3)
    alone = [ResidualSampling.of([one], logits.device).pick(logits[row : row + 1], 3).item() for row, one in enumerate(infos)]
    assert together.tolist() == alone
    same = logits[:1].expand(6, -1)
    assert len(set(ResidualSampling.of(infos, logits.device).pick(same, 3).tolist())) > 1
    other = [ResidualSampling.of(infos, logits.device).pick(same, group).tolist() for group in (1, 2, 3)]
    assert other[0] != other[1] != other[2]


def test_greedy_and_drawn_rows_share_a_batch():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    cold, one, unset = info(temperature=0.0), info(temperature=1.0, top_k=1, seed=5), {NUM_COMPUTED_TOKENS: 4}
    infos = [cold, one, unset, info(temperature=9.0, drawn=False)]
    assert ResidualSampling.of(infos, logits.device).pick(logits, 1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_k": 0, "top_p": 0.6}, {"top_k": 4, "top_p": 0.7}])
def test_draws_follow_the_filtered_distribution(limits):
    count = 20000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.2, -1.0, -3.0])
    infos = [info(position, temperature=0.8, seed=11, **limits) for position in range(count)]
    drawn = ResidualSampling.of(infos, logits.device).pick(logits.expand(count, -1), 1).bincount(minlength=6) / count
    wanted = (logits / 0.8).softmax(0)
    if limits["top_k"]:
        wanted[limits["top_k"] :] = 0
    wanted /= wanted.sum()
    kept = wanted.cumsum(0) - wanted < limits.get("top_p", 1.0)
    wanted = wanted * kept / wanted[kept].sum()
    assert (kept & (wanted > 0)).sum() < 6  # something was cut
    torch.testing.assert_close(drawn, wanted, atol=0.015, rtol=0)
    assert not drawn[wanted == 0].any()


def test_uniform_numbers_are_spread_and_repeat():
    seeds, positions = torch.tensor([0, 2**63 - 1]).repeat_interleave(5000), torch.arange(5000).repeat(2)
    made = uniform(seeds, positions, 1)
    assert torch.equal(made, uniform(seeds, positions, 1))
    assert made.min() >= 0 and made.max() < 1 and len(made.unique()) == len(made)
    for part in made.split(5000):
        torch.testing.assert_close(part.histc(10, 0, 1) / 5000, torch.full((10,), 0.1, dtype=made.dtype), atol=0.02, rtol=0)


def test_only_codes_and_the_end_may_be_sampled():
    mask = suppressed(3072, 2150)
    assert (~mask).nonzero()[:, 0].tolist() == [*range(2048), 2150]
    assert mask[placeholder(3072, 2150)] and mask[placeholder(3072, 3071)]


class Talker(Qwen3TalkerHooks):
    """Prompt row p is p, text row k is 100 + k, pad 999."""

    def prompt_length(self, hook, info):
        if "length" not in info:
            raise MissingStateError(hook, "length was never stored")
        return info["length"]

    def prompt_rows(self, info, first, end):
        return torch.arange(first, end).float()[:, None]

    def text_rows(self, infos, steps):
        rows = [100.0 + step if step < info["texts"] else 999.0 for info, step in zip(infos, steps, strict=True)]
        return torch.tensor(rows)[:, None]


def span(first, count, prompt=8, scheduled=8, **state):
    state = {"length": prompt, "texts": 3} | state
    phase = {NUM_COMPUTED_TOKENS: first, PROMPT_LEN: scheduled, IS_PREFILL: first < scheduled}
    return Talker().preprocess(torch.zeros(count, dtype=torch.long), torch.zeros(count, 1), **state, **phase)


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (0, [0, 1, 2]),
        (7, [7]),  # a prompt's tail of one position
        (6, [6, 7, 100, 101]),  # across the prompt's end
        (9, [101, 102, 999, 999]),  # across the text's end
        (10, [102, 999]),
        (20, [999, 999]),
    ],
)
def test_rows_are_a_function_of_the_position(first, rows):
    for _ in range(2):
        _, made, update = span(first, len(rows))
        assert made[:, 0].tolist() == rows and update == {}
    update = span(first, len(rows), **{LAST_HIDDEN: torch.ones(1, 1)})[2]
    assert bool(update) == (first >= 8)


def test_what_does_not_fit_raises():
    with pytest.raises(ContractError, match="scheduled prompt has 8 positions, its conditioning 7"):
        span(0, 2, prompt=7)
    with pytest.raises(MissingStateError, match="length was never stored"):
        Talker().preprocess(torch.zeros(1), torch.zeros(1, 1), **{NUM_COMPUTED_TOKENS: 0, PROMPT_LEN: 8})
    phase = {NUM_COMPUTED_TOKENS: 8, PROMPT_LEN: 8, "length": 8, "texts": 1}
    with pytest.raises(MissingStateError, match="last_hidden was never stored"):
        Talker().preprocess_decode_batch(input_ids=torch.zeros(1), req_infos=[phase])


def test_frames_join_codes_and_embeddings(predictor):
    width = predictor.model.codec_embedding[0].embedding_dim
    talker = Talker()
    talker.code_predictor = predictor
    table = torch.randn(60, width, generator=torch.Generator().manual_seed(4))
    talker.embed_input_ids = lambda ids: table[ids]
    ids = torch.tensor([3, 59])
    hidden, text = torch.randn(2, 2, width, generator=torch.Generator().manual_seed(5))
    infos = [info(8), info(20, temperature=0.9, top_k=10, seed=1)]
    embeds, codes = talker.talker_mtp(ids, text, hidden, text, req_infos=infos)
    assert codes.shape == (2, 5) and codes[:, 0].tolist() == [3, 59]
    tables = [table, *(part.weight for part in predictor.model.codec_embedding)]
    for row in range(2):
        wanted = text[row] + sum(part[code] for part, code in zip(tables, codes[row], strict=True))
        torch.testing.assert_close(embeds[row], wanted, atol=1e-5, rtol=0)
    alone = talker.talker_mtp(ids[1:], text[1:], hidden[1:], text[1:], req_infos=infos[1:])[1]
    assert alone.tolist() == codes[1:].tolist()
    assert talker.talker_mtp(ids, text, hidden, text)[1][0].tolist() == codes[0].tolist()
