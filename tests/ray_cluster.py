"""A Ray of two nodes for the tests of a file, and fits that are watched while they run."""

from __future__ import annotations

import io
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from event_records import record
from processes import wait_until
from rich.console import Console
from tiny import log_of

from raytrain_ddp import FitResult, TrainConfig, fit
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import LogConfig, ScalingConfig
from raytrain_ddp.ray_backend.ray_start import SETTINGS
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.warm.warm_start import py_executable, start_early

TASKS = Path(__file__).with_name("ray_tasks.py")


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A head with two CPUs and a node with one, which `fit` and `run` find and leave running.

    Their processes are forked: a result equal to a torchrun run therefore also holds for normal
    processes. A lost node counts as lost within seconds.
    """
    os.environ.pop("RAY_ADDRESS", None)
    if not (Path.home() / ".ray" / "auth_token").is_file():  # only `ray.init` would create one
        subprocess.run(["ray", "get-auth-token", "--generate"], check=True, capture_output=True)
    watched = {"RAY_AUTH_MODE": "token", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1"}
    os.environ.update({**watched, **SETTINGS})
    import ray
    from ray.cluster_utils import Cluster

    start_early(1)
    soon = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
    alive = {f"health_check_{name}": value for name, value in soon.items()}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": alive}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    forked = {"py_executable": py_executable(os.getpid(), 1)}
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=forked)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Ears(Display):
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

        def found() -> list[float]:
            return [at for at, event in list(self.heard) if at > after and what(event)]

        wait_until(found, 150)
        return found()[0]


def at_size(size: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "plan" and event["world_size"] == size


def at_step(step: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == "train" and event["step"] >= step


class Running(threading.Thread):
    """A fit in a thread, because Ray adds nodes only in the main thread."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(daemon=True)
        self.config, self.ears = config, Ears()
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


def once(ears: Ears, what: Callable[[dict[str, Any]], bool], do: Callable[[], object]) -> Any:
    """A thread that does something after the first such event."""

    def watch() -> None:
        ears.wait(what)
        do()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def paced(storage: Path, name: str, workers: str = "3", **options: Any) -> TrainConfig:
    """Two epochs of 23 steps, with pauses while the file ``slow`` exists."""
    config = TrainConfig(
        name=name,
        storage=str(storage),
        epochs=2,
        scaling=ScalingConfig(num_workers=workers),
        log=LogConfig(every_steps=1, tensorboard=False),
        task=f"{TASKS}:Paced",
        task_options={"slow": str(storage / "slow")},
    )
    return replace(config, **options)


def weights(config: TrainConfig) -> bytes:
    """The model and optimizer files of the newest checkpoint: equal bytes mean equal bits."""
    newest = checkpoint_store(run_storage(config)).latest()
    assert newest is not None
    return newest.read("model.safetensors") + newest.read("optimizer.safetensors")


def trained(config: TrainConfig) -> list[int]:
    """The steps in the log."""
    return [r["step"] for r in log_of(config) if r["kind"] == "train"]


def processes(title: str) -> list[psutil.Process]:
    """The processes of this process's Ray whose title begins like this."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(word.startswith(title) for word in process.cmdline()):
                found.append(process)
    return found
