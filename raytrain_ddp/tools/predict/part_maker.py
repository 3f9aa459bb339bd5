"""Makes parts of the output, in any process: their rows depend on the job and the part only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch

from raytrain_ddp.checkpoint.run_folder import config_of, find_checkpoint
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.inference.batch_outputs import Asked, outputs
from raytrain_ddp.tools.inference.inputs import open_input
from raytrain_ddp.tools.inference.loaded_model import loaded
from raytrain_ddp.tools.predict.result_table import Columns, joined
from raytrain_ddp.training.runtime.world import World, set_up


@dataclass(frozen=True)
class Job:
    """What is predicted, and how; the same on all nodes.

    Args:
        checkpoint: folder or URI of one checkpoint.
        inputs: words of the command line, relative to the driver's working folder.
        part_rows: of a part, rounded down to whole batches.
    """

    checkpoint: str
    inputs: tuple[str, ...]
    image_column: str | None
    image_size: int | None
    top: int
    probabilities: bool
    layer: str | None
    tta: Literal["none", "flip"]
    batch_size: int | None
    part_rows: int


class Progress(NamedTuple):
    """What was done since the last time.

    Args:
        part, table: a part that is complete, if there is one.
    """

    rows: int
    part: int = -1
    table: Any = None


class PartMaker:
    """The model and the rows of a job, opened in this process.

    Args:
        threads: that compute on CPUs, and that load images.

    Attributes:
        parts: their number.

    Raises:
        ConfigError, DataError, CheckpointError: the job cannot be done here.
    """

    def __init__(self, job: Job, device: torch.device, threads: int) -> None:
        self.job, self._threads = job, threads
        found = find_checkpoint(job.checkpoint)
        config = config_of(found)
        set_up(World(0, 1, device.index or 0, device, threads), config.compute)
        self.model = loaded(found, config, device)
        self._bad: dict[int, str] = {}
        size = job.image_size or 0
        note_bad = self._bad.__setitem__
        self.given = open_input(job.inputs, self.model, note_bad, job.image_column, size)
        self.rows, self.unit = self.given.data.rows, self.model.task.unit
        top = _top(job, self.model.class_names, bool(config.data.target_columns))
        self._columns = Columns(self.model.class_names, top, job.probabilities)
        self._batch = job.batch_size or config.eval_micro_batch
        self._asked = Asked(self._batch, job.tta, job.layer, config.compute.precision)
        self._per_part = max(1, job.part_rows // self._batch)  # batches
        self._batches = -(-self.rows // self._batch)
        self.parts = -(-self._batches // self._per_part)
        self.weights = found.manifest.files["model.safetensors"].sha256

    def plan(self, device: str) -> dict[str, Any]:
        """All that decides the bytes of the output. `device`: its kind, such as cuda."""
        asked = asdict(self.job)
        for name in ("checkpoint", "inputs", "part_rows"):
            del asked[name]
        return {
            "weights": self.weights,
            "input": self.given.data.source.fingerprint(),
            "rows": self.rows,
            **asked,
            "batch_size": self._batch,
            "device": device,
            "top": self._columns.top,
        }

    def rows_of(self, part: int) -> int:
        start = part * self._per_part * self._batch
        return min(self._per_part * self._batch, self.rows - start)

    def made(self, parts: Sequence[int]) -> Iterator[Progress]:
        """Makes these parts, in order; yields after each batch.

        Raises:
            ConfigError, DataError, TaskError: as `outputs`.
        """
        batches, each = range(self._batches), self._per_part
        wanted = [batch for part in parts for batch in batches[part * each : (part + 1) * each]]
        tables = []
        task, net, threads = self.model.task, self.model.model, LoaderThreads(self._threads)
        data = self.given.data
        for done in outputs(task, net, data, self._asked, wanted, self._bad, threads):
            tables.append(self._columns.table(done, self.given.places(done.rows), self._bad))
            part, place = divmod(done.rows.start // self._batch, self._per_part)
            if place == self._per_part - 1 or done.rows.stop == self.rows:
                yield Progress(len(done.rows), part, joined(tables))
                tables = []
            else:
                yield Progress(len(done.rows))

    def close(self) -> None:
        self.given.data.close()


def _top(job: Job, class_names: Sequence[str], of_targets: bool) -> int:
    """How many classes are written; 0 if the outputs are no classes."""
    if of_targets or not class_names:
        for flag, unset in (("top", 1), ("probabilities", False)):
            if getattr(job, flag) != unset:
                raise ConfigError(f"--{flag} has no effect: the run does not predict classes.")
        return 0
    if job.top > len(class_names):
        raise ConfigError(f"--top {job.top}: the run has {len(class_names)} classes.")
    return job.top
