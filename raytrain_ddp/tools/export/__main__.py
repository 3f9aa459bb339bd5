"""``raytrain export RUN --format FORMAT``: a checkpoint for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.command_line import Command, positional
from raytrain_ddp.config.field_types import require_least
from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.files import expanded
from raytrain_ddp.tools.staging import Staging


@dataclass(frozen=True)
class ExportArgs:
    """Export the model of a checkpoint, with its preprocessing, its classes and a README.md.

    The export is loaded again and run on images. The folder gets its final name only if the results
    match those of the model.
    """

    run: str = field(metadata=positional("RUN"))
    """Folder of a run, its name below runs/, or the folder of one checkpoint."""
    format: Literal["onnx", "torch-export", "safetensors"] | None = None
    """What to write."""
    out: str | None = field(default=None, metadata={"metavar": "FOLDER"})
    """Folder to create. Default: the name of the run and the format, such as photos-onnx."""
    checkpoint: Literal["best", "last"] | None = None
    """Checkpoint of the run to export. Default: best."""
    data: str | None = None
    """Images to compare on: a folder, glob, Parquet file, or URI. Default: the evaluation data of
    the run."""
    image_size: int | None = None
    """Side of the model's input in pixels. Default: that of the evaluation."""
    overwrite: bool = False
    """Replace FOLDER if it is an export."""


COMMAND = Command("export", ExportArgs, "RUN --format FORMAT [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    if args.format is None:
        raise ConfigError("--format is missing: onnx, torch-export or safetensors.")
    require_least(args, image_size=1)
    import torch

    from raytrain_ddp.tools.export import formats
    from raytrain_ddp.tools.inference.loaded_model import load

    model, form = load(args.run, args.checkpoint, device="cpu"), formats.FORMATS[args.format]
    if not model.takes_images:
        raise ConfigError(
            f"task = {model.config.task!r} is not an image classification: export the model of "
            "raytrain_ddp.load(RUN).model with torch.export, whose inputs you know."
        )
    out = expanded(args.out or f"{model.config.name}-{args.format}")
    staging = Staging(out, "exporting", f"--out {out}")
    other = "" if (out / "preprocessing.json").exists() else "is not an export"
    staging.require_place(args.overwrite, other)
    images = formats.images_of(model, args.data, args.image_size or 0)
    facts, folder = formats.facts_of(model, *images.shape[-2:]), staging.result
    with staging.held(), staging.writing():
        staging.require_place(args.overwrite, other)  # `out` may exist by now
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed export
        folder.mkdir()
        formats.write(args.format, model, torch.cat([images, images])[:2], facts, folder)
        found = formats.checked(folder, form, model, images)
        card = formats.model_card(model, form.use, found)
        (folder / "README.md").write_text(card, encoding="utf-8")
        staging.finish()
    size_kb = (out / form.file).stat().st_size / 1000
    print(f"{model.checkpoint}\n{found}\n{out / form.file}: {size_kb:,.0f} kB")
    return 0


if __name__ == "__main__":
    run_command(main)
