"""slurm.sbatch on a real Slurm with stand-ins for Ray and the run.

Tests what it does, and leaves behind, when Slurm ends, preempts, or loses a job.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import wait_until
from slurm import FAKES, ROOT
from slurm_cluster import CGROUP, Job, LeftOn, SlurmCluster

from raytrain_ddp.command_line import parse_fit

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
SBATCH = f"{ROOT}/clusters/slurm.sbatch"
QUICK = FAKES / "quick"


class StandInJob:
    """A job whose run is a stand-in."""

    def __init__(self, slurm: SlurmCluster, notes: Path, flags: str = "", ray: str = "") -> None:
        notes.mkdir()
        self.notes = notes
        where = {"PATH": f"{QUICK}:$PATH", "PYTHONPATH": QUICK, "FAKE_FIT": "train"}
        where["FAKE_RAY"] = ray
        self.job = slurm.submit(f"{flags} {SBATCH} mine.toml", FAKE_NOTES=notes, **where)

    def wait_for(self, name: str, timeout_s: float = 60) -> None:
        """Waits until it has written this note."""
        path = self.notes / name
        wait_until(path.exists, timeout_s, f"{name}: {self.job.state}: {self.job.output}")

    @property
    def asked(self) -> list[int]:
        """The signals that the run received before it had made its checkpoint."""
        asked: list[int] = json.loads((self.notes / "asked.json").read_text())
        return asked

    def forget(self) -> None:
        """Resets its notes to those before its first start."""
        shutil.rmtree(self.notes)
        self.notes.mkdir()


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    if slurm.sh("squeue --noheader"):  # the test has failed
        slurm.sh("scancel --user=root")
        wait_until(lambda: not slurm.sh("squeue --noheader"), 60, "jobs to end")
    wait_until(lambda: not slurm.left_on_nodes(), 30, LeftOn(slurm))


def test_jobs_are_in_cgroups_if_slurm_is_configured_to_use_them(slurm: SlurmCluster):
    job = slurm.submit("--nodes=1 --wrap 'cat /proc/self/cgroup'")
    job.wait({"COMPLETED"}, 30)
    assert (f"/job_{job.number}/" in job.output) == (slurm.tracks == CGROUP)


def test_scancel_leaves_no_files_or_processes(slurm: SlurmCluster, tmp_path: Path):
    tried = StandInJob(slurm, tmp_path / "notes")
    tried.wait_for("training")
    tried.job.cancel()
    tried.job.wait({"CANCELLED"}, 30)


def test_scancel_of_the_script_alone_ends_the_job_with_a_checkpoint(
    slurm: SlurmCluster, tmp_path: Path
):
    tried = StandInJob(slurm, tmp_path / "notes")
    tried.wait_for("training")
    tried.job.cancel("--batch --signal=TERM")
    tried.job.wait({"FAILED"}, 30)
    facts = tried.job.facts()
    assert (facts["ExitCode"], facts["Restarts"]) == ("143:0", "0")
    assert tried.asked == [15]


def test_a_job_is_requeued_before_its_time_limit(slurm: SlurmCluster, tmp_path: Path):
    tried = StandInJob(slurm, tmp_path / "notes")
    tried.wait_for("training")
    tried.forget()
    tried.job.warn()
    tried.job.wait({"PENDING"}, 60)
    assert tried.asked == [15]
    tried.forget()
    tried.job.update("TimeLimit=60")
    tried.job.begin_again()
    tried.wait_for("training")
    assert tried.job.facts()["Restarts"] == "1"
    tried.job.cancel("--batch --signal=TERM")
    tried.job.wait({"FAILED"}, 30)


def test_a_preempted_job_makes_its_checkpoint_and_is_requeued(slurm: SlurmCluster, tmp_path: Path):
    """PreemptMode=REQUEUE with GraceTime: at first, Slurm signals only the steps."""
    tried = StandInJob(slurm, tmp_path / "notes")
    tried.wait_for("training")
    urgent = slurm.submit("--partition=urgent --nodes=2 --exclusive --wrap 'sleep 1'")
    urgent.wait({"COMPLETED"}, 50)  # before the grace time has passed: it is not needed
    assert tried.asked == [15]
    facts = tried.job.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1")
    tried.forget()
    tried.job.begin_again()
    tried.wait_for("training")
    tried.job.cancel()
    tried.job.wait({"CANCELLED"}, 30)


def test_a_job_that_loses_a_node_is_requeued(slurm: SlurmCluster, tmp_path: Path):
    """The second node is powered off, and on again when Slurm considers it down."""
    tried = StandInJob(slurm, tmp_path / "notes")
    tried.wait_for("training")
    tried.forget()
    slurm.lab.crash("n2")
    wait_until(lambda: "down" in slurm.sh("sinfo --nodes=n2 --noheader --format=%T"), 60, slurm)
    tried.job.wait({"PENDING"}, 60)
    slurm.lab.boot("n2")
    slurm.start_node("n2")
    wait_until(slurm.is_ready, 60, slurm)
    tried.job.begin_again()
    tried.wait_for("training")
    facts = tried.job.facts()
    assert (facts["Restarts"], facts["NodeList"]) == ("1", "n[1-2]")
    tried.job.cancel()
    tried.job.wait({"CANCELLED"}, 30)


def test_two_concurrent_jobs_on_the_same_nodes_do_not_interfere(
    slurm: SlurmCluster, tmp_path: Path
):
    one, two = (StandInJob(slurm, tmp_path / name) for name in ("one", "two"))
    for tried in (one, two):
        tried.wait_for("training")
        assert tried.job.facts()["NodeList"] == "n[1-2]"
    one.job.cancel()
    one.job.wait({"CANCELLED"}, 30)
    wait_until(lambda: left(slurm, one.job) == [], 20, LeftOn(slurm))
    assert len(left(slurm, two.job)) >= 3, "its folders on both nodes, and the shared one"
    assert two.job.state == "RUNNING"
    assert not (two.notes / "stopping").exists()
    two.job.cancel()
    two.job.wait({"CANCELLED"}, 30)


@pytest.mark.parametrize(("ray", "tries"), [("slow", [3, 3]), ("late", [1, 5])])
def test_a_slow_ray_start_is_retried_on_its_node(
    slurm: SlurmCluster, tmp_path: Path, ray: str, tries: list[int]
):
    """As on a slow disk, where Ray's own limits are too short; or a node that lags behind."""
    tried = StandInJob(slurm, tmp_path / "notes", ray=ray)
    tried.wait_for("training")
    texts = [(tried.notes / f"tries-{node}").read_text() for node in range(2)]
    assert [text.count("\n") for text in texts] == tries
    tried.job.cancel("--batch --signal=TERM")
    tried.job.wait({"FAILED"}, 30)
    assert tried.asked == [15]


def test_tasks_of_an_array_are_independent_jobs(slurm: SlurmCluster, tmp_path: Path):
    """Both run concurrently; neither removes the other's folders."""
    (tmp_path / "wrap.sh").write_text(
        f'#!/bin/bash\nexport FAKE_NOTES={tmp_path}/$SLURM_ARRAY_TASK_ID\nexec bash {SBATCH} "$@"\n'
    )
    flags = "--array=0-1 --nodes=2 --ntasks-per-node=1 --cpus-per-task=16 --mem=64G"
    where = {"PATH": f"{QUICK}:$PATH", "PYTHONPATH": QUICK, "FAKE_FIT": "train"}
    notes = [tmp_path / str(number) for number in range(2)]
    for folder in notes:
        folder.mkdir()
    job = slurm.submit(f"{flags} {tmp_path}/wrap.sh mine.toml", **where)
    for folder in notes:
        wait_until((folder / "training").exists, 60, f"{job.state}: {job.output}")
    lines = [line.split() for line in slurm.sh("squeue --noheader --format='%K %A'").splitlines()]
    numbers = {task: int(number) for task, number in lines}
    assert numbers.keys() == {"0", "1"}
    assert job.number in numbers.values(), "a task has the number of the array"
    slurm.sh(f"scancel --batch --signal=TERM {job.number}_0")
    wait_until((notes[0] / "asked.json").exists, 30, job.number)
    wait_until(lambda: left(slurm, Job(slurm, numbers["0"])) == [], 30, LeftOn(slurm))
    assert slurm.sh("squeue --noheader --format=%K").split() == ["1"]
    assert not (notes[1] / "stopping").exists()
    job.cancel()
    wait_until(lambda: not slurm.sh("squeue --noheader"), 30, job.number)


def test_the_emitted_file_can_be_submitted_unchanged(slurm: SlurmCluster, tmp_path: Path):
    flags = "--name mine --scaling.num-workers 4 --scaling.use-gpu false"
    flags += " --scaling.cpus-per-worker 2"
    emitted = f"{tmp_path}/mine.sbatch"
    slurm.sh(f"python -m raytrain_ddp.fit digits {flags} --emit slurm > {emitted}")
    notes = tmp_path / "notes"
    notes.mkdir()
    where = {"PATH": f"{QUICK}:$PATH", "PYTHONPATH": QUICK, "FAKE_FIT": "train"}
    job = slurm.submit(f"{emitted} --epochs 3", FAKE_NOTES=notes, **where)
    wait_until((notes / "training").exists, 60, job)
    facts = job.facts()
    assert facts["JobName"] == "mine"
    assert int(facts["NumCPUs"]) >= 8
    asked = json.loads((notes / "fit.json").read_text())
    assert asked[0] == "digits"
    assert asked[-2:] == ["--epochs", "3"]
    given = parse_fit(asked).config
    wanted = parse_fit(["digits", *flags.split()]).config
    assert (given.scaling, given.name, given.epochs) == (wanted.scaling, "mine", 3)
    job.cancel("--batch --signal=TERM")
    job.wait({"FAILED"}, 30)
    assert json.loads((notes / "asked.json").read_text()) == [15]


def left(slurm: SlurmCluster, job: Job) -> list[str]:
    return [line for line in slurm.left_on_nodes() if f"-{job.number}" in line]
