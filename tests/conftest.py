"""Set before torch and vLLM are imported, as the command line does."""

import signal

import pytest

from stagevox.config.env import prepare_inline_process

prepare_inline_process()


@pytest.fixture(autouse=True)
def no_signal_handler_left():
    """A handler that a test leaves behind would take a later one's Ctrl-C."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
