"""What a run's best checkpoint predicts: by class, and the worst mistakes as pictures.

Imports torch, and opens the data. Limited in samples and time; samples are spread over the set.
"""

from __future__ import annotations

import base64
import io
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raytrain_ddp.config.input_sections import TORCHVISION_ROOT
from raytrain_ddp.errors import ConfigError, DataError, RaytrainError
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.page import Cell, Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_SAMPLES, _MOST_S = 20_000, 60.0
_WORST, _SIDE = 24, 112  # mistakes; pixels of a picture
_MOST_CLASSES, _MOST_ROWS = 24, 20  # of a matrix; of a table


class Mistake(NamedTuple):
    """A misclassified sample.

    Args:
        sure: the predicted probability of `guess`.
        where: file and row. image: encoded, or a PIL image.
    """

    loss: float
    truth: str
    guess: str
    sure: float
    where: str
    image: Any

    @property
    def picture(self) -> str:
        """A data URI, small enough for e-mail."""
        from PIL import Image

        given = self.image
        opened = given if isinstance(given, Image.Image) else Image.open(io.BytesIO(given))
        small = opened.convert("RGB")
        kind = "jpeg" if max(small.size) > _SIDE else "png"
        small.thumbnail((_SIDE, _SIDE))
        out = io.BytesIO()
        small.save(out, kind)
        return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def predictions(history: RunHistory, device: str) -> list[Part]:
    """What a page shows of them, or why there are none, which is not an error."""
    if not history.files.kept:
        return []
    try:
        return _predictions(history, device)
    except (RaytrainError, OSError) as error:
        return [{"note": f"None: {error}"}]


def _predictions(history: RunHistory, device: str) -> list[Part]:
    from raytrain_ddp.data.splits import open_splits
    from raytrain_ddp.tools.inference.loaded_model import load

    files = history.files
    data = files.manifest.config.get("data", {}) if files.manifest else {}
    kind, _, name = str(data.get("source")).partition(":")
    root = Path(data.get("root") or TORCHVISION_ROOT)
    if kind == "torchvision" and not (root / f".{name}.lock").exists():
        raise ConfigError(f"{kind}:{name} is not in {root}/ here.")  # and is not downloaded
    training_here = device == "auto" and history.state == "running"  # has the GPU to itself
    model = load(files.place.address, device="cpu" if training_here else device)
    config = model.config.data
    if not model.takes_images or config.target_columns:
        raise ConfigError(f"task = {model.config.task!r} is not an image classification.")
    source = open_splits(config).eval
    if source is None:
        raise ConfigError("there is no evaluation set.")
    names, labels, size = model.class_names, source.labels(), model.config.eval_micro_batch
    chunks = [range(at, min(at + size, len(labels))) for at in range(0, len(labels), size)]
    if len(labels) > _MOST_SAMPLES:  # spread out: files are often sorted by class
        chunks = random.Random(0).sample(chunks, _MOST_SAMPLES // size or 1)
    matrix = np.zeros((len(names), len(names)), dtype=int)
    worst, until = list[Mistake](), time.monotonic() + _MOST_S
    for rows in chunks:
        images = [image for image, _ in source.read(np.array(rows))]
        try:
            found = model.predict(images)
        except DataError:  # a bad record
            continue
        for row, image, each in zip(rows, images, found, strict=True):
            truth, guess = names[labels[row]], each["class"]
            matrix[labels[row], names.index(guess)] += 1
            if truth != guess:
                loss = -math.log(max(each["probabilities"][truth], 1e-30))
                where = source.where(row)
                worst.append(Mistake(loss, truth, guess, each["probability"], where, image))
        worst = sorted(worst, key=lambda mistake: -mistake.loss)[:_WORST]
        if time.monotonic() > until:
            break
    of = f"{matrix.sum():,} of {len(labels):,} samples, with {model.checkpoint.name}"
    return [*tables_of(names, matrix, of), {"gallery": worst}]


def tables_of(names: Sequence[str], matrix: NDArray[Any], of: str) -> list[Part]:
    """The results by class.

    Args:
        matrix: [true class, predicted class] -> samples. of: which samples these are.
    """
    support, right = matrix.sum(1), matrix.diagonal()
    recall, precision = right / support.clip(1), right / matrix.sum(0).clip(1)
    rows = [
        (names[n], int(support[n]), f"{recall[n]:.1%}", f"{precision[n]:.1%}")
        for n in np.argsort(recall, kind="stable")
    ]
    head = ("class, the worst first", "samples", "recall", "precision")
    rest: Part = {"fold": f"all {len(rows)} classes", "parts": [{"head": head, "rows": rows}]}
    parts: list[Part] = [
        {"note": f"{right.sum() / max(1, matrix.sum()):.2%} are correct: {of}."},
        {"head": head, "rows": rows[:_MOST_ROWS]},
        rest if len(rows) > _MOST_ROWS else {},
    ]
    wrong = matrix - np.diag(right)
    if len(names) > _MOST_CLASSES:
        pairs = [
            divmod(int(at), len(names)) for at in np.argsort(-wrong, None, "stable")[:_MOST_ROWS]
        ]
        confused = [
            (names[truth], names[guess], int(wrong[truth, guess]), int(support[truth]))
            for truth, guess in pairs
            if wrong[truth, guess]
        ]
        head = ("true class", "predicted class", "times", "of")
        return [*parts, {"head": head, "rows": confused}]

    def cell(truth: int, guess: int) -> Cell:
        count, css = matrix[truth, guess], "right" if truth == guess else "wrong"
        share = recall[truth] if truth == guess else count / max(1, wrong.max())
        title = f"{names[truth]} taken for {names[guess]}: {count} of {support[truth]}"
        return Cell(str(count or ""), css, title=title, share=share)

    every = range(len(names))
    grid = [
        [Cell(names[truth], "dim"), *(cell(truth, guess) for guess in every)] for truth in every
    ]
    title = "rows: true class; columns: predicted class"
    return [*parts, {"head": ("", *names), "rows": grid, "css": "matrix", "title": title}]
