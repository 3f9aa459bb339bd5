"""Opens a run's data on one machine. Does not use Ray, and imports torch only if necessary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.discovery.data_check import locate
from raytrain_ddp.data.loading.sources import Source
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.ray_backend.worker_process import enter_folder
from raytrain_ddp.tasks.task_check import eval_data_of, train_data_of
from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task
from raytrain_ddp.uri import attempt, reason_of


def probe_data(
    config: Mapping[str, Any], folder: str, import_paths: Sequence[str]
) -> dict[str, Any]:
    """Opens the data like a worker.

    Args:
        config: in the form of `to_dict`.
        folder: the driver's working directory, for relative paths.
        import_paths: the location of the user's task on the driver's machine.

    Returns:
        train, eval: [rows, fingerprint] (None: there is no evaluation set). seconds. error: the
        error, without secrets, if any.
    """
    enter_folder(folder, import_paths)
    parsed = from_dict(dict(config))
    began = time.perf_counter()
    found = attempt(lambda: _open_data(parsed))
    if isinstance(found, Exception):
        return {"error": reason_of(parsed.data.source, found)}
    train, evaluation = found
    return {"train": train, "eval": evaluation, "seconds": time.perf_counter() - began}


def _open_data(config: TrainConfig) -> tuple[list[Any], list[Any] | None]:
    train: Source
    other: Source | None
    found = locate(config.data) if config.task in BUILT_IN else None
    if found is not None and found.train.kind != "torchvision":
        splits = open_splits(config.data, found, config.loss.name == "bce")
        train, other = splits.train, splits.eval
        splits.close()
    else:
        task = load_task(config)
        data, eval_data = train_data_of(task, config.seed), eval_data_of(task, config.seed)
        train, other = data.source, eval_data.source if eval_data else None
    return _rows_and_fingerprint(train), _rows_and_fingerprint(other) if other else None


def _rows_and_fingerprint(source: Source) -> list[Any]:
    return [int(source.blocks.sum()), source.fingerprint()]
