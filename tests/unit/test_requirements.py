"""docs/requirements.md lists every requirement once, with the tests that cite it and no others."""

import requirements_table as table

COUNTS = {"PC": 14, "RT": 9, "EX": 16, "TK": 6, "MS": 13, "SV": 5}
IDS = [f"{group}-{number}" for group, count in COUNTS.items() for number in range(1, count + 1)]


def test_every_requirement_is_there_once_and_in_order():
    assert table.ids(table.PAGE.read_text()) == IDS


def test_tests_cite_known_requirements():
    assert sorted(table.tests_by_id(table.ROOT).keys() - set(IDS)) == []


def test_the_column_names_the_tests_that_cite():
    page = table.PAGE.read_text()
    assert page == table.with_tests(page, table.tests_by_id(table.ROOT)), "run: python tools/requirements_table.py"


def test_rows_are_short():
    rows = [row for row in map(table.ROW.match, table.PAGE.read_text().splitlines()) if row]
    assert [row["id"] for row in rows if len(row["asks"].split()) > 30] == []


def test_marks_are_read_from_tests_classes_and_modules(tmp_path):
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_a.py").write_text(
        """
import pytest
pytestmark = [pytest.mark.covers("PC-1"), pytest.mark.slow]

@pytest.mark.covers("PC-2", "PC-3")
def test_a(): ...

@pytest.mark.covers("PC-2")
class TestB:
    async def test_b(self): ...

@pytest.mark.covers("PC-9")
def helper(): ...
"""
    )
    a, b = "tests/unit/test_a.py::test_a", "tests/unit/test_a.py::TestB::test_b"
    assert table.tests_by_id(tmp_path) == {"PC-1": [b, a], "PC-2": [b, a], "PC-3": [a]}


def test_a_stale_column_is_rewritten():
    page = "# Title\n| id | what it asks | tests |\n|---|---|---|\n| PC-1 | a thing | `gone` |\n| PC-2 | more | `x` |\n"
    written = table.with_tests(page, {"PC-2": ["t.py::test_a", "t.py::test_b"]})
    assert written.splitlines()[3:] == ["| PC-1 | a thing | not yet |", "| PC-2 | more | `t.py::test_a`<br>`t.py::test_b` |"]
    assert table.with_tests(written, {"PC-2": ["t.py::test_a", "t.py::test_b"]}) == written
