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
from slurm_cluster import LeftOn, SlurmCluster

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
