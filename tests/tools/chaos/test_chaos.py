"""The command `chaos`: runs that are killed many times and still end with the same result."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from processes import ENVIRONMENT, Group, run_cli
from tiny import TOTAL_STEPS, plain, run_tiny, tiny_config
from warm_python import WarmPython

from raytrain_ddp.checkpoint.run_folder import (
    METRICS_FILE,
    checkpoint_store,
    read_history,
    run_storage,
)
from raytrain_ddp.config.sections import CheckpointConfig, LogConfig, ScalingConfig
from raytrain_ddp.errors import CheckpointError, RaytrainError
from raytrain_ddp.failpoints import SITES, arm
from raytrain_ddp.tools.chaos.__main__ import ChaosArgs, parse
from raytrain_ddp.tools.chaos.comparison import compare, results_of
from raytrain_ddp.tools.chaos.experiment import TAG, ChaosOutcome, chaos, end_tagged
from raytrain_ddp.tools.chaos.fault_plan import DRIVER, Fault, draw_faults
from raytrain_ddp.tools.chaos.killed_run import KilledRun, Process, without_ray

HERE = Path(__file__).parents[2]
SHAPE = (100, 3, 5)  # steps, workers, steps between checkpoints
TINY = f"{HERE / 'tiny.py'}:TinyTask"
LOG = LogConfig(every_steps=1, tensorboard=False, audit=True)
# One that changes the result, those where others keep their state, and one after the run.
NOT_DRAWN = {"train.weights", "start.met", "start.alone", "train.log", "train.compare"}
NOT_DRAWN |= {"train.report"}


def armed(plan: Sequence[Fault]) -> str:
    return ";".join(map(str, plan))


# ------------------------------------------------------------------ the plan


def test_a_plan_is_a_function_of_its_arguments_and_never_changes():
    """Otherwise, the command that replays a run would not work after an upgrade."""
    plan = draw_faults(7, *SHAPE, kills=60, drivers=4)
    assert draw_faults(7, *SHAPE, kills=60, drivers=4) == plan
    assert draw_faults(8, *SHAPE, kills=60, drivers=4) != plan
    assert (len(plan), [f.site for f in plan].count(DRIVER)) == (64, 4)
    assert armed(draw_faults(0, *SHAPE, kills=3, drivers=1)) == PINNED


PINNED = (
    "train.loss:kill@rank=1,from=12;"
    "train.after_step:kill@rank=1,from=15;"
    "train.before_step:kill@rank=0,from=42;"
    "driver.event:kill@rank=0,from=88"
)


def test_a_plan_of_many_kills_contains_every_kind_of_fault_and_no_duplicates(tmp_path: Path):
    plan = draw_faults(0, *SHAPE, kills=400, drivers=3)
    assert len({str(fault) for fault in plan}) == len(plan)
    assert {fault.site for fault in plan} == {*SITES} - {"evaluate", *NOT_DRAWN}
    assert {f.rank for f in plan if f.site == "train.loss"} == {0, 1, 2}
    assert {f.hit for f in plan if f.site == "checkpoint.payload"} == {1, 2, 3, 4}
    arm(armed(plan), str(tmp_path))  # each is accepted
    arm("", str(tmp_path))
    commits = [f.step or 0 for f in plan if f.site.startswith("checkpoint.")]
    assert any(commits.count(step) >= 2 for step in commits)  # killed on consecutive attempts
    assert all(step % 5 == 0 for step in commits)
    for place, fault in enumerate(plan):
        assert fault.after == (place if fault.step is None else None)
    starts = [fault.site.startswith("start.") for fault in plan]
    assert (True, True) in pairwise(starts)  # the start after a kill is killed
    steps = [fault.step for fault in plan if fault.step is not None]
    assert steps == sorted(steps)


def test_a_short_run_has_fewer_faults_of_steps():
    assert len(draw_faults(0, 5, 1, 5, kills=0, drivers=9)) == 3
    faults = draw_faults(0, 5, 1, 5, kills=100)
    assert (len(faults), sum(fault.step is not None for fault in faults)) == (100, 15)
    assert {fault.rank for fault in draw_faults(0, *SHAPE[:1], 0, 5, kills=100)} == {None}


# ------------------------------------------------------------------ one run


class Ended:
    """A process that has ended, or that never does unless it is killed."""

    def __init__(self, status: int | None) -> None:
        self._status = status

    def poll(self) -> int | None:
        return self._status

    def kill(self) -> None:
        self._status = -9 if self._status is None else self._status


@pytest.mark.parametrize(
    ("starts", "made", "said"),
    [
        ([("", 0, 0)], 1, ""),
        ([("fired-0", -9, None), ("fired-1", 0, 1), ("", 0, 0)], 3, ""),
        ([("fired-0", -9, 1), ("", None, 1), ("", 0, 0)], 2, r"run\.log"),
    ],
)
def test_a_run_is_restarted_after_a_fault_and_given_up_after_another_failure(
    starts: list[tuple[str, int | None, int | None]], made: int, said: str, tmp_path: Path
):
    def launch(recipe: Path, environment: Mapping[str, str], _: int) -> Sequence[Process]:
        mark, *statuses = starts.pop(0)
        if mark:
            (Path(environment["RAYTRAIN_DDP_FAILPOINTS_DIR"]) / mark).touch()
        return [Ended(status) for status in statuses]

    plan = [Fault("train.loss"), Fault("train.loss", 1)]
    run = KilledRun(tiny_config(tmp_path, "run"), launch, {}, plan, repeat(2))
    with pytest.raises(RaytrainError, match=said) if said else nullcontext():
        run.drive()
    assert len(run.sizes) == made


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_leftover_processes_are_found_by_their_environment_and_ended():
    code = "import os, time; os.fork(); print(flush=True); time.sleep(60)"
    command, tag = [sys.executable, "-c", code], uuid.uuid4().hex
    environment = {**os.environ, TAG: tag}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # both are there
        assert end_tagged(f"other-{tag}", 0.0) == []
        assert len(end_tagged(tag, 0.0)) == 2
        assert process.wait(20) == -signal.SIGKILL


def test_two_runs_are_equal_only_if_all_bits_records_and_files_are(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "one", log=LOG, epochs=1, limit_train_batches=4)
    workers(1, run_tiny, plain(config))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (run_storage(replace(config, name=name)) for name in ("one", "two"))

    def wrong() -> list[str]:
        return [row.what.split()[0] for row in compare(one, two) if not row.equal]

    assert results_of(one)["leftover files"] == "0"
    log = tmp_path / "two" / METRICS_FILE
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines):
        kind, what = json.loads(line)["kind"], "log"
        for key in {"train": ("loss", "lr"), "audit": ("sha256",), "eval": ("metrics",)}[kind]:
            what = "samples" if kind == "audit" else "log"
            changed = json.dumps({**json.loads(line), key: "other"})
            log.write_text("\n".join([*lines[:number], changed, *lines[number + 1 :]]))
            assert wrong() == [what]
        for others in ([], [line, line]):  # it is missing, or there twice
            log.write_text("\n".join([*lines[:number], *others, *lines[number + 1 :]]))
            assert what in wrong()
        later = json.dumps({**json.loads(line), "seconds": 9.9})
        log.write_text("\n".join([*lines[:number], later, *lines[number + 1 :]]))
        assert wrong() == [], "time is no part of it"
    checkpoints = tmp_path / "two" / "checkpoints"
    (checkpoints / ".tmp-x").touch()
    (checkpoints / "step-00000011-a0001").mkdir()
    (checkpoints / "step-00000011-a0001" / "model.safetensors").touch()
    assert wrong() == ["leftover"]
    assert results_of(two)["leftover files"].startswith("2 ")
    model = checkpoints / str(checkpoint_store(two).names()[0]) / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        results_of(two)


# ------------------------------------------------------------------ whole runs


FAULTS = [  # at every site, on each rank, in each phase of a commit, and in consecutive starts
    Fault("train.before_step", 1, 2),
    Fault("train.loss", 2, 4),
    Fault("train.after_backward", 0, 5),
    Fault("checkpoint.snapshot", step=6),
    Fault("checkpoint.begin", step=6),
    *(Fault("checkpoint.payload", step=9, hit=hit) for hit in (1, 2, 3, 4)),
    Fault("checkpoint.manifest", step=12),
    Fault("checkpoint.committed", step=12),
    Fault("train.after_step", 2, 13),
    *(Fault("start.opened", 1), Fault("start.warmed_up", 2), Fault("start.loaded", 0)),
    *(Fault("prune.manifest"), Fault("prune.done")),
    Fault("evaluate", 1, 20),
    Fault("data.read", 2, 23),
    Fault("train.after_backward", 1, 29),
    Fault("checkpoint.manifest", step=TOTAL_STEPS),
    Fault("checkpoint.committed", step=TOTAL_STEPS),
]


def test_fault_01_02_03_05_a_run_killed_at_every_failpoint_ends_with_the_same_bits(tmp_path: Path):
    """Three workers without Ray, once undisturbed and once killed 22 times."""
    plan = [replace(f, after=n) if f.step is None else f for n, f in enumerate(FAULTS)]
    config = tiny_config(tmp_path, "calm", task=TINY, log=LOG)
    config = replace(config, checkpoint=CheckpointConfig(every_steps=3, every_s=0.0))
    config = replace(config, scaling=ScalingConfig(num_workers=3, use_gpu=False))
    tag = uuid.uuid4().hex  # processes with it are killed: never those of other tests
    environment = {**os.environ, TAG: tag}
    with without_ray(environment) as launch:
        calm = KilledRun(config, launch, environment, [], repeat(3))
        wild = KilledRun(replace(config, name="wild"), launch, environment, plan, repeat(3))
        calm.drive()
        wild.drive()
    rows = compare(run_storage(calm.config), run_storage(wild.config))
    assert [row for row in rows if not row.equal] == []
    steps = [record["step"] for record in read_history(run_storage(wild.config))]
    assert [*dict.fromkeys(steps)] == [*range(1, TOTAL_STEPS + 1)]
    assert {*wild.fired} == {*plan}
    assert {fault.site for fault in wild.fired} == {*SITES} - {DRIVER, *NOT_DRAWN}
    assert len(plan) / 2 < len(wild.sizes) <= 1 + len(plan)  # two ranks may die at once
    assert end_tagged(tag, 0.0) == []


def tiny_args(storage: Path, *argv: str) -> ChaosArgs:
    flags = ("--local", "--storage", str(storage), "--task", TINY, "--optim.lr", "0.05")
    flags += ("--batch-size", "32", "--micro-batch", "8", "--checkpoint.every-steps", "3")
    return parse([*flags, "--data.workers", "1", *argv])


def test_a_killed_and_resized_run_equals_one_undisturbed_worker(tmp_path: Path):
    flags = ("--exact", "--resize", "--workers", "4", "--kills", "8", "--epochs", "3")
    outcome = chaos(tiny_args(tmp_path, *flags, "--seed", "2"))
    assert outcome.equal, outcome.rows
    sizes = outcome.disturbed.sizes
    assert list(tmp_path.iterdir()) == []
    assert len({*sizes}) > 2
    assert all(before != after for before, after in pairwise(sizes))
    assert len(outcome.disturbed.fired) >= 6


def test_a_difference_is_reported_with_status_1_and_both_runs_are_kept(tmp_path: Path):
    """The loss in a line of the first run's log is changed while the second one runs."""
    words = ["--local", "--kills", "2", "--epochs", "1", "--batch-size", "256", "--seed", "3"]
    with chaos_process(tmp_path, words) as process:
        out = until(process, "disturbed")
        [log] = tmp_path.glob(f"runs/chaos-*/undisturbed/{METRICS_FILE}")
        log.write_text(log.read_text().replace('"loss": 2.', '"loss": 3.', 1))
        out += process.communicate(timeout=100)[0]
    assert process.returncode == 1, out
    assert "disturbed: 2 faults in 6 steps" in out
    assert [line.split()[0] for line in out.splitlines() if "WRONG" in line] == ["log"]
    assert len(list(tmp_path.glob(f"runs/chaos-*/*disturbed/{METRICS_FILE}"))) == 2
    assert out.endswith(f"raytrain chaos {' '.join(words)}\n")


def test_ctrl_c_ends_all_processes_and_leaves_no_files(tmp_path: Path):
    with chaos_process(tmp_path, ["--local", "--storage", "."]) as process:
        until(process, "undisturbed")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=100)[0].splitlines() == ["stopped"]
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def chaos_process(folder: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raytrain_ddp", "chaos", *words]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1"}
    return WarmPython(command, cwd=folder, env=environment, **streams)


def until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if line.startswith(word):
            return read
    raise AssertionError(read)


REFUSED = {  # arguments, and what the line names
    "--kills -1": "--kills = -1",
    "--workers 9": "slots",
    "--name x": "--name",
    "--local --drivers 1": "--drivers",
    "--resize --local": "--resize",
    "--resize --exact": "--resize",
    "no-such-recipe": "no-such-recipe",
    "--storage s3://key:hidden@bucket/runs --local": "s3://bucket/runs",
    "--storage a-file --local": "a-file: cannot be written",
    "--storage a-file/runs --local": "cannot be written: Not a directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_invalid_arguments_are_refused_in_one_line(words: str, tmp_path: Path):
    (tmp_path / "a-file").touch()
    answer = run_cli("chaos", *words.split(), cwd=tmp_path)
    assert answer.status in (2, 3)
    assert REFUSED[words] in answer.err
    assert answer.err.count("\n") == 1
    assert "hidden" not in answer.err
    assert answer.heavy == []


# ------------------------------------------------------------------ long ones


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("more", [(), ("--exact", "--resize", "--workers", "4")])
def test_a_run_with_a_thousand_kills_ends_with_the_same_bits(more: tuple[str, ...], tmp_path: Path):
    many = ("--kills", "1000", "--epochs", "40", "--seed", "1")
    outcome = chaos(tiny_args(tmp_path, *many, *more))
    require_equal(outcome, 0.95)
    print(f"\n{len(outcome.disturbed.fired)} faults, {len(outcome.disturbed.sizes)} starts")


def require_equal(outcome: ChaosOutcome, share: float) -> None:
    """Nearly all faults of the plan have fired; some may have no occasion."""
    assert outcome.equal, outcome.rows
    assert len(outcome.disturbed.fired) >= share * len(outcome.disturbed.plan)
