"""``raytrain predict RUN INPUT --out FILE``: a checkpoint's output for each row."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.flags import positional
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.validation import ADDRESS, MAY_BE_EMPTY, require_least
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.files import expanded

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.tools.predict.cluster_workers import Places
    from raytrain_ddp.tools.predict.result_files import ResultFile


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
    """File to write: .parquet, .csv or .jsonl."""
    top: int = 1
    """Most probable classes to write for each row."""
    probabilities: bool = False
    """Add the probabilities of all classes."""
    layer: str | None = None
    """Add the output of this module of the model as an embedding, such as avgpool."""
    tta: Literal["none", "flip"] = "none"
    """Test-time augmentation. flip: the mean of the outputs for each image and its mirror image."""
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
    args = COMMAND.parse(argv)
    if args.out is None:
        raise ConfigError("--out is missing: the file to write (.parquet, .csv or .jsonl).")
    if args.image_column is not None and not args.inputs:
        raise ConfigError("--image-column has no effect without INPUT.")
    if args.address is None and args.workers is not None:
        raise ConfigError("--workers has no effect without --address.")
    if args.address is not None and args.device.startswith("cuda:"):
        raise ConfigError(f"--device {args.device}: give cuda or cpu with --address.")
    require_least(args, top=1, image_size=1, batch_size=1, workers=1)
    from raytrain_ddp.tools.predict.result_files import ResultFile

    file, began = ResultFile(expanded(args.out), args.overwrite), time.monotonic()
    try:
        model, unit, counts = _predict(args, file)
    except KeyboardInterrupt:
        if file.parts():
            text = "Finished work is kept: run the same command again to continue."
            print(text, file=sys.stderr)
        raise
    rows, bad, labeled, right = counts
    images = unit.removesuffix("s") if rows == 1 else unit
    print(f"{model}\n{rows:,} {images}, each once, in {time.monotonic() - began:.1f} s")
    if bad:
        print(f"  {bad:,} cannot be read: see the column error")
    if labeled:
        print(f"  class is the label in {right:,} of {labeled:,} ({right / labeled:.6f})")
    print(f"{file.out}: {file.out.stat().st_size / 1000:,.0f} kB")
    if bad == rows:
        raise DataError(f"none of the {bad} {unit} can be read: see the column error.")
    return 0


def _predict(args: PredictArgs, file: ResultFile) -> tuple[str, str, list[int]]:
    """Returns the checkpoint, what a row is, and what `ResultFile.complete` returns."""
    from raytrain_ddp.checkpoint.run_folder import find_checkpoint

    found = find_checkpoint(args.run, args.checkpoint)
    import torch

    from raytrain_ddp.tools.display.work_meter import shown
    from raytrain_ddp.tools.predict.part_maker import PartMaker
    from raytrain_ddp.training.runtime.world import choose_device

    device = choose_device(args.device if args.address is None else "cpu")
    job = replace(args, run=found.storage.address)
    maker = PartMaker(job, device, torch.get_num_threads())
    unit = maker.model.task.unit
    for note in maker.given.notes:
        print(note, file=sys.stderr)
    with closing(maker.given.data), ExitStack() as stack:
        stack.enter_context(file.held())
        places = None
        if args.address is not None:
            places = stack.enter_context(_connected(args, maker.model.config))
        plan = maker.plan()
        file.begin({**plan, "device": places.device if places else device.type}, args.overwrite)
        wanted = [part for part in range(maker.parts) if not file.part(part).exists()]
        if places:
            from raytrain_ddp.tools.predict.cluster_workers import made_on_cluster

            print(f"starting {places}", file=sys.stderr)
            made = made_on_cluster(job, plan, places, maker.model.config, wanted)
        tell = stack.enter_context(shown(unit, sized=False))("predicting", maker.rows)
        tell(maker.rows - sum(map(maker.rows_of, wanted)), 0)
        if not places:
            made = maker.made(wanted, lambda rows: tell(rows, 1))
        for part, table in stack.enter_context(closing(made)):
            file.write_part(part, table)
            if places:
                tell(maker.rows_of(part), 1)
        about = {"checkpoint": str(found), "weights_sha256": plan["weights"]}
        return str(found), unit, file.complete(maker.parts, about)


@contextmanager
def _connected(args: PredictArgs, config: TrainConfig) -> Iterator[Places]:
    """Connects to the cluster; yields where its workers run."""
    from raytrain_ddp.ray_backend import cluster
    from raytrain_ddp.tools.predict.cluster_workers import places_for

    print(f"connecting to Ray at {args.address}", file=sys.stderr)
    options = {"runtime_env": cluster.shipped_code(config)}
    with cluster.ray_connection(args.address, {}, options, tell=lambda _: None):
        yield places_for(cluster.live_node_resources(), args.workers, args.device)


if __name__ == "__main__":
    run_command(main)
