"""``raytrain export RUN --format FORMAT``: a checkpoint for other programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.flags import positional
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.validation import require_least
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.files import expanded, require_utf8
from raytrain_ddp.tools.staging import Staging


@dataclass(frozen=True)
class ExportArgs:
    """Export the model of a checkpoint, with its preprocessing, its classes and a README.md.

    A fresh process loads the export and computes images with it. The folder gets its name only if
    the results are those of the model.
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

    from raytrain_ddp.tools.export.check import checked, images_of
    from raytrain_ddp.tools.export.formats import FORMATS, as_text, facts_of
    from raytrain_ddp.tools.export.model_card import model_card
    from raytrain_ddp.tools.inference.loaded_model import load

    model, form = load(args.run, args.checkpoint, device="cpu"), FORMATS[args.format]
    if not model.takes_images:
        raise ConfigError(
            f"task = {model.config.task!r} is not an image classification: export the model of "
            "raytrain_ddp.load(RUN).model with torch.export, whose inputs you know."
        )
    out = expanded(args.out or f"{model.config.name}-{args.format}")
    _require_place(out, args.overwrite)
    images = images_of(model, args.data, args.image_size or 0)
    facts = facts_of(model, *images.shape[-2:])
    with _staged(out, args.overwrite) as folder:
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        (folder / "preprocessing.json").write_text(text, encoding="utf-8")
        form.write(model, torch.cat([images, images])[:2], as_text(facts), folder / form.file)
        found = checked(folder, form.use, model, facts["activation"], images)
        card = model_card(model, form.use, found)
        (folder / "README.md").write_text(card, encoding="utf-8")
    size_kb = (out / form.file).stat().st_size / 1000
    print(f"{model.checkpoint}\n{found}\n{out / form.file}: {size_kb:,.0f} kB")
    return 0


@contextmanager
def _staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder of this process only, which becomes `out` unless an exception is raised."""
    staging = Staging(out, "exporting", f"--out {out}")
    with staging.held(), staging.writing():
        _require_place(out, overwrite)  # it may be there by now
        shutil.rmtree(staging.result, ignore_errors=True)  # of a killed export
        staging.result.mkdir()
        yield staging.result
        staging.finish()


def _require_place(out: Path, overwrite: bool) -> None:
    """Raises ConfigError if the folder cannot be made there, or would replace anything other than
    an export."""
    require_utf8("--out", out)  # as the writers do
    is_other = out.exists() and not (out / "preprocessing.json").exists()
    for is_wrong, why in (
        (not out.parent.is_dir(), f"there is no folder {out.parent}"),
        (out.exists() and not overwrite, "exists already: give another name, or --overwrite"),
        (is_other, "is not an export, and is not replaced: give another name"),
    ):
        if is_wrong:
            raise ConfigError(f"--out {out}: {why}.")


if __name__ == "__main__":
    run_command(main)
