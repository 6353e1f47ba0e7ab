"""The public names, and how little importing them costs."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import stagevox
import stagevox.contract

SRC = Path(__file__).resolve().parents[2] / "src"


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order ruff keeps."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def problems(module: ModuleType) -> list[str]:
    """What is wrong with a module's ``__all__``."""
    names = list(getattr(module, "__all__", ()))
    found = [] if names == sorted(set(names), key=order) else [f"{module.__name__}.__all__ is not sorted, or has doubles"]
    for name in names:
        if not hasattr(module, name):
            found.append(f"{module.__name__}.{name} doesn't exist")
        elif (inspect.isclass(value := getattr(module, name)) or inspect.isroutine(value)) and not inspect.getdoc(value):
            found.append(f"{module.__name__}.{name} has no docstring")
    if not module.__doc__:
        found.append(f"{module.__name__} has no docstring")
    return found


@pytest.mark.parametrize("module", [stagevox, stagevox.contract], ids=lambda module: module.__name__)
def test_public_names_exist_are_sorted_and_documented(module):
    assert problems(module) == []


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["b", "a"], {"a": len, "b": len}),
        (["a", "a"], {"a": len}),
        (["a", "B"], {"a": len, "B": int}),
        (["missing"], {}),
        (["f"], {"f": lambda: None}),
    ],
)
def test_a_planted_problem_is_found(names, values):
    module = ModuleType("planted", "Documented.")
    module.__dict__.update(values, __all__=names)
    assert len(problems(module)) == 1


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the code."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", code + "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_vllm():
    loaded = loaded_by("import stagevox, stagevox.contract")
    assert "stagevox" in loaded
    assert not loaded & {"vllm", "transformers"}


def test_the_check_sees_what_is_loaded():
    assert "wave" in loaded_by("import wave")
