"""``raytrain export RUN --format FORMAT``: a checkpoint for other programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.flags import positional
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.validation import require_least
from raytrain_ddp.errors import ConfigError, DataError, PreflightError, RaytrainError
from raytrain_ddp.files import expanded, require_alone, require_utf8

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
    format: Literal["onnx", "torch-export", "safetensors", "timm", "hf", "torchscript"] | None = (
        None
    )
    """What to write. hf: the layout of a timm model on the Hugging Face Hub."""
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
        raise ConfigError(
            "--format is missing: onnx, torch-export, torchscript, safetensors, timm or hf."
        )
    require_least(args, image_size=1)
    import torch

    from raytrain_ddp.tasks.model_zoo import timm_name
    from raytrain_ddp.tools.export.formats import as_text, facts_of, require_format
    from raytrain_ddp.tools.export.model_card import model_card
    from raytrain_ddp.tools.inference.loaded_model import load

    model = load(args.run, args.checkpoint, device="cpu")
    form = require_format(args.format, model)
    out = expanded(args.out or f"{model.config.name}-{args.format}")
    _require_place(out, args.overwrite)
    images = _images(args, model)
    facts = facts_of(model, *images.shape[-2:])
    with _staged(out, args.overwrite) as stage:
        _write_json(stage / "preprocessing.json", facts)
        example = torch.cat([images, images])[:2]
        form.write(model, example, as_text(facts), stage)
        checked = _checked(args.format, form.file, model, images, stage)
        use = form.use.replace("{classes}", str(len(model.class_names)))
        use = use.replace("{architecture}", timm_name(model.config.model.name)[0])
        card = model_card(model, facts, args.license, use, f"The export was c{checked[1:]}.")
        (stage / "README.md").write_text(card, encoding="utf-8")
    size_kb = (out / form.file).stat().st_size / 1000
    print(f"{model.checkpoint}\n{checked}\n{out / form.file}: {size_kb:,.0f} kB")
    return 0


@contextmanager
def _staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder of this process only, which becomes `out` unless an exception is raised.

    Raises:
        RunLockedError: another process exports to the same folder.
        PreflightError: it cannot be written, such as on a full disk.
    """
    hidden = out.parent / f".{out.name}.exporting"
    stage = hidden / "export"
    try:
        hidden.mkdir(exist_ok=True)
        with (hidden / "lock").open("w") as lock:
            text = "another process is exporting to it: wait for it, or stop it."
            require_alone(lock, f"--out {out}: {text}")
            try:
                _require_place(out, overwrite)  # it may be there by now
                shutil.rmtree(stage, ignore_errors=True)  # of a killed export
                stage.mkdir()
                yield stage
                if out.exists():
                    shutil.rmtree(out)
                stage.rename(out)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise PreflightError(f"--out {out}: cannot be written: {reason}.") from None


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


def _checked(name: str, file: str, model: LoadedModel, images: Any, stage: Path) -> str:
    """Compares the export with the model; says how far they differ.

    Raises:
        RaytrainError: they differ, or the export cannot be loaded.
    """
    import torch

    from raytrain_ddp.config.recipe import to_dict
    from raytrain_ddp.tasks.model_zoo import arguments, timm_name
    from raytrain_ddp.tools.export.formats import activation
    from raytrain_ddp.tools.export.reload import logits_of_export

    config = model.config
    request = {
        "format": name,
        "file": file,
        "classes": len(model.class_names),
        "config": to_dict(config),
        "architecture": timm_name(config.model.name)[0],
        "model_args": arguments(config.model),
    }
    found, by = logits_of_export(stage, request, images.numpy())
    with torch.inference_mode():
        wanted = model(images)
    outputs = [torch.from_numpy(found), wanted.float()]
    kind = activation(model)
    if kind != "none":
        outputs = [o.softmax(1) if kind == "softmax" else o.sigmoid() for o in outputs]
    apart = (outputs[0] - outputs[1]).abs().max().item()
    same = int((outputs[0].argmax(1) == outputs[1].argmax(1)).sum())
    what = "an output" if kind == "none" else "a probability"
    checked_by = f"by {by} in a fresh process on {len(images)} images"
    if not apart <= _TOLERANCE * max(1.0, outputs[1].abs().max().item()):
        raise RaytrainError(
            f"--format {name}: the export gives other results, {checked_by}: {what} differs by "
            f"{apart:.3g}."
        )
    same_class = "" if kind == "none" else f", {same} of the same class"
    return f"checked {checked_by}: {what} differs by at most {apart:.2g}{same_class}"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
