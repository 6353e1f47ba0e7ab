"""No code tells prefill from decode by how many tokens a span has (TK-3): a prompt's one-token tail looks like a decode step.

Looks for comparisons of a span's length with 1 or 2. What is allowed is listed with its reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "stagevox"

# (file, function): why its comparison doesn't decide phase.
ALLOWED = {
    ("stage/rows.py", "is_decode_row"): "PC-5's eligibility: one token AND not prefill",
    ("stage/generation.py", "_generate"): "how many requests the batch has, not how many tokens one of them",
    ("stage/mtp.py", "complete_frames"): "how many requests the batch has",
    ("stage/preprocess.py", "run"): "how many requests the batch has",
}

# Where a len() may be that of a span.
SEES_SPANS = ("contract", "stage", "models", "conformance")
LENGTH = re.compile(r"span|num_(new_|scheduled_|query_)?(tokens|rows)|(query|seq)_?len|n_tokens")


def is_length(node: ast.expr) -> bool:
    """Whether an expression is a length: ``span``, ``num_scheduled[i]``, ``x.shape[0]``, ``len(x)``, ``end - start``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(LENGTH.search(name))
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=0)):
            return True
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=0)]):
            return True
        case ast.Call(func=ast.Attribute(attr="numel")):
            return True
        case ast.Call(func=ast.Name(id="len"), args=[of]):
            return not ast.unparse(of).endswith("shape")
        case ast.Call(func=ast.Name(id="int" | "max" | "min"), args=[first, *_]):
            return is_length(first)
        case ast.Call(func=ast.Attribute(value=value, attr="item" | "get" | "max" | "min" | "sum")):
            return is_length(value)
        case ast.Subscript(value=value) | ast.NamedExpr(value=value):
            return is_length(value)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            ends = bool(re.search(r"end|stop", ast.unparse(left)) and re.search("start|begin", ast.unparse(right)))
            return ends or is_length(left)
        case ast.BinOp(left=left):
            return is_length(left)
    return False


def has_one_or_two(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and type(part.value) is int and part.value in (1, 2) for part in constants(node))


def constants(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def comparisons(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Compare]]:
    """Every comparison of a length with 1 or 2, with the function it stands in."""
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Compare):
            sides = [child.left, *child.comparators]
            if any(map(is_length, sides)) and any(map(has_one_or_two, sides)):
                yield inside, child
        yield from comparisons(child, inside)


def span_comparisons(root: Path) -> dict[tuple[str, str], list[str]]:
    """(file, function) -> the comparisons found there."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        for function, node in comparisons(ast.parse(path.read_text())):
            if "len(" in ast.unparse(node) and not relative.startswith(SEES_SPANS):
                continue
            found.setdefault((relative, function), []).append(f"{relative}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.covers("TK-3")
def test_nothing_decides_phase_by_span_length():
    found = span_comparisons(PACKAGE)
    assert [line for place, lines in found.items() if place not in ALLOWED for line in lines] == []


def test_every_exception_is_still_needed():
    assert [place for place in ALLOWED if place not in span_comparisons(PACKAGE)] == []


@pytest.mark.parametrize(
    "condition",
    [
        "span == 1",
        "row.span > 1",
        "1 < span",
        "span in (1, 2)",
        "num_scheduled_tokens[req_id] == 1",
        "scheduled.num_scheduled_tokens.get(req_id, 0) <= 1",
        "input_ids.shape[0] == 1",
        "input_ids.size(0) != 1",
        "ids.numel() < 2",
        "len(input_ids) >= 2",
        "end - start == 1",
        "(n := len(ids)) == 1",
        "query_lens.max() == 1",
        "span - computed == 1",
    ],
)
def test_a_planted_comparison_is_found(tmp_path, condition):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "talker.py").write_text(
        f"class T:\n    def preprocess(self):\n        return 3 if {condition} else 4\n"
    )
    assert list(span_comparisons(tmp_path)) == [("models/talker.py", "preprocess")]


@pytest.mark.parametrize(
    "condition",
    ["span == 0", "x.shape[1] == 1", "x.dim() == 2", "len(x.shape) == 2", "count == 1", "span == width", "flag is True"],
)
def test_another_comparison_is_not(tmp_path, condition):
    (tmp_path / "talker.py").write_text(f"def f():\n    return {condition}\n")
    assert span_comparisons(tmp_path) == {}
