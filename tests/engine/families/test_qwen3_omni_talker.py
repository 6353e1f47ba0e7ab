"""Rows of the Qwen3-Omni Talker by absolute position (TK-6), and what crosses to it. No engine runs."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from oracles.qwen3_omni import CASES, Reference
from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import PROMPT_LENGTH, TOKEN_IDS, ReplyRows
from stagevox.contract import IS_PREFILL, MROPE_POSITIONS, MTP_INPUTS, NUM_COMPUTED_TOKENS, PROMPT_LEN, RowsAt
from stagevox.errors import ContractError, MissingStateError, UnknownVoiceError
from stagevox.models.checkpoint import read_tensors
from stagevox.models.qwen3_omni.bridge import TalkerInput
from stagevox.models.qwen3_omni.config import chat_ids, codec_ids
from stagevox.models.qwen3_omni.talker import HEAD, HEAD_ROWS, REPLY, REPLY_LENGTH, SPEAKER, USER, USER_MEDIA, Qwen3OmniTalker
from stagevox.models.qwen3_omni.thinker import PLACES, ROWS
from stagevox.models.qwen3_omni.topology import topology
from stagevox.models.qwen3_talker.hooks import LAST_HIDDEN
from stagevox.stage.payload import StageRequest
from stagevox.stage.vllm_config import make_config
from support.vllm_layers import one_rank, ready

FAMILY = "qwen3_omni"
USER_ROWS = 5
PROMPT = USER_ROWS + HEAD_ROWS
REPLY_ROWS = 3
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Rows have values up to 10; bfloat16 keeps eight bits of them."""


@pytest.fixture(scope="module")
def tensors(checkpoint):
    files = {entry.file for entry in read_tensors(checkpoint(FAMILY)).values()}
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def talker(request, checkpoint, tensors):
    spec = next(stage for stage in topology(checkpoint(FAMILY)).stages if stage.name == "talker")
    config = make_config(spec, {"dtype": request.param, "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 20})
    default = torch.get_default_dtype()
    with one_rank(config), torch.inference_mode():
        torch.set_default_dtype(request.param)
        try:
            made = Qwen3OmniTalker(vllm_config=config)
        finally:
            torch.set_default_dtype(default)
        loaded = made.load_weights(iter(tensors.items()))
        assert loaded >= {name for name, _ in made.named_parameters()}
        ready(made)
        yield made


def thinker_rows(count, seed=0):
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def state():
    """A request's state, as the runner makes it of the adapter's payload. Its user said four words and showed a picture of one row."""
    return {
        USER: thinker_rows(USER_ROWS, 1),
        USER_MEDIA: torch.tensor([False, False, True, False, False]),
        HEAD: thinker_rows(3, 2),
        REPLY: thinker_rows(REPLY_ROWS, 3),
        REPLY_LENGTH: REPLY_ROWS,
        SPEAKER: "chelsie",
    }


@pytest.fixture(scope="module")
def formula(tensors, checkpoint):
    """Row p of a request, written down a second time."""
    chat, codec = chat_ids(checkpoint(FAMILY)), codec_ids(checkpoint(FAMILY))
    embed = tensors["thinker.model.embed_tokens.weight"]
    codes = tensors["talker.model.codec_embedding.weight"]

    def project(kind, row):
        first, second = (
            (tensors[f"talker.{kind}_projection.linear_fc{i}.weight"], tensors[f"talker.{kind}_projection.linear_fc{i}.bias"])
            for i in (1, 2)
        )
        return second[0] @ torch.nn.functional.silu(first[0] @ row + first[1]) + second[1]

    def row(state, position):
        text = [*state[REPLY], embed[chat.tts_eos]]
        if position < USER_ROWS:
            return project("hidden" if state[USER_MEDIA][position] else "text", state[USER][position])
        if position < PROMPT:
            index = position - USER_ROWS
            pad, bos = embed[chat.tts_pad], embed[chat.tts_bos]
            left = [*state[HEAD], pad, pad, pad, pad, bos, text[0]][index]
            speaker = codec.speakers[state[SPEAKER]]
            right = [None, None, None, *codec.prefix, speaker, codec.pad, codec.bos][index]
            return project("text", left) + (0 if right is None else codes[right])
        step = position - PROMPT + 1
        return project("text", text[step] if step < len(text) else embed[chat.tts_pad])

    return row


def span(talker, state, first, count, scheduled=PROMPT):
    """What the hook makes of ``count`` positions from ``first`` on."""
    phase = {NUM_COMPUTED_TOKENS: first, PROMPT_LEN: scheduled, IS_PREFILL: first < scheduled}
    ids = torch.full((count,), 7)
    given, rows, update = talker.preprocess(ids, torch.zeros(count, 64), **state, **phase)
    assert given is ids
    return rows, update


@pytest.mark.covers("TK-6", "TK-4")
@pytest.mark.parametrize(
    ("first", "count"),
    [
        (0, PROMPT),
        (PROMPT - 1, 1),  # a prompt's tail of one position
        (USER_ROWS - 1, 3),
        (USER_ROWS + 2, 2),  # the first codec row
        (2, 1),  # the picture
        (PROMPT - 3, 6),  # across the prompt's end
        (PROMPT + 1, 4),  # reply, end, pad
        (PROMPT + REPLY_ROWS - 1, 1),  # the end
        (PROMPT + REPLY_ROWS + 5, 3),  # wholly past the reply
    ],
)
def test_rows_by_position(talker, formula, state, first, count):
    kept = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    wanted = torch.stack([formula(state, position) for position in range(first, first + count)])
    for _ in range(2):  # a replay asks again
        rows, update = span(talker, state, first, count)
        assert rows.dtype == talker.tts_rows.dtype and update == {}
        torch.testing.assert_close(rows.float(), wanted, atol=TOLERANCE[rows.dtype], rtol=0.02)
    assert all(torch.equal(state[key], value) for key, value in kept.items()), "the state was changed"
    assert len({str(row.tolist()) for row in rows}) == len({min(p, PROMPT + REPLY_ROWS) for p in range(first, first + count)})


@pytest.mark.covers("TK-6")
def test_any_split_gives_the_same_rows(talker, state):
    whole, _ = span(talker, state, 0, PROMPT + 8)
    for size in (1, 3, 8):
        parts = [span(talker, state, first, min(size, PROMPT + 8 - first))[0] for first in range(0, PROMPT + 8, size)]
        torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE[whole.dtype] / 2, rtol=0)


@pytest.mark.covers("TK-6")
def test_a_decode_step_and_its_batch_are_the_same_row(talker, formula, state):
    other = state | {SPEAKER: "ethan", REPLY: thinker_rows(6, 9), REPLY_LENGTH: 6}
    hidden = torch.ones(1, 64, dtype=talker.tts_rows.dtype)
    infos = [
        one | {LAST_HIDDEN: hidden * at, NUM_COMPUTED_TOKENS: at, PROMPT_LEN: PROMPT, IS_PREFILL: False}
        for one, at in ((state, PROMPT), (other, PROMPT + 2), (state, PROMPT + 9))
    ]
    _, rows, last, text, updates = talker.preprocess_decode_batch(input_ids=torch.tensor([1, 2, 3]), req_infos=infos)
    assert rows is text and last[:, 0].tolist() == [PROMPT, PROMPT + 2, PROMPT + 9] and updates == [{}, {}, {}]
    for info, row in zip(infos, rows, strict=True):
        wanted = formula(info, info[NUM_COMPUTED_TOKENS])
        torch.testing.assert_close(row.float(), wanted, atol=TOLERANCE[row.dtype], rtol=0.02)
    alone, update = span(talker, state | {LAST_HIDDEN: hidden}, PROMPT, 1)
    torch.testing.assert_close(alone, rows[:1], atol=TOLERANCE[rows.dtype] / 2, rtol=0)
    assert update[MTP_INPUTS][0] is hidden


@pytest.mark.covers("TK-2")
@pytest.mark.parametrize("key", [USER, USER_MEDIA, HEAD, SPEAKER])
def test_missing_conditioning(talker, state, key):
    del state[key]
    with pytest.raises(MissingStateError, match=f"{key} was never stored"):
        span(talker, state, 0, 2)


@pytest.mark.covers("TK-2")
def test_wrong_conditioning(talker, state):
    with pytest.raises(ContractError, match=f"prompt has {PROMPT + 1} positions, its conditioning {PROMPT}"):
        span(talker, state, 0, 2, scheduled=PROMPT + 1)
    with pytest.raises(MissingStateError, match="speaker is 'nobody', expected one of aiden, chelsie, ethan"):
        span(talker, state | {SPEAKER: "nobody"}, 0, 2)


@pytest.mark.covers("TK-2")
def test_rows_that_have_not_come_yet(talker, state):
    """The scheduler never runs past what is on hand; if it did, that would not go unnoticed."""
    del state[REPLY_LENGTH]
    span(talker, state, 0, PROMPT + REPLY_ROWS - 1)
    with pytest.raises(MissingStateError, match="reply_rows has no row 3"):
        span(talker, state, PROMPT + REPLY_ROWS - 1, 1)
    del state[REPLY]
    with pytest.raises(MissingStateError, match="reply_rows has no row 0"):
        span(talker, state, PROMPT - 1, 1)


def test_control_ids_are_never_sampled(talker, checkpoint):
    codec = codec_ids(checkpoint(FAMILY))
    logits = talker.compute_logits(torch.randn(2, 64, dtype=talker.tts_rows.dtype))
    allowed = [*range(codec.vocab_size - 1024), codec.eos]
    assert logits.shape == (2, codec.vocab_size)
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == allowed * 2


# what crosses


def chunks_of(checkpoint, name, whole, cut=None):
    """The chunks that the Thinker's processor ships for a case's prompt and a reply of three tokens, step by step."""
    chat = chat_ids(checkpoint(FAMILY))
    reference = Reference(checkpoint(FAMILY))
    inputs = reference.inputs(CASES[name])
    ids = inputs["input_ids"][0]
    rows = thinker_rows(len(ids) + 2, 4)
    more = {key: inputs[key] for key in ("image_grid_thw", "video_grid_thw", "video_second_per_grid") if key in inputs}
    if "feature_attention_mask" in inputs:
        more["audio_seqlens"] = inputs["feature_attention_mask"].sum(1)
    more["second_per_grids"] = more.pop("video_second_per_grid", None)
    axes = reference.model.thinker.get_rope_index(ids[None], attention_mask=torch.ones_like(ids)[None], **more)[0][:, 0].long()
    places = torch.cat([ids[None], axes]).T
    end = int(axes.max()) + 1
    reply = torch.tensor([[11, end, end, end], [12, end + 1, end + 1, end + 1]])
    steps = [
        ([11], {ROWS: rows[: len(ids)], PLACES: places}, None),
        ([12], {ROWS: rows[len(ids) :][:1], PLACES: reply[:1]}, None),
        ([chat.im_end], {ROWS: rows[len(ids) + 1 :], PLACES: reply[1:]}, "stop"),
    ]
    processor = ReplyRows(checkpoint(FAMILY), stream=not whole)
    made = [chunk for step in steps for chunk in processor.push("a", *step)]
    assert processor.num_open == 0
    return made, ids, rows, reference, more


def request(voice="ethan"):
    return StageRequest("a", None, options={"voice": voice})


def test_whole_reply(checkpoint):
    (chunk,), ids, rows, *_ = chunks_of(checkpoint, "turns", whole=True)
    assert chunk.end and chunk.data[PROMPT_LENGTH] == len(ids) and chunk.data[TOKEN_IDS][:2] == [11, 12]
    given = TalkerInput(checkpoint(FAMILY)).accept(request(), chunk)
    said = given.payload[USER]
    # Two users' turns of three; the system's and the earlier assistant's are not heard.
    starts = (ids == 641).nonzero()[:, 0].tolist()
    wanted = torch.cat([rows[starts[1] : starts[2]], rows[starts[3] : starts[4]]])
    assert torch.equal(said, wanted) and not given.payload[USER_MEDIA].any()
    assert torch.equal(given.payload[HEAD], rows[starts[4] : starts[4] + 3])
    assert torch.equal(given.payload[REPLY].rows, rows[-2:]) and given.payload[REPLY_LENGTH] == 2
    assert len(given.prompt_token_ids) == len(said) + HEAD_ROWS and given.ready is None and given.end
    assert given.cache_salt and codec_ids(checkpoint(FAMILY)).vocab_size - 1 == given.prompt_token_ids[0]


def test_a_reply_as_it_is_written(checkpoint):
    made, _ids, rows, *_ = chunks_of(checkpoint, "turns", whole=False)
    adapter = TalkerInput(checkpoint(FAMILY))
    given = [adapter.accept(request(), chunk) for chunk in made]
    length = len(given[0].prompt_token_ids)
    assert [one.ready for one in given] == [length - 1, length, None]
    assert [one.end for one in given] == [False, False, True] and [one.cache_salt for one in given] == [None] * 3
    pieces = [one.payload[REPLY] for one in given if REPLY in one.payload]
    assert [piece.first for piece in pieces] == [0, 1] and all(isinstance(piece, RowsAt) for piece in pieces)
    assert torch.equal(torch.cat([piece.rows for piece in pieces]), rows[-2:])
    assert REPLY_LENGTH not in given[1].payload and given[2].payload[REPLY_LENGTH] == 2


def test_the_salt_is_a_digest_of_the_conditioning(checkpoint):
    (chunk,), *_ = chunks_of(checkpoint, "turns", whole=True)
    adapter = TalkerInput(checkpoint(FAMILY))
    first, again, voiced = (adapter.accept(request(voice), chunk).cache_salt for voice in ("ethan", "ethan", "aiden"))
    other = Chunk("a", 0, True, {**chunk.data, ROWS: chunk.data[ROWS] + 1})
    assert first == again and len({first, voiced, adapter.accept(request(), other).cache_salt}) == 3


@pytest.mark.parametrize("name", ["turns", "image", "audio", "video", "mixed"])
def test_positions_of_what_is_heard(checkpoint, name):
    """Axes of the heard turns, taken from the Thinker's, are those that the reference computes anew."""
    (chunk,), ids, _, reference, more = chunks_of(checkpoint, name, whole=True)
    given = TalkerInput(checkpoint(FAMILY)).accept(request(), chunk)
    positions, delta = given.payload[MROPE_POSITIONS]
    starts = [*(ids == 641).nonzero()[:, 0].tolist(), len(ids)]
    turns = [ids[a:b] for a, b in pairwise(starts) if ids[a + 1] == chat_ids(checkpoint(FAMILY)).user]
    heard = torch.cat([*turns, torch.full((HEAD_ROWS,), 668)])[None]
    rope = reference.model.talker.get_rope_index(heard, attention_mask=torch.ones_like(heard), **more)
    assert torch.equal(positions, rope[0][:, 0].long()) and delta == int(rope[1])
    assert (positions[0] != positions[1]).any() == (name in ("image", "video", "mixed"))
    media = given.payload[USER_MEDIA]
    assert media.sum() == torch.isin(ids, torch.tensor(chat_ids(checkpoint(FAMILY)).media)).sum()


def test_what_can_not_be_spoken(checkpoint):
    (chunk,), *_ = chunks_of(checkpoint, "short", whole=True)
    with pytest.raises(UnknownVoiceError, match="no voice 'nobody'.*aiden, chelsie, ethan"):
        TalkerInput(checkpoint(FAMILY)).accept(request("nobody"), chunk)
    count = chunk.data[PROMPT_LENGTH]
    nothing = Chunk("a", 0, True, {**chunk.data, ROWS: chunk.data[ROWS][:count], PLACES: chunk.data[PLACES][:count]})
    given = TalkerInput(checkpoint(FAMILY)).accept(request(), nothing)
    assert given.skip and not given.prompt_token_ids
    with pytest.raises(ContractError, match="chunk 0 of a has no rows"):
        TalkerInput(checkpoint(FAMILY)).accept(request(), Chunk("a", 0, True, {TOKEN_IDS: [1]}))
    with pytest.raises(ContractError, match="chunk 2 of a came, 0 was next"):
        TalkerInput(checkpoint(FAMILY)).accept(request(), Chunk("a", 2, True, {TOKEN_IDS: [1]}))


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_failed_thinker_ships_nothing(checkpoint, reason):
    processor = ReplyRows(checkpoint(FAMILY))
    payload = {ROWS: thinker_rows(4), PLACES: torch.zeros(4, 4, dtype=torch.long)}
    assert processor.push("a", [1], payload, None) == [] and processor.num_open == 1
    assert processor.push("a", [], {}, reason) == [] and processor.num_open == 0
