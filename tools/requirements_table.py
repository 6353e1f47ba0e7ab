"""Write the test column of docs/requirements.md from the ``@pytest.mark.covers(...)`` marks: ``python tools/requirements_table.py``.

A mark may stand on a test, on a class of tests, or be a module's ``pytestmark``. Tests are read from their source, not run.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "requirements.md"
ROW = re.compile(r"^\| (?P<id>[A-Z]{2}-\d+) \| (?P<asks>.+?) \|(?P<tests>.*)\|$")
NOT_YET = "not yet"


def cited(expressions: Iterable[ast.expr]) -> set[str]:
    """The ids in the ``covers`` marks among some decorators, or among the values of a ``pytestmark``."""
    ids: set[str] = set()
    for node in expressions:
        if isinstance(node, ast.List | ast.Tuple):
            ids |= cited(node.elts)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.covers", "mark.covers"):
            ids |= {ast.literal_eval(argument) for argument in node.args}
    return ids


def marks(body: list[ast.stmt], prefix: str, inherited: set[str]) -> Iterator[tuple[str, str]]:
    """(test, id) of every test in a module's or class's body."""
    here = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    inherited = inherited | cited(here)
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from marks(node.body, f"{prefix}::{node.name}", inherited | cited(node.decorator_list))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield from ((f"{prefix}::{node.name}", each) for each in inherited | cited(node.decorator_list))


def tests_by_id(root: Path) -> dict[str, list[str]]:
    """Requirement -> the tests that cite it, sorted."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for test, each in marks(ast.parse(path.read_text()).body, path.relative_to(root).as_posix(), set()):
            found.setdefault(each, []).append(test)
    return {each: sorted(tests) for each, tests in found.items()}


def ids(page: str) -> list[str]:
    """The ids of a page's rows, in order."""
    return [row["id"] for row in map(ROW.match, page.splitlines()) if row]


def with_tests(page: str, tests: dict[str, list[str]]) -> str:
    """The page with its test column written anew."""

    def written(line: str) -> str:
        row = ROW.match(line)
        if not row:
            return line
        names = "<br>".join(f"`{test}`" for test in tests.get(row["id"], ())) or NOT_YET
        return f"| {row['id']} | {row['asks']} | {names} |"

    return "\n".join(map(written, page.splitlines())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tests(PAGE.read_text(), tests_by_id(ROOT)))
