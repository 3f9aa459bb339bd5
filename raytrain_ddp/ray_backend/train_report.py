"""Reports the end of a run to Ray Train: its Result has the best and the last checkpoint.

Ray Train keeps a register of checkpoints in the storage, and no run starts there once a listed
folder is gone, as retention removes it. So what Ray writes stays in the memory of its processes,
and a report names folders that are committed already: nothing is copied or deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import fsspec  # type: ignore[import-untyped]
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.run_folder import CHECKPOINTS, checkpoint_store, read_log, run_storage
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.events import Eval
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.ray_backend.worker import WorkerSettings, train_on_worker

REPORT_S = 10.0
"""The longest time in seconds that a run that has ended waits for Ray Train."""


class RunFiles(pafs.FSSpecHandler):  # type: ignore[misc]
    """The storage as Ray Train sees it. It reads checkpoints there; whatever it writes, creates or
    deletes is in the memory of its process.

    Args:
        uri: the URI of the storage, which is opened when a checkpoint is first read.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(fsspec.filesystem("memory"))
        self.uri = uri

    def __reduce__(self) -> tuple[type[RunFiles], tuple[str]]:
        return RunFiles, (self.uri,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFiles) and other.uri == self.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def get_file_info(self, paths: Sequence[str]) -> list[Any]:
        return [self._holder(path).get_file_info(path) for path in paths]

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._holder(selector.base_dir).get_file_info(selector)

    def open_input_stream(self, path: str) -> Any:
        return self._holder(path).open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._holder(path).open_input_file(path)

    def _holder(self, path: str) -> Any:
        is_stored = f"/{CHECKPOINTS}/" in path
        return self._stored if is_stored else pafs.PyFileSystem(pafs.FSSpecHandler(self.fs))

    @cached_property
    def _stored(self) -> Any:
        return open_storage(self.uri).fs


def train_and_report(given: Mapping[str, Any]) -> None:
    """Trains on a worker of the TorchTrainer, then reports the end of the run. All workers that
    Ray Train knows take part in the report.

    Args:
        given: "given", the settings of the worker, and "files", the `RunFiles` of the run.
    """
    train_on_worker(given["given"])
    report = threading.Thread(target=_report, args=(given["given"], given["files"]), daemon=True)
    report.start()  # after the driver has the outcome, which nothing here can change
    report.join(REPORT_S)


def _report(given: WorkerSettings, files: Any) -> None:
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    with suppress(Exception):
        rank = ray.train.get_context().get_world_rank()
        failpoint("train.report", rank)
        found = _committed(run_storage(from_dict(given.config))) if rank == 0 else []
        for number in range(broadcast_from_rank_zero(len(found))):
            path, metrics = found[number] if rank == 0 else ("", {})
            ray.train.report(
                metrics,
                checkpoint=ray.train.Checkpoint(path, filesystem=files) if path else None,
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
                delete_local_checkpoint_after_upload=False,
            )


def _committed(run: Storage) -> list[tuple[str, dict[str, float]]]:
    """Paths and metrics of the best checkpoint, unless it is the last one, and of the last one."""
    names = checkpoint_store(run).names()
    bests = [record.step for record in read_log(run) if isinstance(record, Eval) and record.best]
    best = [name for name in names[1:] if name.step in bests[-1:]]
    opened = [checkpoint_store(run).open(name) for name in best[:1] + names[:1]]
    return [
        (each.storage.path, {**each.manifest.metrics, "step": each.manifest.step})
        for each in opened
    ]
