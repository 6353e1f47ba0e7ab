"""How a chunk is written down: msgpack for what it says, raw bytes for its tensors. No pickle anywhere.

A value comes out as it went in: int (64 bits), float, bool, str, bytes, None, list, tuple, mapping with str keys (as a dict), and
tensor of any shape and of the types in :data:`DTYPES`. Everything else is refused, subclasses too, rather than changed on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from stagevox.errors import PayloadError

_PLAIN = {int, float, bool, str, bytes, type(None)}
_TENSOR, _TUPLE = 1, 2  # msgpack extension codes

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.complex64, torch.complex128),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of a tensor; its bytes travel apart, in row-major order."""

    dtype: str
    shape: tuple[int, ...]

    def nbytes(self) -> int:
        """How many bytes it has; raises ValueError if there is no such tensor."""
        if self.dtype not in DTYPES or any(size < 0 for size in self.shape):
            raise ValueError(f"no tensor is a {self.dtype} of shape {list(self.shape)}")
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A chunk on its way. Tensors whose indices are in ``shared`` lie in ``segment``, one after the other; each other one is a frame.

    ``lane`` numbers a request's road between two stages: a later use of the same request id has a higher one.
    """

    key: bytes
    stage: str
    lane: int
    req_id: str
    seq: int
    end: bool
    data: msgspec.Raw
    tensors: list[TensorSpec]
    shared: list[int]
    segment: str | None


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """The chunks, as (lane, seq), that the consumer has copied or doesn't want: their memory is the producer's again."""

    key: bytes
    taken: list[tuple[int, int]]


_encoder = msgspec.msgpack.Encoder()
_put_decoder = msgspec.msgpack.Decoder(Put)
_ack_decoder = msgspec.msgpack.Decoder(Ack)


def encode(message: Put | Ack) -> bytes:
    """A message as its first frame."""
    return _encoder.encode(message)


def decode_put(frame: bytes | memoryview) -> Put:
    """The chunk in a first frame; raises :class:`msgspec.MsgspecError` if it is none."""
    return _put_decoder.decode(frame)


def decode_ack(frame: bytes | memoryview) -> Ack:
    """The acknowledgement in a frame; raises :class:`msgspec.MsgspecError` if it is none."""
    return _ack_decoder.decode(frame)


class Payload:
    """A chunk's data, taken apart; ``views`` are the tensors' bytes, not copied if they are contiguous on the CPU."""

    __slots__ = ("data", "nbytes", "specs", "views")

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Raises :class:`stagevox.errors.PayloadError`, which names the value, if there is one that can't be carried."""
        self.specs: list[TensorSpec] = []
        self.views: list[memoryview] = []
        try:
            self.data = _encoder.encode(self._pack(data, "data"))
        except (OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise PayloadError(f"a chunk can't be written down: {error}") from error
        self.nbytes = len(self.data) + sum(map(len, self.views))

    def _pack(self, value: Any, path: str) -> Any:
        """The value with extension objects for what msgpack doesn't know."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return value if _PLAIN.issuperset(map(type, value)) else self._pack_all(value, path)
        if isinstance(value, torch.Tensor):
            self.specs.append(_spec(value, path))
            self.views.append(_bytes_of(value))
            return msgspec.msgpack.Ext(_TENSOR, _encoder.encode(len(self.specs) - 1))
        if kind is tuple:
            return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(self._pack_all(value, path)))
        if isinstance(value, Mapping):
            for key in value:
                if type(key) is not str:
                    raise PayloadError(f"a chunk can't carry {path}: its keys must be str, not {type(key).__name__}")
            return {key: self._pack(each, f"{path}.{key}") for key, each in value.items()}
        raise PayloadError(f"a chunk can't carry {path}: a {kind.__module__}.{kind.__qualname__}")

    def _pack_all(self, values: Sequence[Any], path: str) -> list[Any]:
        return [self._pack(each, f"{path}[{index}]") for index, each in enumerate(values)]


def blank(spec: TensorSpec) -> tuple[torch.Tensor, memoryview]:
    """A new tensor and its bytes, to be filled."""
    tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    return tensor, _bytes_of(tensor)


def unpack(data: bytes | memoryview | msgspec.Raw, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Put the data of a chunk together again; raises ValueError or :class:`msgspec.MsgspecError` if it is malformed."""

    def extension(code: int, content: memoryview) -> Any:
        inner = msgspec.msgpack.decode(content, ext_hook=extension)
        if code == _TENSOR and type(inner) is int and 0 <= inner < len(tensors):
            return tensors[inner]
        if code == _TUPLE and type(inner) is list:
            return tuple(inner)
        raise ValueError(f"no tensor or tuple: extension {code}")

    return msgspec.msgpack.decode(data, type=dict[str, Any], ext_hook=extension)


def _spec(tensor: torch.Tensor, path: str) -> TensorSpec:
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise PayloadError(f"a chunk can't carry {path}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
    return TensorSpec(name, tuple(tensor.shape))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, which they keep alive; a copy only if it is not contiguous or not on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a single element may be contiguous with any stride, which view refuses.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
