"""Generic chunk processors: every row once, in order, whatever the steps were (F07, RT-5)."""

from __future__ import annotations

import random

import pytest

from stagevox.connectors.base import Chunk
from stagevox.connectors.chunks import LEFT_CONTEXT, PROMPT_LENGTH, TOKEN_IDS, FrameChunks, ReplyRows, WholeReply


def join(blocks):
    return [row for block in blocks for row in block]


def feed(processor, req_id, steps, reason="stop"):
    """Push the rows of each step, then the end; rows are plain lists."""
    chunks = []
    for number, rows in enumerate(steps):
        last = number == len(steps) - 1
        chunks += processor.push(req_id, [], {"codes": rows} if rows else {}, reason if last else None)
    return chunks


def frames(sizes=(2, 4, 8), context=0):
    return FrameChunks("codes", sizes, context=context, concat=join)


def new_rows(chunk: Chunk):
    return chunk.data.get("codes", [])[chunk.data[LEFT_CONTEXT] :]


@pytest.mark.covers("SV-3")
def test_first_chunk_is_small_and_sizes_grow():
    chunks = feed(frames(), "a", [[n] for n in range(30)] + [[]])
    assert [len(new_rows(chunk)) for chunk in chunks] == [2, 4, 8, 8, 8, 0]
    assert [chunk.seq for chunk in chunks] == list(range(6))
    assert [chunk.end for chunk in chunks] == [False] * 5 + [True]
    assert "codes" not in chunks[-1].data


@pytest.mark.covers("SV-3")
def test_a_last_step_that_fills_the_chunk_ends_it():
    chunks = feed(frames(), "a", [[0], [1], [2, 3, 4, 5]])
    assert [(len(new_rows(chunk)), chunk.end) for chunk in chunks] == [(2, False), (4, True)]


@pytest.mark.covers("SV-3", "EX-9")
@pytest.mark.parametrize("context", [0, 1, 3, 100])
def test_chunks_do_not_depend_on_how_steps_delivered_the_rows(context):
    rng = random.Random(context)
    for total in range(40):
        rows = list(range(total))
        whole = feed(frames(context=context), "a", [rows])
        assert join(new_rows(chunk) for chunk in whole) == rows
        for _ in range(5):
            cuts = sorted(rng.randint(0, total) for _ in range(rng.randint(0, 6)))
            steps = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
            processor = frames(context=context)
            chunks = feed(processor, "a", steps)
            assert join(new_rows(chunk) for chunk in chunks) == rows
            assert processor.num_open == 0
            if steps[-1]:
                assert chunks == whole


@pytest.mark.covers("EX-9")
def test_context_is_the_rows_just_before():
    chunks = feed(frames(sizes=(2, 3), context=4), "a", [[0, 1, 2, 3, 4, 5, 6, 7, 8]])
    assert [(chunk.data["codes"], chunk.data[LEFT_CONTEXT]) for chunk in chunks] == [
        ([0, 1], 0),
        ([0, 1, 2, 3, 4], 2),
        ([1, 2, 3, 4, 5, 6, 7], 4),
        ([4, 5, 6, 7, 8], 4),
    ]


def test_no_rows_at_all_still_ends():
    (chunk,) = feed(frames(), "a", [[]])
    assert chunk == Chunk("a", 0, True, {LEFT_CONTEXT: 0})


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("make", [frames, lambda: WholeReply(concat=join)])
def test_a_failed_request_ships_nothing_and_is_forgotten(make, reason):
    processor = make()
    processor.push("a", [1], {"codes": [0]}, None)
    assert processor.push("a", [2], {"codes": [1]}, reason) == []
    assert processor.num_open == 0


@pytest.mark.parametrize("make", [frames, lambda: WholeReply(concat=join)])
def test_drop_forgets(make):
    processor = make()
    processor.push("a", [1], {"codes": [0]}, None)
    processor.push("b", [1], {"codes": [0]}, None)
    processor.drop("a")
    processor.drop("a")
    assert processor.num_open == 1


def test_requests_are_apart():
    processor = frames(sizes=(2,))
    shipped = []
    for n in range(6):
        for req_id in ("a", "b"):
            shipped += processor.push(req_id, [], {"codes": [(req_id, n)]}, "stop" if n == 5 else None)
    for req_id in ("a", "b"):
        own = [chunk for chunk in shipped if chunk.req_id == req_id]
        assert join(new_rows(chunk) for chunk in own) == [(req_id, n) for n in range(6)]
        assert [chunk.seq for chunk in own] == [0, 1, 2]


@pytest.mark.parametrize("sizes, context", [((), 0), ((0,), 0), ((2, -1), 0), ((2,), -1)])
def test_bad_sizes_are_refused(sizes, context):
    with pytest.raises(ValueError, match="sizes"):
        FrameChunks("codes", sizes, context=context)


REPLY_STEPS = [
    ([5], {"hidden": [10, 11], "place": [0, 1]}, None),  # the prompt's rows come with the first token
    ([6, 7], {"hidden": [12, 13], "place": [2, 3]}, None),
    ([], {}, None),
    ([8], {"hidden": [14], "place": [4]}, "length"),
]


@pytest.mark.covers("RT-5")
@pytest.mark.parametrize("kind", [WholeReply, ReplyRows])
def test_whole_reply_is_one_chunk_with_all_ids_and_rows(kind):
    processor = kind(concat=join)
    assert processor.requires_token_updates
    *before, (chunk,) = [processor.push("a", *step) for step in REPLY_STEPS]
    assert before == [[], [], []]
    rows = {"hidden": [10, 11, 12, 13, 14], "place": [0, 1, 2, 3, 4]}
    assert chunk == Chunk("a", 0, True, {TOKEN_IDS: [5, 6, 7, 8], PROMPT_LENGTH: 2, **rows})
    assert processor.num_open == 0


@pytest.mark.covers("RT-5", "RT-6")
def test_a_reply_as_it_is_made():
    processor = ReplyRows(stream=True, concat=join)
    made = [processor.push("a", *step) for step in REPLY_STEPS]
    assert made == [
        [Chunk("a", 0, False, {TOKEN_IDS: [5], PROMPT_LENGTH: 2, "hidden": [10, 11], "place": [0, 1]})],
        [Chunk("a", 1, False, {TOKEN_IDS: [6, 7], "hidden": [12, 13], "place": [2, 3]})],
        [],
        [Chunk("a", 2, True, {TOKEN_IDS: [8], "hidden": [14], "place": [4]})],
    ]
    assert processor.num_open == 0


def test_a_prompt_that_is_followed_by_fed_tokens_in_its_own_step():
    """Two tokens of one step: the first of them was fed, so the last row isn't the prompt's."""
    (chunk,) = ReplyRows(concat=join).push("a", [5, 6], {"hidden": [10, 11, 12]}, "stop")
    assert chunk.data[PROMPT_LENGTH] == 2


def test_a_reply_without_rows():
    (chunk,) = ReplyRows(stream=True, concat=join).push("a", [5], {}, "stop")
    assert chunk == Chunk("a", 0, True, {TOKEN_IDS: [5]})


def test_torch_rows():
    torch = pytest.importorskip("torch")
    processor = FrameChunks("codes", (2,), context=1)
    chunks = []
    for n in range(3):
        chunks += processor.push("a", [], {"codes": torch.tensor([[n, n]])}, "stop" if n == 2 else None)
    assert [chunk.data["codes"][:, 0].tolist() for chunk in chunks] == [[0, 1], [1, 2]]


@pytest.mark.covers("MS-9")
def test_how_many_rows_the_first_chunk_lacks():
    frames = FrameChunks("rows", [4, 8], concat=join)
    assert frames.rows_to_first_chunk("a") == 4
    assert frames.push("a", [], {"rows": [1]}, None) == []
    assert frames.rows_to_first_chunk("a") == 3
    assert len(frames.push("a", [], {"rows": [2, 3, 4, 5]}, None)) == 1
    assert frames.rows_to_first_chunk("a") is None, "it is out"
    assert WholeReply(concat=join).rows_to_first_chunk("a") is None, "nobody listens before the end"
