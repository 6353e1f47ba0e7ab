"""The pages say what is there: links, paths, names, commands, and the table of what is overridden in vLLM."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "stagevox"
VLLM = Path(find_spec("vllm").submodule_search_locations[0])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WALKTHROUGH = (ROOT / "docs" / "walkthrough.md").read_text()

TICKED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?P<path>[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|txt|toml)|/))(?:::(?P<name>[\w.\[\]-]+))?")
UPSTREAM = re.compile(r"(v1|platforms|model_executor)/|_custom_ops")


def text(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def resolve(path: str) -> Path | None:
    bases = [VLLM] if UPSTREAM.match(path) else [ROOT, PACKAGE]
    return next((base / path for base in bases if (base / path).exists()), None)


@cache
def names(path: Path) -> set[str]:
    """What a file defines: functions, classes, constants, and a class's methods and attributes as ``Class.name``."""
    found = set()

    def targets(node: ast.AST) -> list[ast.expr]:
        return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
                for inner in ast.walk(node):
                    for target in targets(inner):
                        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                            found.add(f"{prefix}{node.name}.{target.attr}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + node.name)
            else:
                found.update(prefix + target.id for target in targets(node) if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text()).body, "")
    return found


def missing(page: str) -> list[str]:
    """Paths, and names in files, that a page mentions in backticks and that don't exist."""
    found = []
    for ticked in TICKED.findall(page):
        mentioned = PATH.fullmatch(ticked)
        if mentioned is None:
            continue
        file, name = resolve(mentioned["path"]), mentioned["name"]
        if file is None or (name and name.replace("::", ".").split("[")[0] not in names(file)):
            found.append(ticked)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_names_exist(page):
    assert missing(text(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text(page)) if "://" not in target]
    assert [target for target in targets if not (page.parent / target.split("#")[0]).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        compile(block, page.name, "exec")


def test_planted_mistakes_are_found():
    page = "`stage/rows.py::is_decode_row` `stage/gone.py` `stage/rows.py::gone` `v1/core/sched/scheduler.py::Scheduler.gone` `tests/unit/`"
    assert missing(page) == ["stage/gone.py", "stage/rows.py::gone", "v1/core/sched/scheduler.py::Scheduler.gone"]


def test_the_example_on_the_page_is_the_file():
    assert (ROOT / "examples" / "minimal_talker.py").read_text() in (ROOT / "docs" / "contract.md").read_text()


def test_commands_exist():
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake (\w+)\b(?= |\s+#|$)", readme, re.M)) - {"make"} <= set(targets) | {"does", "and"}
    for module in re.findall(r"-m (stagevox[\w.]+)", readme + (ROOT / "Makefile").read_text()):
        assert (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").exists(), module


def test_the_table_of_options_is_that_of_say():
    code = "".join((PACKAGE / "cli" / name).read_text() for name in ("say.py", "deploy_options.py"))
    defined = set(re.findall(r'"(--[a-z-]+)"', code))
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| .*?`(--[a-z-]+)", readme, re.M)) == defined


# What each of our classes is mixed over.
OVER = {
    "stage/scheduler.py": {
        "OmniSchedulerMixin": [("v1/core/sched/scheduler.py", "Scheduler")],
    },
    "stage/ar_scheduler.py": {
        "ARSchedulerMixin": [("v1/core/sched/scheduler.py", "Scheduler"), ("v1/core/sched/async_scheduler.py", "AsyncScheduler")],
        "OmniARScheduler": [("v1/core/sched/scheduler.py", "Scheduler")],
        "OmniAsyncARScheduler": [("v1/core/sched/async_scheduler.py", "AsyncScheduler")],
    },
    "stage/generation_scheduler.py": {
        "OmniGenerationScheduler": [("v1/core/sched/scheduler.py", "Scheduler")],
    },
    "stage/runner.py": {
        "OmniGPUModelRunner": [("v1/worker/gpu_model_runner.py", "GPUModelRunner")],
        "GPUARModelRunner": [("v1/worker/gpu_model_runner.py", "GPUModelRunner")],
        "CPUARModelRunner": [
            ("v1/worker/gpu_model_runner.py", "GPUModelRunner"),
            ("v1/worker/cpu_model_runner.py", "CPUModelRunner"),
        ],
    },
    "stage/generation.py": {
        "OmniGenerationModelRunner": [("v1/worker/gpu_model_runner.py", "GPUModelRunner")],
        "GPUGenerationModelRunner": [("v1/worker/gpu_model_runner.py", "GPUModelRunner")],
        "CPUGenerationModelRunner": [("v1/worker/cpu_model_runner.py", "CPUModelRunner")],
    },
    "stage/worker.py": {
        "_Reports": [("v1/worker/worker_base.py", "WorkerBase")],
        "OmniCPUWorker": [("v1/worker/cpu_worker.py", "CPUWorker")],
        "OmniGPUWorker": [("v1/worker/gpu_worker.py", "Worker")],
    },
}


def methods(path: Path, cls: str) -> set[str]:
    body = next(node.body for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == cls)
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def overridden() -> set[str]:
    """``path::Class.method`` of ours that upstream defines too."""
    return {
        f"{path}::{cls}.{method}"
        for path, classes in OVER.items()
        for cls, bases in classes.items()
        for base, name in bases
        for method in methods(PACKAGE / path, cls) & methods(VLLM / base, name)
    }


def test_every_override_stands_in_the_table():
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| [^|]+ \|$", WALKTHROUGH, re.M)
    ours = {mine for mine, _ in rows if not mine.startswith("stage/plugin.py")}
    assert ours == overridden()
    assert [mine for mine, theirs in rows if mine in ours and mine.split(".")[-1] != theirs.split(".")[-1]] == []


def test_no_class_over_vllm_is_left_out():
    """Classes in the files above that inherit from one of vLLM's, or from one of ours that does."""
    for path, classes in OVER.items():
        tree = ast.parse((PACKAGE / path).read_text())
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            bases = {ast.unparse(base).split(".")[-1] for base in cls.bases}
            known = {name for group in OVER.values() for name in group}
            upstream = {name for group in OVER.values() for over in group.values() for _, name in over} | {"Upstream"}
            assert not bases & (known | upstream) or cls.name in classes, f"{path}::{cls.name}"
