"""Chunks that two processes can make alike, and a process that holds one end of a road."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import struct
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch

from stagevox.connectors.base import Chunk
from stagevox.connectors.outbox import RoadLimits
from stagevox.connectors.roadmap import RoadMap
from stagevox.connectors.shm import ShmConnector
from stagevox.connectors.wire import DTYPES

SHM = Path("/dev/shm")


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN, and 0.0 is not -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return struct.pack("d", left) == struct.pack("d", right) if isinstance(left, float) else left == right


def digest(data: Any) -> str:
    """A hash of values and types, all the way down."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        found.update(type(value).__name__.encode() + b"(")
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{list(value.shape)}".encode())
            found.update(torch.empty(value.shape, dtype=value.dtype).copy_(value).reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())
        found.update(b")")

    add(data)
    return found.hexdigest()


def make_data(seed: object, largest: int = 20_000) -> dict[str, Any]:
    """Any data: tensors of any type up to ``largest`` elements, some empty, some not contiguous, some nested."""
    rng = random.Random(str(seed))
    data: dict[str, Any] = {"token_ids": [rng.randrange(2**40) for _ in range(rng.randrange(20))], "left": rng.random()}
    for index in range(rng.randrange(4)):
        rows, columns = rng.choice([0, 1, 3, 17]), rng.choice([0, 1, 64, largest // 17])
        dtype = DTYPES[rng.choice(["float32", "bfloat16", "float16", "int64", "bool", "uint8"])]
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        tensor = torch.randint(0, 100, (rows, columns), generator=generator).to(dtype)
        data[f"rows{index}"] = rng.choice([tensor, tensor.T, tensor[:, ::2], [tensor, None], {"t": (tensor, True)}])
    return data


def make_chunk(req_id: str, seq: int, end: bool = False, largest: int = 20_000) -> Chunk:
    """The chunk that every process makes of these arguments; one of its tensors is large enough for shared memory."""
    return Chunk(req_id, seq, end, {**make_data((req_id, seq), largest), "wave": torch.full((2000,), float(seq))})


def summary(chunk: Chunk) -> tuple[str, int, bool, str]:
    """All of a chunk, small enough to tell another process."""
    return chunk.req_id, chunk.seq, chunk.end, digest(chunk.data)


def segments(prefix: str) -> list[str]:
    """Names in shared memory that begin so."""
    return sorted(path.name for path in SHM.iterdir() if path.name.startswith(prefix))


def take(road: ShmConnector, stage: str, timeout: float) -> list[tuple[str, int, bool, str]]:
    """Chunks that come within the time, as soon as there are any."""
    chunks = road.get(stage)
    if not chunks:
        road.wait(timeout)
        chunks = road.get(stage)
    return [summary(chunk) for chunk in chunks]


def live(name: str, roadmap: RoadMap, limits: RoadLimits, commands: Any) -> None:
    """Run one end of a road: carry out ``(method, *arguments)`` until the pipe is closed."""
    warnings.simplefilter("error")
    with commands:
        road = ShmConnector(name, roadmap, limits=limits)
        commands.send(road.address)
        while True:
            try:
                what, *arguments = commands.recv()
            except EOFError:
                break
            if what == "put":
                stage, *chunk = arguments
                result: Any = road.put(stage, make_chunk(*chunk))
            elif what == "take":
                result = take(road, name, *arguments)
            elif what == "failures":
                result = [(req_id, type(error).__name__, str(error)) for req_id, error in road.failures()]
            elif what == "get":  # without telling what came
                result = len(road.get(*arguments))
            elif what in ("num_open", "num_segments"):
                result = getattr(road, what)
            else:
                result = getattr(road, what)(*arguments)
            commands.send(result)
        road.close()


@contextlib.contextmanager
def torch_server() -> Iterator[None]:
    """Within this, children start in milliseconds: forked from a fresh process that has torch and nothing else."""
    multiprocessing.set_forkserver_preload(["torch", "zmq", "msgspec"])
    yield
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


class Child:
    """The other end of a road, in a process of its own; ``child.put("b", "req", 0)`` is done there."""

    def __init__(self, name: str, roadmap: RoadMap, limits: RoadLimits | None = None, method: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(method)
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(name, roadmap, limits or RoadLimits(), theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.where = self.answer(60)

    def answer(self, timeout: float = 20) -> Any:
        assert self.pipe.poll(timeout), "the child doesn't answer"
        return self.pipe.recv()

    def tell(self, what: str, *arguments: Any) -> None:
        self.pipe.send((what, *arguments))

    def __getattr__(self, what: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.tell(what, *arguments)
            return self.answer()

        return call

    def kill(self, signal: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal)

    def end(self) -> int | None:
        """Let it close its end, and return its exit code."""
        self.pipe.close()
        self.process.join(10)
        return self.process.exitcode
