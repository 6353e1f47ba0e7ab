"""Tiny checkpoints of the families, made once a session."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from support.families import Golden


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(family)``: the folder of its tiny checkpoint. Nobody writes there."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            write = import_module(f"stagevox.bench.checkpoints.{family}").write
            made[family] = write(tmp_path_factory.mktemp("checkpoints") / family)
        return made[family]

    return make


@pytest.fixture(scope="session")
def golden(checkpoint: Callable[[str], Path]) -> Callable[[str], Golden]:
    """``golden(family)``: what its reference made of the same checkpoint."""
    read: dict[str, Golden] = {}

    def get(family: str) -> Golden:
        if family not in read:
            read[family] = Golden.read(family, checkpoint(family))
        return read[family]

    return get
