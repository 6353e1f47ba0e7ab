"""Who may import whom, and where vLLM's private names may be used. Read from the source; lazy imports count too."""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "stagevox"

# One upgrade of vLLM is a walk through these.
PRIVATE_NAMES = {
    f"stage/{name}.py"
    for name in ("plugin", "engine", "scheduler", "ar_scheduler", "generation_scheduler", "worker", "runner", "generation")
} | {"stage/multi_step/executor.py"}
# (file, private module): why there all the same. An upgrade of vLLM looks here too.
PRIVATE_MODULES = {
    (
        "models/mini/layers.py",
        "vllm._custom_ops",
    ): "packs weights for the oneDNN kernel, twice as fast as a linear layer at this size",
}
RUNNER_SIDE = {
    f"stagevox.stage.{name}"
    for name in (
        "worker",
        "runner",
        "border",
        "rows",
        "buffer",
        "frame_log",
        "preprocess",
        "mtp",
        "outputs",
        "host_copy",
        "materialise",
        "row_store",
        "step_log",
        "generation",
        "seeded",
    )
} | {"stagevox.stage.multi_step.executor"}


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Every imported name in full, ``from a import b`` as ``a.b``: (line, name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    yield node.lineno, name


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def why_forbidden(part: str, name: str) -> str | None:
    """Why code in this part of the package (``stage``, ``pipeline``, ...) may not import that name."""
    if within(name, "vllm") and part not in ("stage", "models", "bench"):
        return "vllm is imported only under stage, models and bench"
    if part == "contract" and not (
        name.split(".")[0] in sys.stdlib_module_names or within(name, "torch", "stagevox.contract", "stagevox.errors")
    ):
        return "contract imports torch and the standard library only"
    if part in ("pipeline", "server", "observe") and within(name, "torch"):
        return f"{part} knows no tensors"
    if part in ("pipeline", "server", "observe") and within(name, *RUNNER_SIDE):
        return f"{part} doesn't reach into the runner"
    if part == "stage" and within(name, "stagevox.pipeline"):
        return "stage never imports pipeline"
    if part == "models" and within(name, "stagevox.pipeline", "stagevox.server"):
        return "models see the contract, torch and vLLM's layers"
    if part == "models" and within(name, "stagevox.stage") and not within(name, "stagevox.stage.payload"):
        return "of a stage, models see the plain values that cross its border"
    return None


def parse(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def package_of(relative: str) -> str:
    return ".".join(("stagevox", *Path(relative).parent.parts))


def forbidden_imports(root: Path) -> list[str]:
    found = []
    for relative, tree in parse(root):
        part = relative.split("/")[0]
        for line, name in imports(tree, package_of(relative)):
            if reason := why_forbidden(part, name):
                found.append(f"{relative}:{line}: imports {name}: {reason}")
    return found


NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, in spite of the underscore


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMEDTUPLE


def private_definitions(tree: ast.Module) -> set[str]:
    """Private functions, classes, variables and attributes that a file defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def upstream_privates(module: str, seen: set[str]) -> set[str]:
    """Private methods of the classes in a vLLM module and in the modules their bases come from."""
    top = find_spec("vllm")
    if module in seen or top is None or not top.submodule_search_locations:
        return set()
    seen.add(module)
    path = Path(top.submodule_search_locations[0], *module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    names = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef) and is_private(node.name)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for base in upstream_bases(tree, package):
        names |= upstream_privates(base, seen)
    return names


def upstream_bases(tree: ast.Module, package: str) -> set[str]:
    """The vLLM modules that the base classes in a file come from."""
    origin = {name.rpartition(".")[2]: name.rpartition(".")[0] for _, name in imports(tree, package) if within(name, "vllm")}
    bases = {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    return {origin[base] for base in bases if base in origin}


def foreign_names(tree: ast.Module) -> set[str]:
    """Names bound by importing something other than vLLM and stagevox."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0] for alias in node.names if not within(alias.name, "vllm", "stagevox")
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and not within(node.module or "", "vllm", "stagevox"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def uses_of_private_names(root: Path) -> list[str]:
    """Outside the files that may: imports of vLLM's private names, attributes that are not ours, overridden private methods."""
    found = []
    files = dict(parse(root))
    ours = set().union(*(private_definitions(tree) for relative, tree in files.items() if relative not in PRIVATE_NAMES))
    for relative, tree in files.items():
        if relative in PRIVATE_NAMES:
            continue
        package = package_of(relative)
        for line, name in imports(tree, package):
            private = within(name, "vllm") and any(map(is_private, name.split(".")))
            if private and (relative, name) not in PRIVATE_MODULES:
                found.append(f"{relative}:{line}: imports {name}, private to vLLM")
        foreign = foreign_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in ours:
                continue
            if ast.unparse(node.value).split(".")[0] not in foreign:
                found.append(f"{relative}:{node.lineno}: {ast.unparse(node)}: a private name that stagevox doesn't define")
        upstream = set().union(*(upstream_privates(module, set()) for module in upstream_bases(tree, package)))
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef) and node.name in upstream:
                    found.append(f"{relative}:{node.lineno}: {cls.name}.{node.name} overrides a private method of vLLM")
    return found


def test_imports_follow_the_rules():
    assert forbidden_imports(PACKAGE) == []


def test_private_names_of_vllm_stay_where_an_upgrade_looks():
    assert uses_of_private_names(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("contract/phase.py", "import vllm"),
        ("contract/phase.py", "import numpy"),
        ("contract/phase.py", "from ..stage import rows"),
        ("pipeline/process.py", "def f():\n    import torch.nn"),
        ("pipeline/process.py", "from stagevox.stage.runner import OmniGPUModelRunner"),
        ("pipeline/process.py", "from ..stage import runner"),
        ("server/app.py", "from stagevox.stage.multi_step import executor"),
        ("observe/metrics.py", "import torch"),
        ("observe/trace.py", "from vllm import LLM"),
        ("server/app.py", "import importlib\nimportlib.import_module('torch')"),
        ("stage/engine.py", "from ..pipeline.request import Request"),
        ("stage/multi_step/plan.py", "from ...pipeline import request"),
        ("models/mini/talker.py", "from stagevox.stage.buffer import merge"),
        ("audio/wav.py", "from vllm import LLM"),
        ("omni.py", "import vllm.config"),
        ("__init__.py", "from .pipeline import x\nimport vllm"),
    ],
)
def test_a_planted_import_is_found(tmp_path, file, code):
    plant(tmp_path, file, code)
    assert len(forbidden_imports(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (
            "contract/phase.py",
            "from __future__ import annotations\nimport torch, dataclasses\nfrom stagevox.errors import ContractError",
        ),
        ("contract/__init__.py", "from .phase import RowPhase"),
        ("pipeline/inline.py", "from stagevox.stage import payload\nfrom ..connectors.base import Connector"),
        ("stage/runner.py", "import torch, vllm\nfrom ..contract import RowPhase"),
        ("bench/run.py", "import vllm"),
    ],
)
def test_an_allowed_import_is_not(tmp_path, file, code):
    plant(tmp_path, file, code)
    assert forbidden_imports(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("stage/rows.py", "from vllm.v1.worker.gpu_model_runner import _x"),
        ("stage/rows.py", "from vllm.v1._private import x"),
        ("stage/buffer.py", "def f(request):\n    return request._all_token_ids"),
        ("stage/multi_step/plan.py", "import vllm\ndef f(s):\n    return s.kv_cache_manager._free(1)"),
        ("stage/mtp.py", "class A:\n    def f(self):\n        return self._update_states(None)"),
    ],
)
def test_a_planted_private_name_is_found(tmp_path, file, code):
    plant(tmp_path, file, code)
    assert len(uses_of_private_names(tmp_path)) == 1


def test_a_planted_override_is_found(tmp_path):
    code = "from vllm.v1.core.sched.async_scheduler import AsyncScheduler\n\nclass Ours(AsyncScheduler):\n"
    code += "    def _update_after_schedule(self, so): ...\n    def _ours(self): ...\n"
    code += "    def _handle_blocked_waiting_request(self, r): ...\n"
    plant(tmp_path, "stage/wait.py", code)
    own, inherited = uses_of_private_names(tmp_path)
    assert "_update_after_schedule" in own and "_handle_blocked_waiting_request" in inherited


def test_own_and_foreign_private_names_are_not(tmp_path):
    plant(tmp_path, "stage/buffer.py", "from torch import nn\nclass A:\n    def __init__(self):\n        self._x = nn._C\n")
    plant(tmp_path, "stage/runner.py", "class R:\n    def f(self, request):\n        return request._all_token_ids")
    assert uses_of_private_names(tmp_path) == []


def plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
