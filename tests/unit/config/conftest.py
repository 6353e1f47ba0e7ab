"""A model with options to set, and deploy files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from stagevox.config import options
from stagevox.config.topology import StageSpec, Topology
from stagevox.contract import StageExecutionType


class Frames:
    """A chunk processor."""

    def __init__(
        self,
        checkpoint: Path | None = None,
        sizes: Sequence[int] = (4, 8),
        context: int = 2,
        *,
        concat: Callable[[list], list] = list,
    ):
        if min(sizes) < 1:
            raise ValueError("sizes must be positive")
        self.sizes, self.context = tuple(sizes), context


class Input:
    """An input adapter."""

    def __init__(self, checkpoint: Path, left_context: int = 25, smooth: bool = False):
        pass


@pytest.fixture
def model(fake_model, monkeypatch):
    """The fake model, whose stages have defaults and options; ``fake_model`` with its ``topology``."""
    module = ModuleType("stagevox_fake_options")
    module.Frames, module.Input = Frames, Input
    monkeypatch.setitem(sys.modules, module.__name__, module)
    options._options.cache_clear()
    front_end = "stagevox_fake_model:FrontEnd"
    where = Path("/nowhere")
    stages = (
        StageSpec("thinker", StageExecutionType.AR, where, {"max_num_seqs": 8}, sampling={"max_tokens": 80}),
        StageSpec(
            "talker",
            StageExecutionType.AR,
            where,
            {"max_num_seqs": 8, "dtype": "float32"},
            sampling={"temperature": 0.0, "top_k": 20},
            chunk_processor="stagevox_fake_options:Frames",
            chunk_options={"context": 3},
        ),
        StageSpec("code2wav", StageExecutionType.GENERATION, where, input_adapter="stagevox_fake_options:Input"),
    )
    topology = Topology("fake", stages, front_end, where)
    monkeypatch.setattr("stagevox.models.registry.resolve_topology", lambda name: replace(topology))
    fake_model.topology = topology
    return fake_model


@pytest.fixture
def deploy(tmp_path):
    """Writes a deploy file, ``deploy.yaml``, and returns its path."""

    def write(text):
        path = tmp_path / "deploy.yaml"
        path.write_text(text)
        return path

    return write
