"""What crosses the packaged model's boundaries, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from mini_reference import TinyOmni

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import TOKEN_IDS, WholeReply
from stagevox.contract import CODES
from stagevox.errors import (
    ContractError,
    EmptyTextError,
    TextTooLongError,
    UnknownVoiceError,
    VocabularyError,
)
from stagevox.models.mini.bridge import CHUNK_FRAMES, Code2WavInput, TalkerFrames, TalkerInput
from stagevox.models.mini.front_end import MiniFrontEnd
from stagevox.models.mini.pieces import PieceTable, expected_frames, frame_cap
from stagevox.models.mini.text import ThinkerTokenizer
from stagevox.models.mini.topology import stages
from stagevox.stage.payload import StageRequest

SILENCE = [307, 15, 15, 15]


@pytest.fixture(scope="module")
def oracle():
    return TinyOmni()


@pytest.fixture(scope="module")
def adapter():
    return TalkerInput()


def reply(words: str) -> Chunk:
    """The Thinker's reply that says ``words``, as it reaches the Talker."""
    tokenizer = ThinkerTokenizer()
    ids = [tokenizer.tokens.index(word) for word in words.split()]
    processor = WholeReply()
    for token in ids:
        assert processor.push("r", [token], {}, None) == []
    (chunk,) = processor.push("r", [tokenizer.eos_id], {}, "stop")
    assert processor.num_open == 0
    return chunk


def talker_request(**fields) -> StageRequest:
    return StageRequest("r", None, options={"voice": "slt"}, **fields)


# -- Thinker -> Talker ------------------------------------------------------------------------------------------------


@pytest.mark.covers("TK-1", "RT-2")
@pytest.mark.parametrize("text", ["hello", "seven plus three is ten", "go to the small pink chair on the left"])
def test_text_rows_are_the_oracles(adapter, oracle, text):
    given = adapter.accept(talker_request(), reply(text))
    assert given.payload["text_rows"].tolist() == oracle.tokenize(text)
    assert given.payload["text_rows"].dtype == torch.long
    assert given.payload["voice"] == "slt"
    assert given.prompt_token_ids == [514] * 5 + [513]
    assert given.end


@pytest.mark.covers("RT-2")
def test_the_cap_follows_from_the_text(adapter, oracle):
    text = "seven plus three is ten"
    pieces = len(oracle.tokenize(text)) - 1
    given = adapter.accept(talker_request(), reply(text))
    assert given.sampling == {"max_tokens": 3 * pieces + 41}
    assert len(oracle.generate(text)) < frame_cap(pieces)


def test_a_client_may_lower_the_cap_but_not_raise_it(adapter):
    chunk = reply("hello")
    limit = adapter.accept(talker_request(), chunk).sampling["max_tokens"]
    # A client counts frames; the last token that is sampled never becomes one.
    assert adapter.accept(talker_request(sampling={"max_tokens": 5}), chunk).sampling["max_tokens"] == 6
    assert adapter.accept(talker_request(sampling={"max_tokens": 5000}), chunk).sampling["max_tokens"] == limit


def test_the_cap_never_exceeds_the_models_frames(adapter):
    long = adapter.accept(talker_request(), reply(" ".join(["seven"] * 13)))
    assert long.sampling == {"max_tokens": 171}


def test_equal_conditioning_has_an_equal_salt_in_another_process(adapter):
    salt = adapter.accept(talker_request(), reply("hello")).cache_salt
    assert salt != adapter.accept(talker_request(), reply("hello hello")).cache_salt
    script = (
        "from stagevox.models.mini.bridge import TalkerInput as T, Chunk, StageRequest as S;"
        f"print(T().accept(S('q', None), Chunk('q', 0, True, {dict(reply('hello').data)})).cache_salt)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.split()[-1] == salt
    assert len(salt) == 64


def test_an_unknown_voice_is_refused_with_the_known_ones(adapter):
    with pytest.raises(UnknownVoiceError) as caught:
        adapter.accept(StageRequest("r", None, options={"voice": "bob"}), reply("hello"))
    assert caught.value.allowed == ("slt",)


def test_an_empty_reply_is_refused(adapter):
    with pytest.raises(EmptyTextError):
        adapter.accept(talker_request(), reply(""))


@pytest.mark.covers("RT-2")
def test_a_reply_comes_whole(adapter):
    with pytest.raises(ContractError, match="whole"):
        adapter.accept(talker_request(), Chunk("r", 1, True, {TOKEN_IDS: []}))


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_the_longest_text_fits_and_one_word_more_does_not():
    table = PieceTable()
    sevens = ["seven"] * 13  # 65 pieces
    assert table.frame_cap(table.encode(sevens)) == 170
    with pytest.raises(TextTooLongError, match="the first 13 fit") as caught:
        table.encode([*sevens, "seven"])
    assert caught.value.field == "text"
    assert expected_frames(68) == 170


def test_words_the_voice_lacks_are_named():
    with pytest.raises(VocabularyError, match="'aardvark', 'gnu'"):
        PieceTable().encode(["gnu", "hello", "aardvark", "gnu"])


def test_the_table_is_the_oracles(oracle):
    table = PieceTable()
    assert set(table.words) == set(oracle.words) == set(ThinkerTokenizer().words)
    assert table.encode(["good", "morning"]) == oracle.tokenize("good morning")


# -- Talker -> Code2Wav -----------------------------------------------------------------------------------------------


def frames(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count)[:, None] * torch.ones(1, 4, dtype=torch.long)


def bridge(steps: list[int], req_id: str = "r") -> list:
    """Steps of so many frames each, then the end: what Code2Wav is given."""
    processor, adapter, given, made = TalkerFrames(), Code2WavInput(), [], 0
    for last, count in [(False, count) for count in steps] + [(True, 0)]:
        payload = {CODES: frames(made, count)} if count else {}
        made += count
        for chunk in processor.push(req_id, [0] * count, payload, "stop" if last else None):
            given.append(adapter.accept(StageRequest(req_id, None), chunk))
    assert processor.num_open == 0
    return given


@pytest.mark.covers("EX-9", "SV-3")
@pytest.mark.parametrize("steps", [[1] * 60, [8] * 7, [], [1], [4], [5, 3, 40, 1]])
def test_the_axis_is_silence_frames_silence(steps):
    given, total = bridge(steps), sum(steps)
    axis = torch.cat([torch.tensor([SILENCE] * 8), frames(0, total), torch.tensor([SILENCE])])
    assert torch.equal(given[-1].payload["codes"], axis)
    assert [item.end for item in given] == [False] * (len(given) - 1) + [True]
    positions = 0
    for item in given:
        positions += len(item.prompt_token_ids)
        assert torch.equal(item.payload["codes"], axis[:positions]), "the state covers just the positions so far"
    assert positions == total + 9


@pytest.mark.covers("SV-3")
def test_chunks_grow_from_a_small_first_one():
    new = [len(item.prompt_token_ids) for item in bridge([1] * 100)]
    assert new == [8 + 6, 12, 36, 46 + 1]
    assert CHUNK_FRAMES[0] <= 8


@pytest.mark.covers("SV-3")
def test_a_request_without_frames_still_ends():
    (only,) = bridge([])
    assert only.end and len(only.prompt_token_ids) == 9


@pytest.mark.covers("SV-3")
def test_requests_do_not_mix():
    adapter = Code2WavInput()
    for start, req_id in ((0, "a"), (50, "b")):
        adapter.accept(StageRequest(req_id, None), Chunk(req_id, 0, False, {CODES: frames(start, 4)}))
    last = adapter.accept(StageRequest("a", None), Chunk("a", 1, True, {CODES: frames(4, 2)}))
    assert torch.equal(last.payload["codes"][8:14], frames(0, 6))


@pytest.mark.covers("SV-3")
def test_nothing_is_kept_past_end_or_drop():
    adapter = Code2WavInput()
    adapter.accept(StageRequest("a", None), Chunk("a", 0, True, {CODES: frames(0, 4)}))
    adapter.accept(StageRequest("b", None), Chunk("b", 0, False, {CODES: frames(0, 4)}))
    adapter.drop("b")
    adapter.drop("never seen")
    again = adapter.accept(StageRequest("b", None), Chunk("b", 0, False, {CODES: frames(0, 4)}))
    assert len(again.prompt_token_ids) == 12


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize(
    "chunk",
    [
        Chunk("r", 1, False, {CODES: frames(0, 4)}),
        Chunk("r", 0, False, {CODES: frames(0, 4)[:, :3]}),
        Chunk("r", 0, False, {CODES: torch.tensor([[512, 0, 0, 0]])}),
        Chunk("r", 0, False, {CODES: torch.tensor([[0, 0, -1, 0]])}),
    ],
    ids=["out of order", "three groups", "EOS", "negative"],
)
def test_bad_chunks_are_refused(chunk):
    with pytest.raises(ContractError, match="Code2WavInput"):
        Code2WavInput().accept(StageRequest("r", None), chunk)


# -- front end --------------------------------------------------------------------------------------------------------


def test_the_front_end_admits_and_reads_back():
    front_end = MiniFrontEnd()
    tokenizer = ThinkerTokenizer()
    request = front_end.admit("r", {"text": "Hello, good morning!"})
    assert request.prompt_token_ids == tokenizer.encode("hello good morning")
    assert request.options == {"voice": "slt"}
    assert front_end.reply_text([tokenizer.tokens.index("hello"), tokenizer.eos_id], {}) == "hello"
    assert (front_end.voices, front_end.sample_rate) == (("slt",), 16000)


@pytest.mark.parametrize(
    ("text", "voice", "error"),
    [
        ("hello", "bob", UnknownVoiceError),
        (" ... ", None, EmptyTextError),
        ("a zebra", None, VocabularyError),
        ("seven " * 40, None, TextTooLongError),
    ],
)
def test_the_front_end_refuses_before_any_engine_works(text, voice, error):
    with pytest.raises(error) as caught:
        MiniFrontEnd().admit("r", {"text": text, "voice": voice})
    assert caught.value.field in ("text", "voice")
    if error is UnknownVoiceError:
        assert caught.value.allowed == ("slt",)


# -- stages -----------------------------------------------------------------------------------------------------------


def test_no_client_can_undo_the_models_stop_ids():
    pytest.importorskip("vllm")
    from stagevox.stage.sampling import sampling_params

    thinker, talker, _ = stages()
    params = sampling_params({**talker.sampling, "stop_token_ids": [3], "temperature": 0.7, "seed": 1}, talker.constraints, 99)
    assert params.stop_token_ids == [3, 512] and params.top_k == 20 and params.max_tokens == 99
    assert sampling_params(talker.sampling, talker.constraints, 99).temperature == 0
    assert ThinkerTokenizer().eos_id in thinker.constraints["stop_token_ids"]


def test_contexts_hold_the_longest_speech():
    _, talker, code2wav = stages()
    frames = json.loads((talker.checkpoint / "config.json").read_text())["max_frames"]
    assert talker.engine_args["max_model_len"] >= 6 + frames + 1
    assert code2wav.engine_args["max_model_len"] > 8 + frames + 1
    for spec in stages():
        assert spec.engine_args["max_num_batched_tokens"] >= spec.engine_args["max_num_seqs"]
