"""torchvision beside CPU torch: it imports, its transforms work, its missing operators say so."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stagevox.stage import torchvision_schemas

SRC = Path(__file__).resolve().parents[2] / "src"

needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")


def run(code: str, *path: Path) -> list[str]:
    """The lines that a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, SRC])), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_torchvision
def test_transforms_work_and_missing_operators_say_so():
    code = """
import torch
from stagevox.stage.torchvision_schemas import declare_missing_schemas
declare_missing_schemas()
assert not declare_missing_schemas()

import torchvision
from torchvision.transforms.v2 import functional as F
image = torch.full((3, 40, 60), 0.75)
image = F.normalize(F.resize(image, [28, 28], antialias=True), [0.5] * 3, [0.25] * 3)
print(tuple(image.shape), round(image.min().item(), 3), round(image.max().item(), 3))

try:
    torchvision.ops.nms(torch.rand(2, 4), torch.rand(2), 0.5)
except RuntimeError as error:
    print(str(error)[:30])
try:
    torch.ops.torchvision.nms(torch.rand(2, 4), torch.rand(2), 0.5)
except NotImplementedError as error:
    print(str(error)[:33])
"""
    shape, operator, raw_operator = run(code)
    assert shape == "(3, 28, 28) 1.0 1.0"
    assert operator == "Couldn't load custom C++ ops. "
    assert raw_operator == "Could not run 'torchvision::nms' "


@needs_torchvision
def test_vllm_vision_models_import_and_preprocess_images():
    code = """
from stagevox.stage.torchvision_schemas import declare_missing_schemas
declare_missing_schemas()
from vllm.model_executor.models import qwen2_5_omni_thinker, qwen2_vl

import numpy as np
from PIL import Image
from transformers import Qwen2VLImageProcessor
image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8))
out = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=112 * 112)(images=[image], return_tensors="pt")
pixels = out["pixel_values"]
print(tuple(pixels.shape), out["image_grid_thw"].tolist(), bool(pixels.isfinite().all()), bool(pixels.std() > 0.1))
"""
    assert run(code)[-1] == "(24, 1176) [[1, 4, 6]] True True"


@needs_torchvision
@pytest.mark.skipif(
    not any(point.name == "stagevox_torchvision" for point in entry_points(group="torch.backends")),
    reason="stagevox is on the path, not installed",
)
def test_an_interpreter_that_never_names_stagevox_can_import_torchvision():
    """As an engine process does: it is spawned, and imports vLLM first."""
    assert run("import torchvision; print(torchvision.__version__)")  # torch comes in while torchvision is half imported
    assert run("import torch, torchvision; print(torchvision.__version__)")


def test_declaring_costs_no_import_of_torchvision():
    code = """
import sys, torch
from stagevox.stage.torchvision_schemas import declare_missing_schemas
declare_missing_schemas()
print("torchvision" in sys.modules)
"""
    assert run(code) == ["False"]


def test_a_torchvision_whose_operators_load_is_left_alone(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "empty.c").write_text("int stagevox_test;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", package / "_C.so", tmp_path / "empty.c"], check=True)
    code = """
import torch
from stagevox.stage.torchvision_schemas import declare_missing_schemas
print(declare_missing_schemas(), hasattr(torch.ops.torchvision, "nms"))
"""
    assert run(code, tmp_path) == ["False False"]


def test_nothing_is_declared_without_torchvision_or_under_cuda(monkeypatch):
    monkeypatch.setattr(torchvision_schemas, "find_spec", lambda name: None)
    assert not torchvision_schemas.declare_missing_schemas()

    monkeypatch.setattr(torchvision_schemas, "_compiled_operators_load", lambda: pytest.fail("tried to load"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not torchvision_schemas.declare_missing_schemas()
