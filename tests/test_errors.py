"""What the commands refuse: one line, the exit status, no traceback, and no file is written."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run_cli
from refused import Row
from refused_config import VALUES

from raytrain_ddp import errors
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

COMMANDS = {
    *("fit", "run", "evaluate", "predict", "export", "convert", "sweep", "report", "doctor"),
    "chaos",
}
FILES = sorted(Path(__file__).parent.glob("refused_*.py"))
ROWS: list[Row] = [row for file in FILES for row in import_module(file.stem).ROWS]


def words_of(row: Row) -> list[str]:
    words = shlex.split(row.command)
    return words if words[0] in COMMANDS else ["fit", *words]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_faults_39_40_41_what_cannot_work_is_refused_in_one_line_with_its_exit_status(
    row: Row, tmp_path: Path
):
    for package in row.needs.split():
        pytest.importorskip(package)
    row.write_files(tmp_path)
    with row.during(tmp_path):
        before = {*tmp_path.rglob("*")}
        answer = run_cli(*words_of(row), cwd=tmp_path, warm=not row.light)
        made = {*tmp_path.rglob("*")} - before
    assert answer.status == row.status, answer.err
    lines = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, answer.err
    assert [word for word in row.names.split() if word not in answer.err] == [], answer.err
    assert "Traceback" not in answer.err or row.status == 1
    assert "\x1b" not in answer.err
    assert row.writes or not [path for path in made if "__pycache__" not in path.parts]
    if row.light:
        assert answer.heavy == []


def test_each_command_and_each_exit_status_has_a_row():
    assert {words_of(row)[0] for row in ROWS} == COMMANDS
    assert {row.status for row in ROWS} == {1, 2, 3, 4, 5, 6, 8}  # 7 needs workers that die


def test_each_error_ends_a_command_with_the_status_that_the_documentation_gives_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Also 7; a class of the user's inherits the status, or sets its own."""
    monkeypatch.setattr("sys.argv", ["raytrain"])
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| (\d) \| `(\w+)` \|", text, re.MULTILINE)
    kinds = {name: (getattr(errors, name), int(status)) for status, name in documented}
    assert sorted(status for _, status in kinds.values()) == [1, 2, 3, 4, 5, 6, 7, 8]

    class Own(errors.DataError):
        exit_status = 77

    class Wrong(errors.DataError):
        exit_status = 126

    for kind, status in [*kinds.values(), (Own, 77), (Wrong, 4)]:

        def main(argv: object, kind: type[Exception] = kind) -> int:
            raise kind("line one")

        with pytest.raises(SystemExit) as caught:
            run_command(main)
        assert (caught.value.code, capsys.readouterr().err) == (status, "error: line one\n")


@pytest.mark.parametrize("field", VALUES)
def test_a_value_that_cannot_work_is_refused_in_python_and_in_a_recipe(field: str):
    section, _, name = field.rpartition(".")

    def build(given: dict[str, Any]) -> object:
        made = (type(getattr(TrainConfig(), section)) if section else TrainConfig)(**given)
        return TrainConfig(**{section: made}) if section else made

    def read(given: dict[str, Any]) -> object:
        return from_dict({section: given} if section else given, where="mine.toml")

    for value in VALUES[field]:
        for act in (build, read):
            with pytest.raises(ConfigError) as caught:
                act({name: value})
            said = str(caught.value)
            assert field in said or name in said.replace("-", "_"), said
            assert "\n" not in said
