"""The table of errors: a row is an input, the exit status, and what the one line names.

The rows are in ``refused_*.py``, by subject; `test_errors.py` finds these files and runs them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

Content = str | bytes | Callable[[Path], object]


def nothing(folder: Path) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Row:
    """A command that fails.

    Attributes:
        command: as typed after ``raytrain``, ``fit`` if the first word is no command; it runs in an
            empty folder that has `files`.
        status: the exit status.
        names: words of the message: the field, file or value; separated by spaces.
        files: content by path; a function writes what is not a text.
        light: it ends without loading torch or Ray.
        during: what holds while it runs, such as a lease; is given the folder.
        writes: it fails once it has begun, and leaves files.
        needs: packages without which the row is skipped, separated by spaces.
    """

    command: str
    status: int
    names: str
    files: Mapping[str, Content] = field(default_factory=dict)
    light: bool = False
    during: Callable[[Path], AbstractContextManager[object]] = nothing
    writes: bool = False
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.status} {ascii(self.command)[1:-1][:80]}"

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
