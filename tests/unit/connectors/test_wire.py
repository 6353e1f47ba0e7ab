"""What goes in comes out, type by type; what can't is refused by name."""

from __future__ import annotations

import collections
import enum

import msgspec
import numpy as np
import pytest
import torch

from stagevox.connectors.wire import DTYPES, Payload, TensorSpec, blank, decode_ack, decode_put, unpack
from stagevox.errors import PayloadError
from support.road import same


def travel(data):
    """Over the wire: only bytes cross."""
    payload = Payload(data)
    made = [blank(spec) for spec in msgspec.msgpack.decode(msgspec.msgpack.encode(payload.specs), type=list[TensorSpec])]
    for (_, there), here in zip(made, payload.views, strict=True):
        there[:] = bytes(here)
    return unpack(payload.data, [tensor for tensor, _ in made])


@pytest.mark.covers("SV-3")
@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)])
def test_every_type_and_shape(name, shape):
    torch.manual_seed(len(name))
    bits = torch.randint(0, 256, (*shape, DTYPES[name].itemsize), dtype=torch.uint8)
    tensor = bits.view(DTYPES[name]).reshape(shape) if name != "bool" else bits.reshape(shape) > 127
    (back,) = travel({"x": tensor}).values()
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert bytes(Payload({"x": back}).views[0]) == bytes(Payload({"x": tensor}).views[0])  # NaN bits too


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(4, 6).T,
        torch.arange(24)[::5],
        torch.arange(6).reshape(2, 3)[:, 1:],
        torch.arange(3).expand(4, 3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.arange(12).reshape(3, 4)[1:2, 1],
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["transposed", "strided", "sliced", "expanded", "grad", "parameter", "one of a column", "conjugate", "negative"],
)
def test_tensors_that_are_not_what_their_memory_is(tensor):
    (back,) = travel({"x": tensor}).values()
    assert back.is_contiguous() and not back.requires_grad
    assert same(back, tensor.detach().resolve_conj().resolve_neg())


def test_a_plain_tensor_is_not_copied_before_it_is_sent():
    tensor = torch.zeros(4)
    payload = Payload({"x": tensor})
    tensor[2] = 1
    assert bytes(payload.views[0]) == tensor.numpy().tobytes()


@pytest.mark.covers("SV-3")
def test_plain_values_keep_their_types():
    data = {
        "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1],
        "floats": [0.0, -0.0, 1e300, float("inf"), 0.1],
        "mixed": [True, 1, 1.0, None, "é\n", b"\x00", [], {}, ()],
        "tuple": (1, (2, [3.0]), {"x": (torch.ones(2), None)}),
        "": {"deep": {"deeper": [torch.zeros(2, dtype=torch.bool), [torch.arange(3)]]}},
    }
    assert same(travel(data), data)
    assert same(travel({"x": [float("nan")]})["x"], [float("nan")])


def test_a_mapping_comes_as_a_dict():
    assert travel(collections.OrderedDict(a=collections.ChainMap({"b": 1}))) == {"a": {"b": 1}}


def test_the_comparison_of_these_tests_sees_a_difference():
    assert not same((1,), [1]) and not same(1, 1.0) and not same(True, 1) and not same({"a": 1}, {"b": 1})
    assert not same(torch.ones(1), torch.ones(1, 1)) and not same(torch.ones(1), torch.ones(1).double())
    assert not same([1], [1, 2]) and not same(-0.0, 0.0) and not same(torch.ones(2), torch.zeros(2))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.covers("SV-5")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros(2), "data.x: a numpy.ndarray"),
        (np.float64(1), "data.x: a numpy.float64"),
        ({1, 2}, "data.x: a builtins.set"),
        ([1, [object()]], r"data.x\[1\]\[0\]: a builtins.object"),
        ([Colour.RED], r"data.x\[0\]: a .*Colour"),
        ({"y": {1: 2}}, "data.x.y: its keys must be str, not int"),
        (lambda: 0, "data.x: a builtins.function"),
        (msgspec.msgpack.Ext(1, b"\x00"), "data.x: a msgspec.*Ext"),
        (torch.eye(2).to_sparse(), "data.x: a tensor of torch.float32, torch.sparse_coo"),
        (torch.empty(2, device="meta"), "data.x: a tensor of .* on meta"),
        (2**64, "can't be written down"),
        ("\ud800", "can't be written down"),
    ],
    ids=lambda value: None if isinstance(value, str) and value.startswith("data") else type(value).__name__,
)
def test_what_cannot_be_carried_is_refused_by_name(value, said):
    with pytest.raises(PayloadError, match=said):
        Payload({"x": value})


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(PayloadError):
        Payload({"x": loop})


@pytest.mark.parametrize("spec", [TensorSpec("float32", (-1, 2)), TensorSpec("object", (1,)), TensorSpec("float32", (2, -1, -1))])
def test_impossible_tensors_have_no_size(spec):
    with pytest.raises(ValueError, match="no tensor is"):
        spec.nbytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, msgspec.msgpack.encode(1))}),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, msgspec.msgpack.encode(-1))}),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(2, msgspec.msgpack.encode(1))}),
        msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(7, msgspec.msgpack.encode(0))}),
    ],
)
def test_malformed_data_is_a_value_error(data):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        unpack(data, [torch.zeros(1)])


@pytest.mark.parametrize("decode", [decode_put, decode_ack])
@pytest.mark.parametrize("frame", [b"", b"\x80", b"\x93\xa3put", b"\xff" * 100])
def test_malformed_messages_are_msgspec_errors(decode, frame):
    with pytest.raises(msgspec.MsgspecError):
        decode(frame)
