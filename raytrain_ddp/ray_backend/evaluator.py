"""The worker that only evaluates checkpoints (eval.asynchronous): an actor as large as a worker.

The driver passes on what rank 0 asks for. If the actor or its node dies, Ray starts it again and
repeats the evaluation.
"""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_ddp.checkpoint.evaluation_file import Evaluation, read_evaluation, write_evaluation
from raytrain_ddp.checkpoint.manifest import DamagedError
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.errors import (
    ConfigError,
    PreflightError,
    RaytrainError,
    RetriesExhausted,
    is_passing,
)
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.worker import WorkerSettings, apply_settings, require_folder
from raytrain_ddp.ray_backend.worker_process import end_with_raylet

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.tasks.task import Task
    from raytrain_ddp.training.runtime.world import World

_TRIES = 3  # of an evaluation whose process dies
_AGAIN_S, _MOST_AGAIN = 30.0, 20  # of one whose storage fails


class Evaluator:
    """The driver's side.

    Raises:
        PreflightError: there is no room for it.
    """

    def __init__(self, given: WorkerSettings, layout: Layout, wait_s: float) -> None:
        wanted = dict(layout.per_worker)
        self._group = placement_group([wanted])  # so that elastic workers leave it its place
        if not self._group.wait(max(1.0, wait_s)):
            self.close()
            raise PreflightError(
                f"eval.asynchronous: there is no room for an evaluation worker with {wanted} "
                "besides the training workers: use fewer of them with --scaling.num-workers."
            )
        self._actor = ray.remote(
            num_cpus=wanted.get("CPU", 0),
            num_gpus=wanted.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=_TRIES,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
        )(_Actor).remote()
        self._given = ray.put(given)
        self._asked: dict[str, Any] = {}
        self._failed: dict[str, tuple[int, float]] = {}  # name -> how often, and when at last

    def ask(self, checkpoint: str) -> None:
        """Asks for the evaluation of the checkpoint of that name, once."""
        if checkpoint not in self._asked:
            self._asked[checkpoint] = self._actor.evaluate.remote(self._given, checkpoint)

    def look(self) -> None:
        """Raises the error of an evaluation that failed: RaytrainError; cheap."""
        pending = [answer for answer in self._asked.values() if answer is not None]
        done = ray.wait(pending, num_returns=len(pending), timeout=0)[0] if pending else []
        for name, (_, at) in [*self._failed.items()]:
            if self._asked[name] is None and time.monotonic() - at > _AGAIN_S:
                del self._asked[name]
                self.ask(name)
        for name, answer in self._asked.items():
            if answer in done:
                self._asked[name] = None
                try:
                    ray.get(answer)
                    self._failed.pop(name, None)
                except ray.exceptions.RayTaskError as error:
                    times = self._failed.get(name, (0, 0.0))[0] + 1
                    # A storage may fail for a while; training goes on meanwhile, too.
                    if not is_passing(error.cause) or times > _MOST_AGAIN:
                        raise _of(name, error.cause) from error
                    self._failed[name] = times, time.monotonic()
                except ray.exceptions.RayError as error:
                    text = f"its process died {_TRIES + 1} times ({str(error).splitlines()[0]})"
                    raise RetriesExhausted(f"the evaluation of {name} failed: {text}") from error

    def close(self) -> None:
        """Ends the actor, even in the middle of an evaluation, which the next start repeats."""
        with suppress(Exception):  # all of Ray may have ended
            ray.kill(self._actor)
        with suppress(Exception):
            remove_placement_group(self._group)


def _of(name: str, error: BaseException) -> RaytrainError:
    """The error of an evaluation, with the name of the checkpoint, and its exit status."""
    kind = type(error) if isinstance(error, RaytrainError) else RetriesExhausted
    what = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {error}"
    return kind(f"the evaluation of {name} failed: {what}")


class _Actor:
    """Loads the task with the first checkpoint."""

    def __init__(self) -> None:
        end_with_raylet()
        self._parts: tuple[TrainConfig, Task, Data, World] | None = None

    def evaluate(self, given: WorkerSettings, checkpoint: str) -> None:
        apply_settings(given)
        config = from_dict(given.config)
        name = CheckpointName.parse(checkpoint)
        if name is None:
            raise ConfigError(f"{checkpoint}: not the name of a checkpoint")
        store = checkpoint_store(run_storage(config))
        folder = store.storage.join(checkpoint)
        if read_evaluation(folder) is not None:  # asked by an earlier start
            return
        require_folder(config, given.lease)
        if self._parts is None:
            self._parts = _loaded(given)
        from raytrain_ddp.training.async_evaluation import evaluate_checkpoint

        config, task, data, world = self._parts
        try:
            found = store.open(name)
        except DamagedError as error:
            if folder.names():  # otherwise, a start that resumed from an earlier one removed it
                write_evaluation(folder, Evaluation(error=str(error)))
            return
        evaluation = evaluate_checkpoint(config, task, data, found, world)
        failpoint("evaluate.checkpoint", step=name.step)
        write_evaluation(folder, evaluation)


def _loaded(given: WorkerSettings) -> tuple[TrainConfig, Task, Data, World]:
    """The config that the run has settled, its task and evaluation data, and this process."""
    import torch

    from raytrain_ddp.tasks.task_check import eval_data_of
    from raytrain_ddp.tasks.task_loading import load_task
    from raytrain_ddp.training.runtime.world import World, set_up
    from raytrain_ddp.training.start.settling import as_begun

    config = from_dict(given.config)
    if given.task is not None:
        config = replace(config, task=pickle.loads(given.task))
    config = as_begun(config)
    device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
    world = World(0, 1, 0, device, given.threads)
    set_up(world, config.compute)
    task = load_task(config)
    data = eval_data_of(task, config.seed)
    if data is None:
        raise ConfigError("eval.asynchronous has no effect, as there is no evaluation set.")
    return config, task, data, world
