"""The process of one stage: an engine, a socket to the server, and the road to the stages beside it.

    python -m stagevox.stage.process

The server starts it with a :class:`stagevox.stage.messages.Launch` as the first line of standard input. Standard input stays open as
long as the server lives; when it ends, so does this process, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from stagevox.config.env import hush_libraries, prepare_inline_process
from stagevox.config.objects import load_attribute

from .messages import (
    Add,
    Answer,
    Ask,
    Died,
    Drop,
    ErrorInfo,
    Gauges,
    Launch,
    Quit,
    Ready,
    Refused,
    Renewed,
    Rest,
    Standing,
    Stepped,
    ToServer,
    ToStage,
    decode_launch,
    decode_to_stage,
    encode,
)
from .payload import StageRequest

IDLE = 1.0
"""Longest sleep, in seconds, of a stage that has nothing to do."""

MOST_RESTS = 16
"""Most waits that are told apart between two steps."""


def as_tensors(value: Any) -> Any:
    """A payload as it came from the server, its arrays as tensors."""
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())  # decoded arrays can't be written
    if isinstance(value, Mapping):
        return {key: as_tensors(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_tensors(each) for each in value]
    return value


class StageProcess:
    """Steps the engine while it has work; else sleeps until the server or an upstream stage has something."""

    def __init__(self, launch: Launch) -> None:
        import zmq

        self._launch = launch
        self._target = launch.target
        self._onward: set[str] = set()
        self._taken: list[tuple[str, int, bool]] = []
        self._bytes = 0
        self._held: set[str] = set()
        self._rests: list[Rest] = []
        self._told = Gauges()
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.PAIR)
        self._control.setsockopt(zmq.LINGER, 1000)
        self._control.setsockopt(zmq.SNDHWM, 0)
        self._control.setsockopt(zmq.RCVHWM, 0)
        self._control.connect(launch.control)

    def run(self) -> int:
        """Load the engine and serve until told to quit; returns the exit status."""
        import zmq

        from stagevox.connectors.outbox import RoadLimits
        from stagevox.connectors.shm import ShmConnector

        launch = self._launch
        try:
            self._engine = load_attribute(launch.engine)(launch.spec, launch.overrides, record=launch.record)
            feeds = [] if self._target is None else [self._target]
            self._road = ShmConnector(launch.spec.name, launch.roadmap, feeds, RoadLimits(**launch.road))
        except BaseException as error:
            self._send(Died(ErrorInfo.of(error)))
            self._context.destroy(linger=1000)
            return 1
        self._send(Ready())
        try:
            while True:
                if not self._engine.has_work():
                    self._rest()
                while True:
                    try:
                        message = decode_to_stage(self._control.recv(zmq.NOBLOCK))
                    except zmq.Again:
                        break
                    if isinstance(message, Quit):
                        return 0
                    self._take(message)
                self._serve_road()
                if self._engine.has_work():
                    self._step()
        except BaseException as error:
            self._send(Died(ErrorInfo.of(error)))
            raise
        finally:
            self._road.close()
            self._context.destroy(linger=1000)

    def _rest(self) -> None:
        """Sleep until something comes, and note what was waited for."""
        gauges = self._gauges()
        if gauges != self._told:
            self._told = gauges
            self._send(Standing(gauges))
        reason = "consumer" if self._held else "input" if gauges.parked else "idle"
        began = time.monotonic()
        self._road.wait(IDLE, self._control)
        rests = self._rests
        last = rests[-1] if rests else None
        if last is not None and (last.reason == reason or len(rests) == MOST_RESTS):
            rests[-1] = Rest(last.reason, last.began, time.monotonic())
        else:
            rests.append(Rest(reason, began, time.monotonic()))

    def _gauges(self) -> Gauges:
        gauges = self._engine.gauges()
        gauges.payload_bytes = self._bytes
        return gauges

    def _send(self, message: ToServer) -> None:
        self._control.send(encode(message))

    def _take(self, message: ToStage) -> None:
        match message:
            case Add(request, onward):
                self._add(request, onward)
            case Drop(req_ids):
                self._engine.abort(req_ids)
                for req_id in req_ids:
                    self._onward.discard(req_id)
                    self._road.drop(req_id)
            case Renewed():
                assert self._target is not None
                self._road.renew(self._target)
            case Ask(what):
                self._answer(what)

    def _add(self, request: StageRequest, onward: bool) -> None:
        self._road.open(request.req_id)
        if onward:
            self._onward.add(request.req_id)
        try:
            self._engine.add(replace(request, payload=as_tensors(request.payload)))
        except Exception as error:
            self._send(Refused(request.req_id, ErrorInfo.of(error)))

    def _answer(self, what: str) -> None:
        rows = self._engine.trace() if what == "trace" else []
        if what == "clear_trace":
            self._engine.clear_trace()
        held = {"requests": self._engine.num_requests, "road": self._road.num_open, "segments": self._road.num_segments}
        self._send(Answer(what, rows, {**held, "onward": len(self._onward), **self._engine.state_size()}))

    def _serve_road(self) -> None:
        """Hand over what came, and hold back the requests whose chunks the next stage doesn't take."""
        for chunk in self._road.get(self._launch.spec.name):
            self._engine.deliver(chunk)
            self._taken.append((chunk.req_id, chunk.seq, chunk.end))
        for req_id, error in self._road.failures():
            self._send(Refused(req_id, ErrorInfo.of(error)))
        if self._target is not None:
            full = self._road.is_full
            self._held = {req_id for req_id in self._onward if full(req_id)} if self._road.in_flight() else set()
            self._engine.hold(self._held)

    def _step(self) -> None:
        began = time.monotonic()
        outputs, chunks = self._engine.step()
        seconds = time.monotonic() - began
        told = []
        for chunk in chunks:
            if chunk.req_id not in self._onward:
                continue
            assert self._target is not None
            try:
                self._road.put(self._target, chunk)
            except Exception as error:
                self._send(Refused(chunk.req_id, ErrorInfo.of(error)))
                continue
            self._bytes += sum(getattr(value, "nbytes", 0) for value in chunk.data.values())
            told.append((chunk.req_id, chunk.seq, chunk.end))
        self._told = self._gauges()
        taken, self._taken = self._taken, []
        rests, self._rests = self._rests, []
        self._send(Stepped(outputs, told, taken, seconds, self._told, began, rests))


def end_with(stdin: BinaryIO, launch: Launch) -> None:
    """When standard input ends, so does the process: its server is gone, and nobody else will clear up after the run."""

    def watch() -> None:
        while stdin.read(4096):
            pass
        launch.roadmap.sweep()
        shutil.rmtree(launch.roadmap.folder, ignore_errors=True)
        os._exit(3)

    threading.Thread(target=watch, daemon=True, name="server watch").start()


def main() -> int:
    """Serve the stage that standard input describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the server decides
    stdin = sys.stdin.buffer.raw if hasattr(sys.stdin.buffer, "raw") else sys.stdin.buffer
    line = b""
    while not line.endswith(b"\n"):
        more = stdin.read(1)
        if not more:
            return 3
        line += more
    launch = decode_launch(line)
    end_with(stdin, launch)
    prepare_inline_process(launch.spec.kernels)
    hush_libraries()
    # What libraries print goes where logs go; nobody reads standard output.
    with contextlib.redirect_stdout(sys.stderr):
        return StageProcess(launch).run()


if __name__ == "__main__":
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # Not sys.exit: with the process goes all that the engine holds, and vLLM's own way there takes seconds of collecting garbage.
    os._exit(status)
