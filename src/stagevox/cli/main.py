"""``stagevox``: parses the command line and turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted (Ctrl-C or SIGTERM), 141 nobody reads the output.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from stagevox.errors import BadRequestError, ConfigError, StagevoxError

from . import bench, config, say, serve

COMMANDS = (say, serve, bench, config)
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it in one line, as all bad input is answered."""
        self.exit(2, f"stagevox: error: {_one_line(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Without ``argv`` it is this process's own command line, and the process ends here: engines take seconds to shut down in
    order, and the end of the process frees the same. With it, the caller's signal handlers stay.
    """
    if argv is None:
        _catch_signals()
        _open_closed_streams()
    args = _parser().parse_args(argv)
    code = _run(args)
    if argv is None:
        os._exit(code)
    return code


def _run(args: argparse.Namespace) -> int:
    """Run the command; errors become a line and a code."""
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except (BadRequestError, ConfigError) as error:
        _complain(error)
        return 2
    except StagevoxError as error:
        _complain(error)
        return 1
    except BrokenPipeError:
        # Nobody reads on; what Python would flush at its end has nowhere to go.
        _stdout_to_nowhere()
        return BROKEN_PIPE
    except (TimeoutError, socket.gaierror) as error:  # they are OSErrors, but nothing was written
        _complain(OSError(error.strerror or str(error) or "timed out"))
        return 1
    except OSError as error:  # such as a disk that has become full
        _complain(OSError(f"can't write: {error.strerror or error}"))
        _stdout_to_nowhere()
        return 1


def _stdout_to_nowhere() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Started with a standard stream closed, as daemons are: keep its number from the next file that is opened."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None and number:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stagevox", description="Serve models that think in text, then speak.", allow_abbrev=False)
    parser.add_argument("-v", "--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return f"stagevox {version('stagevox')}"
    except PackageNotFoundError:
        return "stagevox (not installed)"


def _complain(error: Exception) -> None:
    with suppress(OSError):  # where errors go may be full itself
        print(f"stagevox: error: {_one_line(str(error))}", file=sys.stderr, flush=True)


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _catch_signals() -> None:
    """End at once on Ctrl-C or SIGTERM, instead of unwinding through engines that take seconds to shut down."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _stop)
        signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: Any) -> None:
    if sys.stderr.isatty():
        os.write(2, b"\n")  # the progress bar's line is not finished
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
