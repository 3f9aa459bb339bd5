"""What the commands refuse: one line, the exit status, no traceback, and no file is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from processes import run_cli
from refused import Row
from refused_commands import ROWS as COMMANDS
from refused_data import ROWS as DATA

COMMAND_NAMES = {"fit", "run", "evaluate", "predict", "export", "convert", "sweep", "report"}


@pytest.mark.parametrize("row", [*COMMANDS, *DATA], ids=str)
def test_what_cannot_work_is_refused_in_one_line_with_its_exit_status(row: Row, tmp_path: Path):
    for name, content in row.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = sorted(tmp_path.rglob("*"))
    words = shlex.split(row.command)
    if words[0] not in COMMAND_NAMES:
        words.insert(0, "fit")
    answer = run_cli(*words, cwd=tmp_path, warm=not row.light)
    assert answer.status == row.status, answer.err
    assert [word for word in row.names.split() if word not in answer.err] == []
    errors = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, answer.err
    assert "Traceback" not in answer.err
    if row.light:
        assert answer.heavy == []
    made = [path for path in tmp_path.rglob("*") if path not in before]
    assert [path for path in made if "__pycache__" not in path.parts] == []
