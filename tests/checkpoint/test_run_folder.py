"""The folder of a run: found by path or by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_ddp.checkpoint import run_folder
from raytrain_ddp.checkpoint.run_folder import (
    METRICS_FILE,
    open_run,
    parsed_lines,
    path_of_run,
    run_storage,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError, UnreachableError


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "events.jsonl"])
def test_a_run_is_found_by_name_although_its_data_folder_has_the_same_name(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`fit --data.source photos` trains the run `photos`, and the README continues with this
    name."""
    monkeypatch.chdir(tmp_path)
    Path("photos/train/cat").mkdir(parents=True)
    assert path_of_run("photos") == "photos"  # nothing else has the name
    Path("runs/photos").mkdir(parents=True)
    assert path_of_run("photos") == "photos"  # it is not a run yet
    Path("runs/photos", file).touch()
    assert path_of_run("photos") == "runs/photos"
    assert path_of_run("photos/train") == "photos/train"
    assert path_of_run(str(tmp_path / "photos")) == str(tmp_path / "photos")
    for other in (".", "runs", "s3://bucket/photos"):
        assert path_of_run(other) == other
    Path("photos", file).touch()  # a run in the working folder takes precedence
    assert path_of_run("photos") == "photos"


def test_lines_that_are_not_records_are_skipped(tmp_path: Path):
    lines = ["", "x", "5", '{"kind": 1', "[" * 100_000, '{"a":' * 100_000, '{"kind": 2}']
    assert parsed_lines(lines, METRICS_FILE) == [{"kind": 2}]


def test_a_sweep_is_refused_where_a_run_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("runs/rates/trial-1").mkdir(parents=True)
    Path("runs/rates/sweep.json").touch()
    Path("runs/rates/trial-1/config.toml").touch()
    for place in ("rates", "runs/rates", str(tmp_path / "runs/rates")):
        with pytest.raises(ConfigError, match=r"is a sweep: name one of its runs. .*: trial-1"):
            open_run(place)


def test_fault_15_an_opened_storage_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(uri: str) -> None:
        raise UnreachableError(uri)

    first = TrainConfig(name="first", storage=str(tmp_path))
    opened = run_storage(first)
    monkeypatch.setattr(run_folder, "open_storage", refuse)
    assert run_storage(first) == opened
    monkeypatch.chdir(tmp_path.parent)
    assert run_storage(TrainConfig(name="first", storage=tmp_path.name)) == opened
    with pytest.raises(UnreachableError):
        run_storage(TrainConfig(name="first", storage=str(tmp_path / "another")))
    monkeypatch.undo()
    (tmp_path / "file").touch()
    for _ in range(2):
        with pytest.raises(PreflightError, match="is a file"):
            run_storage(TrainConfig(name="first", storage=str(tmp_path / "file")))
