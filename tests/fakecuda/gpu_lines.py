"""Which lines of the package are reached only on a GPU, and which of them were executed."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "raytrain_ddp"
_MENTION = re.compile(r"torch\.cuda\.|\.is_cuda\b|== 'cuda'|_on_gpu\b|\bon_gpu\b")
_REFUSAL = re.compile(r"!= 'cuda'|not \S+\.is_cuda|not \S*_?on_gpu")


@cache
def find() -> dict[str, dict[int, str]]:
    """File, relative to the package -> number and text of each line whose statement mentions a
    GPU's own API, or is run only if a condition that does so holds."""
    found: dict[str, dict[int, str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        rows = text.splitlines()
        lines = {line: rows[line - 1].strip() for line in _of(ast.parse(text).body)}
        if lines:
            found[str(file.relative_to(PACKAGE))] = lines
    return found


def _of(body: Sequence[ast.stmt], only_gpu: bool = False) -> Iterator[int]:
    """Lines of a block; `only_gpu`: all of it is run on GPUs only."""
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if not any(inner):
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                continue  # text
            if only_gpu or _MENTION.search(ast.unparse(statement)):
                yield statement.lineno
            continue
        test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        if only_gpu:
            yield statement.lineno
        if test and _REFUSAL.search(test):
            yield from _of(statement.body)
            yield from _of(statement.orelse, True)
            only_gpu |= (
                isinstance(statement.body[-1], ast.Return | ast.Continue) and " or " not in test
            )
            continue
        mentions = bool(test and _MENTION.search(test))
        yield from _of(inner[0], only_gpu or mentions)
        for block in inner[1:]:
            yield from _of(block, only_gpu)


@contextmanager
def watching() -> Iterator[set[str]]:
    """The set gets ``file:line`` of those lines that this process executes in threads of Python."""
    seen: set[str] = set()
    wanted: dict[CodeType, tuple[str, frozenset[int]] | None] = {}
    prefix = f"{PACKAGE}/"

    def of(code: CodeType) -> tuple[str, frozenset[int]] | None:
        name = code.co_filename
        lines = find().get(name[len(prefix) :]) if name.startswith(prefix) else None
        own = frozenset(line for _, _, line in code.co_lines() if line) & {*(lines or ())}
        return (name[len(prefix) :], own) if own else None

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in wanted:
            wanted[code] = of(code)
        if wanted[code] is None:
            return None
        return on_line

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        file, lines = wanted[frame.f_code]  # type: ignore[misc]
        if event == "line" and frame.f_lineno in lines:
            seen.add(f"{file}:{frame.f_lineno}")
        return on_line

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        yield seen
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
