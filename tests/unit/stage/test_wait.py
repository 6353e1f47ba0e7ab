"""Registered is not ready (EX-2)."""

import pytest

from stagevox.stage.wait import WaitRoom, WaitState

pytestmark = pytest.mark.covers("EX-2")


def test_requests_are_counted_by_reason():
    room = WaitRoom()
    room["a"] = room["b"] = WaitState.WAITING_FOR_INPUT
    room["c"] = WaitState.WAITING_FOR_CHUNK
    assert (room.count(WaitState.WAITING_FOR_INPUT), room.count(WaitState.WAITING_FOR_CHUNK)) == (2, 1)
    room["a"] = WaitState.WAITING_FOR_CHUNK
    del room["b"]
    assert (room.count(WaitState.WAITING_FOR_INPUT), room.count(WaitState.WAITING_FOR_CHUNK)) == (0, 2)
    assert WaitRoom().count(WaitState.WAITING_FOR_CHUNK) == 0
