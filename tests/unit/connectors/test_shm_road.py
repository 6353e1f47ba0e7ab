"""Both ends of a road in one process: order, windows, deadlines, and what is left. Over local sockets and over TCP."""

from __future__ import annotations

import itertools
import os
import stat
import time

import msgspec
import pytest
import torch
import zmq

from stagevox.connectors.base import Chunk
from stagevox.connectors.outbox import RoadLimits
from stagevox.connectors.roadmap import LOOPBACK, RoadOwner
from stagevox.connectors.shm import ShmConnector
from stagevox.connectors.wire import Ack, Payload, Put, TensorSpec, encode
from stagevox.errors import (
    BackpressureError,
    ChunkOrderError,
    ClosedError,
    ConfigError,
    DeadlineError,
    PayloadError,
    UnknownStageError,
)
from support.road import make_chunk, same, segments, summary

BIG = 5000
"""Elements of a tensor that goes through shared memory."""


class World:
    """A run with stages ``a`` and ``b``, made as they are asked for."""

    def __init__(self, clock, tcp):
        self.clock, self.tcp = clock, tcp
        self.owner = RoadOwner(["a", "b"], {"b": LOOPBACK} if tcp else {})
        self.roads = []

    def road(self, name, **limits):
        road = ShmConnector(name, self.owner.map, limits=RoadLimits(**limits), clock=self.clock)
        self.roads.append(road)
        return road

    def pair(self, *open_requests, **limits):
        a, b = self.road("a", **limits), self.road("b", **limits)
        self.introduce(a, b)
        for road, req_id in itertools.product((a, b), open_requests):
            road.open(req_id)
        return a, b

    def introduce(self, a, b):
        if self.tcp:
            a.connect("b", b.address)

    def close(self):
        for road in self.roads:
            road.close()
        assert segments(self.owner.map.prefix()) == []
        assert os.listdir(self.owner.map.folder) == ["lock"]
        self.owner.close()


@pytest.fixture(params=["ipc", "tcp"])
def world(request, clock):
    world = World(clock, request.param == "tcp")
    yield world
    world.close()


@pytest.fixture
def local(clock):
    world = World(clock, tcp=False)
    yield world
    world.close()


def until(what, *roads):
    """Turn the stages' loops, which sleep until something comes, until ``what`` is true; returns it."""
    give_up = time.monotonic() + 10
    while not (found := what()):
        assert time.monotonic() < give_up, "nothing happens"
        poller = zmq.Poller()
        for socket, events in itertools.chain(*(road.pollables() for road in roads)):
            poller.register(socket, events)
        poller.poll(100)
    return found


def flow(a, b, count):
    """The next chunks that come to ``b``, of which it acknowledges each."""
    chunks = []

    def turn():
        a.get("a")
        chunks.extend(b.get("b"))
        a.get("a")
        return len(chunks) >= count

    until(turn, a, b)
    return chunks


def settle(a, b=None):
    """Turn the loops until all that ``a`` has sent is acknowledged."""
    until(lambda: [b.get("b") if b else None, a.get("a")] and not a.in_flight(), a, *([b] if b else []))


def tensor_chunk(seq, *, req_id="r", end=False, size=BIG):
    return Chunk(req_id, seq, end, {"x": torch.full((size,), float(seq))})


@pytest.mark.covers("SV-3")
def test_chunks_come_once_and_in_order(world):
    a, b = world.pair("r", "s")
    sent = [make_chunk("r", 0), make_chunk("s", 0), make_chunk("r", 1), make_chunk("s", 1, True), make_chunk("r", 2, True)]
    for chunk in sent:
        a.put("b", chunk)
    got = flow(a, b, 5)
    assert [summary(chunk) for chunk in got] == [summary(chunk) for chunk in sent]
    assert all(same(dict(one.data), dict(other.data)) for one, other in zip(got, sent, strict=True))
    settle(a, b)
    assert b.get("b") == [] and a.failures() == b.failures() == []
    assert a.num_open == b.num_open == 2
    for road, req_id in itertools.product((a, b), "rs"):
        road.drop(req_id)
    assert a.num_open == b.num_open == a.num_segments == a.in_flight() == 0


def test_what_comes_is_the_consumers_own(local):
    a, b = local.pair("r")
    chunk = tensor_chunk(0)
    a.put("b", chunk)
    (got,) = flow(a, b, 1)
    a.put("b", tensor_chunk(1))  # into the same memory
    flow(a, b, 1)
    got.data["x"].add_(1)
    assert same(got.data["x"], torch.ones(BIG)) and same(chunk.data["x"], torch.zeros(BIG))


def test_large_tensors_take_shared_memory_and_small_ones_do_not(local):
    a, b = local.pair("r", inline=4000)
    a.put("b", Chunk("r", 0, False, {"x": torch.zeros(999), "n": 1}))
    flow(a, b, 1)
    assert segments(local.owner.map.prefix()) == []
    a.put("b", Chunk("r", 1, False, {"x": torch.zeros(1000), "y": torch.ones(3), "z": torch.ones(1001)}))
    until(lambda: a.get("a") or segments(local.owner.map.prefix("a")), a)
    (name,) = segments(local.owner.map.prefix("a"))
    assert os.stat(f"/dev/shm/{name}").st_size == 2001 * 4
    (got,) = flow(a, b, 1)
    assert got.data["y"].tolist() == [1, 1, 1] and got.data["z"].sum() == 1001


def test_tcp_takes_no_shared_memory(clock):
    world = World(clock, tcp=True)
    a, b = world.pair("r")
    a.put("b", tensor_chunk(0))
    (got,) = flow(a, b, 1)
    assert same(got.data["x"], torch.zeros(BIG)) and segments(world.owner.map.prefix()) == []
    assert b.address.startswith("tcp://127.0.0.1:")
    world.close()


def test_without_room_in_shared_memory_tensors_go_as_frames(local, monkeypatch):
    a, b = local.pair("r")
    asked = []
    monkeypatch.setattr(a._pool, "write", lambda views: asked.append(len(views)))
    a.put("b", Chunk("r", 0, True, {"x": torch.ones(BIG), "y": [torch.zeros(BIG)]}))
    (got,) = flow(a, b, 1)
    assert asked == [2]
    assert same(got.data, {"x": torch.ones(BIG), "y": [torch.zeros(BIG)]})


@pytest.mark.covers("SV-5")
def test_sockets_are_private(local):
    local.pair()
    assert stat.S_IMODE(os.stat(local.owner.map.folder).st_mode) == 0o700
    for name in "ab":
        assert stat.S_IMODE(os.stat(f"{local.owner.map.folder}/{name}").st_mode) == 0o600
    os.chmod(local.owner.map.folder, 0o750)
    with pytest.raises(ConfigError, match=r"a.address: .* must be private"):
        local.road("a")
    os.chmod(local.owner.map.folder, 0o700)


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("seqs", [[1], [0, 2], [0, 0], [0, 1, 0], [0, 1, 1]])
def test_a_gap_or_repeat_is_an_error_where_it_is_put(world, seqs):
    a, b = world.pair("r", "s")
    *good, bad = seqs
    for seq in good:
        a.put("b", tensor_chunk(seq))
    with pytest.raises(ChunkOrderError, match=f"b: expected chunk {len(good)} of r, got chunk {bad}"):
        a.put("b", tensor_chunk(bad))
    a.put("b", tensor_chunk(0, req_id="s"))
    assert len(flow(a, b, len(seqs))) == len(seqs)


def test_nothing_may_follow_the_end(world):
    a, b = world.pair("r")
    a.put("b", tensor_chunk(0, end=True))
    flow(a, b, 1)
    with pytest.raises(ChunkOrderError, match="b: expected no more chunks of r, got chunk 1"):
        a.put("b", tensor_chunk(1))


def test_a_value_that_cannot_be_carried_leaves_the_road_as_it_was(world):
    a, b = world.pair("r")
    with pytest.raises(PayloadError, match="data.x"):
        a.put("b", Chunk("r", 0, False, {"x": object()}))
    a.put("b", tensor_chunk(0))
    assert len(flow(a, b, 1)) == 1


@pytest.mark.covers("SV-3")
def test_a_full_window_neither_blocks_nor_loses(world):
    a, b = world.pair("r", per_request=3)
    full = []
    for seq in range(20):
        a.put("b", tensor_chunk(seq, end=seq == 19))
        full.append(a.is_full("r"))
    assert a.in_flight("r") == a.in_flight() == 20
    until(lambda: a.get("a") or a.num_segments or world.tcp, a)
    time.sleep(0.05)
    a.get("a")
    assert a.num_segments <= 3
    assert full[2:] == [True] * 18 and a.is_full("r") and not a.is_full("other")
    got = flow(a, b, 20)
    assert [chunk.seq for chunk in got] == list(range(20)) and got[-1].end
    assert [int(chunk.data["x"][0]) for chunk in got] == list(range(20))
    settle(a, b)
    assert not a.is_full("r") and a.num_segments == 0


def test_a_request_is_paused_before_anything_waits(world):
    a, b = world.pair("r", per_request=2)
    a.put("b", tensor_chunk(0))
    assert not a.is_full("r")
    flow(a, b, 1)
    settle(a, b)
    a.put("b", tensor_chunk(1))
    a.put("b", tensor_chunk(2))
    assert a.is_full("r")
    assert len(flow(a, b, 2)) == 2


def test_one_full_request_holds_no_other_up(world):
    a, b = world.pair("r", "s", per_request=2)
    for seq in range(10):
        a.put("b", tensor_chunk(seq))
    a.put("b", tensor_chunk(0, req_id="s"))
    until(lambda: a.get("a") or not a.is_full("s"), a)
    first = until(lambda: a.get("a") or b.get("b"), a, b)
    first += b.get("b")
    while len(first) < 3:
        first += until(lambda: b.get("b"), b)
    assert sorted((chunk.req_id, chunk.seq) for chunk in first) == [("r", 0), ("r", 1), ("s", 0)]


def test_an_edge_is_bounded_and_shared_fairly(world):
    names = [f"r{n}" for n in range(6)]
    a = world.road("a", per_edge=6)
    for name in names:
        a.open(name)
        for seq in range(4):
            a.put("b", tensor_chunk(seq, req_id=name))  # all wait: b is not there yet
    b = world.road("b")
    world.introduce(a, b)
    for name in names:
        b.open(name)
    first = []
    until(lambda: a.get("a") or a._outboxes["b"]._count, a)
    until(lambda: first.extend(b.get("b")) or len(first) == 6, b)
    time.sleep(0.02)
    assert b.get("b") == [] and a.in_flight() == 24
    assert [(chunk.req_id, chunk.seq) for chunk in first] == [(name, 0) for name in names]
    rest = flow(a, b, 18)
    for name in names:
        assert [chunk.seq for chunk in first + rest if chunk.req_id == name] == list(range(4))


def test_an_edge_is_bounded_in_bytes_and_a_giant_passes_alone(world):
    a, b = world.pair("r", edge_bytes=50_000)
    sizes = [BIG, BIG, BIG, 40_000, 10]
    for seq, size in enumerate(sizes):
        a.put("b", tensor_chunk(seq, size=size))
    outbox, most = a._outboxes["b"], []

    def turn():
        most.append((outbox._bytes, outbox._count))
        a.get("a")
        return len(got.extend(b.get("b")) or got) == 5

    got = []
    until(turn, a, b)
    assert [chunk.data["x"].numel() for chunk in got] == sizes
    assert any(size > 50_000 for size, _ in most)
    assert all(size <= 50_000 or count == 1 for size, count in most)


@pytest.mark.covers("SV-3")
def test_a_producer_that_does_not_pause_loses_the_request_not_memory(world):
    a, b = world.pair("r", "s", per_request=2, queued=5)
    with pytest.raises(BackpressureError, match="b: 5 chunks of r wait and none is taken"):
        for seq in range(10):
            a.put("b", tensor_chunk(seq))
    assert a.in_flight() in (5, 6, 7)
    a.drop("r")
    b.drop("r")
    a.put("b", tensor_chunk(0, req_id="s"))
    assert [chunk.req_id for chunk in flow(a, b, 1)] == ["s"]
    settle(a, b)


@pytest.mark.covers("SV-3")
def test_chunks_of_dropped_requests_are_refused_and_freed(world):
    a, b = world.pair("r", "s")
    a.put("b", tensor_chunk(0))
    a.put("b", tensor_chunk(0, req_id="s"))
    b.drop("r")
    a.put("b", tensor_chunk(1))
    assert [chunk.req_id for chunk in flow(a, b, 1)] == ["s"]
    settle(a, b)
    assert a.num_segments == 0 and b.failures() == []
    a.drop("r")
    a.put("b", tensor_chunk(2))
    a.put("b", tensor_chunk(0))
    a.drop("unknown")
    assert a.in_flight() == 0 and a.num_open == b.num_open == 1


def test_a_drop_at_the_producer_leaves_what_it_has_sent(world):
    a, b = world.pair("r", per_request=2)
    for seq in range(5):
        a.put("b", tensor_chunk(seq))
    until(lambda: a.get("a") or len(a._outboxes["b"]._by_req["r"].sent) == 2, a)
    a.drop("r")
    assert a.in_flight() == 2 and a.num_open == 1
    assert [chunk.seq for chunk in flow(a, b, 2)] == [0, 1]
    settle(a, b)
    assert a.num_open == a.num_segments == 0 and a._outboxes["b"]._lanes == {}


@pytest.mark.covers("EX-2")
def test_a_chunk_that_overtakes_the_opening_of_its_request_waits_for_it(world, clock):
    a, b = world.pair()
    a.open("r")
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or b.get("b") or b.num_open == 1, a, b)
    assert a.in_flight() == 1
    b.open("r")
    assert b.due_in() == 0
    a.put("b", tensor_chunk(1, end=True))
    assert [chunk.seq for chunk in flow(a, b, 2)] == [0, 1]
    settle(a, b)


def test_chunks_of_unknown_requests_are_freed_soon(world, clock):
    a, b = world.pair(grace=0.5)
    a.open("r")
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or b.get("b") or b.num_open == 1, a, b)
    assert 0 < b.due_in() <= 0.5
    clock.now += 0.6
    assert b.get("b") == [] and b.num_open == 0
    settle(a, b)
    assert a.num_segments == 0
    b.open("r")
    assert b.get("b") == []


def test_a_later_use_of_an_id_gets_no_chunk_of_an_earlier_one(world):
    a, b = world.pair("r")
    a.put("b", tensor_chunk(0))
    flow(a, b, 1)
    a.put("b", tensor_chunk(1))  # on the way while both ends forget the request
    a.drop("r")
    b.drop("r")
    for road in (a, b):
        road.open("r")
    a.put("b", tensor_chunk(0, end=True))
    assert [(chunk.seq, chunk.end) for chunk in flow(a, b, 1)] == [(0, True)]
    settle(a, b)
    assert b.failures() == [] and b.get("b") == []


def test_the_memory_of_dropped_requests_is_forgotten(world, clock):
    _, b = world.pair(*map(str, range(50)), deadline=10)
    for n in range(50):
        b.drop(str(n))
    assert len(b._inbox._dropped) == 50
    clock.now += 11
    b.get("b")
    assert not b._inbox._dropped


@pytest.mark.covers("SV-3")
def test_nobody_ever_connects(world, clock):
    a = world.road("a", deadline=5, per_request=2)
    for req_id in "rs":
        a.open(req_id)
    for seq in range(4):
        a.put("b", tensor_chunk(seq))
    assert a.num_segments == 0 and a.is_full("r") and a.due_in() == 5
    clock.now += 3
    a.put("b", tensor_chunk(0, req_id="s"))
    clock.now += 2
    a.get("a")
    ((req_id, error),) = a.failures()
    assert req_id == "r" and isinstance(error, DeadlineError)
    assert str(error) == "b: chunk 0 of r was not taken in 5 s"
    assert a.failures() == [] and a.in_flight() == 1 and a.due_in() == 3
    a.put("b", tensor_chunk(4))  # it has failed: ignored
    assert a.in_flight() == 1
    clock.now += 3
    a.get("a")
    assert [req_id for req_id, _ in a.failures()] == ["s"] and a.in_flight() == 0
    a.drop("r")
    a.drop("s")
    assert a.num_open == 0 and a._outboxes["b"]._lanes == {}


@pytest.mark.covers("SV-3")
def test_a_consumer_that_hangs_costs_bounded_memory(world, clock):
    a, b = world.pair(deadline=5, per_request=2, per_edge=3, queued=4)
    seen = 0
    for n in range(40):
        a.open(str(n))
        for seq in range(3):
            a.put("b", tensor_chunk(seq, req_id=str(n)))
        until(lambda: a.get("a") or True, a)
        seen = max(seen, len(segments(world.owner.map.prefix("a"))))
        clock.now += 6
        a.get("a")
        assert [(req_id, type(error)) for req_id, error in a.failures()] == [(str(n), DeadlineError)]
        a.drop(str(n))
        assert a.in_flight() == a.num_open == a.num_segments == 0
    assert seen <= 3
    b.get("b")  # what was withdrawn is of no request here; nothing fails


def test_a_withdrawn_chunk_fails_its_request_at_the_consumer(local, clock):
    a, b = local.pair("r", deadline=5)
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or a.num_segments, a)
    clock.now += 6
    a.get("a")
    assert len(a.failures()) == 1
    until(lambda: b.get("b") or b._inbox.failures, b)
    ((req_id, error),) = b.failures()
    assert req_id == "r" and isinstance(error, ChunkOrderError)
    assert str(error) == "b: chunk 0 of r was lost: its sender has died or given it up"


def test_a_lost_chunk_is_found_though_others_arrive(world, clock):
    a, b = world.pair("r", "s", deadline=5)
    a.put("b", tensor_chunk(0))
    flow(a, b, 1)
    settle(a, b)
    outbox = a._outboxes["b"]
    real = outbox.socket
    outbox.socket = type("Lossy", (), {"poll": real.poll, "recv": real.recv, "send_multipart": lambda *_: None})()
    a.put("b", tensor_chunk(1))
    outbox.socket = real
    clock.now += 4
    a.put("b", tensor_chunk(2))
    until(lambda: a.get("a") or b.get("b") or b._inbox.failures, a, b)
    assert [str(error) for _, error in b.failures()] == ["b: expected chunk 1 of r, got chunk 2"]
    a.put("b", tensor_chunk(0, req_id="s"))
    assert len(flow(a, b, 1)) == 1
    clock.now += 2
    a.get("a")
    assert [str(error) for _, error in a.failures()] == ["b: chunk 1 of r was not taken in 5 s"]


def test_the_deadline_runs_from_when_a_chunk_was_sent(world, clock):
    """Here both waited for the consumer to start, and one then for the other."""
    a = world.road("a", deadline=5, per_request=1)
    a.open("r")
    for seq in range(2):
        a.put("b", tensor_chunk(seq))
    clock.now += 4
    b = world.road("b")
    world.introduce(a, b)
    until(lambda: a.get("a") or a._outboxes["b"]._count, a)
    clock.now += 4
    a.get("a")
    assert a.failures() == [] and a.due_in() == 1
    clock.now += 1
    a.get("a")
    assert [str(error) for _, error in a.failures()] == ["b: chunk 0 of r was not taken in 5 s"]


def test_a_chunk_behind_those_of_others_waits_while_any_is_taken(world, clock):
    a, b = world.pair(*"rstu", deadline=5, per_edge=1)
    for req_id in "rstu":
        a.put("b", tensor_chunk(0, req_id=req_id))
    until(lambda: a.get("a") or a._outboxes["b"]._count, a)
    taken = []
    for _ in "rstu":
        clock.now += 4
        taken += until(lambda: b.get("b"), b)
        until(lambda: a.get("a") or a._outboxes["b"]._heard_at == clock.now, a)
        assert a.failures() == []
    assert [chunk.req_id for chunk in taken] == list("rstu")


def test_what_failed_and_was_dropped_is_not_told(world, clock):
    a = world.road("a", deadline=5)
    a.open("r")
    a.put("b", tensor_chunk(0))
    clock.now += 6
    a.get("a")
    assert a._outboxes["b"].failures
    a.drop("r")
    assert a.failures() == []


def test_early_chunks_of_a_request_that_is_dropped_unopened_are_freed(world):
    a, b = world.pair(grace=100)
    a.open("r")
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or b.get("b") or b.num_open == 1, a, b)
    b.drop("r")
    assert b.num_open == 0
    until(lambda: a.get("a") or not a.in_flight(), a)


def test_a_consumer_that_leaves_just_then_loses_nothing(local):
    a, b = local.pair("r")
    outbox = a._outbox("b")

    def gone(*_):
        raise zmq.Again

    real, outbox.socket = outbox.socket, type("Gone", (), {"poll": lambda *_: True, "send_multipart": gone})()
    a.put("b", tensor_chunk(0))
    assert a.in_flight() == 1 and a.num_segments == outbox._count == 0
    outbox.socket = real
    assert [chunk.seq for chunk in flow(a, b, 1)] == [0]


def test_what_a_dead_consumer_never_took_does_not_hold_the_edge_shut(local, clock):
    """Its requests were dropped, and their chunks fill the edge, until the producer hears of the new one: not by the deadline."""
    a, b = local.pair(*"rst", per_edge=3, per_request=2, deadline=30)
    for req_id in "rst":
        a.put("b", tensor_chunk(0, req_id=req_id))
    until(lambda: [a.get("a")] and a.num_segments == 3, a)  # sent
    for req_id in "rs":  # t goes on: its consumer has ended it, which the producer is not told
        a.drop(req_id)
    b.close()
    b = local.road("b")
    for road in (a, b):
        road.open("u")
    a.put("b", tensor_chunk(0, req_id="u", end=True))
    for _ in range(20):
        a.wait(0.01)
        assert a.get("a") == [] == b.get("b")
    assert (a.in_flight(), a.num_segments) == (4, 3)
    a.renew("b")
    assert a.in_flight("u") == a.in_flight() and a.num_open == 2
    (chunk,) = flow(a, b, 1)
    assert same(chunk.data, tensor_chunk(0).data) and chunk.end
    settle(a, b)
    a.put("b", tensor_chunk(1, req_id="t"))
    a.put("b", tensor_chunk(2, req_id="t", end=True))
    until(lambda: b.get("b") or b._inbox.req_ids() == {"u", "t"}, a, b)
    clock.now += 2  # nobody opens t there
    settle(a, b)
    assert a.failures() == b.failures() == [] and a.num_segments == 0
    for req_id in "tu":
        a.drop(req_id)
    outbox = a._outboxes["b"]
    assert a.num_open == 0 and outbox._count == outbox._bytes == 0 and outbox._lanes == {}


class Forger:
    """A socket that says what it wants to stage ``b``."""

    def __init__(self, world, b):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(b.address)
        self.fields = dict(
            zip(Put.__struct_fields__, (world.owner.map.key, "b", 1, "r", 0, False, None, [], [], None), strict=True)
        )

    def say(self, *frames, data=None, raw=None, **fields):
        payload = Payload(data or {})
        put = Put(**{**self.fields, "data": msgspec.Raw(raw or payload.data), "tensors": payload.specs, **fields})
        self.socket.send_multipart([encode(put), *(frames or payload.views)])

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def forged(world):
    b = world.road("b", deadline=5)
    b.open("r")
    forger = Forger(world, b)
    yield forger, b
    forger.close()


def failures(b):
    until(lambda: b.get("b") or b._inbox.failures, b)
    return [f"{type(error).__name__}: {error}" for _, error in b.failures()]


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("seqs", [[1], [0, 0], [0, 2], [0, 1, 0]])
def test_a_gap_or_repeat_on_the_wire_is_refused(forged, seqs):
    forger, b = forged
    for seq in seqs:
        forger.say(seq=seq, data={"n": seq})
    got = []
    until(lambda: got.extend(b.get("b")) or b._inbox.failures, b)
    assert [chunk.seq for chunk in got] == seqs[:-1]
    wanted = f"ChunkOrderError: b: expected chunk {len(seqs) - 1} of r, got chunk {seqs[-1]}"
    assert [f"{type(error).__name__}: {error}" for _, error in b.failures()] == [wanted]
    forger.say(seq=len(seqs) - 1)
    assert msgspec.msgpack.decode(forger.socket.recv())[2] and b.get("b") == [] and b.failures() == []


def test_a_repeat_after_the_end_is_refused(forged):
    forger, b = forged
    forger.say(end=True)
    assert len(until(lambda: b.get("b"), b)) == 1
    forger.say(end=True)
    assert failures(b) == ["ChunkOrderError: b: expected no more chunks of r, got chunk 0"]


def test_a_second_sender_of_a_request_is_refused(forged):
    forger, b = forged
    forger.say()
    forger.say(seq=1, lane=2)
    assert failures(b) == ["ChunkOrderError: b: chunk 1 of r comes from another sender than those before it"]


@pytest.mark.covers("SV-5")
def test_strangers_are_ignored(forged):
    forger, b = forged
    forger.say(key=b"guess")
    forger.say(stage="c")
    forger.socket.send_multipart([b"GET / HTTP/1.1"])
    forger.socket.send(b"")
    until(lambda: b.get("b") or b.num_refused == 4, b)
    forger.say(data={"n": 1})
    assert [chunk.data for chunk in until(lambda: b.get("b"), b)] == [{"n": 1}]
    assert b.failures() == []


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize(
    ("frames", "fields"),
    [
        ([b"123"], {"tensors": [TensorSpec("uint8", (4,))]}),
        ([b"1234", b"5"], {"tensors": [TensorSpec("uint8", (4,))]}),
        ([], {"tensors": [TensorSpec("uint8", (2**60,))]}),
        ([b""], {"tensors": [TensorSpec("object", (0,))]}),
        ([b""], {"tensors": [TensorSpec("uint8", (-1, 0))]}),
        ([], {"tensors": [TensorSpec("uint8", (1,))], "shared": [0]}),
        ([], {"tensors": [TensorSpec("uint8", (1,))], "shared": [0], "segment": "../../etc/passwd"}),
        ([], {"shared": [3], "segment": "PREFIXx"}),
        ([], {"tensors": [TensorSpec("uint8", (1,))] * 2, "shared": [1, 0], "segment": "PREFIXx"}),
        ([], {"raw": msgspec.msgpack.encode([1])}),
        ([], {"raw": msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, b"\x00")})}),
    ],
)
def test_malformed_chunks_fail_their_request_alone(world, forged, frames, fields):
    forger, b = forged
    b.open("s")
    if "segment" in fields:
        fields["segment"] = fields["segment"].replace("PREFIX", world.owner.map.prefix())
    forger.say(*frames, **fields)
    (line,) = failures(b)
    assert line.startswith("PayloadError: b: chunk 0 of r can't be read: ")
    forger.say(req_id="s", lane=3, data={"n": 1})
    assert [chunk.req_id for chunk in until(lambda: b.get("b"), b)] == ["s"]


@pytest.mark.covers("SV-5")
def test_a_size_beyond_the_segment_takes_no_memory(world, forged):
    forger, b = forged
    path = f"/dev/shm/{world.owner.map.prefix('a')}x"
    with open(path, "wb") as file:
        file.write(b"123")
    forger.say(tensors=[TensorSpec("uint8", (2**50,))], shared=[0], segment=os.path.basename(path))
    assert failures(b) == ["ChunkOrderError: b: chunk 0 of r was lost: its sender has died or given it up"]
    os.unlink(path)


@pytest.mark.parametrize("key", [b"guess", None])
def test_acknowledgements_of_strangers_are_ignored(clock, key):
    world = World(clock, tcp=True)
    context = zmq.Context()
    stranger = context.socket(zmq.ROUTER)
    port = stranger.bind_to_random_port("tcp://127.0.0.1")
    a = world.road("a")
    a.connect("b", f"tcp://127.0.0.1:{port}")
    a.open("r")
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or stranger.poll(0), a)
    peer, head, _ = stranger.recv_multipart()
    lane = msgspec.msgpack.decode(head)[3]
    stranger.send_multipart([peer, encode(Ack(key, [(lane, 0)])) if key else b"hello"])
    until(lambda: a.get("a") or a.num_refused, a)
    assert a.in_flight() == 1
    stranger.send_multipart([peer, encode(Ack(world.owner.map.key, [(lane, 0), (lane, 0), (lane, 7), (99, 0)]))])
    until(lambda: a.get("a") or not a.in_flight(), a)
    assert a._outboxes["b"]._count == a._outboxes["b"]._bytes == 0
    context.destroy(linger=0)
    world.close()


def test_waiting_ends_when_something_comes_or_is_due(world, clock):
    a, b = world.pair("r", grace=0.01, deadline=0.05)
    assert not a.wait(0.01) and not b.wait(0.01)
    reader, writer = os.pipe()
    assert not b.wait(0.01, reader)
    os.write(writer, b"x")
    assert b.wait(10, reader)
    os.close(reader)
    os.close(writer)
    a.put("b", tensor_chunk(0))
    until(lambda: a.get("a") or b.wait(0.1), a)
    assert b.wait(10)
    assert len(b.get("b")) == 1
    assert a.wait(10)
    a.get("a")
    assert a.in_flight() == 0


def test_waiting_sleeps_no_longer_than_the_next_deadline():
    world = World(time.monotonic, tcp=False)
    a = world.road("a", deadline=0.1)
    a.open("r")
    a.put("b", tensor_chunk(0))
    before = time.monotonic()
    while not (found := a.failures()):
        assert a.wait(10)
        a.get("a")
    assert [req_id for req_id, _ in found] == ["r"] and 0.09 < time.monotonic() - before < 5
    world.close()


def test_a_wait_wakes_when_the_consumer_comes(world):
    a = world.road("a")
    a.open("r")
    a.put("b", tensor_chunk(0))
    assert not a.wait(0.02)
    b = world.road("b")
    world.introduce(a, b)
    b.open("r")
    assert a.wait(10)
    assert len(flow(a, b, 1)) == 1


def test_other_stages_and_addresses_are_errors(world):
    a, b = world.pair("r")
    with pytest.raises(UnknownStageError, match="'c'"):
        a.put("c", tensor_chunk(0))
    with pytest.raises(UnknownStageError, match="doesn't run in this process"):
        a.get("b")
    with pytest.raises(UnknownStageError, match="no 'z'"):
        world.road("z")
    with pytest.raises(ConfigError, match="b.address: is .* already"):
        a.connect("b", "tcp://127.0.0.1:1")
    a.open("r")
    assert a.num_open == b.num_open == 1


def test_a_taken_port_is_a_named_error(clock):
    world = World(clock, tcp=True)
    b = world.road("b")
    other = RoadOwner(["b"], {"b": b.address})
    with pytest.raises(ConfigError, match="b.address: can't listen at tcp://127.0.0.1:.*in use"):
        ShmConnector("b", other.map)
    other.close()
    world.close()


def test_a_run_that_has_ended_is_a_named_error(clock):
    world = World(clock, tcp=False)
    world.close()
    with pytest.raises(ClosedError, match="has ended"):
        world.road("a")


@pytest.mark.covers("SV-3")
def test_closing_with_chunks_everywhere_is_quick_and_complete(world):
    a, b = world.pair("r", per_request=2)
    for seq in range(6):
        a.put("b", tensor_chunk(seq))
    until(lambda: a.get("a") or a._outboxes["b"]._count == 2, a)
    before = time.monotonic()
    a.close()
    b.close()
    assert time.monotonic() - before < 2
    a.close()
    for call in (lambda: a.put("b", tensor_chunk(6)), lambda: a.get("a"), lambda: a.open("s"), lambda: a.wait(0)):
        with pytest.raises(ClosedError):
            call()
    a.drop("r")
    assert a.num_open == a.in_flight() == 0


def test_closing_alone_is_quick(world):
    a = world.road("a")
    a.open("r")
    a.put("b", tensor_chunk(0))
    before = time.monotonic()
    a.close()
    assert time.monotonic() - before < 2


@pytest.mark.parametrize(
    "bad",
    [{"per_request": 0}, {"per_edge": 0}, {"queued": 7}, {"inline": -1}, {"deadline": 0}, {"grace": -1}, {"deadline": 1e999}],
)
def test_limits_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        RoadLimits(**bad)


def test_a_connector_in_one_process_is_never_full():
    from stagevox.connectors.local import LocalConnector

    road = LocalConnector()
    road.open("r")
    road.put("b", tensor_chunk(0))
    assert not road.is_full("r") and road.failures() == []
