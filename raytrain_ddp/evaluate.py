"""``python -m raytrain_ddp.evaluate RUN|CHECKPOINT``: exact metrics of a checkpoint."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.config.command_line import Command, flat, positional
from raytrain_ddp.config.field_types import MAY_BE_EMPTY
from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import ConfigError, DataError, PreflightError
from raytrain_ddp.events import Eval, Plan
from raytrain_ddp.files import expanded

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain_ddp.checkpoint.store import Checkpoint
    from raytrain_ddp.config.train_config import TrainConfig
    from raytrain_ddp.tasks.task import Task
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.runtime.world import World


@dataclass(frozen=True)
class ReadArgs:
    """How the data are read, if not as in the run."""

    eval_split: str | None = None
    """Split to evaluate on."""
    root: str | None = None
    """Folder or URI of the images that a list names."""
    image_column: str | None = field(default=None, metadata=MAY_BE_EMPTY)
    """Column with the images."""
    label_column: str | None = field(default=None, metadata=MAY_BE_EMPTY)
    """Column with the labels."""
    target_columns: tuple[str, ...] = ()
    """Columns with the labels or numbers, in the order of the run's."""
    image_size: int | None = None
    """Side of the images, in pixels."""
    eval_crop: float | None = None
    """Share of the shorter side that is kept, in the center."""
    bad_records: Literal["error", "skip"] | None = None
    """What to do with an image that cannot be decoded. skip: leave it out."""
    max_bad: int | None = None
    """With skip: number of bad records that there may be."""


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
    read: ReadArgs = field(default_factory=ReadArgs, metadata=flat("data", "data."))
    per_class: bool = False
    """Add a table with the precision and recall of each class."""
    device: str = "auto"
    """Device, such as cpu, cuda or cuda:1. auto: a GPU if there is one."""
    out: str | None = None
    """Write all values to this file as JSON."""
    follow: bool = False
    """Evaluate each checkpoint soon after its commit, alongside the run, until the run has ended.
    The results are in followed.jsonl in the run's folder; the report shows them."""


_LOOK_EVERY_S = 1.0
COMMAND = Command("evaluate", EvaluateArgs, "RUN [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    if args.follow:
        return _follow(args)
    out = None if args.out is None else _place(args.out)
    from raytrain_ddp.checkpoint.run_folder import with_checkpoint

    return with_checkpoint(args.run, args.checkpoint, lambda found: _evaluate(args, found, out))


def _evaluate(args: EvaluateArgs, checkpoint: Checkpoint, out: Path | None) -> int:
    from raytrain_ddp.checkpoint.run_folder import config_of, recorded

    config = config_of(checkpoint)
    given = _given(args, config)
    implied: dict[str, Any] = {"eval_size": 0} if "image_size" in given else {}
    if "eval_source" in given:
        implied |= {"eval_split": "auto", "holdout": 0.0}
        if not (config.data.eval_size or config.data.image_size):  # as `predict` does
            implied["image_size"] = recorded(checkpoint).get("data", {}).get("image_size", 0)
    config = replace(config, data=replace(config.data, **{**implied, **given}))
    from raytrain_ddp.data.loading.loader import LoaderThreads
    from raytrain_ddp.tasks.task_check import metrics_of
    from raytrain_ddp.training.evaluation import evaluate
    from raytrain_ddp.training.steps.device_feed import require_few_bad

    world = _world(args.device, config)
    try:
        build = _opened(checkpoint, config, given, world)
    except DataError as error:
        if args.data is not None:
            raise
        raise DataError(f"{error} To evaluate on other data: --data SOURCE.") from None
    task, data = build.task, build.eval_data
    assert data is not None
    if args.per_class and task.per_class_metrics is None:
        raise ConfigError(f"task = {config.task!r} has no per_class_metrics().")
    metrics = metrics_of(task, args.per_class)
    values = evaluate(build, LoaderThreads(world.threads), metrics)
    skipped = int(values.pop("skipped", 0))
    if skipped == data.rows:
        raise DataError(f"none of the {skipped} {task.unit} of the evaluation set can be read.")
    require_few_bad(skipped, "in the evaluation set", config.data.max_bad)
    _print(checkpoint, data.rows, skipped, task, values)
    if out is not None:
        _write(out, checkpoint, data.rows - skipped, values)
    return 0


def _follow(args: EvaluateArgs) -> int:
    """Runs --follow; returns the exit status. A later call continues where an earlier one ended."""
    if args != EvaluateArgs(args.run, device=args.device, follow=True):
        raise ConfigError("--follow evaluates as the run does: use it with --device only.")
    from raytrain_ddp.checkpoint import run_folder
    from raytrain_ddp.checkpoint.lease import owner_of
    from raytrain_ddp.checkpoint.manifest import DamagedError
    from raytrain_ddp.data.loading.loader import LoaderThreads
    from raytrain_ddp.errors import with_backoff
    from raytrain_ddp.records import json_of, to_record
    from raytrain_ddp.training.evaluation import evaluation_of
    from raytrain_ddp.training.state.shared_checkpoint import load_model

    run = run_folder.open_run(args.run)
    store, done = run_folder.checkpoint_store(run), run_folder.read_followed(run)
    seen = {each.step for each in done}
    builds: list[Build] = []

    def evaluated(checkpoint: Checkpoint) -> Eval:
        if not builds:
            config = run_folder.config_of(checkpoint)
            builds.append(_opened(checkpoint, config, {}, _world(args.device, config)))
        build, task, began = builds[0], builds[0].task, time.monotonic()
        load_model(build.model, checkpoint)
        metrics, tables = evaluation_of(build, LoaderThreads(build.world.threads))
        sign, step, name = 1 if task.goal == "max" else -1, checkpoint.name.step, task.monitor
        others = [sign * each.metrics.get(name, math.nan) for each in done]
        best = not (math.isnan(metrics[name]) or any(v >= sign * metrics[name] for v in others))
        plans = [e for e, _, _ in run_folder.read_events(run) if isinstance(e, Plan)]
        epoch = (step - 1) // plans[-1].steps_per_epoch if plans else 0
        return Eval(step, epoch, metrics, tables, name, best, time.monotonic() - began)

    def look(_: int) -> bool:
        """Evaluates new checkpoints; returns whether there were none and the run has ended."""
        has_ended = owner_of(run) is None  # asked first: until it ends, it may commit
        new = [name for name in reversed(store.names()) if name.step not in seen]
        for name in new:
            try:
                record = evaluated(store.open(name))
                lines = [json_of(to_record(each)) + "\n" for each in (*done, record)]
                run.write_atomic(run_folder.FOLLOWED_FILE, "".join(lines).encode())
                done.append(record)
                text = "  ".join(f"{metric} {v:.6f}" for metric, v in record.metrics.items())
            except (DamagedError, FileNotFoundError) as error:  # the run may have pruned it
                text = f"is not evaluated: {error}"
            seen.add(name.step)
            print(f"step {name.step}  {text}", flush=True)
        return has_ended and not new

    def pause(wait_s: float, _: OSError) -> bool:
        time.sleep(wait_s)
        return True

    try:
        while not with_backoff(look, pause):
            time.sleep(_LOOK_EVERY_S)
    except OSError as error:
        raise PreflightError(f"{run}: {error}") from None
    return 0


def _world(device_name: str, config: TrainConfig) -> World:
    """Returns the world of this process alone, after setting up its device."""
    import torch

    from raytrain_ddp.training.runtime.world import World, choose_device, set_up

    device = choose_device(device_name)
    world = World(0, 1, device.index or 0, device, torch.get_num_threads())
    set_up(world, config.compute)
    return world


def _place(out: str) -> Path:
    """The file to write. Raises ConfigError, before any work, if it cannot be there."""
    path = expanded(out)
    if not os.path.isdir(path.parent) or os.path.isdir(path):
        raise ConfigError(f"--out {path}: give the name of a file in a folder that is there.")
    return path


def _given(args: EvaluateArgs, config: TrainConfig) -> dict[str, Any]:
    """The fields of the run's [data] that the flags replace."""
    flags = {"eval_source": args.data, **vars(args.read)}
    columns, own = args.read.target_columns, config.data.target_columns
    if columns and len(columns) != len(own):
        predicts = f"columns {' '.join(own)}" if own else "classes of --data.label-column"
        raise ConfigError(
            f"--data.target-columns {' '.join(columns)}: the run predicts {predicts}."
        )
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _opened(
    checkpoint: Checkpoint, config: TrainConfig, given: Mapping[str, Any], world: World
) -> Build:
    """The model, as the run evaluates it, and the data to evaluate on.

    Args:
        given: the fields of [data] that flags have replaced; each must have an effect.
    """
    from raytrain_ddp.data.splits import unused_fields
    from raytrain_ddp.tasks.task_check import eval_data_of
    from raytrain_ddp.tasks.task_loading import BUILT_IN
    from raytrain_ddp.tools.inference.inputs import evaluation_of_run
    from raytrain_ddp.tools.inference.loaded_model import loaded
    from raytrain_ddp.training.build import Build

    reads: set[str] = set()
    model = loaded(checkpoint, config, world.device, reads)
    data, unused = None, dict[str, str]()
    if config.task in BUILT_IN:
        source = evaluation_of_run(config, model.class_names)
        if source is not None:
            unused = dict(unused_fields(source, config.data, "the evaluation set"))
            data = model.data_of(source, None)
    else:
        data = eval_data_of(model.task, config.seed)
        unread = [name for name in given if f"data.{name}" not in reads]
        unused = dict.fromkeys(unread, f"has no effect: {config.task} does not read it.")
    for name in given:
        if name in unused:
            flag = "--data" if name == "eval_source" else f"--data.{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {unused[name]}")
    if data is None:
        raise ConfigError("there is no evaluation set: give one with --data.")
    build = Build(config, world, model.task)
    build.model, build.eval_data = build.placed(model.model), data
    return build


def _write(path: Path, checkpoint: Checkpoint, samples: int, values: Mapping[str, Tensor]) -> None:
    """Writes JSON: numbers and nested lists of numbers; non-finite values as NaN or Infinity."""
    figures = {
        name: value.item() if value.numel() == 1 else value.tolist()
        for name, value in values.items()
    }
    content = {"checkpoint": str(checkpoint), "samples": samples, "metrics": figures}
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror}).") from None


def _print(
    checkpoint: Checkpoint, rows: int, skipped: int, task: Task, values: Mapping[str, Tensor]
) -> None:
    some = f"{rows - skipped} of {rows}" if skipped else f"{rows}"
    left_out = f"; {skipped} bad records left out" if skipped else ""
    print(f"{checkpoint}\n{some} {task.unit}, each exactly once{left_out}")
    for name, value in values.items():
        if value.numel() == 1:
            print(f"  {name:<8} {value.item():.6f}")
    for name, value in values.items():
        if name == "classes" and value.shape == (len(task.class_names), 5):
            _print_classes(task, value)
        elif value.numel() != 1:  # torch abbreviates large tensors
            print(f"  {name}, shape {tuple(value.shape)}")
            print(indent(str(value).removeprefix("tensor"), "    "))


def _print_classes(task: Any, counts: Tensor) -> None:
    """counts: (classes, 5): tp, fp, tn, fn, support."""
    from rich.table import Table

    from raytrain_ddp.tools.display.terminal import terminal

    table = Table("class", "samples", "right", "precision", "recall", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (tp, fp, _, fn, support) in zip(task.class_names, counts.tolist(), strict=True):
        precision = f"{tp / (tp + fp):.4f}" if tp + fp else "-"
        recall = f"{tp / (tp + fn):.4f}" if tp + fn else "-"
        table.add_row(name, str(support), str(tp), precision, recall)
    terminal().print(table)


if __name__ == "__main__":
    run_command(main)
