"""slurm.sbatch with stand-ins for Slurm, Ray, and the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm import FAKES, ROOT, Job, free_number, port_of, processes_of

SBATCH = ROOT / "clusters" / "slurm.sbatch"
Submit = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    """Starts a job whose Ray and run are stand-ins."""
    quick = FAKES / "quick"
    jobs = []

    def start(*words: str, number: int | None = None, **variables: str) -> Job:
        number = number or free_number()
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        path = f"{quick}:{FAKES}:{os.environ['PATH']}"
        given = {"PATH": path, "PYTHONPATH": str(quick), "FAKE_FIT": "train", **variables}
        jobs.append(Job(folder, number, SBATCH, words, **given))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def reported_ray(job: Job, node: int) -> dict[str, Any]:
    reported: dict[str, Any] = json.loads((job.folder / f"ray-{node}.json").read_text())
    return reported


def asked_of_fit(job: Job) -> Any:
    return json.loads((job.folder / "asked.json").read_text())


def train(job: Job) -> None:
    job.wait_until((job.folder / "training").exists, 60)


def stop(job: Job) -> None:
    """Slurm's signal at the end of a job, which the run answers with a checkpoint."""
    job.warn(signal.SIGTERM)
    assert job.status() == 143, job.output


def test_the_time_limit_makes_a_checkpoint_and_requeues_the_job(submit: Submit):
    job = submit("mine.toml", "--name", "a b", SLURM_JOB_NUM_NODES="3")
    train(job)
    head, *workers = (reported_ray(job, node) for node in range(3))
    assert "--head" in head["words"]
    for reported in (head, *workers):
        assert reported["auth"] == "token"
        assert reported["token"] == [64, 0o600]
        assert reported["folder"] == 0o700
        assert reported["gloo"] == "lo"
        assert "--block" in reported["words"]
    addresses = {w for reported in workers for w in reported["words"] if w.startswith("--address=")}
    assert addresses == {f"--address=127.0.0.1:{port_of(job.number)}"}
    job.warn(signal.SIGUSR1)
    job.wait_until((job.folder / "stopping").exists, 30)
    job.warn(signal.SIGTERM)  # Slurm's own, at the limit: must not cut the checkpoint short
    assert job.status() == 143, job.output
    assert asked_of_fit(job) == [signal.SIGTERM]
    assert job.requeued == [f"requeue {job.number}"]
    assert json.loads((job.folder / "fit.json").read_text()) == ["mine.toml", "--name", "a b"]


def test_jobs_on_one_node_have_separate_ports_and_folders_and_leave_nothing(submit: Submit):
    """They are canceled, which makes a checkpoint and does not requeue them."""
    jobs = [submit(), submit()]
    for job in jobs:
        train(job)
    words = [reported_ray(job, 0)["words"] for job in jobs]
    ports = [{w.partition("=")[2] for w in each if "port=" in w} - {"0"} for each in words]
    assert [len(each) for each in ports] == [9, 9]
    assert not ports[0] & ports[1]
    stop(jobs[0])
    assert asked_of_fit(jobs[0]) == [signal.SIGTERM]
    assert jobs[0].requeued == []
    assert processes_of(jobs[0].folder) == []
    assert not Path(f"/tmp/ray-{jobs[0].number}").exists()
    assert not list(jobs[0].folder.glob(".raytrain-*"))
    assert Path(f"/tmp/ray-{jobs[1].number}").exists(), "the other one's Ray lives"
    stop(jobs[1])


def test_the_job_has_the_runs_exit_status_and_is_not_requeued_too_often(submit: Submit):
    job = submit(FAKE_FIT="7")
    assert job.status() == 7, job.output
    assert job.requeued == []
    job = submit(SLURM_RESTART_COUNT="3", MOST_REQUEUES="3")
    train(job)
    job.warn()
    assert job.status() == 143, job.output
    assert job.requeued == []


def test_a_failed_head_start_is_reported_without_waiting_for_other_nodes(submit: Submit):
    job = submit(FAKE_RAY="broken", SLURM_JOB_NUM_NODES="3", WAIT_S="600")
    assert job.status(60) == 3
    assert "no such luck" in job.output, "what Ray said"
    assert processes_of(job.folder) == []


def test_leftovers_of_an_ended_job_are_removed_by_the_users_next_job(
    submit: Submit, tmp_path: Path
):
    number, over, lives = free_number(), free_number(), free_number()
    ours = tmp_path / str(number)
    swept = [Path(f"/tmp/ray-{over}"), ours / f".raytrain-slurm-{over}"]
    kept = [Path(f"/tmp/ray-{lives}"), ours / f".raytrain-slurm-{lives}"]
    kept += [ours / f".raytrain-elsewhere-{over}", ours / ".raytrain-slurm-x", ours / "runs"]
    for folder in (*swept, *kept):
        folder.mkdir(parents=True)
        (folder / "token").write_text("secret")
    left = subprocess.Popen(["bash", "-c", "sleep 100; :", f"/tmp/ray-{over}/session_1/raylet"])
    try:
        job = submit(number=number, FAKE_OVER=str(over))
        train(job)
        gone = [folder for folder in (*swept, *kept) if not folder.exists()]
        assert gone == swept
        assert left.poll() is not None
        stop(job)
    finally:
        left.kill()
        left.wait()
        for folder in (swept[0], kept[0]):
            shutil.rmtree(folder, ignore_errors=True)


def test_a_time_limit_during_the_wait_for_nodes_requeues_the_job(submit: Submit):
    job = submit(FAKE_RAY="alone", SLURM_JOB_NUM_NODES="2", WAIT_S="600")
    job.wait_until((job.folder / "ray-0.json").exists, 30)
    job.warn()
    assert job.status(20) == 143, job.output
    assert job.requeued == [f"requeue {job.number}"]
    assert not (job.folder / "training").exists()


def test_the_wait_for_nodes_is_bounded(submit: Submit):
    job = submit(FAKE_RAY="alone", SLURM_JOB_NUM_NODES="2", WAIT_S="2")
    assert job.status() == 3
    assert "1 of 2" in job.output
    assert job.requeued == []
