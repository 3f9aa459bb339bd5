"""slurm.sbatch on a real Slurm with a real Ray: equal bits, whatever happens to the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import wait_until
from slurm import ROOT
from slurm_cluster import LeftOn, SlurmCluster

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, read_events, run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.events import Plan

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SBATCH = f"{ROOT}/clusters/slurm.sbatch"
TASK = f"{ROOT}/tests/ray_tasks.py:Paced"


def paced(folder: Path, name: str) -> TrainConfig:
    """Digits with `flags`, with the same bits on any number of workers."""
    return TrainConfig(
        name=name,
        storage=str(folder),
        steps=120,
        exact=True,
        task=TASK,
        task_options={"slow": str(folder / "slow"), "pause_s": "0.4"},
        log=LogConfig(every_steps=1, tensorboard=False),
    )


def flags(config: TrainConfig) -> str:
    return (
        f"--name {config.name} --storage {config.storage} --steps {config.steps} --exact "
        f"--task {TASK} --task-options slow {config.task_options['slow']} pause_s 0.4 "
        "--log.every-steps 1 --log.no-tensorboard"
    )


def weights(config: TrainConfig) -> bytes:
    newest = checkpoint_store(run_storage(config)).latest()
    assert newest is not None
    assert newest.manifest.step == config.steps
    return newest.read("model.safetensors") + newest.read("optimizer.safetensors")


def steps_of(config: TrainConfig) -> int:
    log = Path(config.storage) / str(config.name) / "metrics.jsonl"
    return log.read_text().count('"kind": "train"') if log.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of one process without Ray."""
    config = paced(tmp_path_factory.mktemp("undisturbed"), "run")
    fit_locally(config)
    return weights(config)


def test_the_unedited_script_trains_across_nodes_is_requeued_and_has_equal_bits(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: bytes
):
    config = paced(tmp_path, "run")
    (tmp_path / "slow").touch()
    # One CPU for each node's Ray, so each node has one worker.
    job = slurm.submit(f"--cpus-per-task=1 {SBATCH} {flags(config)}", PYTHONPATH=ROOT / "tests")
    wait_until(lambda: steps_of(config) >= 5, 300, job)
    job.warn()
    job.wait({"PENDING"}, 150)
    done = steps_of(config)
    assert 5 <= done < 120
    (tmp_path / "slow").unlink()
    wait_until(lambda: not slurm.left_on_nodes(), 60, LeftOn(slurm))
    job.update("TimeLimit=60")
    job.begin_again()
    job.wait({"COMPLETED"}, 300)
    assert job.facts()["Restarts"] == "1"
    assert steps_of(config) == 120, "each step once"
    assert weights(config) == undisturbed
    plans = [e.event for e in read_events(run_storage(config)) if isinstance(e.event, Plan)]
    assert [{*plan.hosts} for plan in plans] == [{"n1", "n2"}] * 2
    wait_until(lambda: not slurm.left_on_nodes(), 60, LeftOn(slurm))
