"""What the command line makes of an error that no command has caught."""

from __future__ import annotations

import argparse
import errno
import socket

import pytest

from stagevox.cli.main import _run


@pytest.mark.parametrize(
    "error, line",
    [
        (TimeoutError(), "timed out"),
        (TimeoutError("no answer in 30 s"), "no answer in 30 s"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (OSError(errno.EIO, "Input/output error"), "can't write: Input/output error"),
    ],
)
def test_only_what_could_not_be_written_is_called_so(error, line, capfd, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr("stagevox.cli.main._stdout_to_nowhere", lambda: None)  # it is for good
    assert _run(argparse.Namespace(run=fail)) == 1
    assert capfd.readouterr() == ("", f"stagevox: error: {line}\n")
