"""What the end-to-end tests share: it takes seconds to load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mini_reference import TinyOmni

from stagevox import Omni
from support.transcribe import Transcriber


@pytest.fixture(scope="session")
def oracle() -> TinyOmni:
    torch.set_num_threads(1)
    return TinyOmni()


@pytest.fixture(scope="session")
def omni() -> Iterator[Omni]:
    """The packaged model as it comes."""
    with Omni("mini") as one:
        yield one


@pytest.fixture(scope="session")
def transcribe() -> Transcriber:
    return Transcriber()
