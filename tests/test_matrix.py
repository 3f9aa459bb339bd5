"""FAULTS.md: every row of the fault matrix has tests, or a reason why not."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROWS = range(1, 64)


def table() -> dict[int, str]:
    """Row -> its last cell."""
    text = (HERE / "FAULTS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == len({number for number, _ in rows}), "a row is there twice"
    return {int(number): cell for number, cell in rows}


@cache
def all_tests() -> dict[str, set[str]]:
    """File -> the names of its tests."""
    return {
        path.name: {
            node.name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        for path in HERE.rglob("test_*.py")
    }


@cache
def opted_in(file: str) -> set[str]:
    """The tests of a file that do not run by default."""
    (path,) = HERE.rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(re.search(r"mark\.(slow|gpu|lab)", ast.unparse(d)) for d in node.decorator_list)
    }


def rows_of(test: str) -> list[int]:
    """``test_fault_17_and_18_...`` -> 17, 18."""
    match = re.match(r"test_faults?_((?:\d\d_(?:and_)?)+)", test)
    return [int(number) for number in re.findall(r"\d\d", match[1])] if match else []


def test_the_matrix_has_every_row():
    assert sorted(table()) == list(ROWS)


def test_each_row_names_existing_tests_or_gives_a_reason():
    tests = all_tests()
    for row, cell in table().items():
        named = re.findall(r"`([^`:]+\.py)::([^`]+)`", cell)
        missing = [test for file, test in named if test not in tests[file]]
        assert not missing, f"row {row}"
        assert named or re.match(r"None: .{20,}", cell), f"row {row}: neither tests nor a reason"


def test_opt_in_tests_are_marked_as_opt_in():
    for row, cell in table().items():
        by_default, _, on_demand = cell.partition("Opt in: ")
        for tests, said in ((by_default, False), (on_demand, True)):
            for file, test in re.findall(r"`([^`:]+\.py)::([^`]+)`", tests):
                assert (test in opted_in(file)) == said, f"row {row}: {test}"


def test_every_test_with_a_row_number_is_in_that_row():
    rows = table()
    for file, tests in all_tests().items():
        for test in tests:
            for row in rows_of(test):
                assert f"`{file}::{test}`" in rows[row], f"{file}::{test} is not in row {row}"


def test_row_numbers_are_parsed_from_test_names():
    assert rows_of("test_fault_01_02_03_05_killed") == [1, 2, 3, 5]
    assert rows_of("test_fault_17_and_18_all_missing") == [17, 18]
    assert rows_of("test_faults_without_a_step") == []
