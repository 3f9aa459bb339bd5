"""``raytrain predict RUN INPUT --out FILE``: a checkpoint's output for each row."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from raytrain_ddp.config.command_line import Command, positional
from raytrain_ddp.config.field_types import ADDRESS, MAY_BE_EMPTY, require_least
from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.files import expanded
from raytrain_ddp.tools.formatting import plural

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.tools.predict.result_file import PartMaker, Places, ResultFile


@dataclass(frozen=True)
class PredictArgs:
    """Write the predictions of a checkpoint to a file, with a row for each image.

    Images that cannot be read are rows with an error. The file appears when it is complete; the
    same command again resumes where it was stopped, and the file has the same bytes.
    """

    run: str = field(metadata=positional("RUN"))
    """Folder of a run, its name below runs/, or the folder of one checkpoint."""
    inputs: tuple[str, ...] = field(default=(), metadata=positional("INPUT"))
    """Images, folders, globs, Parquet files or lists of images, as paths or URIs. Default: the
    evaluation data of the run, with their labels."""
    out: str | None = field(default=None, metadata={"metavar": "FILE"})
    """File to write: .parquet or .csv."""
    top: int = 1
    """Most probable classes to write for each row."""
    probabilities: bool = False
    """Add the probabilities of all classes."""
    layer: str | None = None
    """Add the output of this module of the model as an embedding, such as avgpool."""
    checkpoint: Literal["best", "last"] | None = None
    """Checkpoint of the run to use. Default: best."""
    image_column: str | None = field(default=None, metadata=MAY_BE_EMPTY)
    """Column of Parquet files and lists that has the images. Default: that of the run."""
    image_size: int | None = None
    """Side of the model's input in pixels. Default: that of the evaluation."""
    batch_size: int | None = None
    """Images of a forward pass. Default: as in the evaluation, so that the outputs are the same."""
    device: str = "auto"
    """Device, such as cpu, cuda or cuda:1. auto: a GPU if there is one."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Predict on a running Ray cluster. All nodes must see the run and the images; FILE is written
    on this machine."""
    workers: int | None = None
    """Number of workers of the cluster. Default: one for each GPU or, if there is none, one for
    each node."""
    overwrite: bool = False
    """Replace FILE if it exists, and what was begun for it with other flags."""


COMMAND = Command("predict", PredictArgs, "RUN [INPUT ...] --out FILE [--FLAG ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args, began = COMMAND.parse(argv), time.monotonic()
    if args.out is None:
        raise ConfigError("--out is missing: the file to write (.parquet or .csv).")
    if args.address is None and args.workers is not None:
        raise ConfigError("--workers has no effect without --address.")
    require_least(args, top=1, image_size=1, batch_size=1, workers=1)
    from raytrain_ddp.checkpoint.run_folder import with_checkpoint
    from raytrain_ddp.tools.predict.result_file import ResultFile

    file = ResultFile(expanded(args.out), args.overwrite)
    maker, bad = with_checkpoint(
        args.run,
        args.checkpoint,
        lambda found: _predict(replace(args, run=found.storage.address), file),
    )
    rows, unit = maker.rows, maker.model.task.unit
    took = f"{time.monotonic() - began:.1f} s"
    print(f"{maker.model.checkpoint}\nwrote a row for each of {rows:,} {unit} in {took}")
    if bad:
        print(f"  {bad:,} cannot be read: see the column error")
    print(f"{file.out}: {file.out.stat().st_size / 1000:,.0f} kB")
    if bad == rows:
        raise DataError(f"none of the {bad} {unit} can be read: see the column error.")
    return 0


def _predict(job: PredictArgs, file: ResultFile) -> tuple[PartMaker, int]:
    """Returns the maker that wrote the file, and how many rows cannot be read.

    Args:
        job: see `PartMaker`.
    """
    import torch

    from raytrain_ddp.tools.display.terminal import shown
    from raytrain_ddp.tools.predict.result_file import PartMaker, made_on_cluster
    from raytrain_ddp.training.runtime.world import choose_device

    device = choose_device("cpu" if job.address else job.device)
    maker = PartMaker(job, device, torch.get_num_threads())
    plan = maker.plan()
    for note in maker.given.notes:
        print(note, file=sys.stderr)
    with closing(maker.given.data), file.held(), ExitStack() as stack:
        places = None
        if job.address:
            places = stack.enter_context(_connected(job.address, job, maker.model.config))
        file.begin({**plan, "device": places.device if places else device.type}, job.overwrite)
        wanted = [part for part in range(maker.parts) if not file.part(part).exists()]
        tell = stack.enter_context(shown(maker.model.task.unit, sized=False))(
            "predicting", maker.rows
        )
        tell(maker.rows - sum(map(maker.rows_of, wanted)), 0)
        if places:
            made = made_on_cluster(job, maker, places, wanted)
        else:
            made = maker.made(wanted, lambda rows: tell(rows, 1))
        for part, table in stack.enter_context(closing(made)):
            file.write_part(part, table)
            if places:
                tell(maker.rows_of(part), 1)
        about = {"checkpoint": str(maker.model.checkpoint), "weights_sha256": plan["weights"]}
        return maker, file.complete(maker.parts, about)


@contextmanager
def _connected(address: str, job: PredictArgs, config: TrainConfig) -> Iterator[Places]:
    """Connects to the cluster; yields where its workers run."""
    from raytrain_ddp.ray_backend import cluster
    from raytrain_ddp.ray_backend.task_transfer import shipped_code
    from raytrain_ddp.tools.predict.result_file import places_for

    options = {"runtime_env": shipped_code(config)}
    with cluster.ray_connection(address, {}, options, tell=lambda _: None):
        places = places_for(cluster.live_node_resources(), job.workers, job.device)
        workers = plural(places.workers, "worker")
        print(f"starting {workers} on {places.device}", file=sys.stderr)
        yield places


if __name__ == "__main__":
    run_command(main)
