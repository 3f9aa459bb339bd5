"""``raytrain predict RUN INPUT --out FILE``: a checkpoint's output for each row."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.flags import positional
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.validation import ADDRESS, MAY_BE_EMPTY, require_least
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.files import expanded

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.output_parts import OutputParts, Totals
    from raytrain_ddp.tools.predict.part_maker import PartMaker, Progress

_ROWS_PER_PART = 2048
_SUFFIXES = ".parquet, .csv or .jsonl"


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
        raise ConfigError(f"--out is missing: the file to write ({_SUFFIXES}).")
    if args.image_column is not None and not args.inputs:
        raise ConfigError("--image-column has no effect without INPUT.")
    if args.address is None and args.workers is not None:
        raise ConfigError("--workers has no effect without --address.")
    if args.address is not None and args.device.startswith("cuda:"):
        raise ConfigError(f"--device {args.device}: give cuda or cpu with --address.")
    require_least(args, top=1, image_size=1, batch_size=1, workers=1)
    from raytrain_ddp.tools.predict.output_parts import OutputParts

    parts = OutputParts(expanded(args.out), args.overwrite)
    began = time.monotonic()
    try:
        totals, maker = _predict(args, parts)
    except KeyboardInterrupt:
        if parts.folder.exists():
            text = "Finished work is kept: run the same command again to continue."
            print(text, file=sys.stderr)
        raise
    _print(totals, maker, parts, time.monotonic() - began)
    if totals.bad == totals.rows:
        raise DataError(f"none of the {totals.bad} {maker.unit} can be read: see the column error.")
    return 0


def _predict(args: PredictArgs, parts: OutputParts) -> tuple[Totals, PartMaker]:
    from raytrain_ddp.checkpoint.run_folder import find_checkpoint

    found = find_checkpoint(args.run, args.checkpoint)
    import torch

    from raytrain_ddp.tools.display.work_meter import shown
    from raytrain_ddp.tools.predict.part_maker import Job, PartMaker
    from raytrain_ddp.training.runtime.world import choose_device

    device = choose_device(args.device if args.address is None else "cpu")
    shared = {name: getattr(args, name) for name in Job.__dataclass_fields__ if hasattr(args, name)}
    job = Job(**{**shared, "checkpoint": found.storage.address, "part_rows": _ROWS_PER_PART})
    maker = PartMaker(job, device, torch.get_num_threads())
    config = maker.model.config
    for note in maker.given.notes:
        print(note, file=sys.stderr)
    with closing(maker), ExitStack() as stack:
        stack.enter_context(parts.held())
        places = None
        if args.address is not None:
            from raytrain_ddp.ray_backend import cluster
            from raytrain_ddp.tools.predict.cluster_workers import places_for, working

            print(f"connecting to Ray at {args.address}", file=sys.stderr)
            options = {"runtime_env": cluster.shipped_code(config)}
            there = cluster.ray_connection(args.address, {}, options, tell=lambda _: None)
            stack.enter_context(there)
            places = places_for(cluster.live_node_resources(), args.workers, args.device)
        make: Callable[[Sequence[int]], Iterator[Progress]] = maker.made
        plan = maker.plan(places.device if places else device.type)
        parts.begin(plan)
        wanted = [part for part in range(maker.parts) if not parts.path(part).exists()]
        if places:
            print(f"starting {places}", file=sys.stderr)
            make = stack.enter_context(working(job, plan, places, config, len(wanted)))
        tell = stack.enter_context(shown(maker.unit, sized=False))("predicting", maker.rows)
        tell(maker.rows - sum(map(maker.rows_of, wanted)), 0)
        for step in make(wanted):
            tell(step.rows, 1)
            if step.table is not None:
                parts.write(step.part, step.table)
        about = {"checkpoint": str(found), "weights_sha256": maker.weights}
        return parts.finish(maker.parts, about), maker


def _print(totals: Totals, maker: PartMaker, parts: OutputParts, seconds: float) -> None:
    print(maker.job.checkpoint)
    unit = maker.unit.removesuffix("s") if totals.rows == 1 else maker.unit
    print(f"{totals.rows:,} {unit}, each once, in {seconds:.1f} s")
    if totals.bad:
        print(f"  {totals.bad:,} cannot be read: see the column error")
    if totals.labeled:
        share = totals.right / totals.labeled
        print(f"  class is the label in {totals.right:,} of {totals.labeled:,} ({share:.6f})")
    print(f"{parts.out}: {parts.out.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    run_command(main)
