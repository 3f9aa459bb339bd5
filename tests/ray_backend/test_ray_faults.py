"""Nodes of a real Ray that are lost, added, and removed with notice; one cluster for all tests.

Each fit starts its workers cold, so one run covers as much as possible.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm_python
from event_records import record
from metadata_server import PREEMPTED, serve
from rich.console import Console

from raytrain_ddp import FitResult, TrainConfig, fit
from raytrain_ddp.checkpoint.run_folder import (
    checkpoint_store,
    read_events,
    read_history,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    OptimConfig,
    ScalingConfig,
)
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.events import End
from raytrain_ddp.ray_backend.ray_settings import SETTINGS

HERE = Path(__file__).parents[1]
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


class RecordingDisplay(Display):
    """A display that shows nothing and records each event with its time."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()), live=False)
        self.heard: list[tuple[float, dict[str, Any]]] = []

    def handle(self, event: Any) -> None:
        self.heard.append((time.monotonic(), record(event)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for _, event in self.heard if event["kind"] == kind]

    def wait(self, what: Callable[[dict[str, Any]], bool], after: float = 0.0) -> float:
        """Waits for the first event of that kind; returns its time."""
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            for at, event in list(self.heard):
                if at > after and what(event):
                    return at
            time.sleep(0.05)
        raise AssertionError(f"never came; heard: {self.heard[-20:]}")


class Running(threading.Thread):
    """A fit in a thread, because Ray adds nodes only in the main thread."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(daemon=True)
        self.config, self.ears = config, RecordingDisplay()
        self.result: FitResult | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = fit(self.config, display=self.ears)
        except BaseException as error:
            self.error = error

    def end(self) -> FitResult:
        self.join(timeout=200)
        assert self.error is None, self.error
        assert self.result is not None
        return self.result


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    """A head with capacity for one worker, plus the nodes that a test adds."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_AUTH_MODE"] = "token"
    if not (
        Path.home() / ".ray" / "auth_token"
    ).is_file():  # `ray.init` creates one, a node does not
        subprocess.run(["ray", "get-auth-token", "--generate"], check=True, capture_output=True)
    os.environ.update({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1", **SETTINGS})
    import ray
    from ray.cluster_utils import Cluster

    soon = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
    alive = {f"health_check_{name}": value for name, value in soon.items()}
    cluster = Cluster(True, head_node_args={"num_cpus": 1, "_system_config": alive})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def paced(folder: Path, name: str, **options: Any) -> TrainConfig:
    config = TrainConfig(
        name=name,
        storage=str(folder),
        epochs=6,
        optim=OptimConfig(lr=1e-4),  # at 0.1, rounding errors grow to percents in fifty steps
        scaling=ScalingConfig(num_workers="1:3", resize_s=1),
        log=LogConfig(every_steps=1, audit=True, tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=5, every_s=0),
        task=f"{HERE / 'ray_tasks.py'}:Paced",
        task_options={"slow": str(folder / "slow")},
    )
    return replace(config, **options)


def at_size(size: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "plan" and event["world_size"] == size


def at_step(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "train" and event["step"] >= step


def any_step(event: dict[str, Any]) -> bool:
    return event["kind"] == "train"


def processes(title: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if any(word.startswith(title) for word in p.info["cmdline"] or ())]


def weights(config: TrainConfig) -> bytes:
    newest = checkpoint_store(run_storage(config)).latest()
    assert newest is not None
    return newest.read("model.safetensors") + newest.read("optimizer.safetensors")


def drain(cluster: Any, node: Any, seconds: float) -> None:
    """What an autoscaler reports to Ray when a cloud is about to remove a machine."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    deadline_ms = int(1e3 * (time.time() + seconds))
    why = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    accepted, reported = GcsClient(address=cluster.address).drain_node(
        node.node_id, why, "taken away", deadline_ms
    )
    assert accepted, reported


def drain_by_the_watch(cluster: Any, node: Any, seconds: float) -> None:
    """What clusters/gcp.yaml runs on the node, once the machine is preempted."""
    watch = [sys.executable, "-m", "raytrain_ddp.spot", "gcp"]
    with serve() as metadata:
        metadata.texts[PREEMPTED] = "TRUE"
        assert seconds == 30  # its notice
        words = ["--metadata", metadata.url, "--address", cluster.address]
        done = subprocess.run(
            [*watch, *words, "--node-id", node.node_id], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "this node is drained" in done.stdout


def test_fault_34_a_node_removed_with_notice_costs_no_step_and_no_failure(
    cluster: Any, tmp_path: Path
) -> None:
    check_taken_away(cluster, tmp_path, 16.0, drain)


@pytest.mark.slow  # a minute: the notice is as long as in the cloud
def test_fault_34_the_watch_turns_a_google_cloud_notice_into_a_checkpoint(
    cluster: Any, tmp_path: Path
) -> None:
    check_taken_away(cluster, tmp_path, 30.0, drain_by_the_watch)


def check_taken_away(
    cluster: Any, tmp_path: Path, notice_s: float, drain: Callable[[Any, Any, float], None]
) -> None:
    node = cluster.add_node(num_cpus=1)
    (tmp_path / "slow").touch()
    scaling = ScalingConfig(num_workers="1:2", max_failures=0, resize_s=1)
    rarely = CheckpointConfig(every_epochs=0, every_s=0)
    options = {"scaling": scaling, "checkpoint": rarely, "eval": EvalConfig(every_epochs=0)}
    run = Running(paced(tmp_path, "drained", epochs=6 if notice_s < 20 else 14, **options))
    ears = run.ears
    ears.wait(at_step(7))
    drained = time.monotonic()
    drain(cluster, node, notice_s)
    noticed = ears.wait(lambda e: e["kind"] == "note" and "will be preempted" in e["text"], drained)
    ears.wait(lambda e: e["kind"] == "checkpoint", noticed)
    time.sleep(max(0.0, drained + notice_s - time.monotonic()))
    removed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    planned = ears.wait(at_size(1), removed)
    (tmp_path / "slow").unlink()
    result = run.end()
    assert result.status == "finished"
    assert ears.of("failed") == []
    assert len(ears.of("preempted")) == 1
    saved = [e["step"] for at, e in ears.heard if e["kind"] == "checkpoint" and at < removed]
    last_step = max(e["step"] for at, e in ears.heard if e["kind"] == "train" and at < planned)
    assert len(saved) == 1  # at the notice
    assert saved[0] < last_step
    # Rank 0 may have been lost before it sent its last lines: they are in the log.
    (unheard,) = [e["start_step"] - last_step for e in ears.of("plan")[1:]]
    assert 0 <= unheard <= 3, "no step was repeated"
    assert planned - removed < 30
    steps = [r["step"] for r in read_history(run_storage(run.config)) if r["kind"] == "train"]
    assert steps == [*range(1, steps[-1] + 1)]


def test_fault_28_workers_join_with_a_new_node_and_any_may_die_without_a_restart(
    cluster: Any, tmp_path: Path
) -> None:
    """A run starts with two of at most three workers.

    A node is added, and its worker joins; it is killed and joins again; then one of the first two
    is killed. With exact, the bits are those of one process.
    """
    options = {"exact": True, "epochs": 8}
    reference = paced(tmp_path, "reference", **options)
    torch.set_num_threads(1)
    fit_locally(reference, display=RecordingDisplay())
    nodes = [cluster.add_node(num_cpus=1)]
    (tmp_path / "slow").touch()
    run = Running(paced(tmp_path, "grown", **options))
    run.ears.wait(at_step(7))
    nodes.append(cluster.add_node(num_cpus=1))
    at = run.ears.wait(at_size(3))
    for title in ("ray::SingleWorker.train", "ray::RayTrainWorker"):
        run.ears.wait(any_step, at)
        processes(title)[0].kill()
        at = run.ears.wait(at_size(2), at)
        if title != "ray::RayTrainWorker":
            at = run.ears.wait(at_size(3), at)
    (tmp_path / "slow").unlink()
    assert run.end().status == "finished"
    plans = run.ears.of("plan")
    assert [event["world_size"] for event in plans][:5] == [2, 3, 2, 3, 2]
    assert all(event["replaced"] is not None for event in plans[1:]), "from a checkpoint"
    assert len(run.ears.of("failed")) == 2
    steps = [r["step"] for r in read_history(run_storage(run.config)) if r["kind"] == "train"]
    assert steps == [*range(1, steps[-1] + 1)]
    ours, theirs = (weights(config) for config in (run.config, reference))
    assert ours == theirs
    deadline = time.monotonic() + 10
    while processes("ray::SingleWorker") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes("ray::SingleWorker")
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow  # two minutes on two cores
@pytest.mark.timeout(600)
def test_fault_28_one_run_continues_with_three_two_one_and_three_workers(
    cluster: Any, tmp_path: Path
) -> None:
    reference = paced(tmp_path, "reference")
    torch.set_num_threads(1)
    fit_locally(reference, display=RecordingDisplay())
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]

    (tmp_path / "slow").touch()
    run = Running(paced(tmp_path, "resized"))
    run.ears.wait(at_step(7))
    for size in (2, 1):
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        lost = time.monotonic()
        again = run.ears.wait(any_step, run.ears.wait(at_size(size), lost))
        assert again - lost < 60  # by default, Ray waits a minute for lost nodes
        run.ears.wait(any_step, time.monotonic() + 0.5)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    run.ears.wait(at_size(3), lost)
    (tmp_path / "slow").unlink()
    result = run.end()
    assert result.status == "finished"
    sizes = [event["world_size"] for event in run.ears.of("plan")]
    assert (sizes[:3], sizes[-1]) == (
        [3, 2, 1],
        3,
    )  # possibly after 2: nodes are added one by one
    for kind, values in (("audit", ("step", "sha256")), ("train", ("step",))):
        theirs, ours = (
            [[r[v] for v in values] for r in read_history(run_storage(c)) if r["kind"] == kind]
            for c in (reference, run.config)
        )
        assert ours == theirs
    losses, undisturbed = (
        [r["loss"] for r in read_history(run_storage(c)) if r["kind"] == "train"]
        for c in (run.config, reference)
    )
    assert losses == pytest.approx(undisturbed, rel=2e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, Ray is in the driver's process")
@pytest.mark.parametrize("part", ["raylet", "gcs_server", "core worker", "training worker"])
def test_fault_06_a_run_whose_ray_is_killed_ends_with_status_7_and_one_line(
    part: str, tmp_path: Path
) -> None:
    """The core worker is that of the driver. A training worker is replaced, the run goes on."""
    steps = "60" if part == "training worker" else "100000"
    flags = ["--steps", steps, "--log.every-steps", "1", "--scaling.num-workers", "2"]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *flags, "--storage", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with warm_python.WarmPython(
        [*command, "--name", "run"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
        while not log.exists() or not log.read_text():
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = psutil.Process(driver.pid).children(recursive=True)
        servers = [each.cmdline() for each in below if "fork_server.py" in " ".join(each.cmdline())]
        assert {line[3] for line in servers} <= {
            str(driver.pid)
        }  # of the run, for the next one, too
        if part == "core worker":
            below = [each for each in below if each.ppid() == driver.pid and is_fork(each)]
        elif part == "training worker":
            below = [each for each in below if "RayTrainWorker" in " ".join(each.cmdline())]
        else:
            below = [each for each in below if each.name() == part]
        below[0].kill()
        _, errors = driver.communicate(timeout=200)
    end = [event.event for event in read_events(open_storage(str(tmp_path / "run")))][-1]
    assert isinstance(end, End)
    if part == "training worker":
        assert (driver.returncode, end.status, errors) == (0, 0, "")
        return
    assert (driver.returncode, end.status) == (7, 7)
    assert "connection to Ray is lost" in errors
    assert errors.count("\n") == 1


def is_fork(process: psutil.Process) -> bool:
    return process.cmdline() == psutil.Process(process.ppid()).cmdline()
