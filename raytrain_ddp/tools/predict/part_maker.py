"""Makes parts of the output, in any process: their rows depend on the job and the part only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from raytrain_ddp.checkpoint.run_folder import config_of, find_checkpoint
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.inference.batch_outputs import outputs
from raytrain_ddp.tools.inference.inputs import open_input
from raytrain_ddp.tools.inference.loaded_model import loaded
from raytrain_ddp.tools.predict.result_table import Columns, joined
from raytrain_ddp.training.runtime.world import World, set_up

_ROWS_PER_PART = 2048


@dataclass(frozen=True)
class Job:
    """What is predicted, and how; the same on all nodes.

    Args:
        checkpoint: folder or URI of one checkpoint.
        inputs: words of the command line, relative to the driver's working folder.
        flat: see `Columns`.
    """

    checkpoint: str
    inputs: tuple[str, ...]
    flat: bool
    image_column: str | None
    image_size: int | None
    top: int
    probabilities: bool
    layer: str | None
    tta: Literal["none", "flip"]
    batch_size: int | None


class PartMaker:
    """The model and the rows of a job, opened in this process.

    Args:
        threads: that compute on CPUs, and that load images.

    Attributes:
        parts: their number; each has `_ROWS_PER_PART` rows, rounded down to whole batches.

    Raises:
        ConfigError, DataError, CheckpointError: the job cannot be done here.
    """

    def __init__(self, job: Job, device: torch.device, threads: int) -> None:
        self._job, self._threads = job, threads
        found = find_checkpoint(job.checkpoint)
        config = config_of(found)
        set_up(World(0, 1, device.index or 0, device, threads), config.compute)
        self.model = model = loaded(found, config, device)
        self._bad: dict[int, str] = {}
        note_bad, size = self._bad.__setitem__, job.image_size or 0
        self.given = open_input(job.inputs, model, note_bad, job.image_column, size)
        self.rows = self.given.data.rows
        top = job.top if model.class_names and not config.data.target_columns else 0
        if not top and (job.top > 1 or job.probabilities):
            flag = "top" if job.top > 1 else "probabilities"
            raise ConfigError(f"--{flag} has no effect: the run does not predict classes.")
        if top > len(model.class_names):
            raise ConfigError(f"--top {top}: the run has {len(model.class_names)} classes.")
        self._columns = Columns(model.class_names, top, job.probabilities, job.flat)
        self._asked = model.asked(job.batch_size, job.tta, job.layer)
        self._batch = self._asked.batch_size
        self._each = max(1, _ROWS_PER_PART // self._batch)  # batches of a part
        self.parts = -(-self.rows // (self._each * self._batch))

    def plan(self) -> dict[str, Any]:
        """All that decides the bytes of the output."""
        weights = self.model.checkpoint.manifest.files["model.safetensors"].sha256
        decides = {"weights": weights, "input": self.given.data.source.fingerprint()}
        decides |= {"rows": self.rows, **asdict(self._job), "batch_size": self._batch}
        return {k: v for k, v in decides.items() if k not in ("checkpoint", "inputs")}

    def rows_of(self, part: int) -> int:
        size = self._each * self._batch
        return min(size, self.rows - part * size)

    def made(self, parts: Sequence[int], tell: Callable[[int], object]) -> Iterator[tuple[int, Any]]:
        """Yields each of these parts and its table, in order.

        Args:
            tell: called with the number of rows after each batch.

        Raises:
            ConfigError, DataError, TaskError: as `outputs`.
        """
        each, last = self._each, -(-self.rows // self._batch)
        wanted = [n for part in parts for n in range(part * each, min(part * each + each, last))]
        model, data, threads = self.model, self.given.data, LoaderThreads(self._threads)
        tables = []
        for done in outputs(model.task, model.model, data, self._asked, wanted, self._bad, threads):
            tables.append(self._columns.table(done, self.given.places(done.rows), self._bad))
            tell(len(done.rows))
            part, place = divmod(done.rows.start // self._batch, each)
            if place == each - 1 or done.rows.stop == self.rows:
                yield part, joined(tables)
                tables = []
