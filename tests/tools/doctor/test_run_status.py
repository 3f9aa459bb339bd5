"""`doctor --run`: the state of a run, according to its files, and how to stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from processes import ENVIRONMENT, run_cli
from warm_python import WarmPython

from raytrain_ddp.checkpoint.lease import LEASE_FILE, Owner
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, open_run
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tools.doctor.assessment import Report, Row
from raytrain_ddp.tools.doctor.run_status import examine_run, how_to_stop

TIME = {"time": "2026-11-20T18:05:31Z"}
PLAN = {"kind": "plan", "start_step": 0, "total_steps": 100, "world_size": 3, "device": "cpu"}
FAILED = {"kind": "failed", "step": 12, "message": "rank 1 (b) crashed; resuming from step 10"}
SAVED = {"kind": "checkpoint", "step": 20}
EPOCHS_OF_10 = {**PLAN, "steps_per_epoch": 10}
EVALUATED = {"kind": "eval", "step": 20, "metrics": {}}
LONG = ["--epochs", "1000"]
SLOW = {"kind": "straggler", "rank": 2, "text": "rank 2 on w2 takes 3.0 x as long as the others"}


def line(step: int) -> dict[str, Any]:
    timing = {"step_s": 0.5, "split_s": {"compute": 0.2, "communication": 0.3}}
    return {"kind": "train", "step": step, "samples_per_s": 640.0, "timing": timing}


LINES = [line(10), line(20)]


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
        (run / name).write_text("".join(json.dumps({**TIME, **each}) + "\n" for each in lines))
    for name in (CONFIG_FILE, EVENTS_FILE, METRICS_FILE):
        os.utime(run / name, (time.time() - quiet_s,) * 2)
    if owner is not None:
        (run / LEASE_FILE).write_text(json.dumps(asdict(owner)))
    return run


def rows(run: Path) -> tuple[Report, dict[str, Row]]:
    report = examine_run(open_run(str(run)))
    return report, {row.check: row for row in report.rows}


def test_a_run_that_makes_progress_is_ok_and_nothing_is_written(tmp_path: Path):
    run = written(tmp_path, [PLAN, SAVED], LINES, owner=Owner.here())
    report, row = rows(run)
    assert {row.verdict for row in report.rows} == {"ok"}
    assert f"pid {os.getpid()}" in row["driver"].found
    assert row["progress"].found.startswith("step 20 of 100 (20 %), ")
    assert row["progress"].where == "3 workers"
    assert row["speed"].found == "640 samples/s, 0.50 s a step, 40 s left"
    assert row["limit"].found.startswith("waits for all-reduces 60 %")
    assert row["checkpoint"].found.startswith("step 20")
    assert len([*run.iterdir()]) == 4


@pytest.mark.parametrize(
    ("quiet_s", "events", "records", "makes_progress"),
    [
        (45, [PLAN], LINES, True),  # a line takes five seconds
        (55, [PLAN], LINES, False),
        (500, [PLAN], [], True),  # it starts
        (300, [EPOCHS_OF_10], LINES, True),  # it evaluates
        (300, [EPOCHS_OF_10], [*LINES, EVALUATED], False),
        (300, [EPOCHS_OF_10], [line(10), line(15)], False),
        (300, [PLAN, FAILED], LINES, True),  # workers are replaced
        (300, [PLAN, FAILED, {**PLAN, "start_step": 20}], LINES, True),  # first steps
        (300, [PLAN, FAILED, PLAN], LINES, False),
    ],
)
def test_fault_33_a_run_that_writes_nothing_for_long_makes_no_progress(
    tmp_path: Path, quiet_s: int, events: list[Any], records: list[Any], makes_progress: bool
):
    report, row = rows(written(tmp_path, events, records, quiet_s, Owner.here()))
    assert report.count("fail") == (not makes_progress)
    assert (row["progress"].verdict == "ok") == makes_progress
    assert ("scaling.hang_s" in row["progress"].advice) != makes_progress


def test_a_driver_that_just_started_is_not_judged_by_older_records(tmp_path: Path):
    run = written(tmp_path, [PLAN], LINES, 7200, Owner.here())
    os.utime(run / CONFIG_FILE, (time.time() - 40,) * 2)
    assert rows(run)[1]["progress"] == Row(
        "progress", "3 workers", "step 20 of 100 (20 %), 40 s ago"
    )


def test_a_run_with_a_dead_or_no_driver_is_reported(tmp_path: Path):
    run = written(tmp_path, [PLAN], [line(20)], owner=replace(Owner.here(), born=1))
    for _ in range(2):
        report, row = rows(run)
        assert row["driver"].verdict == "fail"
        assert "Run the command again" in row["driver"].advice
        assert "to stop" not in row
        assert report.count("fail") == 1
        (run / LEASE_FILE).unlink(missing_ok=True)
    with (run / EVENTS_FILE).open("a") as file:
        file.write(json.dumps({**TIME, "kind": "end", "status": 0}) + "\n")
    report, row = rows(run)
    assert row["driver"].found == "ended with status 0"
    assert {row.verdict for row in report.rows} == {"ok"}


def test_a_run_ended_by_an_error_names_it(tmp_path: Path):
    traceback = "Traceback (most recent call last):\n  x\nKeyError: 'z'\n"
    ended = {"kind": "end", "status": 1, "message": f"the task failed on b, rank 1:\n{traceback}"}
    report, row = rows(written(tmp_path, [PLAN, ended], [line(20)]))
    reported = "ended with status 1: the task failed on b, rank 1: KeyError: 'z'"
    assert (row["driver"].found, row["driver"].verdict) == (reported, "warn")
    assert (report.count("fail"), report.if_good) == (0, "the run has ended")


def test_fault_32_a_slow_rank_is_reported_until_it_keeps_up_or_the_workers_change(tmp_path: Path):
    recovered = {"kind": "straggler", "rank": None, "text": "rank 2 keeps up again"}
    for number, events in enumerate([[SLOW], [SLOW, recovered], [SLOW, PLAN]]):
        run = written(tmp_path / f"{number}", [PLAN, *events], LINES, owner=Owner.here())
        slowest = Row("slowest", "rank 2", SLOW["text"], "warn")
        assert rows(run)[1].get("slowest") == (slowest if number == 0 else None)


def test_a_failure_warns_until_the_next_checkpoint(tmp_path: Path):
    for kind in ("failed", "preempted", "checkpoint_failed"):
        failure = {**FAILED, "kind": kind, "text": FAILED["message"]}
        for events, verdict in (([SAVED, failure], "warn"), ([failure, SAVED], "ok")):
            run = written(tmp_path / kind / verdict, [PLAN, *events], [], owner=Owner.here())
            failures = rows(run)[1]["failures"]
            assert failures.verdict == verdict
            assert FAILED["message"] in failures.found


def test_the_command_takes_a_name_avoids_torch_and_tolerates_records_without_numbers(
    tmp_path: Path,
):
    odd = {**line(30), "samples_per_s": None, "loss": None}
    odd["timing"] = {"step_s": None, "split_s": {"compute": None}}
    older = {"kind": "resync", "step": 15, "ranks": [1], "source": 0, "first": "conv.weight"}
    written(tmp_path, [PLAN], [line(20), older, odd], 700.0, Owner.here())
    answer = run_cli("doctor", "--run", "r", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (3, [])
    assert "- samples/s, - a step" in answer.out
    assert "1 failure, 0 warnings: the run makes no progress." in answer.out
    answer = run_cli("doctor", "--run", "r", "--json", cwd=tmp_path)
    assert json.loads(answer.out, parse_constant=pytest.fail)["status"] == 3


def test_the_process_host_and_slurm_job_to_signal_are_named(monkeypatch: pytest.MonkeyPatch):
    def told(host: str = "") -> str:
        owner = Owner.parse(json.dumps(asdict(Owner.here())).encode())
        assert owner is not None
        return how_to_stop(replace(owner, host=host or owner.host))

    command = f"kill -INT {os.getpid()}"
    assert (told(), told("node-7")) == (command, f"ssh node-7 {command}")
    monkeypatch.setenv("SLURM_JOB_ID", "14")
    assert told("node-7").endswith("scancel --batch --signal=TERM 14")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert told().endswith("scancel --batch --signal=TERM 12_2")


def test_a_run_that_does_what_doctor_says_ends_with_a_checkpoint(tmp_path: Path):
    def told() -> dict[str, str]:
        answer = run_cli("doctor", "--run", "mine", "--json", cwd=tmp_path)
        return {row["check"]: row["found"] for row in json.loads(answer.out)["rows"]}

    process = WarmPython(
        [
            sys.executable,
            *["-m", "raytrain_ddp.fit", "--local", "--name", "mine", "--epochs", "1000"],
        ],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for text in process.stdout:
            if "checkpoint" in text or "eval" in text:
                break
        stop = told()["to stop"]
        assert stop == f"kill -INT {process.pid}"
        subprocess.run(stop.split(), check=True)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert "status 130" in told()["driver"]
    assert told()["checkpoint"].split(",")[0] in told()["progress"]
