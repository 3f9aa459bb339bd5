"""Builds Ray Train's `TorchTrainer` for a run, and cleans up what it leaves behind."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.run_folder import LOGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.messages import ControllerStarted, Event, Placed
from raytrain_ddp.ray_backend.cluster import import_paths
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.ray_settings import PREEMPTION_WATCHER
from raytrain_ddp.ray_backend.task_transfer import code_of
from raytrain_ddp.ray_backend.worker import WorkerSettings, train_on_worker
from raytrain_ddp.training.runtime.nccl_settings import collective_timeout, nccl_settings

_LEFT_OUT = (
    "DatasetsCallback",  # a manager of Ray Data's data sets, which nothing uses
    # Frees the workers' placement if the controller dies, as `Controller` does. It asks the
    # dashboard whether the controller lives: 15 s at the end of a run if there is none.
    "PlacementGroupCleanerCallback",
)
_ABORT_S = 20.0  # while it starts workers, however long that takes, it handles no messages
# A check costs all workers 4 to 13 ms; notices come at least half a minute ahead.
_LOOK_EVERY_S = 3.0


def make_trainer(config: TrainConfig, run: Storage, layout: Layout, given: WorkerSettings) -> Any:
    """A `TorchTrainer` whose workers run `train` on `layout` and report to the given mailbox."""
    import ray
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from raytrain_ddp.ray_backend.failure_callback import FailureCallback

    class Trainer(TorchTrainer):  # type: ignore[misc]
        """A trainer without two processes that each start waits for. A later Ray that does not
        call this starts them."""

        def _create_default_callbacks(self) -> list[Any]:
            usual = super()._create_default_callbacks()
            return [each for each in usual if type(each).__name__ not in _LEFT_OUT]

    parent, _, name = run.path.rstrip("/").rpartition("/")
    return Trainer(
        train_on_worker,
        train_loop_config={"given": given},
        scaling_config=ScalingConfig(
            num_workers=layout.workers,
            use_gpu=layout.use_gpu,
            resources_per_worker=dict(layout.per_worker),
            placement_strategy=config.scaling.placement,
            elastic_resize_monitor_interval_s=config.scaling.resize_s,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=parent,
            storage_filesystem=_memory(),
            # Ray replaces workers without limit; the driver's FailurePolicy decides when to stop.
            failure_config=FailureConfig(
                max_failures=-1,
                max_preemption_failures=config.scaling.max_preemptions,
                controller_failure_limit=-1,
            ),
            callbacks=[FailureCallback(given.mailbox, ray.get_runtime_context().get_actor_id())],
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        torch_config=_torch_config(config, layout, given.least > 0),
    )


class Controller:
    """What is known of Ray Train's controller, and the placement of its workers."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._placement: Any = None

    def take(self, event: Event) -> None:
        if isinstance(event, ControllerStarted):
            self._actor = event.actor
        elif isinstance(event, Placed):
            self._placement = event.group

    def end(self) -> None:
        """Ends the controller. If it were only killed, its resource request would remain, and the
        next elastic run would wait three minutes for it."""
        import ray

        if self._actor is None:
            return
        with suppress(Exception):  # it, or all of Ray, has already ended
            try:  # like Ray's own handling of Ctrl-C; not public, so it may disappear
                with suppress(Exception):
                    ray.get(self._actor.abort.remote(), timeout=_ABORT_S)
            finally:
                ray.kill(self._actor)
                self.free_placement()

    def free_placement(self) -> None:
        """Frees the resources of workers whose controller did not, as it was killed: they would be
        reserved as long as this process lives."""
        from ray.util import remove_placement_group

        with suppress(Exception):  # it is free, or there is none
            remove_placement_group(self._placement)


def worker_settings(
    config: TrainConfig,
    run: Storage,
    layout: Layout,
    mailbox: Any,
    task: bytes | None,
    lease: str,
) -> WorkerSettings:
    """What each worker receives.

    Args:
        layout: as it is configured.
        task: the pickled task, if its name does not suffice; see `pickled_task`.
        lease: the token of this process, which holds the run's lease.
    """
    return WorkerSettings(
        config=to_dict(config),
        task=task,
        folder=str(Path.cwd()),
        import_paths=import_paths(config),
        log_folder=f"{run.path}/{LOGS}" if run.is_local else None,
        mailbox=mailbox,
        threads=max(1, int(layout.per_worker["CPU"])),
        lease=lease,
        look_every_s=0.0 if os.environ.get(PREEMPTION_WATCHER) == "0" else _LOOK_EVERY_S,
        most=layout.most,
        backend=layout.backend,
        code=code_of(config),
        argv=tuple(sys.argv),
        failpoints=(os.environ.get(VARIABLE, ""), os.environ.get(FOLDER_VARIABLE, "")),
    )


def _torch_config(config: TrainConfig, layout: Layout, replaces: bool) -> Any:
    from ray.train.torch import TorchConfig

    from raytrain_ddp.ray_backend.replacing import NcclConfig, ReplacingConfig

    if replaces:  # the workers make their process groups
        return ReplacingConfig(backend=layout.backend)
    if "nccl" not in layout.backend:
        return TorchConfig(backend=layout.backend)
    timeout_s = int(collective_timeout(config.scaling).total_seconds())
    return NcclConfig(backend=layout.backend, timeout_s=timeout_s, settings=nccl_settings(config))


def _memory() -> Any:
    """Keeps what Ray Train writes of a run in its controller's memory.

    In the run's storage it would be written without retries, so a single storage failure would
    end the run.
    """
    import fsspec  # type: ignore[import-untyped]
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(fsspec.filesystem("memory")))
