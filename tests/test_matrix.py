"""FAULTS.md: every row of the fault matrix has a test by default, or says where it is tested."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROWS = range(1, 64)


def rows_of(test: str) -> list[int]:
    """``test_fault_17_and_18_...`` -> 17, 18."""
    match = re.match(r"test_faults?_((?:\d\d_(?:and_)?)+)", test)
    return [int(number) for number in re.findall(r"\d\d", match[1])] if match else []


def by_row() -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """Row -> the names of its tests that run by default, and of the others."""
    by_default, opt_in = defaultdict(set), defaultdict(set)
    for path in HERE.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        marks = re.findall(r"^pytestmark = .*", text, re.MULTILINE)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                words = " ".join([*marks, *map(ast.unparse, node.decorator_list)])
                tests = opt_in if re.search(r"mark\.(slow|gpu|lab)", words) else by_default
                for row in rows_of(node.name):
                    tests[row].add(node.name)
    return by_default, opt_in


def test_each_row_of_the_fault_matrix_has_a_test_by_default_or_says_why_not():
    text = (HERE / "FAULTS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]*)\|$", text, re.MULTILINE)
    assert [int(row) for row, _ in rows] == list(ROWS)
    by_default, opt_in = by_row()
    assert {*by_default, *opt_in} <= {*ROWS}
    without = [(int(row), remark) for row, remark in rows if int(row) not in by_default]
    for row, remark in without:
        others = [int(number) for number in re.findall(r"\d+", remark)]
        elsewhere = remark.startswith("With row") and all(by_default[other] for other in others)
        assert elsewhere or (remark.startswith("Opt in") and opt_in[row]), f"row {row}"
