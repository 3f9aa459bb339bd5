"""The table of errors: a row is an input, the exit status, and what the one line names.

The rows are in ``refused_*.py``, by subject; `test_errors.py` runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A command that ends before it trains.

    Attributes:
        command: as typed after ``raytrain``, ``fit`` if the first word is a flag; it runs in an
            empty folder that has `files`.
        status: the exit status.
        names: words of the message: the field, file or value; separated by spaces.
        files: content by path; a function writes what is not a text.
        light: it ends without loading torch or Ray.
    """

    command: str
    status: int
    names: str
    files: Mapping[str, str | bytes | Callable[[Path], object]] = field(default_factory=dict)
    light: bool = False

    def __str__(self) -> str:
        return self.command[:80]
