"""Makes parts of the output, in any process: their rows depend on the job and the part only."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raytrain_ddp.checkpoint.run_folder import config_of, find_checkpoint
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.inference.batch_outputs import outputs
from raytrain_ddp.tools.inference.inputs import open_input
from raytrain_ddp.tools.inference.loaded_model import loaded
from raytrain_ddp.tools.predict.result_table import Columns, is_flat, joined
from raytrain_ddp.training.runtime.world import World, set_up

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.__main__ import PredictArgs

_ROWS_PER_PART = 2048
_DECIDING = ("image_column", "image_size", "top", "probabilities", "layer", "tta")


class PartMaker:
    """The model and the rows of a job, opened in this process.

    Args:
        job: the command, with the folder or URI of one checkpoint as its run; the same on all
            nodes. Its inputs are relative to the driver's working folder.
        threads: that compute on CPUs, and that load images.

    Attributes:
        parts: their number; each has `_ROWS_PER_PART` rows, rounded down to whole batches.

    Raises:
        ConfigError, DataError, CheckpointError: the job cannot be done here.
    """

    def __init__(self, job: PredictArgs, device: torch.device, threads: int) -> None:
        self._job, self._threads = job, threads
        found = find_checkpoint(job.run)
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
        self._columns = Columns(model.class_names, top, job.probabilities, is_flat(str(job.out)))
        self._batch = job.batch_size or config.eval_micro_batch
        self._each = max(1, _ROWS_PER_PART // self._batch)  # batches of a part
        self.parts = -(-self.rows // (self._each * self._batch))

    def plan(self) -> dict[str, Any]:
        """All that decides the bytes of the output."""
        weights = self.model.checkpoint.manifest.files["model.safetensors"].sha256
        flags = {name: getattr(self._job, name) for name in _DECIDING}
        source = {"input": self.given.data.source.fingerprint(), "rows": self.rows}
        return {"weights": weights, **source, **flags, "batch_size": self._batch}

    def rows_of(self, part: int) -> int:
        size = self._each * self._batch
        return min(size, self.rows - part * size)

    def made(
        self, parts: Sequence[int], tell: Callable[[int], object]
    ) -> Generator[tuple[int, Any], None, None]:
        """Yields each of these parts and its table, in order.

        Args:
            tell: called with the number of rows after each batch.

        Raises:
            ConfigError, DataError, TaskError: as `outputs`.
        """
        each, last = self._each, -(-self.rows // self._batch)
        wanted = [n for part in parts for n in range(part * each, min(part * each + each, last))]
        job, threads = self._job, LoaderThreads(self._threads)
        given = wanted, self._bad, threads, self._batch, job.tta, job.layer
        tables = []
        for done in outputs(self.model, self.given.data, *given):
            tables.append(self._columns.table(done, self.given.places(done.rows), self._bad))
            tell(len(done.rows))
            part, place = divmod(done.rows.start // self._batch, each)
            if place == each - 1 or done.rows.stop == self.rows:
                yield part, joined(tables)
                tables = []
