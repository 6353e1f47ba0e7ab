"""What a server and the process of a stage say to each other: msgpack over one socket, no pickle, no torch.

Arrays travel as type, shape and bytes. On the server's side they are numpy's, on the stage's side what is a tensor in a payload is
torch's (:func:`stagevox.stage.process.as_tensors`). bfloat16, which numpy lacks, becomes float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import stagevox.errors
from stagevox.config.topology import StageSpec
from stagevox.connectors.roadmap import RoadMap
from stagevox.errors import RequestFailedError, StagevoxError

from .payload import StageOutput, StageRequest, StepRow

_ARRAY, _TUPLE = 1, 2  # msgpack extension codes


class Launch(msgspec.Struct, frozen=True):
    """All that a stage's process needs to know; the first line of its standard input, as JSON."""

    spec: StageSpec
    overrides: dict[str, Any]
    roadmap: RoadMap
    control: str
    """Where the server listens for this stage."""
    target: str | None
    """The stage that this one feeds."""
    record: bool
    road: dict[str, Any]
    """Fields of :class:`stagevox.connectors.outbox.RoadLimits`."""
    engine: str = "stagevox.stage.engine:StageEngine"
    """``module:Class`` of the engine, made with spec, overrides and ``record``."""


class Add(msgspec.Struct, tag="add", array_like=True):
    """Register a request; its chunks go to the next stage if ``onward``."""

    request: StageRequest
    onward: bool


class Drop(msgspec.Struct, tag="drop", array_like=True):
    """Forget requests, wherever they stand."""

    req_ids: list[str]


class Renewed(msgspec.Struct, tag="renewed", array_like=True):
    """Another process runs the next stage now; the requests that come after this are its first."""


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Answer with an :class:`Answer`: ``trace``, ``clear_trace`` or ``held``."""

    what: str


class Quit(msgspec.Struct, tag="quit", array_like=True):
    """End."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded and listening."""


class ErrorInfo(msgspec.Struct, tag="error", array_like=True):
    """An error on its way between processes."""

    kind: str
    message: str
    field: str | None = None
    allowed: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """What there is to tell about it."""
        field = getattr(error, "field", None)
        kind, allowed = type(error).__name__, getattr(error, "allowed", ())
        message = str(error) if isinstance(error, StagevoxError) else f"{kind}: {error}"
        return cls(kind, message, field if isinstance(field, str) else None, tuple(map(str, allowed)))

    def to_error(self) -> StagevoxError:
        """The same error here; what is none of ours is a :class:`RequestFailedError`."""
        kind = getattr(stagevox.errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, StagevoxError)):
            return RequestFailedError(self.message)
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        if self.field is not None:
            error.field, error.allowed = self.field, self.allowed  # type: ignore[attr-defined]
        return error


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """A request could not be taken, or failed outside the engine."""

    req_id: str
    error: ErrorInfo


class Stepped(msgspec.Struct, tag="stepped", array_like=True):
    """What a step made. ``chunks`` went straight to the next stage, ``taken`` came from the one before: ``(req_id, seq, end)``.

    Stages' messages reach the server in any order. With ``taken`` it never learns that a request has ended here before it knows
    that its input had.
    """

    outputs: list[StageOutput]
    chunks: list[tuple[str, int, bool]]
    taken: list[tuple[str, int, bool]]
    seconds: float
    gauges: Gauges
    began: float = 0.0
    """When the step began, in seconds of ``time.monotonic``: processes of one host share that clock."""
    rests: list[Rest] = []
    """What the stage waited for since its last step."""


class Standing(msgspec.Struct, tag="standing", array_like=True):
    """How a stage stands that has nothing to step, if that isn't as it was told last: requests were added or dropped."""

    gauges: Gauges


class Rest(msgspec.Struct, frozen=True, array_like=True):
    """A time in which a stage slept; ``began`` and ``ended`` are seconds of ``time.monotonic``."""

    reason: str
    """``input``: of its requests some wait for upstream; ``consumer``: some are held, for the next stage is behind; else ``idle``."""
    began: float
    ended: float


class Gauges(msgspec.Struct, array_like=True):
    """How a stage stands."""

    running: int = 0
    waiting: int = 0
    parked: int = 0
    """Of all requests, those that wait for input or a chunk."""
    kv_usage: float = 0.0
    preemptions: int = 0
    """Since the stage was loaded."""
    payload_bytes: int = 0
    """Chunks put on the road since the stage was loaded."""
    replays: int = 0
    """Preempted requests that ran again, computing anew what they had lost, since the stage was loaded."""
    windows: int = 0
    """Rounds that merged several decode steps, since the stage was loaded."""
    window_steps: int = 0
    """Their steps."""
    tokens_saved: int = 0
    """Tokens that took no round of their own."""
    refusals: dict[str, int] = msgspec.field(default_factory=dict)
    """Rounds that could have merged steps and did not, by the reason."""


class Died(msgspec.Struct, tag="died", array_like=True):
    """The engine can't start, or broke; the process ends."""

    error: ErrorInfo


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """To an :class:`Ask`."""

    what: str
    rows: list[StepRow]
    held: dict[str, int]


ToStage = Add | Drop | Renewed | Ask | Quit
ToServer = Ready | Refused | Stepped | Standing | Died | Answer


def _encode_other(value: Any) -> Any:
    """What msgpack lacks: arrays and tensors; paths become text."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects can't leave its process")
        whole = np.ascontiguousarray(value)
        return msgspec.msgpack.Ext(_ARRAY, _encoder.encode((whole.dtype.str, value.shape, whole.tobytes())))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} can't leave its process")


def _decode_ext(code: int, content: memoryview) -> Any:
    if code == _ARRAY:
        dtype, shape, data = msgspec.msgpack.decode(content, type=tuple[str, tuple[int, ...], bytes])
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError("an array of objects")
        return np.frombuffer(data, kind).reshape(shape)
    raise ValueError(f"unknown extension {code}")


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_to_stage = msgspec.msgpack.Decoder(ToStage, ext_hook=_decode_ext, dec_hook=_decode_other)
_to_server = msgspec.msgpack.Decoder(ToServer, ext_hook=_decode_ext, dec_hook=_decode_other)


def encode(message: ToStage | ToServer) -> bytes:
    """A message as bytes; raises TypeError for a value that can't leave its process."""
    return _encoder.encode(message)


def decode_to_stage(data: bytes) -> ToStage:
    """What the server says; raises :class:`msgspec.MsgspecError` for anything else."""
    return _to_stage.decode(data)


def decode_to_server(data: bytes) -> ToServer:
    """What a stage says; raises :class:`msgspec.MsgspecError` for anything else."""
    return _to_server.decode(data)


def encode_launch(launch: Launch) -> bytes:
    """A launch as one line of JSON."""
    return msgspec.json.encode(launch, enc_hook=_encode_other)


def decode_launch(line: bytes) -> Launch:
    """The launch in a line; raises :class:`msgspec.MsgspecError` for anything else."""
    return msgspec.json.decode(line, type=Launch, dec_hook=_decode_other)
