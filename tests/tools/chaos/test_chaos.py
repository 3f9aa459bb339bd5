"""The command `chaos`: runs that are killed many times and still end with the same result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import Group, run_cli
from tiny import TOTAL_STEPS, plain, run_tiny, tiny_config
from warm_python import WarmPython

from raytrain_ddp.checkpoint.run_folder import METRICS_FILE, checkpoint_store, run_storage
from raytrain_ddp.config.sections import CheckpointConfig, LogConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError
from raytrain_ddp.failpoints import SITES, arm
from raytrain_ddp.tools.chaos.__main__ import parse
from raytrain_ddp.tools.chaos.comparison import results_of
from raytrain_ddp.tools.chaos.experiment import ChaosOptions, ChaosOutcome, chaos
from raytrain_ddp.tools.chaos.fault_plan import DRIVER, Fault, RunShape, armed, draw_faults
from raytrain_ddp.tools.chaos.observation import (
    TAG,
    FaultMonitor,
    FiredFault,
    LogFollower,
    Watcher,
    drive,
    tag,
    tagged,
)
from raytrain_ddp.tools.chaos.runners import LocalRunner, RayRunner, Zygote

HERE = Path(__file__).parents[2]
SHAPE = RunShape(total_steps=100, world_size=3, save_every=5)
TINY = f"{HERE / 'tiny.py'}:TinyTask"

# Sites of the driver, and one that changes the result.
NOT_DRAWN = {"driver.event", "train.weights"}
NOT_DRAWN |= {
    "start.met",
    "start.alone",
    "train.log",
    "train.compare",
}  # where the other workers keep their state


class Notes(Watcher):
    """Collects everything that is reported to it."""

    def __init__(self) -> None:
        self.faults: list[FiredFault] = []

    def fired(self, fired: FiredFault) -> None:
        self.faults.append(fired)


# ------------------------------------------------------------------ the plan


def test_a_plan_is_a_function_of_its_arguments():
    plan = draw_faults(7, SHAPE, kills=60, drivers=4, nodes=3)
    assert draw_faults(7, SHAPE, kills=60, drivers=4, nodes=3) == plan
    assert draw_faults(8, SHAPE, kills=60, drivers=4, nodes=3) != plan
    assert len(plan) == 67
    assert [f.site for f in plan].count(DRIVER) == 4
    assert [f.action for f in plan].count("node") == 3


def test_the_plan_of_a_seed_never_changes():
    """Otherwise, the command that replays a run would not work after an upgrade."""
    assert armed(draw_faults(0, SHAPE, kills=3, drivers=1)) == PINNED


PINNED = (
    "train.after_step:kill@rank=2,from=26;"
    "data.read:kill@rank=0,from=48;"
    "checkpoint.payload:kill@step=90,hit=1"
)


def test_a_plan_of_many_kills_contains_every_kind_of_fault_and_no_duplicates(tmp_path: Path):
    plan = draw_faults(0, SHAPE, kills=400, drivers=3)
    assert len({str(fault) for fault in plan}) == len(plan)
    sites = {fault.site for fault in plan}
    assert sites == {*SITES, DRIVER} - {"evaluate", *NOT_DRAWN}
    assert {f.rank for f in plan if f.site == "train.loss"} == {0, 1, 2}
    assert {f.hit for f in plan if f.site == "checkpoint.payload"} == {1, 2, 3, 4}
    arm(armed(plan), str(tmp_path))  # each is accepted
    arm("", str(tmp_path))
    commits = [f.step for f in plan if f.site.startswith("checkpoint.")]
    assert any(commits.count(step) >= 2 for step in commits)  # killed on consecutive attempts
    assert all(step % SHAPE.save_every == 0 for step in commits if step is not None)
    ranks = [f.rank for f in plan if f.site.startswith("start.")]
    assert set(ranks) == {0, 1, 2}


def test_faults_without_a_step_wait_for_earlier_faults():
    plan = draw_faults(3, SHAPE, kills=200)
    for place, fault in enumerate(plan):
        assert fault.after == (place if fault.step is None else None)
    assert plan[0].step is not None  # the start after a kill is killed
    pairs = pairwise(plan)
    assert any(a.site.startswith("start.") and b.site.startswith("start.") for a, b in pairs)
    steps = [fault.step for fault in plan if fault.step is not None]
    assert steps == sorted(steps)


def test_more_kills_than_failpoints_are_refused():
    short = RunShape(total_steps=5, world_size=1, save_every=5)
    with pytest.raises(ConfigError, match="too many kills"):
        draw_faults(0, short, kills=100)
    assert len(draw_faults(0, short, kills=0, drivers=3)) == 3
    with pytest.raises(ConfigError, match="too many drivers"):
        draw_faults(0, short, kills=0, drivers=4)


# ------------------------------------------------------------------ watching


def test_the_log_is_followed_across_restarts_and_each_step_is_counted(tmp_path: Path):
    """At most two starts between two polls; an incomplete line is ignored."""
    path = tmp_path / "metrics.jsonl"
    log = LogFollower(path)
    log.look()
    assert (log.step, log.executed) == (0, 0)

    def line(step: int, seconds: float, kind: str = "train") -> str:
        return json.dumps({"kind": kind, "step": step, "seconds": seconds}) + "\n"

    first = [line(step, 0.1 * step) for step in (1, 2, 3)]
    path.write_text("".join(first) + line(3, 0.4, "eval") + first[0][:9])
    log.look()
    assert (log.step, log.executed) == (3, 3)
    with path.open("a") as file:
        file.write(line(4, 0.5)[9:])
    log.look()
    log.look()
    assert log.executed == 4
    with path.open("a") as file:
        file.write(line(5, 0.6))  # the file is replaced before a poll
    again = tmp_path / "again"
    again.write_text("".join(first[:2]) + line(3, 0.05))
    again.replace(path)
    log.look()
    assert (log.step, log.executed) == (3, 6)
    log.close()


def test_a_fired_fault_is_reported_once_with_its_location(tmp_path: Path):
    plan = [
        Fault("train.loss", 1, 4),
        Fault(DRIVER, step=6),
        Fault("start.loaded", 0, after=1),
        Fault("train.after_step", 2, 9),
    ]
    faults = FaultMonitor(plan, tmp_path / "fired")
    assert faults.news() == []
    (tmp_path / "fired" / "fired-1").write_text("0 30")
    (tmp_path / "fired" / "fired-2").write_text("")  # killed during a write
    reported = faults.news()
    assert [(f.number, f.fault.site, f.rank, f.step) for f in reported] == [
        (1, "start.loaded", 0, 30),
        (2, "train.after_step", 2, 9),
    ]
    assert faults.news() == []
    assert faults.driver_due(5) is None
    due = faults.driver_due(8)
    assert due is not None
    assert (due.number, due.fault.site, due.step) == (3, DRIVER, 8)
    assert faults.driver_due(99) is None
    assert faults.count == 3
    assert len(list((tmp_path / "fired").iterdir())) == 3  # counts for `after`, too


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_leftover_processes_are_found_by_their_environment():
    code = "import os, time; os.fork(); print(flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=tag("here", os.environ),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()  # both are there
    found = tagged("here")
    assert process.pid in found
    assert len(found) == 2
    assert tagged("elsewhere") == {}
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()
    assert TAG not in os.environ


class Scripted:
    """A runner whose starts exit with these statuses; each may fire a fault."""

    def __init__(self, starts: Sequence[tuple[int, str]], fired: Path) -> None:
        self._starts, self._fired = list(starts), fired
        self.sizes: list[int] = []

    def start(self) -> None:
        self._status, name = self._starts.pop(0)
        if name:
            (self._fired / name).touch()

    def ended(self) -> Sequence[int]:
        return [0, self._status, 0]

    def kill(self) -> None:
        raise AssertionError

    def words(self) -> str:
        return "ValueError: no"

    def close(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("starts", "made", "problem"),
    [
        ([(0, "")], 1, ""),
        ([(-9, "fired-0"), (1, "fired-1"), (0, "")], 3, ""),
        ([(-9, "fired-0"), (1, ""), (0, "")], 2, "it failed (1) without a fault: ValueError: no"),
    ],
)
def test_a_run_is_restarted_after_a_fault_and_abandoned_after_an_unexplained_exit(
    starts: list[tuple[int, str]], made: int, problem: str, tmp_path: Path
):
    faults = FaultMonitor([Fault("train.loss"), Fault("train.loss", 1)], tmp_path / "fired")
    log = LogFollower(tmp_path / METRICS_FILE)
    runner = Scripted(starts, tmp_path / "fired")
    ran = drive(runner, log, faults, Watcher())
    assert (ran.starts, ran.problem) == (made, problem)


class Frozen(Scripted):
    """Does nothing until it is killed."""

    killed = False

    def ended(self) -> Sequence[int] | None:
        return [-9] if self.killed else None

    def kill(self) -> None:
        self.killed = True


def test_a_run_without_progress_is_killed_and_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raytrain_ddp.tools.chaos.observation.STUCK_S", 0.1)
    faults = FaultMonitor([], tmp_path / "fired")
    runner = Frozen([(0, "")], tmp_path / "fired")
    ran = drive(runner, LogFollower(tmp_path / METRICS_FILE), faults, Watcher())
    assert "no step and no fault" in ran.problem
    assert runner.killed


# ------------------------------------------------------------------ comparing


def test_two_runs_are_equal_only_if_all_bits_records_and_files_are(workers: Group, tmp_path: Path):
    audited = LogConfig(every_steps=1, tensorboard=False, audit=True)
    config = tiny_config(tmp_path, "one", log=audited, epochs=1, limit_train_batches=4)
    workers(1, run_tiny, plain(config))
    run = run_storage(config)
    left = results_of(run)
    assert list(left.steps) == [1, 2, 3, 4]
    assert left.leftovers == []

    other = replace(config, name="two")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert results_of(run_storage(other)) == left
    log = tmp_path / "two" / METRICS_FILE
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        kind = record["kind"]
        for key in {"train": ("loss", "lr"), "audit": ("sha256",), "eval": ("metrics",)}[kind]:
            changed = {**record, key: "other"}
            log.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]))
            assert results_of(run_storage(other)) != left, (kind, key)
        log.write_text("\n".join(lines[:number] + lines[number + 1 :]))
        assert results_of(run_storage(other)) != left, "a record is missing"
        log.write_text("\n".join([*lines[:number], line, *lines[number:]]))
        assert results_of(run_storage(other)) != left, "a record is there twice"
        log.write_text(
            "\n".join(
                [*lines[:number], json.dumps({**record, "seconds": 9.9}), *lines[number + 1 :]]
            )
        )
        assert results_of(run_storage(other)) == left, "time is no part of it"
    log.write_text("\n".join(lines))

    checkpoints = tmp_path / "two" / "checkpoints"
    (checkpoints / ".tmp-x").touch()
    (checkpoints / "step-00000011-a0001").mkdir()
    (checkpoints / "step-00000011-a0001" / "model.safetensors").touch()
    assert list(results_of(run_storage(other)).leftovers) == [
        "checkpoints/.tmp-x",
        "checkpoints/step-00000011-a0001/",
    ]
    newest = checkpoint_store(run_storage(other)).names()[0]
    model = checkpoints / str(newest) / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    with pytest.raises(RaytrainError, match=r"model\.safetensors"):
        results_of(run_storage(other))


# ------------------------------------------------------------------ whole runs


@pytest.fixture
def warm_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that forks the workers is itself forked from one that has loaded torch.

    Its leftover processes could not be found: a fork keeps the original environment in /proc.
    """
    started = SimpleNamespace(Popen=WarmPython, PIPE=subprocess.PIPE)
    monkeypatch.setattr("raytrain_ddp.tools.chaos.runners.subprocess", started)


def tiny_order(storage: Path, kills: int, drivers: int, epochs: int, seed: int = 0) -> ChaosOptions:
    config = tiny_config(storage, "undisturbed", task=TINY, epochs=epochs, seed=seed)
    config = replace(config, checkpoint=CheckpointConfig(every_steps=3, every_s=0.0))
    return ChaosOptions(config, kills, drivers, workers=3, local=True)


def faults_at_every_site() -> list[Fault]:
    """A kill at every site, on each rank, in each phase of a commit, and in consecutive starts."""
    plan = [
        Fault("train.before_step", 1, 2),
        Fault("train.loss", 2, 4),
        Fault("train.after_backward", 0, 5),
        Fault("checkpoint.snapshot", step=6),
        Fault("checkpoint.begin", step=6),
        *(Fault("checkpoint.payload", step=9, hit=hit) for hit in (1, 2, 3, 4)),
        Fault("checkpoint.manifest", step=12),
        Fault("checkpoint.committed", step=12),
        Fault("train.after_step", 2, 13),
        Fault("start.opened", 1),
        Fault("start.warmed_up", 2),
        Fault("start.loaded", 0),
        Fault("prune.manifest"),
        Fault("prune.done"),
        Fault("evaluate", 1, 20),
        Fault("data.read", 2, 23),
        Fault(DRIVER, step=25),
        Fault("train.after_backward", 1, 29),
        Fault("checkpoint.manifest", step=TOTAL_STEPS),
        Fault("checkpoint.committed", step=TOTAL_STEPS),
    ]
    return [
        replace(fault, after=place) if fault.step is None else fault
        for place, fault in enumerate(plan)
    ]


def test_fault_01_02_03_05_a_run_killed_at_every_failpoint_ends_with_the_same_bits(tmp_path: Path):
    """Three workers without Ray, once undisturbed and once killed 23 times."""
    config = replace(
        tiny_order(tmp_path, 0, 0, epochs=3).config,
        log=LogConfig(every_steps=1, tensorboard=False, audit=True),
        scaling=ScalingConfig(num_workers=3, use_gpu=False),
    )
    notes = Notes()
    left, rans = [], []
    with Zygote(tag("sweep", os.environ)) as zygote:
        zygote.order("kill")  # after the run has ended: no effect
        for name, plan in (("undisturbed", []), ("disturbed", faults_at_every_site())):
            ours = replace(config, name=name)
            faults = FaultMonitor(plan, tmp_path / f"fired-{name}")
            log = LogFollower(tmp_path / name / METRICS_FILE)
            runner = LocalRunner(zygote, ours, plan, faults.folder, lambda _: 3)
            ran = drive(runner, log, faults, notes)
            log.close()
            assert ran.problem == ""
            rans.append(ran)
            left.append(results_of(run_storage(ours)))
    assert left[0] == left[1]
    assert list(left[1].steps) == list(range(1, TOTAL_STEPS + 1))
    assert left[1].leftovers == []
    reported = notes.faults
    assert sorted(str(fired.fault) for fired in reported) == sorted(
        map(str, faults_at_every_site())
    )
    assert {fired.fault.site for fired in reported} == {*SITES, DRIVER} - NOT_DRAWN
    assert rans[0].executed == TOTAL_STEPS < rans[1].executed
    assert len(reported) / 2 < rans[1].starts <= 1 + len(reported)  # two ranks may die at once
    assert tagged("sweep") == {}


def require_equal(outcome: ChaosOutcome, notes: Notes) -> None:
    """Asserts no difference, and that nearly all faults of the plan fired; some may have no
    occasion."""
    assert outcome.equal, [row for row in outcome.rows if not row.right]
    assert [row.what for row in outcome.rows[:4]] == [
        f"{name} (sha256)" for name in ("weights", "optimizer", "samples", "log")
    ]
    assert all(row.undisturbed == row.disturbed for row in outcome.rows[:4])
    assert len(notes.faults) == outcome.fired >= 0.99 * outcome.planned
    assert outcome.disturbed.executed > outcome.total_steps == outcome.undisturbed.executed


def resized(order: ChaosOptions, notes: Notes) -> ChaosOutcome:
    """With 1 to 4 workers, a different number at each start, and exact: equal to a one-worker
    run."""
    order = replace(order, config=replace(order.config, exact=True), resize=True, workers=4)
    outcome = chaos(order, notes)
    assert outcome.equal, [row for row in outcome.rows if not row.right]
    return outcome


@pytest.mark.usefixtures("warm_zygote")
def test_a_killed_and_resized_run_equals_one_undisturbed_worker(tmp_path: Path):
    notes = Notes()
    outcome = resized(tiny_order(tmp_path, kills=8, drivers=1, epochs=3, seed=2), notes)
    assert outcome.undisturbed.sizes == [1]
    sizes = outcome.disturbed.sizes
    assert len({*sizes}) > 2
    assert all(before != after for before, after in pairwise(sizes))
    assert len(notes.faults) == outcome.fired >= 0.8 * outcome.planned


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_with_a_thousand_kills_and_resizes_equals_one_undisturbed_worker(tmp_path: Path):
    notes = Notes()
    outcome = resized(tiny_order(tmp_path, kills=1000, drivers=20, epochs=40, seed=1), notes)
    assert outcome.fired >= 0.95 * outcome.planned
    assert {*outcome.disturbed.sizes} == {1, 2, 3, 4}
    print(f"\n{outcome.fired} faults, {outcome.disturbed.starts} starts")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_with_a_thousand_kills_ends_with_the_same_bits(tmp_path: Path):
    notes = Notes()
    started = time.monotonic()
    outcome = chaos(tiny_order(tmp_path, kills=1000, drivers=20, epochs=40, seed=1), notes)
    require_equal(outcome, notes)
    calm, wild = outcome.undisturbed, outcome.disturbed
    print(
        f"\n{outcome.fired} of {outcome.planned} faults in {time.monotonic() - started:.0f} s, "
        f"{wild.starts} starts; steps: useful {outcome.total_steps} / executed {wild.executed}; "
        f"{(wild.wall_s - calm.wall_s) / outcome.fired:.2f} s per fault"
    )


# ------------------------------------------------------------------ on Ray


def digits_order(storage: Path, kills: int, drivers: int) -> ChaosOptions:
    return ChaosOptions(TrainConfig(storage=str(storage), epochs=4), kills, drivers, workers=3)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fault_01_05_killed_workers_and_a_killed_driver_on_ray_leave_no_processes(tmp_path: Path):
    notes = Notes()
    outcome = chaos(digits_order(tmp_path, kills=3, drivers=2), notes)
    require_equal(outcome, notes)
    assert [fired.fault.site for fired in notes.faults].count(DRIVER) == 2
    assert outcome.rows[-1].what == "processes left behind"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fault_06_after_the_head_is_lost_the_same_command_resumes_on_a_new_one(tmp_path: Path):
    """Ray's server (GCS) of an embedded Ray is killed: the run ends by itself within bounded time.

    The same command resumes it, and the result equals that of a run without Ray.
    """
    slow = (
        tmp_path / "slow"
    )  # workers do not need the server: with few steps left, they would finish
    config = replace(
        digits_order(tmp_path, 0, 0).config,
        task=f"{HERE / 'ray_tasks.py'}:Paced",
        task_options={"slow": str(slow), "pause_s": "2"},
        log=LogConfig(every_steps=1, tensorboard=False, audit=True),
        checkpoint=CheckpointConfig(every_steps=5, every_s=0.0),
        scaling=ScalingConfig(num_workers=3, cpus_per_worker=0.5, use_gpu=False),
    )
    environment = tag("head", os.environ)
    calm, wild = (replace(config, name=name) for name in ("undisturbed", "disturbed"))
    plan = [Fault("driver.event", step=40)]  # recorded here when the server is killed
    faults = FaultMonitor(plan, tmp_path / "fired")

    class HeadKiller(Watcher):
        def at(self, step: int) -> None:
            if step >= 40 and not (tmp_path / "fired" / "fired-0").exists():
                (server,) = [pid for pid, line in tagged("head").items() if "gcs_server" in line]
                os.kill(server, 9)
                slow.touch()
                (tmp_path / "fired" / "fired-0").touch()

    class Again(RayRunner):
        def start(self) -> None:
            slow.unlink(missing_ok=True)
            super().start()

    with Zygote(environment) as zygote:
        nothing = FaultMonitor([], tmp_path / "fired-undisturbed")
        log = LogFollower(tmp_path / "undisturbed" / METRICS_FILE)
        local = LocalRunner(
            zygote, calm, [], nothing.folder, lambda _: calm.scaling.worker_range()[1]
        )
        assert drive(local, log, nothing, Watcher()).problem == ""
        log.close()
    log = LogFollower(tmp_path / "disturbed" / METRICS_FILE)
    ran = drive(Again(wild, environment), log, faults, HeadKiller())
    log.close()
    assert (ran.problem, ran.starts, ran.statuses) == ("", 2, [0])
    assert results_of(run_storage(wild)) == results_of(run_storage(calm))
    deadline = time.monotonic() + 90  # two of Ray's own agents notice it late
    while tagged("head") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert tagged("head") == {}


# ------------------------------------------------------------------ a difference


class TamperingWatcher(Notes):
    """Changes the loss in one line of the disturbed run's log before the comparison."""

    def __init__(self, storage: Path) -> None:
        super().__init__()
        self._storage = storage

    def phase(self, name: str, planned: int = 0, total_steps: int = 0) -> None:
        if name == "comparing":
            (log,) = self._storage.glob(f"chaos-*/disturbed/{METRICS_FILE}")
            log.write_text(log.read_text().replace('"loss": 1.', '"loss": 2.', 1))


@pytest.mark.usefixtures("warm_zygote")
def test_a_difference_is_reported_and_both_runs_are_kept(tmp_path: Path):
    outcome = chaos(tiny_order(tmp_path, kills=1, drivers=0, epochs=1), TamperingWatcher(tmp_path))
    assert not outcome.equal
    assert [row.what for row in outcome.rows if not row.right] == ["log (sha256)"]
    assert (outcome.folder / "disturbed" / METRICS_FILE).exists()
    assert (outcome.folder / "undisturbed" / METRICS_FILE).exists()


# ------------------------------------------------------------------ the command


def test_the_command_prints_the_faults_the_verdict_and_the_line_that_replays_it(tmp_path: Path):
    argv = ("--local", "--kills", "2", "--drivers", "0", "--epochs", "1", "--batch-size", "256")
    argv = (*argv, "--micro-batch", "64", "--seed", "3")
    answer = run_cli("chaos", *argv, cwd=tmp_path)
    assert answer.status == 0, answer.out + answer.err
    assert answer.heavy == []
    assert "disturbed: 2 faults in 6 steps" in answer.out
    for words in ("weights (sha256)", "equal to the last bit", "useful 6 / executed"):
        assert words in answer.out
    assert f"raytrain chaos {' '.join(argv)}" in answer.out
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--kills", "-1"), "--kills = -1: must be 0 or more"),
        (("--workers", "9"), "slots"),
        (("--nodes", "3", "--local"), "--nodes = 3"),
        (("--resize", "--local"), "needs --exact"),
        (("--resize", "--exact"), "needs --local, or --nodes"),
        (("no-such-recipe",), "no-such-recipe"),
        (("--storage", "s3://key:hidden@bucket/runs", "--local"), "s3://bucket/runs"),
        (("--storage", "a-file", "--local"), "a-file: cannot be written: File exists"),
        (("--storage", "a-file/runs", "--local"), "cannot be written: Not a directory"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    argv: tuple[str, ...], words: str, tmp_path: Path
):
    (tmp_path / "a-file").touch()
    answer = run_cli("chaos", *argv, cwd=tmp_path)
    assert answer.status in (ConfigError.exit_status, PreflightError.exit_status)
    assert words in answer.err
    assert "Traceback" not in answer.err
    assert "hidden" not in answer.err
    assert answer.heavy == []


def test_help_answers_at_once(tmp_path: Path):
    answer = run_cli("chaos", "--help-all", cwd=tmp_path)
    assert answer.status == 0
    assert answer.heavy == []
    assert answer.cpu_s < 2
    for flag in ("--kills", "--drivers", "--nodes", "--local", "--workers", "--optim.lr"):
        assert flag in answer.out


def test_flags_override_the_recipe():
    args = parse(["digits", "--epochs", "5", "--kills", "7"])
    assert (args.recipe, args.config.epochs, args.kills) == ("digits", 5, 7)
    assert parse([]).config == TrainConfig()
