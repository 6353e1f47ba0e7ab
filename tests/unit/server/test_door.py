"""What a connection may cost before it has said what it wants."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest

from stagevox.server import door


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def rest(wire):
    """All that comes until the server hangs up; a reset ends it too."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := wire.recv(65536):
            data += piece
    return data


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


HEADS = {
    "one endless header": (b"GET /health HTTP/1.1\r\nX: ", b"a" * 8192),
    "headers without end": (b"GET /health HTTP/1.1\r\n", b"X: a\r\n" * 1000),
    "a path without end": (b"GET /", b"a" * 8192),
}


def sent_until_cut_off(wire, more):
    """Bytes that a server took of something endless; it is given up at 50 heads."""
    sent = 0
    with suppress(ConnectionError):
        while sent < 50 * door.MAX_HEAD:
            wire.sendall(more)
            sent += len(more)
            time.sleep(0.0005)
    return sent


@pytest.mark.parametrize("case", HEADS)
def test_a_head_that_does_not_end_takes_no_memory(listen, case):
    first, more = HEADS[case]
    with listen() as server, connect(server) as wire:
        wire.sendall(first)
        assert sent_until_cut_off(wire, more) < 40 * door.MAX_HEAD, "the server listened on"


def test_a_head_that_is_too_large_is_431(listen):
    with listen() as server, connect(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * door.MAX_HEAD)
        status, error = error_of(rest(wire))
        assert status == 431 and error["type"] == "invalid_request_error"


def test_a_large_head_that_ends_is_read(listen):
    with listen() as server, connect(server) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"a" * (door.MAX_HEAD - 1000))
        time.sleep(0.05)
        wire.sendall(b"\r\n\r\n")
        assert rest(wire).startswith(b"HTTP/1.1 200")


SAID = [b"", b"\r\n", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"]


@pytest.mark.parametrize(("kept", "said"), [*((False, said) for said in SAID), *((True, said) for said in SAID[1:])])
def test_who_does_not_say_what_it_wants_must_leave(listen, monkeypatch, kept, said):
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.3)
    with listen() as server, connect(server) as wire:
        if kept:
            wire.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += wire.recv(65536)
        wire.sendall(said)
        began = time.monotonic()
        if len(said) > 2:  # a byte now and then is no progress
            time.sleep(0.15)
            wire.sendall(b"T")
        answer = rest(wire)
        assert 0.1 < time.monotonic() - began < 3
        assert error_of(answer)[0] == 408 if len(said) > 2 else answer == b""


def test_a_body_that_goes_on_after_its_answer_keeps_no_connection(listen, monkeypatch):
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.3)
    with listen(max_body_bytes=100) as server, connect(server) as wire:
        wire.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert wire.recv(65536).startswith(b"HTTP/1.1 413")
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 5:
                wire.sendall(b" ")
                time.sleep(0.05)


def test_a_slow_answer_and_a_slow_body_are_not_cut_off(listen, monkeypatch):
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.1)
    body = json.dumps({"input": "many words to say ", "response_format": "wav"}).encode()
    with listen(pause=0.02) as server, connect(server) as wire:
        head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        wire.sendall(head.encode() + b"Connection: close\r\n\r\n" + body[:20])
        time.sleep(0.5)
        wire.sendall(body[20:])
        began = time.monotonic()
        answer = rest(wire)
        assert answer.startswith(b"HTTP/1.1 200") and b"RIFF" in answer
        assert time.monotonic() - began > 0.2, "the answer was not slow"


NO_HTTP = {
    "noise": b"\x00\x01\xff\r\n\r\n",
    "two lengths": b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "a length and chunks": b"POST /v1/audio/speech HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk that is none": b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a method that is none": b"BREW /v1/audio/speech HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("case", NO_HTTP)
def test_what_is_no_http_is_400_in_the_shape_of_all_errors(listen, case):
    with listen() as server, connect(server) as wire:
        wire.sendall(NO_HTTP[case])
        status, error = error_of(rest(wire))
        assert status == 400 and set(error) == {"message", "type", "param", "code"}
        assert not server.client.submitted


CHUNKED = b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
TAILS = {"trailers without end": (b"", b"X: a\r\n" * 1000), "one endless trailer": (b"X: ", b"a" * 8192)}


def in_chunks(*chunks):
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n"


@pytest.mark.parametrize("case", TAILS)
def test_trailers_that_do_not_end_take_no_memory(listen, monkeypatch, case):
    kept = []
    on_headers_complete = door.Door.on_headers_complete

    def note(self):
        on_headers_complete(self)
        kept.append(self.headers)

    monkeypatch.setattr(door.Door, "on_headers_complete", note)
    first, more = TAILS[case]
    with listen() as server, connect(server) as wire:
        wire.sendall(CHUNKED + b"\r\n" + in_chunks(b'{"input": "hello"}') + first)
        assert sent_until_cut_off(wire, more) < 40 * door.MAX_HEAD, "the server listened on"
        assert len(kept) == 1 and len(kept[0]) == 3, "trailers became headers"


def test_trailers_that_are_too_large_are_431(listen):
    with listen() as server, connect(server) as wire:
        wire.sendall(CHUNKED + b"\r\n" + in_chunks(b'{"input": "hello"}'))
        time.sleep(0.05)
        wire.sendall(b"X: " + b"a" * (door.MAX_HEAD - 2))
        status, error = error_of(rest(wire))
        assert status == 431 and error["type"] == "invalid_request_error"


def test_trailers_and_large_chunks_are_read(listen):
    body = b'{"input": "hello", "response_format": "wav"' + b" " * (3 * door.MAX_HEAD) + b"}"
    with listen() as server, connect(server) as wire:
        wire.sendall(CHUNKED + b"Connection: close\r\n\r\n" + in_chunks(body[:9], body[9:]) + b"X: a\r\n")
        time.sleep(0.05)
        wire.sendall(b"Y: b\r\n\r\n")
        assert rest(wire).startswith(b"HTTP/1.1 200")
