"""What crosses between the stages of Qwen2.5-Omni: whole or in pieces, it comes to the same."""

import pytest
import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import ReplyRows
from stagevox.contract import CODES, MROPE_POSITIONS, RowsAt, merge_update
from stagevox.errors import ContractError, UnknownVoiceError
from stagevox.models.qwen2_5_omni.bridge import Code2WavInput, TalkerCodes, TalkerInput
from stagevox.models.qwen2_5_omni.code2wav import CODES_STATE, SEED, WINDOWS, Window
from stagevox.models.qwen2_5_omni.config import read_ids
from stagevox.models.qwen2_5_omni.noise import noise
from stagevox.models.qwen2_5_omni.talker import PROMPT_ROWS, REPLY_ROWS, REPLY_WHOLE
from stagevox.models.qwen2_5_omni.thinker import ROWS, TOKENS
from stagevox.stage.payload import StageRequest

LENGTH, E = 5, 64
REQUEST = StageRequest("r", None, options={"voice": "Ethan"})


def thinker_steps(tokens, rest=1):
    """What the Thinker's steps hand out: the whole prompt's rows first, then a row for each token that was fed."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(LENGTH + len(tokens), E, generator=generator)
    table = torch.arange(LENGTH + len(tokens))[:, None].expand(-1, 4).contiguous()
    spans = [(0, LENGTH), *((LENGTH + k, LENGTH + k + 1) for k in range(len(tokens) - rest))]
    return [(tokens[k : k + 1], {ROWS: rows[a:b], TOKENS: table[a:b]}) for k, (a, b) in enumerate(spans)], rows


def ship(processor, steps, reason="stop"):
    chunks = []
    for index, (tokens, payload) in enumerate(steps):
        chunks += processor.push("r", tokens, payload, reason if index == len(steps) - 1 else None)
    assert processor.num_open == 0
    assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.end for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks


def state_after(adapter, chunks):
    """All payloads of a request merged, and what else its inputs said."""
    state, inputs = {}, []
    for chunk in chunks:
        given = adapter.accept(REQUEST, chunk)
        payload = dict(given.payload)
        piece = payload.get(REPLY_ROWS)
        if isinstance(piece, RowsAt):
            before = state.get(REPLY_ROWS, piece.rows[:0])
            assert piece.first == len(before)
            payload[REPLY_ROWS] = torch.cat([before, piece.rows])
        state = merge_update(state, payload)
        inputs.append(given)
    return state, inputs


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.covers("RT-2", "TK-1")
def test_whole_and_in_pieces_come_to_the_same(tiny_qwen2_5_omni, count):
    steps, rows = thinker_steps(list(range(100, 100 + count)))
    whole, (only,) = state_after(TalkerInput(tiny_qwen2_5_omni), ship(ReplyRows(tiny_qwen2_5_omni), steps))
    chunks = ship(ReplyRows(tiny_qwen2_5_omni, stream=True), steps)
    assert len(chunks) == count
    pieces, inputs = state_after(TalkerInput(tiny_qwen2_5_omni), chunks)
    for key in (PROMPT_ROWS, REPLY_ROWS):
        assert torch.equal(whole[key], pieces[key]), key
    assert torch.equal(whole[PROMPT_ROWS][:LENGTH], rows[:LENGTH])
    assert torch.equal(whole[PROMPT_ROWS][LENGTH + 1], rows[LENGTH])
    assert torch.equal(whole[REPLY_ROWS][:-2], rows[LENGTH + 1 : LENGTH + count - 1])
    assert whole[REPLY_WHOLE] and pieces[REPLY_WHOLE]
    positions, delta = whole[MROPE_POSITIONS]
    assert torch.equal(positions, torch.arange(LENGTH + 2).expand(3, -1)) and delta == 0
    begins = next(given for given in inputs if given.prompt_token_ids)
    assert begins.prompt_token_ids == only.prompt_token_ids
    assert only.cache_salt and only.ready is None and only.end


@pytest.mark.covers("EX-2")
def test_readiness_follows_the_rows(tiny_qwen2_5_omni):
    """Generated position k is ready with row k of the reply, and all of them at its end."""
    steps, _ = thinker_steps(list(range(100, 106)))
    _, inputs = state_after(TalkerInput(tiny_qwen2_5_omni), ship(ReplyRows(tiny_qwen2_5_omni, stream=True), steps))
    assert [(bool(given.prompt_token_ids), given.ready, given.end) for given in inputs] == [
        (False, None, False),
        (True, LENGTH + 2, False),
        (False, LENGTH + 3, False),
        (False, LENGTH + 4, False),
        (False, LENGTH + 5, False),
        (False, None, True),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_nothing_but_its_end_is_skipped(tiny_qwen2_5_omni, stream):
    steps, _ = thinker_steps([642])
    (chunk,) = ship(ReplyRows(tiny_qwen2_5_omni, stream=stream), steps)
    adapter = TalkerInput(tiny_qwen2_5_omni)
    assert adapter.accept(REQUEST, chunk).skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_reply_speaks_its_last_token(tiny_qwen2_5_omni, stream):
    """The engine samples one token more, so every returned one has a row."""
    steps, rows = thinker_steps([100, 101, 102], rest=0)
    assert steps[-1][0] == [], "the last step's token is thrown away, its row is not"
    state, _ = state_after(TalkerInput(tiny_qwen2_5_omni), ship(ReplyRows(tiny_qwen2_5_omni, stream=stream), steps, "length"))
    assert torch.equal(state[REPLY_ROWS][:-2], rows[LENGTH + 1 : LENGTH + 3])


@pytest.mark.covers("TK-1")
def test_media_positions_go_on_after_their_largest(tiny_qwen2_5_omni):
    steps, _ = thinker_steps([100, 101])
    steps[0][1][TOKENS] = steps[0][1][TOKENS].clone()
    steps[0][1][TOKENS][3, 1:] = torch.tensor([3, 9, 4])
    state, _ = state_after(TalkerInput(tiny_qwen2_5_omni), ship(ReplyRows(tiny_qwen2_5_omni), steps))
    positions, delta = state[MROPE_POSITIONS]
    assert positions[:, -2:].tolist() == [[10, 11]] * 3
    assert delta == 12 - (LENGTH + 2)


@pytest.mark.covers("EX-15")
def test_salts_tell_conditioning_apart(tiny_qwen2_5_omni):
    def salt(tokens, voice="Ethan", change=False):
        steps, _ = thinker_steps(tokens)
        if change:
            steps[1][1][ROWS] = steps[1][1][ROWS] + 1e-3
        (chunk,) = ship(ReplyRows(tiny_qwen2_5_omni), steps)
        request = StageRequest("r", None, options={"voice": voice})
        return TalkerInput(tiny_qwen2_5_omni).accept(request, chunk).cache_salt

    salts = {salt([1, 2, 3]), salt([1, 2, 3], "Chelsie"), salt([1, 2, 3, 4]), salt([1, 2, 3], change=True)}
    assert len(salts) == 4 and salt([1, 2, 3]) in salts


def test_an_unknown_voice_is_told_with_the_known_ones(tiny_qwen2_5_omni):
    (chunk,) = ship(ReplyRows(tiny_qwen2_5_omni), thinker_steps([1, 2])[0])
    with pytest.raises(UnknownVoiceError, match="Chelsie, Ethan"):
        TalkerInput(tiny_qwen2_5_omni).accept(StageRequest("r", None, options={"voice": "Nobody"}), chunk)


def test_a_lost_chunk_is_told(tiny_qwen2_5_omni):
    chunks = ship(ReplyRows(tiny_qwen2_5_omni, stream=True), thinker_steps([1, 2, 3])[0])
    adapter = TalkerInput(tiny_qwen2_5_omni)
    adapter.accept(REQUEST, chunks[0])
    with pytest.raises(ContractError, match="chunk 2 of r came, 1 was next"):
        adapter.accept(REQUEST, chunks[2])


# codes to the vocoder


@pytest.mark.covers("RT-5")
def test_codes_without_their_end(tiny_qwen2_5_omni):
    ids = read_ids(tiny_qwen2_5_omni)
    for end in ids.codec_end:
        processor = TalkerCodes(tiny_qwen2_5_omni)
        assert processor.push("r", [1, 2], {}, None) == []
        (chunk,) = processor.push("r", [3, end], {}, "stop")
        assert chunk.end and chunk.data[CODES].tolist() == [[1], [2], [3]]
    (nothing,) = TalkerCodes(tiny_qwen2_5_omni).push("r", [ids.codec_eos], {}, "stop")
    assert nothing.end and CODES not in nothing.data
    given = Code2WavInput(tiny_qwen2_5_omni).accept(REQUEST, nothing)
    assert given.end and not given.prompt_token_ids


def pieces_of(frames, cuts):
    """The same frames in chunks that end at ``cuts``."""
    codes = torch.arange(frames)[:, None]
    ends = [*cuts, frames]
    starts = [0, *cuts]
    data = [{CODES: codes[a:b]} if b > a else {} for a, b in zip(starts, ends, strict=True)]
    return [Chunk("r", seq, seq == len(data) - 1, one) for seq, one in enumerate(data)]


OPTIONS = {"sizes": (4, 6), "context": 5, "ahead": 3}


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("frames", [1, 4, 7, 13, 22])
def test_windows_depend_on_the_frames_alone(tiny_qwen2_5_omni, frames):
    """However the frames come: every frame is wanted once, in order, with all the context that is allowed."""
    starts = [0, 4, *range(10, 40, 6)]
    found = set()
    for cuts in ([], range(1, frames), [frames], [frames // 2, frames // 2]):
        adapter = Code2WavInput(tiny_qwen2_5_omni, **OPTIONS)
        positions, state = 0, {}
        for chunk in pieces_of(frames, list(cuts)):
            given = adapter.accept(REQUEST, chunk)
            positions += len(given.prompt_token_ids)
            state = merge_update(state, given.payload)
            for window in state[WINDOWS]:
                assert window.last <= len(state[CODES_STATE]), "it doesn't see what it is to see"
        assert positions == len(state[WINDOWS]) and state[SEED] == 42
        found.add(tuple(state[WINDOWS]))
    (windows,) = found
    assert [window.start for window in windows] == [start for start in starts if start < frames]
    assert [window.end for window in windows] == [*(window.start for window in windows[1:]), frames]
    for window in windows:
        assert window.left_context_size == min(5, window.start)
        assert window.last == min(frames, window.end + 3)


def test_without_sizes_all_frames_are_one_window(tiny_qwen2_5_omni):
    adapter = Code2WavInput(tiny_qwen2_5_omni)
    first, last = pieces_of(9, [4])
    assert not adapter.accept(REQUEST, first).prompt_token_ids
    given = adapter.accept(REQUEST, last)
    assert given.payload[WINDOWS] == [Window(0, 0, 9, 9)] and len(given.prompt_token_ids) == 1


@pytest.mark.parametrize("code", [-1, 8194])
def test_codes_that_the_vocoder_has_no_row_for_never_reach_it(tiny_qwen2_5_omni, code):
    chunk = Chunk("r", 0, True, {CODES: torch.tensor([[5], [code]])})
    with pytest.raises(ContractError, match="holds no codec frames"):
        Code2WavInput(tiny_qwen2_5_omni).accept(REQUEST, chunk)


def test_noise_is_a_function_of_seed_and_position():
    whole = noise(3, 0, 300, 16)
    assert whole.shape == (300, 16)
    for first, end in [(0, 1), (63, 65), (64, 128), (120, 300), (299, 300), (7, 7)]:
        assert torch.equal(noise(3, first, end, 16), whole[first:end])
    assert not torch.equal(noise(4, 0, 300, 16), whole)
    assert abs(float(whole.mean())) < 0.05 and abs(float(whole.std()) - 1) < 0.05


def test_a_request_that_ends_in_error_ships_nothing(tiny_qwen2_5_omni):
    processor = ReplyRows(tiny_qwen2_5_omni)
    steps, _ = thinker_steps([1, 2])
    assert processor.push("r", *steps[0], None) == []
    assert processor.push("r", [], {}, "error") == [] and processor.num_open == 0
