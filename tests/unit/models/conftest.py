"""Tiny checkpoints for tests that start no engine."""

import pytest


@pytest.fixture(scope="session")
def tiny_qwen2_5_omni(tmp_path_factory):
    from stagevox.bench.checkpoints.qwen2_5_omni import write

    return write(tmp_path_factory.mktemp("tiny") / "qwen2_5_omni")
