"""``python -m raytrain_ddp.evaluate RUN|CHECKPOINT``: exact metrics of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import positional
from raytrain_ddp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain_ddp.checkpoint.store import Checkpoint
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.tasks.task import Task


@dataclass(frozen=True)
class EvaluateArgs:
    """Evaluate a checkpoint in this process, each sample once.

    The metrics equal those that training printed, to the last digit on the same kind of device.
    """

    run: str = field(metadata=positional("RUN"))
    """Folder of a run, its name below runs/, or the folder of one checkpoint."""
    checkpoint: Literal["best", "last"] | None = None
    """Checkpoint of the run to evaluate. Default: best."""
    data: str | None = None
    """Data to evaluate on, as --data.source of fit. Default: the evaluation data of the run."""
    per_class: bool = False
    """Add a table with the precision and recall of each class."""
    device: str = "auto"
    """Device, such as cpu, cuda or cuda:1. auto: a GPU if there is one."""
    out: str | None = None
    """Write all values to this file as JSON."""


COMMAND = Command("evaluate", EvaluateArgs, "RUN [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    from raytrain_ddp.checkpoint.lookup import find_checkpoint

    checkpoint = find_checkpoint(args.run, args.checkpoint)
    config = _config(checkpoint, args.data)
    import torch

    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.tasks.task_check import eval_data_of, metrics_of
    from raytrain_ddp.tasks.task_loading import BUILT_IN, load_task
    from raytrain_ddp.training.async_evaluation import stored_model
    from raytrain_ddp.training.metrics.evaluation import evaluate
    from raytrain_ddp.training.runtime.world import World, choose_device, set_up
    from raytrain_ddp.training.steps.device_feed import require_few_bad

    device = choose_device(args.device)
    world = World(0, 1, device.index or 0, device, torch.get_num_threads())
    set_up(world, config.compute)
    reads: set[str] = set()
    task = load_task(config, reads)
    data = eval_data_of(task, config.seed)
    if args.data is not None and config.task not in BUILT_IN and "data.eval_source" not in reads:
        raise ConfigError(f"--data has no effect: {config.task} does not read data.eval_source.")
    if data is None:
        raise ConfigError("there is no evaluation set: give one with --data.")
    model = stored_model(config, task, checkpoint, device)
    if args.per_class and not hasattr(task, "per_class_metrics"):
        raise ConfigError(f"task = {config.task!r} has no per_class_metrics().")
    metrics = metrics_of(task, args.per_class)
    values = evaluate(
        task,
        model,
        data,
        config.eval_micro_batch,
        world,
        LoaderThreads(world.threads),
        metrics,
        precision=config.compute.precision,
        may_skip=config.data.may_skip,
    )
    skipped = int(values.pop("skipped", 0))
    if skipped == data.rows:
        raise DataError(f"none of the {skipped} {task.unit} of the evaluation set can be read.")
    require_few_bad(skipped, "in the evaluation set", config.data.max_bad)
    if args.out is not None:
        _write(Path(args.out), checkpoint, data.rows - skipped, values)
    _print(checkpoint, data.rows, skipped, task, values)
    return 0


def _config(checkpoint: Checkpoint, data: str | None) -> TrainConfig:
    from raytrain_ddp.config.recipe import from_dict

    config = from_dict(dict(checkpoint.manifest.config), where=str(checkpoint))
    if data is None:
        return config
    given = replace(config.data, eval_source=data, eval_split="auto", holdout=0.0)
    return replace(config, data=given)


def _write(path: Path, checkpoint: Checkpoint, samples: int, values: Mapping[str, Tensor]) -> None:
    """Writes JSON: numbers and nested lists of numbers; non-finite values as NaN or Infinity."""
    content = {"checkpoint": str(checkpoint), "samples": samples}
    figures = {
        name: value.item() if value.numel() == 1 else value.tolist()
        for name, value in values.items()
    }
    try:
        path.write_text(json.dumps({**content, "metrics": figures}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}).") from None


def _print(
    checkpoint: Checkpoint, rows: int, skipped: int, task: Task, values: Mapping[str, Tensor]
) -> None:
    print(f"{checkpoint}")
    if skipped:
        skipped_note = f"{skipped} bad records left out"
        print(f"{rows - skipped} of {rows} {task.unit}, each once; {skipped_note}")
    else:
        print(f"{rows} {task.unit}, each once")
    for name, value in values.items():
        if value.numel() == 1:
            print(f"  {name:<8} {value.item():.6f}")
    for name, value in values.items():
        if name == "classes" and value.shape == (len(getattr(task, "class_names", ())), 5):
            _print_classes(task, value)
        elif value.numel() != 1:  # torch abbreviates large tensors
            print(f"  {name}, shape {tuple(value.shape)}")
            print(indent(str(value).removeprefix("tensor"), "    "))


def _print_classes(task: Any, counts: Tensor) -> None:
    """counts: (classes, 5): tp, fp, tn, fn, support."""
    from rich.console import Console
    from rich.table import Table

    table = Table("class", "samples", "right", "precision", "recall", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (tp, fp, _, fn, support) in zip(task.class_names, counts.tolist(), strict=True):
        precision = f"{tp / (tp + fp):.4f}" if tp + fp else "-"
        recall = f"{tp / (tp + fn):.4f}" if tp + fn else "-"
        table.add_row(name, str(support), str(tp), precision, recall)
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
