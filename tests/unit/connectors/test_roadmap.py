"""Addresses that an operator gives, before any stage listens there."""

from __future__ import annotations

import re
import socket

import pytest

from stagevox.connectors.roadmap import with_port
from stagevox.errors import ConfigError


def test_an_open_port_is_one_that_is_free():
    address = with_port("tcp://127.0.0.1:*")
    found = re.fullmatch(r"tcp://127\.0\.0\.1:(\d+)", address)
    with socket.create_server(("127.0.0.1", int(found[1]))):
        assert with_port(address) == address


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1", "no.such.host", "[:::]"])
def test_a_host_that_can_t_be_listened_at_is_named(host, monkeypatch):
    """A name that nobody knows (looked up without a network), one that is none, and the address of another host."""
    bind = socket.socket.bind

    def look_up(self, address):
        if address[0] == "no.such.host":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", look_up)
    with pytest.raises(ConfigError, match=re.escape(f"no stage can listen at tcp://{host}:*: ")) as caught:
        with_port(f"tcp://{host}:*")
    assert caught.value.field == "connectors.addresses"
