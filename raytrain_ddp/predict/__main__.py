"""``python -m raytrain_ddp.predict RUN INPUT --out FILE``: what a checkpoint says of each row."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import positional
from raytrain_ddp.config.validation import require
from raytrain_ddp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raytrain_ddp.predict.output_parts import OutputParts, Totals

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
    image_column: str | None = None
    """Column of Parquet files and lists that has the images. Default: that of the run."""
    image_size: int | None = None
    """Side of the model's input in pixels. Default: that of the evaluation."""
    batch_size: int | None = None
    """Images of a forward pass. Default: as in the evaluation, so that the outputs are the same."""
    device: str = "auto"
    """Device, such as cpu, cuda or cuda:1. auto: a GPU if there is one."""
    overwrite: bool = False
    """Replace FILE if it exists, and what was begun for it with other flags."""


COMMAND = Command("predict", PredictArgs, "RUN [INPUT ...] --out FILE [--FLAG ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    if args.out is None:
        raise ConfigError(f"--out is missing: the file to write ({_SUFFIXES}).")
    for flag in ("top", "image_size", "batch_size"):
        value = getattr(args, flag)
        name = f"--{flag.replace('_', '-')}"
        require(value is None or value >= 1, name, value, "must be 1 or more")
    from raytrain_ddp.predict.output_parts import OutputParts

    parts = OutputParts(Path(args.out).expanduser(), args.overwrite)
    began = time.monotonic()
    try:
        checkpoint, totals, unit = _predict(args, parts)
    except KeyboardInterrupt:
        print("Finished work is kept: run the same command again to continue.", file=sys.stderr)
        raise
    _print(checkpoint, totals, unit, parts, time.monotonic() - began)
    if totals.bad == totals.rows:
        raise DataError(f"none of the {totals.bad} {unit} can be read: see the column error.")
    return 0


def _predict(args: PredictArgs, parts: OutputParts) -> tuple[str, Totals, str]:
    from raytrain_ddp.checkpoint.lookup import find_checkpoint
    from raytrain_ddp.config.recipe import from_dict

    found = find_checkpoint(args.run, args.checkpoint)
    config = from_dict(dict(found.manifest.config), where=str(found))
    import torch

    from raytrain_ddp.data.loader_threads import LoaderThreads
    from raytrain_ddp.display.work_meter import shown
    from raytrain_ddp.inference.batch_outputs import Asked, outputs
    from raytrain_ddp.inference.inputs import open_input
    from raytrain_ddp.inference.loaded_model import loaded
    from raytrain_ddp.predict.result_table import Columns, joined
    from raytrain_ddp.training.world import World, choose_device, set_up

    device = choose_device(args.device)
    threads = torch.get_num_threads()
    set_up(World(0, 1, device.index or 0, device, threads), config.compute)
    model = loaded(found, config, device)
    bad: dict[int, str] = {}
    given = open_input(args.inputs, model, bad.__setitem__, args.image_column, args.image_size or 0)
    for note in given.notes:
        print(note, file=sys.stderr)
    size, rows = args.batch_size or config.eval_micro_batch, given.data.rows
    top = _top(args, model.class_names, bool(config.data.target_columns))
    asked = Asked(size, args.tta, args.layer, config.compute.precision)
    columns = Columns(model.class_names, top, args.probabilities)
    chunks, each = -(-rows // size), max(1, _ROWS_PER_PART // size)
    weights = found.manifest.files["model.safetensors"].sha256
    about = {"checkpoint": str(found), "weights_sha256": weights}
    plan = {
        "weights": weights,
        "input": given.data.source.fingerprint(),
        "rows": rows,
        "batch_size": size,
        "device": device.type,
        **{name: getattr(args, name) for name in ("probabilities", "layer", "tta")},
        **{name: getattr(args, name) for name in ("image_column", "image_size")},
        "top": top,
    }
    unit = model.task.unit
    try:
        with parts.held(), shown(unit, sized=False) as meter:
            parts.begin(plan)
            tell = meter.phase("predicting", rows)
            wanted = [n for n in range(chunks) if not parts.path(n // each).exists()]
            tell(rows - sum(min(size, rows - n * size) for n in wanted), 0)
            made = []
            task, net = model.task, model.model
            for done in outputs(task, net, given.data, asked, wanted, bad, LoaderThreads(threads)):
                made.append(columns.table(done, given.places(done.rows), bad))
                tell(len(done.rows), 1)
                part, place = divmod(done.rows.start // size, each)
                if place == each - 1 or done.rows.stop == rows:
                    parts.write(part, joined(made))
                    made = []
            return str(found), parts.finish(-(-chunks // each), about), unit
    finally:
        given.data.close()


def _top(args: PredictArgs, class_names: Sequence[str], of_targets: bool) -> int:
    """How many classes are written; 0 if the outputs are no classes."""
    if of_targets or not class_names:
        for flag in ("top", "probabilities"):
            if getattr(args, flag) != getattr(PredictArgs, flag):
                raise ConfigError(f"--{flag} has no effect: the run does not predict classes.")
        return 0
    if args.top > len(class_names):
        raise ConfigError(f"--top {args.top}: the run has {len(class_names)} classes.")
    return args.top


def _print(checkpoint: str, totals: Totals, unit: str, parts: OutputParts, seconds: float) -> None:
    print(checkpoint)
    print(f"{totals.rows:,} {unit}, each once, in {seconds:.1f} s")
    if totals.bad:
        print(f"  {totals.bad:,} cannot be read: see the column error")
    if totals.labeled:
        share = totals.right / totals.labeled
        print(f"  class is the label in {totals.right:,} of {totals.labeled:,} ({share:.6f})")
    print(f"{parts.out}: {parts.size_bytes() / 1000:,.0f} kB")


if __name__ == "__main__":
    run_command(main)
