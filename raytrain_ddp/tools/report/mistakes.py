"""Evaluates a checkpoint for the report: correct and wrong predictions by class, worst mistakes.

Imports torch, and opens the data. Limited in samples and time; samples are spread over the set.
"""

from __future__ import annotations

import base64
import heapq
import io
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, config_of
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.config.input_sections import TORCHVISION_ROOT
from raytrain_ddp.errors import CheckpointError, ConfigError, RaytrainError, first_line
from raytrain_ddp.tools.report.run_files import RunFiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.tasks.task import Task

_MOST_SAMPLES, _MOST_S = 20_000, 60.0
_WORST = 24
_SIDE, _SMALL = 112, 64  # pixels of a thumbnail; of one shown unscaled


class Mistake(NamedTuple):
    """A misclassified sample.

    Args:
        sure: the predicted probability of `guess`.
        picture: a data URI.
        where: file and row; "" if unknown.
    """

    loss: float
    truth: str
    guess: str
    sure: float
    picture: str
    where: str


@dataclass(frozen=True)
class Predictions:
    """Predictions of `checkpoint` on `samples` of the evaluation set's `rows`.

    Args:
        matrix: [truth][guess] -> samples.
        worst: mistakes, the highest loss first.
    """

    checkpoint: str
    class_names: Sequence[str]
    matrix: Sequence[Sequence[int]]
    samples: int
    rows: int
    worst: Sequence[Mistake]


def predict(files: RunFiles, device: str, is_running: bool) -> Predictions:
    """Raises RaytrainError if there is nothing to report, saying why."""
    checkpoint = _best(files)
    config = config_of(checkpoint)
    _require_no_download(config)
    from raytrain_ddp.tasks.task_check import eval_data_of, model_of
    from raytrain_ddp.tasks.task_loading import load_task
    from raytrain_ddp.training.runtime.world import choose_device
    from raytrain_ddp.training.state.shared_checkpoint import load_model

    free = not is_running  # training has the GPU to itself
    on = choose_device(device, free)
    try:
        task = load_task(config)
        data = eval_data_of(task, config.seed)
    except RaytrainError:
        raise
    except Exception as error:  # the user's code, or opening the data
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"the task cannot be built here: {what}") from error
    names = getattr(task, "class_names", None)
    if not names or config.data.target_columns:
        raise ConfigError(f"task = {config.task!r} is not an image classification.")
    if data is None:
        raise ConfigError("there is no evaluation set.")
    model = model_of(task, pretrained=False)
    load_model(model, checkpoint)
    try:
        model = model.to(on).eval()
        return _evaluate(task, model, data, config, [str(n) for n in names], checkpoint)
    except RaytrainError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"the evaluation set cannot be evaluated: {what}") from error


def _best(files: RunFiles) -> Checkpoint:
    """The checkpoint of the best evaluation, or else the newest."""
    kept = [one for one in files.kept if one.manifest]
    at = [one for one in kept if files.best and one.step == files.best.step] or kept
    if not at:
        raise CheckpointError("there is no checkpoint yet.")
    name = CheckpointName.parse(at[0].name)
    assert name is not None  # it comes from a listing of these names
    return checkpoint_store(files.place).open(name)


def _require_no_download(config: TrainConfig) -> None:
    """A report must not download data."""
    kind, _, name = config.data.source.partition(":")
    root = config.data.root or TORCHVISION_ROOT
    if kind == "torchvision" and not (Path(root) / f".{name}.lock").exists():
        raise ConfigError(f"{config.data.source} is not in {root}/ here.")


class _Outputs:
    """Takes the place of a metric, to capture the outputs that the task passes to it."""

    def __init__(self) -> None:
        self.taken: tuple[Tensor, Tensor] | None = None

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.taken = logits, labels


def _evaluate(
    task: Task,
    model: torch.nn.Module,
    data: Data,
    config: TrainConfig,
    names: Sequence[str],
    checkpoint: Checkpoint,
) -> Predictions:
    import torch
    from torch.nn.functional import cross_entropy

    from raytrain_ddp.data.loading.loader import eval_batches
    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.data.loading.nested import to_device

    size, device = config.eval_micro_batch, next(model.parameters()).device
    chunks = list(range(-(-data.rows // size)))
    if data.rows > _MOST_SAMPLES:  # spread out: files are often sorted by class
        chunks = random.Random(0).sample(chunks, _MOST_SAMPLES // size or 1)
    matrix = torch.zeros((len(names), len(names)), dtype=torch.int64)
    worst: list[tuple[float, int, Mistake]] = []
    outputs, until, samples = _Outputs(), time.monotonic() + _MOST_S, 0
    loaded = eval_batches(data, size, chunks, LoaderThreads(torch.get_num_threads()))
    with torch.inference_mode(), closing(loaded):
        for chunk, batch in zip(chunks, loaded, strict=False):
            count = data.samples_of(batch)
            images = batch.get("image") if isinstance(batch, dict) else None
            outputs.taken = None
            if count:
                task.evaluate(model, to_device(batch, device), {"outputs": cast(Any, outputs)})
            if outputs.taken is None:
                continue
            logits, labels = outputs.taken[0].float().cpu(), outputs.taken[1].cpu()
            losses = cross_entropy(logits, labels, reduction="none")
            guesses = logits.argmax(1)
            matrix += torch.bincount(
                labels * len(names) + guesses, minlength=len(names) ** 2
            ).view_as(matrix)
            whole = count == min(size, data.rows - chunk * size)  # no bad record was skipped
            for place in (guesses != labels).nonzero()[:, 0].tolist():
                loss = losses[place].item()
                if len(worst) == _WORST and loss <= worst[0][0]:
                    continue
                row = chunk * size + place
                where = _where(data, row) if whole else ""
                mistake = Mistake(
                    loss,
                    names[int(labels[place])],
                    names[int(guesses[place])],
                    logits[place].softmax(0).max().item(),
                    picture(images[place]) if images is not None else "",
                    where,
                )
                heapq.heappush(worst, (loss, row, mistake))
                if len(worst) > _WORST:
                    heapq.heappop(worst)
            samples += count
            if time.monotonic() > until:
                break
    if not samples:
        raise ConfigError("the task passes no class outputs to its metrics.")
    ordered = [mistake for _, _, mistake in sorted(worst, reverse=True)]
    return Predictions(str(checkpoint.name), names, matrix.tolist(), samples, data.rows, ordered)


def picture(image: Tensor) -> str:
    """A data URI of an image, uint8 (3 or 1, height, width), small enough for e-mail; "" if a
    user's task uses that name for something else."""
    import torch
    from PIL import Image

    if image.dtype is not torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3):
        return ""
    drawn = Image.fromarray(image.cpu().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    kind, options = "png", {}
    if max(drawn.size) > _SMALL:
        drawn.thumbnail((_SIDE, _SIDE))
        kind, options = "jpeg", {"quality": 80}
    out = io.BytesIO()
    drawn.save(out, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def _where(data: Data, row: int) -> str:
    where = getattr(data.source, "where", None)
    return str(where(row)) if where is not None else f"row {row}"
