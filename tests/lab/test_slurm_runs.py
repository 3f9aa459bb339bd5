"""slurm.sbatch on a real Slurm with a real Ray: equal bits, whatever happens to the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import wait_until
from slurm import ROOT
from slurm_cluster import LeftOn, SlurmCluster, ways_to_track

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, read_events, run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.events import Plan

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("slurm", ways_to_track()[:1], indirect=True),
]
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


def test_two_jobs_with_their_own_ray_train_on_the_same_nodes(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: bytes
):
    """Neither joins the other's Ray, uses its ports, or ends its processes."""
    (tmp_path / "slow").touch()
    configs = [paced(tmp_path, name) for name in ("one", "two")]
    jobs = [
        slurm.submit(f"--cpus-per-task=1 {SBATCH} {flags(config)}", PYTHONPATH=ROOT / "tests")
        for config in configs
    ]
    for config, job in zip(configs, jobs, strict=True):
        wait_until(lambda c=config: steps_of(c) >= 3, 400, job)
    assert [job.state for job in jobs] == ["RUNNING"] * 2
    jobs[0].cancel("--batch --signal=TERM")
    jobs[0].wait({"FAILED"}, 100)
    done = steps_of(configs[0])
    assert 3 <= done < 120
    (tmp_path / "slow").unlink()
    jobs[1].wait({"COMPLETED"}, 300)
    assert steps_of(configs[1]) == 120
    assert weights(configs[1]) == undisturbed
    plans = [e.event for e in read_events(run_storage(configs[1])) if isinstance(e.event, Plan)]
    assert [{*plan.hosts} for plan in plans] == [{"n1", "n2"}]
    wait_until(lambda: not slurm.left_on_nodes(), 60, LeftOn(slurm))


SHOWS = """
import json, os, sys
from pathlib import Path

own = {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
Path(sys.argv[1], f"{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(own))
"""
# What scripts read, and what is the same on one node whichever of the two starts them.
READ = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_GTIDS", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME"),
)


def test_run_env_slurm_gives_a_script_the_same_environment_as_srun(
    slurm: SlurmCluster, tmp_path: Path
):
    """Also outside an allocation, except for the number and name of the job."""
    (tmp_path / "shows.py").write_text(SHOWS)
    places = {name: tmp_path / name for name in ("srun", "inside", "outside")}
    for place in places.values():
        place.mkdir()
    run = "python -m raytrain_ddp.run --env slurm --nproc-per-node 2 shows.py"
    wrap = f"srun --ntasks=2 python shows.py {places['srun']} && {run} {places['inside']}"
    there = f"cd {tmp_path} &&"
    flags = f"--nodes=1 --ntasks=2 --cpus-per-task=2 --mem=8G --chdir={tmp_path}"
    job = slurm.submit(f"{flags} --wrap '{wrap}'")
    job.wait({"COMPLETED"}, 200)
    slurm.sh(f"{there} {run} {places['outside']}", 200)
    found = {
        name: [json.loads((place / f"{rank}.json").read_text()) for rank in range(2)]
        for name, place in places.items()
    }
    for rank in range(2):
        expected = {name: found["srun"][rank].get(name) for name in READ}
        assert {name: found["inside"][rank].get(name) for name in READ} == expected
        unknown = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME"))
        outside = {name: found["outside"][rank].get(name) for name in READ}
        assert outside | unknown == expected | unknown
        assert outside["SLURM_JOB_ID"].isdigit()
    slurm.lab.run("n1", "rm -rf /tmp/ray")  # logs, as left by any Ray
    wait_until(lambda: not slurm.left_on_nodes(), 60, LeftOn(slurm))
