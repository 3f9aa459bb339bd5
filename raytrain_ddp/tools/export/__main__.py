"""``raytrain export RUN --format FORMAT``: a checkpoint for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import positional
from raytrain_ddp.config.validation import require_least
from raytrain_ddp.errors import ConfigError, DataError, RaytrainError
from raytrain_ddp.files import expanded, require_utf8

if TYPE_CHECKING:
    from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_TOLERANCE = 1e-3  # of a probability
_ROWS = 64


@dataclass(frozen=True)
class ExportArgs:
    """Export the model of a checkpoint, with its preprocessing, its classes and a model card.

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
    license: str = "unknown"
    """License of the model, for its card, as an identifier of the Hub, such as apache-2.0."""
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

    from raytrain_ddp.tools.export.formats import facts_of, require_format
    from raytrain_ddp.tools.export.model_card import model_card
    from raytrain_ddp.tools.inference.loaded_model import load
    from raytrain_ddp.tools.staging import Staging

    model = load(args.run, args.checkpoint, device="cpu")
    form = require_format(args.format, model)
    out = expanded(args.out or f"{model.config.name}-{args.format}")
    _require_place(out, args.overwrite)
    images = _images(args, model)
    facts = facts_of(model, *images.shape[-2:])
    staging = Staging(out, "exporting", f"--out {out}")
    with staging.held(), staging.writing():
        _require_place(out, args.overwrite)  # it may be there by now
        staging.begin({"format": args.format, "checkpoint": str(model.checkpoint)}, True)
        folder = staging.result
        folder.mkdir()
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        (folder / "preprocessing.json").write_text(text, encoding="utf-8")
        form.write(model, torch.cat([images, images])[:2], facts, folder / form.file)
        checked = _checked(args.format, form.use, model, facts["activation"], images, folder)
        card = model_card(model, facts, args.license, form.use, f"The export was c{checked[1:]}.")
        (folder / "README.md").write_text(card, encoding="utf-8")
        staging.finish()
    size_kb = (out / form.file).stat().st_size / 1000
    print(f"{model.checkpoint}\n{checked}\n{out / form.file}: {size_kb:,.0f} kB")
    return 0


def _require_place(out: Path, overwrite: bool) -> None:
    """Raises ConfigError if the folder cannot be made there, or would replace anything other than
    an export."""
    require_utf8("--out", out)  # as the writers do
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}.")
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out}: exists already: give another name, or --overwrite.")
    if out.exists() and not (out / "preprocessing.json").exists():
        raise ConfigError(f"--out {out}: is not an export, and is not replaced: give another name.")


def _images(args: ExportArgs, model: LoadedModel) -> Any:
    """Images to compare on, uint8 (n, 3, h, w).

    Raises:
        DataError: there are none that can be read.
    """
    import numpy as np

    from raytrain_ddp.data.order.sample_rng import Draws
    from raytrain_ddp.tools.inference.inputs import open_input

    words = [] if args.data is None else [args.data]
    bad: dict[int, str] = {}
    try:
        given = open_input(words, model, bad.__setitem__, image_size=args.image_size or 0)
    except RaytrainError as error:
        if words:
            raise
        hint = "To compare the export on other images: --data FOLDER."
        raise type(error)(f"{error} {hint}") from None
    rows = np.unique(np.linspace(0, given.data.rows - 1, _ROWS).astype(np.int64))
    images = given.data.batch(Draws(0, 0, rows))["image"]
    given.data.close()
    if not len(images):
        raise DataError(f"none of {len(rows)} images can be read: {next(iter(bad.values()))}.")
    return images.contiguous()


def _checked(
    name: str, use: str, model: LoadedModel, activation: str, images: Any, folder: Path
) -> str:
    """Compares the export with the model; says how far they differ.

    Raises:
        RaytrainError: they differ, or the export cannot be loaded.
    """
    import torch

    from raytrain_ddp.config.recipe import to_dict
    from raytrain_ddp.tools.export.reload import logits_of_export

    built = {"config": to_dict(model.config), "classes": len(model.class_names)}
    found, by = logits_of_export(folder, use, built, images.numpy())
    with torch.inference_mode():
        ours, theirs = model(images).float(), torch.from_numpy(found)
    if activation != "none":
        as_shares = torch.sigmoid if activation == "sigmoid" else lambda each: each.softmax(1)
        ours, theirs = as_shares(ours), as_shares(theirs)
    apart = (theirs - ours).abs().max().item()
    checked = f"by {by} in a fresh process on {len(images)} images"
    what = "an output differs" if activation == "none" else "a probability differs"
    if not apart <= _TOLERANCE * max(1.0, ours.abs().max().item()):
        raise RaytrainError(
            f"--format {name}: the export gives other results, {checked}: {what} by {apart:.3g}."
        )
    same = int((theirs.argmax(1) == ours.argmax(1)).sum())
    same_class = "" if activation == "none" else f", {same} of the same class"
    return f"checked {checked}: {what} by at most {apart:.2g}{same_class}"


if __name__ == "__main__":
    run_command(main)
