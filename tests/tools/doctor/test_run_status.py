"""`doctor --run`: the state of a run, according to its files."""

from __future__ import annotations

import io
import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from processes import run_cli
from rich.console import Console

from raytrain_ddp.checkpoint.lease import LEASE_FILE, Owner
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    HANGS,
    METRICS_FILE,
    checkpoint_store,
    open_run,
)
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.tools.doctor.output_table import show
from raytrain_ddp.tools.doctor.rows import Report, Row
from raytrain_ddp.tools.doctor.run_status import assess_run, read_status

PLAN = {"kind": "plan", "start_step": 0, "total_steps": 100, "world_size": 3, "device": "cpu"}
FAILED = {"kind": "failed", "step": 12, "message": "rank 1 (b) crashed; resuming from step 10"}
SAVED = {"kind": "checkpoint", "step": 20}


def line(step: int, **slowest: Any) -> dict[str, Any]:
    split = {"compute": 0.2, "communication": 0.3 if slowest else 0.0}
    timing = {"step_s": 0.5, "split_s": split, "slowest": {"rank": 0, "phase": "data", "ratio": 1}}
    timing["slowest"] |= slowest
    return {"kind": "train", "step": step, "samples_per_s": 640.0, "timing": timing}


def written(
    folder: Path,
    events: list[dict[str, Any]],
    records: list[dict[str, Any]],
    quiet_s: float = 0.0,
    owner: Owner | None = None,
) -> Path:
    """A run's folder in which only the lease has been written for `quiet_s`."""
    run = folder / "runs" / "r"
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(dumps(TrainConfig(name="r")))
    for name, lines in ((EVENTS_FILE, events), (METRICS_FILE, records)):
        (run / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
    for name in (CONFIG_FILE, EVENTS_FILE, METRICS_FILE):
        os.utime(run / name, (time.time() - quiet_s,) * 2)
    if owner is not None:
        (run / LEASE_FILE).write_text(json.dumps(asdict(owner)))
    return run


def rows(run: Path) -> tuple[Report, dict[str, Row]]:
    report = assess_run(read_status(open_run(str(run))))
    return report, {row.check: row for row in report.rows}


def test_a_run_that_makes_progress_is_ok(tmp_path: Path):
    run = written(tmp_path, [PLAN], [line(10), line(20)], owner=Owner.here())
    report, row = rows(run)
    assert report.exit_status == 0
    assert f"pid {os.getpid()}" in row["driver"].found
    assert row["progress"].found.startswith("step 20 of 100 (20 %), ")
    assert row["speed"].found == "640 samples/s, 0.50 s a step, 40 s left"
    assert {r.verdict for r in report.rows} == {"ok"}
    assert sorted(path.name for path in run.iterdir()) == sorted(
        [CONFIG_FILE, EVENTS_FILE, LEASE_FILE, METRICS_FILE]
    )


def test_fault_33_a_run_that_writes_nothing_for_long_makes_no_progress(tmp_path: Path):
    run = written(tmp_path, [PLAN], [line(10), line(20)], 55.0, Owner.here())  # 11 lines
    report, row = rows(run)
    assert row["progress"].verdict == "fail"
    assert "scaling.hang_s" in row["progress"].advice
    assert report.exit_status == PreflightError.exit_status


@pytest.mark.parametrize("quiet_s", [45.0, 599.0])
def test_a_slow_run_and_a_start_get_a_longer_time_limit(tmp_path: Path, quiet_s: float):
    records = [line(10), line(20)] if quiet_s < 50 else []
    report, _ = rows(written(tmp_path, [PLAN], records, quiet_s, Owner.here()))
    assert report.exit_status == 0


EPOCHS_OF_10 = {**PLAN, "steps_per_epoch": 10}
EVALUATED = {"kind": "eval", "step": 20, "metrics": {}}


@pytest.mark.parametrize(
    ("events", "records", "exit_status"),
    [
        ([PLAN], [line(1)], 0),  # the next line may be a hundred steps away
        ([EPOCHS_OF_10], [line(10), line(20)], 0),  # it evaluates
        ([EPOCHS_OF_10], [line(10), line(20), EVALUATED], PreflightError.exit_status),
        ([EPOCHS_OF_10], [line(10), line(15)], PreflightError.exit_status),
        ([PLAN, FAILED], [line(10), line(20)], 0),  # workers are replaced
        ([PLAN, FAILED, {**PLAN, "start_step": 20}], [line(10), line(20)], 0),  # first steps
        ([PLAN, FAILED, PLAN], [line(10), line(20)], PreflightError.exit_status),
    ],
)
def test_a_first_line_an_evaluation_and_a_restart_get_a_longer_time_limit(
    tmp_path: Path, events: list[Any], records: list[Any], exit_status: int
):
    report, _ = rows(written(tmp_path, events, records, 300.0, Owner.here()))
    assert report.exit_status == exit_status


def test_a_driver_that_just_started_is_not_judged_by_older_records(tmp_path: Path):
    run = written(tmp_path, [PLAN], [line(10), line(20)], 7200.0, Owner.here())
    os.utime(run / CONFIG_FILE, (time.time() - 40,) * 2)
    report, row = rows(run)
    assert report.exit_status == 0
    assert row["progress"].found == "step 20 of 100 (20 %), 40 s ago"


def test_fault_32_a_rank_with_more_slots_or_no_longer_present_is_not_reported(tmp_path: Path):
    for number, size in enumerate((3, 2)):
        plan = {**PLAN, "slots": 4, "world_size": size}
        records = [line(10 * n, rank=2, ratio=2.2, phase="compute") for n in range(1, 9)]
        _, row = rows(written(tmp_path / f"{number}", [plan], records, owner=Owner.here()))
        assert row["slowest"].verdict == ("ok" if size == 3 else "warn")


def test_a_run_with_a_dead_or_no_driver_is_reported(tmp_path: Path):
    dead = replace(Owner.here(), born=1)
    run = written(tmp_path, [PLAN], [line(20)], owner=dead)
    report, row = rows(run)
    assert row["driver"].verdict == "fail"
    assert "Run the command again" in row["driver"].advice
    (run / LEASE_FILE).unlink()
    report, row = rows(run)
    assert (row["driver"].verdict, report.exit_status) == ("fail", PreflightError.exit_status)
    with (run / EVENTS_FILE).open("a") as file:
        file.write(json.dumps({"kind": "end", "status": 0}) + "\n")
    assert rows(run)[1]["driver"].found == "ended with status 0"


def test_a_run_with_a_finished_checkpoint_has_ended(tmp_path: Path):
    run = written(tmp_path, [PLAN], [line(100)])
    done = Manifest(100, 1, 1, 3, {}, "data", finished=True)
    checkpoint_store(open_run(str(run))).commit(done, {})
    status = read_status(open_run(str(run)))
    assert (status.has_ended, assess_run(status).exit_status) == (True, 0)
    assert assess_run(status).rows[0].found == "finished"


def test_fault_32_a_slow_rank_and_the_bottleneck_are_reported(tmp_path: Path):
    straggler = {"kind": "straggler", "rank": 2, "host": "w2", "phase": "data", "text": ""}
    records = [line(10 * n, rank=2, ratio=3.0) for n in range(1, 9)]
    _, row = rows(written(tmp_path, [PLAN, straggler], records, owner=Owner.here()))
    assert row["slowest"] == Row(
        "slowest", "rank 2 w2", "3.0 x as long as the others, mostly in data", "warn"
    )
    assert row["limit"].found == "waits for rank 2 60 % of the time"


def test_failures_and_hangs_warn_with_stacks_until_the_next_checkpoint(tmp_path: Path):
    run = written(tmp_path, [PLAN, FAILED], [line(20)], owner=Owner.here())
    folder = run / HANGS / "20260101000000-abcd"
    folder.mkdir(parents=True)
    hang = {"text": "rank 1 (b) did not enter", "step": 12, "ranks": [1]}
    (folder / "hang.json").write_text(json.dumps(hang))
    _, row = rows(run)
    assert row["failures"].verdict == row["hang"].verdict == "warn"
    assert FAILED["message"] in row["failures"].found
    assert row["hang"].where == "rank 1"
    assert "hang/20260101000000-abcd/rank-*.txt" in row["hang"].found
    with (run / EVENTS_FILE).open("a") as file:
        file.write(json.dumps(SAVED) + "\n")
    _, row = rows(run)
    assert row["failures"].verdict == row["hang"].verdict == "ok"


def test_a_hang_whose_failure_is_not_reported_yet_warns(tmp_path: Path):
    run = written(tmp_path, [PLAN, SAVED], [line(20)], owner=Owner.here())
    folder = run / HANGS / "20260101000000-abcd"
    folder.mkdir(parents=True)
    (folder / "hang.json").write_text(json.dumps({"text": "", "step": 23, "ranks": [1]}))
    _, row = rows(run)
    assert (row["failures"].verdict, row["hang"].verdict) == ("ok", "warn")


def test_records_without_numbers_and_damaged_files_are_tolerated(tmp_path: Path):
    odd = line(30)
    odd["timing"] |= {"step_s": None, "split_s": {"compute": None}}
    odd |= {"samples_per_s": None, "loss": None}
    run = written(tmp_path, [PLAN], [line(20), odd], owner=Owner.here())
    for number, content in enumerate(["[]", "5", "{", '{"step": 1, "ranks": 5}', "[" * 10**5]):
        (run / HANGS / f"{number}").mkdir(parents=True)
        (run / HANGS / f"{number}" / "hang.json").write_text(content)
    report, row = rows(run)
    assert row["speed"].found == "- samples/s, - a step"
    assert "hang" not in row
    shown = io.StringIO()
    show(report, Console(file=shown, width=1))
    assert "No problems found." in shown.getvalue()
    answer = run_cli("doctor", "--run", "r", "--json", cwd=tmp_path)

    def refused(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    newest = json.loads(answer.out, parse_constant=refused)["findings"]["newest"]
    assert newest["samples_per_s"] is None


def test_a_run_ended_by_an_error_names_it(tmp_path: Path):
    traceback = "Traceback (most recent call last):\n  x\nKeyError: 'z'\n"
    ended = {"kind": "end", "status": 1, "message": f"the task failed on b, rank 1:\n{traceback}"}
    run = written(tmp_path, [PLAN, ended], [line(20)])
    _, row = rows(run)
    reported = "ended with status 1: the task failed on b, rank 1: KeyError: 'z'"
    assert (row["driver"].found, row["driver"].verdict) == (reported, "warn")
    answer = run_cli("doctor", "--run", str(run), cwd=tmp_path)
    assert answer.out.splitlines()[-1] == "1 warning: the run has ended."


def test_log_records_of_earlier_versions_change_nothing(tmp_path: Path):
    older = {"kind": "resync", "step": 15, "ranks": [1], "source": 0, "first": "conv.weight"}
    found = []
    for logged in ([line(10), line(20)], [line(10), older, line(20)]):
        run = written(tmp_path / str(len(logged)), [PLAN], logged, owner=Owner.here())
        seen = [(row.check, row.found) for row in rows(run)[0].rows if row.check != "driver"]
        found.append([(check, re.sub(r"[\d.]+ s ago", "", text)) for check, text in seen])
    assert found[0] == found[1]


def test_the_command_takes_a_name_avoids_torch_and_reports_a_missing_run(tmp_path: Path):
    written(tmp_path, [PLAN], [line(10)], 700.0, Owner.here())
    answer = run_cli("doctor", "--run", "r", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (PreflightError.exit_status, [])
    assert "1 failure, 0 warnings: the run makes no progress." in answer.out
    answer = run_cli("doctor", "--run", "r", "--json", cwd=tmp_path)
    assert json.loads(answer.out)["findings"]["newest"]["step"] == 10
    answer = run_cli("doctor", "--run", "q", cwd=tmp_path)
    assert (answer.status, answer.out) == (ConfigError.exit_status, "")
    assert "no run there" in answer.err


def test_a_read_only_folder_is_sufficient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = written(tmp_path, [PLAN], [line(10)], owner=Owner.here())
    storage = open_storage(str(run))

    def refused(_: object) -> float:
        raise PermissionError("read only")

    monkeypatch.setattr(type(storage), "clock_s", refused)
    assert assess_run(read_status(storage)).exit_status == 0
