"""What a run's best checkpoint predicts: by class, and the worst mistakes as pictures.

Imports torch, and opens the data. Limited in time.
"""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrain_ddp.config.sections import TORCHVISION_ROOT
from raytrain_ddp.errors import ConfigError, DataError, RaytrainError
from raytrain_ddp.tools.report.page import Cell, Part, Table
from raytrain_ddp.tools.report.run_files import Run, state_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_S = 60.0
_WORST, _SIDE = 24, 112  # mistakes; pixels of a picture
_MOST_CONFUSED = 3  # other classes, of a class


def predictions(run: Run) -> list[Part]:
    """What a page shows of them, or why there are none, which is not an error."""
    try:
        return _predictions(run) if run.manifest else []
    except (RaytrainError, OSError) as error:
        return [f"None: {error}"]


def _predictions(run: Run) -> list[Part]:
    from raytrain_ddp.tools.inference.inputs import evaluation_of_run
    from raytrain_ddp.tools.inference.loaded_model import load

    data = run.manifest.config.get("data", {}) if run.manifest else {}
    kind, _, name = str(data.get("source")).partition(":")
    root = Path(data.get("root") or TORCHVISION_ROOT)
    if kind == "torchvision" and not (root / f".{name}.lock").exists():
        raise ConfigError(f"{kind}:{name} is not in {root}/ here.")  # and is not downloaded
    # a run that trains has the GPU to itself
    model = load(run.place, device="cpu" if state_of(run).name == "running" else "auto")
    config, names = model.config, model.class_names
    if not model.takes_images or config.data.target_columns:
        raise ConfigError(f"task = {config.task!r} is not an image classification.")
    if (source := evaluation_of_run(config, names)) is None:
        raise ConfigError("there is no evaluation set.")
    labels, size = source.labels(), config.eval_micro_batch
    chunks = [range(at, min(at + size, len(labels))) for at in range(0, len(labels), size)]
    random.Random(0).shuffle(chunks)  # files are often sorted by class, and time is limited
    matrix = np.zeros((len(names), len(names)), dtype=int)
    worst, until = list[tuple[float, Cell, Any]](), time.monotonic() + _MOST_S
    for rows in chunks:
        images = [image for image, _ in source.read(np.array(rows))]
        with suppress(DataError):  # a bad record
            for row, image, each in zip(rows, images, model.predict(images), strict=True):
                truth, guess = names[labels[row]], each["class"]
                matrix[labels[row], names.index(guess)] += 1
                if truth != guess:
                    place = source.where(row).rpartition("/")[2]
                    about = f"{each['probability']:.0%} sure, {place}"
                    cell = Cell(f"{truth} taken for {guess}", small=about)
                    worst.append((each["probabilities"][truth], cell, image))
        worst = sorted(worst, key=lambda mistake: mistake[0])[:_WORST]
        if time.monotonic() > until:
            break
    right = matrix.trace() / max(1, matrix.sum())
    of = f"{matrix.sum():,} of {len(labels):,} samples, with {model.checkpoint.name}"
    mistakes = [[cell._replace(image=_uri(image))] for _, cell, image in worst]
    pictures = Table((), mistakes, "cards pictures")
    return [f"{right:.2%} are correct: {of}.", classes(names, matrix), pictures]


def classes(names: Sequence[str], matrix: NDArray[Any]) -> Table:
    """The results by class, the worst first.

    Args:
        matrix: [true class, predicted class] -> samples.
    """
    support, right = matrix.sum(1), matrix.diagonal()
    recall, precision = right / support.clip(1), right / matrix.sum(0).clip(1)
    wrong, rows = matrix - np.diag(right), []
    for n in np.argsort(recall, kind="stable"):
        most = np.argsort(-wrong[n], kind="stable")[:_MOST_CONFUSED]
        taken = [f"{names[other]} ({wrong[n, other]})" for other in most if wrong[n, other]]
        rows.append(
            (names[n], support[n], f"{recall[n]:.1%}", f"{precision[n]:.1%}", ", ".join(taken))
        )
    head = ("class, the worst first", "samples", "recall", "precision", "mostly taken for")
    return Table(head, rows)


def _uri(given: Any) -> str:
    """A data URI of an encoded or a PIL image, small enough for e-mail."""
    from PIL import Image

    opened = given if isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
    small, out = opened.convert("RGB"), io.BytesIO()
    kind = "jpeg" if max(small.size) > _SIDE else "png"
    small.thumbnail((_SIDE, _SIDE))
    small.save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
