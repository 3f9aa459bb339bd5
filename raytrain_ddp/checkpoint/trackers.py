"""Sends log records to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from raytrain_ddp.checkpoint.run_folder import TENSORBOARD, run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import publishable, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Eval, LogRecord, Timing, Train

_IDENTITY_FILE = "logged-as"


class Logger(Protocol):
    """A tracking service. Its errors do not end the training, and training never waits for it: see
    background_writer.py.

    A restored log may contain records that the service already has; they are equal.
    """

    def add(self, record: LogRecord) -> None:
        """Accepts a record; must be cheap."""

    def close(self, failed: bool) -> None:
        """Waits until everything is sent; `failed`: the run ended with an error."""


Open = Callable[[Sequence[LogRecord]], Logger]
"""Opens a service with the records so far. Called late: importing its library takes a while."""


def openers(config: TrainConfig) -> dict[str, Open]:
    """The services that the config enables, by name."""
    run, log = run_storage(config), config.log
    wanted: dict[str, Open] = {}
    if log.tensorboard and run.is_local:
        wanted["TensorBoard"] = partial(TensorBoard, Path(run.path) / TENSORBOARD)
    if log.wandb:
        wanted["Weights & Biases"] = partial(WeightsAndBiases, config)
    if log.mlflow:
        wanted["MLflow"] = partial(MLflow, config)
    return wanted


def tracker_scalars(record: LogRecord) -> Iterator[tuple[str, float]]:
    """(name, value) of a record's numbers, such as train/loss, time/data_s and eval/top1."""
    match record:
        case Train():
            yield "train/loss", record.loss
            for name in ("lr", "samples_per_s", "seconds"):
                if math.isfinite(value := getattr(record, name)):
                    yield f"train/{name}", value
            for name, value in record.scalars.items():
                if math.isfinite(value):
                    yield f"train/{name}", value
            yield from _timing(record.timing)
        case Eval():
            for name, value in record.metrics.items():
                yield f"eval/{name}", float(value)


def _timing(timing: Timing) -> Iterator[tuple[str, float]]:
    for field in fields(timing):
        value = getattr(timing, field.name)
        if timing.split_s and isinstance(value, int | float):
            yield f"time/{field.name}", value
    for phase, seconds in timing.split_s.items():
        yield f"time/{phase}_s", seconds


class TensorBoard:
    """Event files in a folder, which is rewritten."""

    def __init__(self, folder: Path, records: Sequence[LogRecord]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder))
        for record in records:
            self.add(record)

    def add(self, record: LogRecord) -> None:
        for name, value in tracker_scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run shared by all starts of a run. W&B itself skips steps that it already has."""

    def __init__(self, config: TrainConfig, records: Sequence[LogRecord]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.log.project,
            name=str(config.name),
            id=_identity(run_storage(config)),
            resume="allow",
            config=to_dict(publishable(config)),
            settings=wandb.Settings(console="off", silent=True),
        )
        for record in records:
            self.add(record)

    def add(self, record: LogRecord) -> None:
        if figures := dict(tracker_scalars(record)):
            self._run.log(figures, step=record.step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """An MLflow run, found again by a tag. Records that it already has are not sent again."""

    def __init__(self, config: TrainConfig, records: Sequence[LogRecord]) -> None:
        import mlflow
        from mlflow.entities import Param

        try:
            self._client: Any = mlflow.MlflowClient()
        except mlflow.MlflowException as error:  # the default store needs more than mlflow-skinny
            if "MLFLOW_TRACKING_URI" in os.environ:
                raise
            raise OSError(f"set MLFLOW_TRACKING_URI, as http://HOST:5000; {error}") from error
        identity = _identity(run_storage(config))
        there = self._client.get_experiment_by_name(config.log.project)
        experiment = (
            there.experiment_id if there else self._client.create_experiment(config.log.project)
        )
        found = self._client.search_runs([experiment], f"tags.raytrain_run = '{identity}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(
                experiment, run_name=str(config.name), tags={"raytrain_run": identity}
            )
            self._id = made.info.run_id
            settings = _flat(to_dict(publishable(config)))
            params = [Param(name, str(value)) for name, value in settings]
            self._client.log_batch(self._id, params=params)  # in as many requests as it needs
        metrics = found[0].data.metrics if found else {}
        self._had = {name: self._last_step(name) for name in metrics}
        new = [metric for record in records for metric in self._new(record)]
        self._client.log_batch(self._id, metrics=new)

    def _last_step(self, name: str) -> int:
        return max(int(each.step) for each in self._client.get_metric_history(self._id, name))

    def add(self, record: LogRecord) -> None:
        self._client.log_batch(self._id, metrics=self._new(record))

    def _new(self, record: LogRecord) -> list[Any]:
        """The metrics of a record that MLflow does not have yet and can store."""
        from mlflow.entities import Metric

        step, now_ms = record.step, int(1000 * time.time())
        # MLflow refuses other characters, such as the @ in acc@1.
        named = ((re.sub(r"[^\w.: /-]", "_", n), v) for n, v in tracker_scalars(record))
        new = [(n, v) for n, v in named if step > self._had.get(n, -1) and math.isfinite(v)]
        return [Metric(name, value, now_ms, step) for name, value in new]

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


def _identity(run: Storage) -> str:
    """A run's id, the same at each start. It is in the run's folder, as run names are reused."""
    if not run.exists(_IDENTITY_FILE):
        run.write_atomic(_IDENTITY_FILE, uuid4().hex[:16].encode())
    return run.read(_IDENTITY_FILE).decode()


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
