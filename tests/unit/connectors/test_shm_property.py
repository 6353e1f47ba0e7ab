"""Whatever the sizes and whoever comes first: what is put comes once, in order, as it was; and nothing stays behind."""

from __future__ import annotations

import collections
import itertools
import random
import time

import pytest

from stagevox.connectors.base import Chunk
from stagevox.connectors.local import LocalConnector
from stagevox.connectors.outbox import RoadLimits
from stagevox.connectors.roadmap import LOOPBACK, RoadOwner
from stagevox.connectors.shm import ShmConnector
from support.road import Child, make_chunk, make_data, segments, summary, torch_server


class Life:
    """What happens to requests, drawn at random: chunks to put, and when ends learn of a request and forget it."""

    def __init__(self, rng, num_requests):
        self.rng = rng
        self.lengths = {f"r{n}": rng.choice([1, 2, 5, 12]) for n in range(num_requests)}
        self.to_open = {end: list(self.lengths) for end in "ab"}
        self.made = dict.fromkeys(self.lengths, 0)
        self.put = collections.defaultdict(list)
        self.got = collections.defaultdict(list)
        self.dropped = {"a": set(), "b": set()}
        for ids in self.to_open.values():
            rng.shuffle(ids)

    def is_open(self, end, req_id):
        return req_id not in self.to_open[end] and req_id not in self.dropped[end]

    def next_chunk(self, full):
        """A request whose producer may go on, and the seq and end of its next chunk."""
        able = [
            req_id
            for req_id, length in self.lengths.items()
            if self.is_open("a", req_id) and self.made[req_id] < length and not full(req_id)
        ]
        if not able:
            return None
        req_id = self.rng.choice(able)
        seq = self.made[req_id]
        self.made[req_id] += 1
        return req_id, seq, seq == self.lengths[req_id] - 1

    def aborted(self):
        return self.dropped["a"] | self.dropped["b"]

    def check(self):
        for req_id, chunks in self.got.items():
            assert chunks == self.put[req_id][: len(chunks)], req_id
        for req_id in set(self.lengths) - self.aborted():
            assert len(self.got[req_id]) == self.lengths[req_id], req_id
        assert sum(map(len, self.got.values())), "nothing came"


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
@pytest.mark.parametrize("seed", range(15))
def test_any_interleaving(seed, tcp, clock):
    rng = random.Random(seed)
    limits = RoadLimits(
        per_request=rng.choice([1, 2, 8]),
        per_edge=rng.choice([1, 3, 64]),
        edge_bytes=rng.choice([1, 100_000, 2**28]),
        inline=rng.choice([0, 100, 4096, 2**30]),
        keep=rng.choice([0, 50_000, 2**25]),
        grace=100,
    )
    owner = RoadOwner(["a", "b"], {"b": LOOPBACK} if tcp else {})
    prefix = owner.map.prefix()
    a, b = (ShmConnector(name, owner.map, limits=limits, clock=clock) for name in "ab")
    roads = {"a": a, "b": b}
    if tcp:
        a.connect("b", b.address)
    life = Life(rng, 8)
    most, waited = 0, False

    def put():
        nonlocal most, waited
        # Now and then a driver doesn't look.
        if chosen := life.next_chunk(a.is_full if rng.random() < 0.9 else lambda _: False):
            req_id, seq, end = chosen
            chunk = Chunk(req_id, seq, end, make_data((seed, req_id, seq), rng.choice([100, 20_000])))
            life.put[req_id].append(summary(chunk))
            a.put("b", chunk)
            most = max(most, a._outboxes["b"]._count)
            waited |= any(lane.waiting for lane in a._outboxes["b"]._lanes.values())
            assert a.num_segments <= limits.per_edge

    def take():
        for chunk in b.get("b"):
            assert life.is_open("b", chunk.req_id)
            life.got[chunk.req_id].append(summary(chunk))

    def serve():
        a.wait(0.001)
        a.get("a")

    def learn():
        if ids := life.to_open[end := rng.choice("ab")]:
            roads[end].open(ids.pop())

    def abort():
        if rng.random() < 0.1:
            req_id, end = rng.choice(list(life.lengths)), rng.choice("ab")
            if life.is_open(end, req_id):
                life.dropped[end].add(req_id)
                roads[end].drop(req_id)

    for _ in range(300):
        rng.choice([put, put, put, take, serve, learn, abort])()
    for end, road in roads.items():  # all learn of it in the end, and all that is left is put
        while life.to_open[end]:
            road.open(life.to_open[end].pop())
    give_up = time.monotonic() + 30
    while a.in_flight() or any(
        life.made[req_id] < length for req_id, length in life.lengths.items() if life.is_open("a", req_id)
    ):
        assert time.monotonic() < give_up
        put()
        take()
        a.get("a")
    life.check()
    assert a.failures() == b.failures() == []
    assert waited or limits.per_request > 1, "the hard case did not come up"
    assert most <= limits.per_edge
    for road, req_id in itertools.product((a, b), life.lengths):
        road.drop(req_id)
    assert a.num_open == b.num_open == a.in_flight() == a.num_segments == 0
    outbox = a._outboxes["b"]
    assert (outbox._lanes, outbox._by_req, outbox._count, outbox._bytes) == ({}, {}, 0, 0) and not outbox._ready
    a.close()
    b.close()
    owner.close()
    assert segments(prefix) == []


@pytest.mark.parametrize("seed", range(5))
def test_both_roads_carry_the_same(seed):
    """The connector of one process is the reference: what a stage gets doesn't depend on the road."""
    rng = random.Random(seed)
    owner = RoadOwner(["a", "b"])
    a, b = (ShmConnector(name, owner.map) for name in "ab")
    local = LocalConnector()
    for road, req_id in itertools.product((a, b, local), "xyz"):
        road.open(req_id)
    seqs = dict.fromkeys("xyz", 0)
    for _ in range(20):
        req_id = rng.choice("xyz")
        chunk = Chunk(req_id, seqs[req_id], False, make_data((seed, req_id, seqs[req_id])))
        seqs[req_id] += 1
        for road in (a, local):
            road.put("b", chunk)
    want, got = [summary(chunk) for chunk in local.get("b")], []
    give_up = time.monotonic() + 20
    while len(got) < len(want):
        assert time.monotonic() < give_up
        a.get("a")
        got += [summary(chunk) for chunk in b.get("b")]
    for req_id in "xyz":  # between requests there is no order on a road with windows
        assert [one for one in got if one[0] == req_id] == [one for one in want if one[0] == req_id]
    a.close()
    b.close()
    owner.close()


@pytest.mark.covers("SV-3")
def test_any_interleaving_between_processes(capfd):
    with torch_server():
        for seed in range(3):
            between_processes(seed)
    assert capfd.readouterr().err == ""


def between_processes(seed):
    rng = random.Random(seed)
    owner = RoadOwner(["a", "b"], {"b": LOOPBACK} if seed == 1 else {})
    limits = RoadLimits(per_request=2, per_edge=6, keep=rng.choice([0, 2**25]))
    a, b = (Child(name, owner.map, limits) for name in "ab")
    if seed == 1:
        a.connect("b", b.where)
    life = Life(rng, 10)
    for req_id in life.lengths:
        a.open(req_id)
        b.open(req_id)
    life.to_open = {"a": [], "b": []}
    give_up = time.monotonic() + 60
    while chosen := life.next_chunk(lambda _: False):
        a.put("b", *chosen)
        life.put[chosen[0]].append(summary(make_chunk(*chosen)))
        if rng.random() < 0.2:
            for one in b.take(rng.choice([0, 0.01])):
                life.got[one[0]].append(one)
        if rng.random() < 0.3:
            a.get("a")
        if rng.random() < 0.05:
            req_id = rng.choice(list(life.lengths))
            life.dropped["b"].add(req_id)
            b.drop(req_id)
    while a.in_flight():
        assert time.monotonic() < give_up
        a.get("a")
        for one in b.take(0.01):
            life.got[one[0]].append(one)
    life.check()
    assert a.failures() == b.failures() == [] and life.dropped["b"]
    for req_id, end in itertools.product(life.lengths, (a, b)):
        end.drop(req_id)
    assert a.num_open() == b.num_open() == a.num_segments() == 0
    assert a.end() == b.end() == 0
    assert segments(owner.map.prefix()) == []
    owner.close()
