"""Exactly once and in order, or a named error; nothing kept of a dropped request (F07, F10, F19)."""

from __future__ import annotations

import pytest

from stagevox.connectors.base import Chunk
from stagevox.connectors.local import LocalConnector
from stagevox.errors import ChunkOrderError


def chunk(seq, *, req_id="a", end=False):
    return Chunk(req_id, seq, end, {})


@pytest.fixture
def road():
    connector = LocalConnector()
    connector.open("a")
    connector.open("b")
    return connector


@pytest.mark.covers("SV-3")
def test_chunks_come_once_and_in_order(road):
    sent = [chunk(0), chunk(0, req_id="b"), chunk(1), chunk(1, req_id="b", end=True), chunk(2, end=True)]
    for one in sent:
        road.put("talker", one)
    assert road.get("code2wav") == []
    assert road.get("talker") == sent
    assert road.get("talker") == []


def test_edges_count_apart(road):
    road.put("talker", chunk(0, end=True))
    road.put("code2wav", chunk(0))
    assert len(road.get("talker")) == len(road.get("code2wav")) == 1


@pytest.mark.parametrize("seqs", [[1], [0, 2], [0, 0], [0, 1, 0], [0, 1, 1]])
def test_a_gap_or_repeat_is_an_error_and_carries_nothing(road, seqs):
    *good, bad = seqs
    for seq in good:
        road.put("talker", chunk(seq))
    with pytest.raises(ChunkOrderError, match=f"talker: expected chunk {len(good)} of a, got chunk {bad}"):
        road.put("talker", chunk(bad))
    assert len(road.get("talker")) == len(good)
    road.put("talker", chunk(0, req_id="b"))
    assert len(road.get("talker")) == 1


def test_nothing_may_follow_the_end(road):
    road.put("talker", chunk(0, end=True))
    with pytest.raises(ChunkOrderError, match="no more chunks"):
        road.put("talker", chunk(1))


def test_drop_frees_and_later_chunks_are_ignored(road):
    road.put("talker", chunk(0))
    road.put("talker", chunk(0, req_id="b"))
    road.drop("a")
    road.put("talker", chunk(1))
    road.put("talker", chunk(0))
    assert [one.req_id for one in road.get("talker")] == ["b"]
    road.drop("b")
    road.drop("unknown")
    assert road.num_open == 0
    assert road._waiting == {} and road._next == {}
