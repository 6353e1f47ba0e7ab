"""The road between real processes, and what is left of it when one of them is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from stagevox.connectors.outbox import RoadLimits
from stagevox.connectors.roadmap import LOOPBACK, RoadOwner
from support.road import Child, make_chunk, segments, summary, torch_server


@pytest.fixture(scope="module", autouse=True)
def server():
    with torch_server():
        yield


class World:
    def __init__(self, addresses=None):
        self.owner = RoadOwner(["a", "b", "c"], addresses)
        self.children = []

    def child(self, name, method="forkserver", **limits):
        child = Child(name, self.owner.map, RoadLimits(**limits), method)
        self.children.append(child)
        return child

    @property
    def segments(self):
        return segments(self.owner.map.prefix())

    @property
    def sockets(self):
        return sorted(set(os.listdir(self.owner.map.folder)) - {"lock"})

    def close(self):
        for child in self.children:
            child.process.kill()
            child.process.join(10)
        self.owner.close()
        assert self.segments == [] and not os.path.exists(self.owner.map.folder)


@pytest.fixture
def world(capfd):
    world = World()
    yield world
    world.close()
    assert capfd.readouterr().err == ""  # no traceback, and nothing from a resource tracker


def open_everywhere(req_id, *children):
    for child in children:
        child.open(req_id)


def take(producer, consumer, count, timeout=20.0):
    """The next chunks, while both processes go on."""
    chunks, give_up = [], time.monotonic() + timeout
    while len(chunks) < count:
        assert time.monotonic() < give_up, f"{len(chunks)} of {count} chunks came"
        producer.get(producer.name)
        chunks += consumer.take(0.05)
    return chunks


def settle(producer):
    give_up = time.monotonic() + 20
    while producer.in_flight():
        assert time.monotonic() < give_up
        producer.wait(0.1)
        producer.get(producer.name)


def expected(req_id, count, first=0, ends=True):
    return [summary(make_chunk(req_id, seq, ends and seq == count - 1)) for seq in range(first, count)]


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
def test_a_slow_consumer_gets_every_chunk_once_and_whole(capfd, tcp):
    world = World({"b": LOOPBACK} if tcp else None)
    a, b = world.child("a", "spawn", per_request=3), world.child("b", "spawn")
    if tcp:
        a.connect("b", b.where)
    open_everywhere("r", a, b)
    for seq in range(40):
        a.put("b", "r", seq, seq == 39)
    assert a.is_full("r") and a.in_flight("r") == 40
    time.sleep(0.2)
    a.get("a")
    assert a.in_flight("r") == 40 and len(world.segments) <= 3
    assert take(a, b, 40) == expected("r", 40)
    settle(a)
    assert b.take(0) == [] and not a.is_full("r")
    assert a.failures() == b.failures() == []
    for child in (a, b):
        child.drop("r")
        assert child.num_open() == 0
        assert child.end() == 0
    assert world.segments == [] and world.sockets == []
    world.close()
    assert capfd.readouterr().err == ""


@pytest.mark.covers("SV-3")
def test_three_stages_in_a_row(world):
    a, b, c = world.child("a"), world.child("b"), world.child("c")
    open_everywhere("r", a, b, c)
    for seq in range(6):
        a.put("b", "r", seq, seq == 5)
        b.put("c", "r", seq, seq == 5)
    assert take(a, b, 6) == take(b, c, 6) == expected("r", 6)
    assert [child.end() for child in (c, a, b)] == [0, 0, 0]
    assert world.segments == [] and world.sockets == []


def fill(world, a, req_id="r", count=3):
    """Have chunks with tensors on the way: their segments exist, and nobody has taken them."""
    a.open(req_id)
    for seq in range(count):
        a.put("b", req_id, seq)
    give_up = time.monotonic() + 20
    while not world.segments:
        assert time.monotonic() < give_up
        a.wait(0.1)
        a.get("a")


@pytest.mark.covers("SV-3")
def test_a_killed_producer_leaves_nothing_behind_its_owner(world):
    a, b = world.child("a"), world.child("b")
    b.open("r")
    fill(world, a)
    assert b.wait(10.0)  # something has left the producer's process
    a.kill(signal.SIGKILL)
    a.process.join(10)
    assert world.segments and world.owner.map.sweep("a") > 0
    assert world.segments == []
    # The consumer lives: the request of lost chunks fails by name, and the next producer of that name is heard.
    got, failures, give_up = [], [], time.monotonic() + 20
    while not failures and time.monotonic() < give_up:
        got += b.take(0.1)
        failures += b.failures()
    assert got == expected("r", len(got), ends=False)
    lost = f"b: chunk {len(got)} of r was lost: its sender has died or given it up"
    assert failures == [("r", "ChunkOrderError", lost)]
    b.drop("r")
    again = world.child("a")
    open_everywhere("s", again, b)
    again.put("b", "s", 0, True)
    assert take(again, b, 1) == expected("s", 1)
    settle(again)
    assert again.end() == b.end() == 0
    assert world.segments == [] and world.sockets == []


@pytest.mark.covers("SV-3")
def test_what_a_killed_producer_has_sent_still_comes_if_nobody_sweeps(world):
    a, b = world.child("a"), world.child("b")
    b.open("r")
    fill(world, a)
    assert b.wait(10.0)
    a.kill(signal.SIGKILL)
    a.process.join(10)
    got = []
    while chunks := b.take(0.5):
        got += chunks
    assert got and got == expected("r", len(got), ends=False)
    assert b.end() == 0
    assert world.segments  # it could not remove them itself
    world.owner.close()
    assert world.segments == []


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_consumer_that_takes_nothing_ends_in_a_named_error(world, how):
    a, b = world.child("a", deadline=2.0, per_request=2), world.child("b")
    fill(world, a, count=5)
    b.kill(how)
    failures, give_up = [], time.monotonic() + 20
    while not failures and time.monotonic() < give_up:
        a.wait(0.1)
        a.get("a")
        failures += a.failures()
        assert len(world.segments) <= 2
    assert failures == [("r", "DeadlineError", "b: chunk 0 of r was not taken in 2 s")]
    assert world.segments == [] and a.in_flight() == 0
    a.drop("r")
    assert a.num_open() == 0
    # The consumer comes back, under the same address.
    b.kill(signal.SIGKILL)
    b.process.join(10)
    again = world.child("b")
    open_everywhere("s", a, again)
    a.put("b", "s", 0, True)
    assert take(a, again, 1) == expected("s", 1)
    assert again.failures() == []
    settle(a)
    assert a.end() == again.end() == 0
    assert world.segments == [] and world.sockets == []


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_closing_does_not_wait_for_a_consumer_that_takes_nothing(world, how):
    a, b = world.child("a"), world.child("b")
    fill(world, a, count=20)
    b.kill(how)
    before = time.monotonic()
    assert a.end() == 0
    assert time.monotonic() - before < 5
    assert world.segments == []


def test_a_consumer_killed_as_it_reads_leaves_no_segment(world):
    a, b = world.child("a", deadline=2.0), world.child("b")
    open_everywhere("r", a, b)
    for seq in range(30):
        a.put("b", "r", seq)
    b.tell("take", 5.0)
    a.wait(0.05)
    b.kill(signal.SIGKILL)
    b.process.join(10)
    give_up = time.monotonic() + 20
    while a.in_flight():
        assert time.monotonic() < give_up
        a.wait(0.1)
        a.get("a")
    a.drop("r")
    assert a.num_open() == a.num_segments() == 0
    assert a.end() == 0 and world.segments == []


def test_both_killed_and_the_owner_clears_up(world):
    a, b = world.child("a"), world.child("b")
    b.open("r")
    fill(world, a)
    for child in (a, b):
        child.kill(signal.SIGKILL)
        child.process.join(10)
    assert world.segments and world.sockets == ["a", "b"]
    world.owner.close()
    assert world.segments == [] and not os.path.exists(world.owner.map.folder)


def test_the_resource_tracker_is_never_started(tmp_path):
    code = """
import torch
from multiprocessing import resource_tracker
from stagevox.connectors.base import Chunk
from stagevox.connectors.roadmap import RoadOwner
from stagevox.connectors.shm import ShmConnector
owner = RoadOwner(["a", "b"])
a, b = (ShmConnector(name, owner.map, ["b"]) for name in "ab")
for road in (a, b):
    road.open("r")
a.put("b", Chunk("r", 0, True, {"x": torch.ones(9000)}))
while not (got := b.get("b")):
    a.wait(0.1), a.get("a")
assert got[0].data["x"].sum() == 9000
for road in (a, b):
    road.close()
owner.close()
print(resource_tracker._resource_tracker._fd)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("None\n", "") and list(tmp_path.iterdir()) == []


@pytest.mark.covers("SV-5")
def test_tcp_listens_on_loopback_only():
    world = World({"b": LOOPBACK})
    b = world.child("b")
    host, port = b.where.removeprefix("tcp://").split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert b.take(0.1) == [] and b.num_open() == 0
    assert b.end() == 0
    world.close()
