"""``raytrain convert SRC DST``: converts images to Parquet shards for training."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import flat, positional
from raytrain_ddp.config.effects import given_flags
from raytrain_ddp.config.validation import ADDRESS, require_least
from raytrain_ddp.errors import ConfigError, RaytrainError
from raytrain_ddp.files import expanded
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.display.formatting import format_data

if TYPE_CHECKING:
    from raytrain_ddp.tools.convert.task_runners import TaskRunner


@dataclass(frozen=True)
class ConvertArgs:
    """Convert images to Parquet shards for training, or check a converted data set.

    The shards have the layout of Hugging Face `datasets`. They depend on SRC and the flags only,
    not on the number of processes. The same command again resumes where it was stopped. DST appears
    when it is complete.
    """

    source: str | None = field(default=None, metadata=positional("SRC"))
    """Any --data.source of fit: folder, Parquet, tar files, list, torchvision:NAME, or URI."""
    dest: str | None = field(default=None, metadata=positional("DST"))
    """Folder to create."""
    verify: str | None = field(default=None, metadata={"metavar": "DST"})
    """Check a converted data set: read all of it and compare it with its dataset.json."""
    workers: int | None = None
    """Number of processes. Default: one per CPU, or all CPUs of the cluster."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Convert on a running Ray cluster. SRC and DST must be shared folders."""
    shards: ConvertConfig = field(default_factory=ConvertConfig, metadata=flat("shards"))


COMMAND = Command(
    "convert",
    ConvertArgs,
    "SRC DST [--FLAG VALUE ...]",
    {
        "What is read": ["eval-source", "train-split", "eval-split", "root", "bad-records"],
        "What is written": ["resize-short", "quality", "shuffle", "shard-mib"],
        "How": ["workers", "address", "verify"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    require_least(args, workers=1)
    cpus = args.workers or int(local_resources()["CPU"])
    from raytrain_ddp.tools.display.work_meter import shown

    if args.verify is not None:
        if args.source is not None:
            raise ConfigError("--verify checks one folder: do not give SRC and DST with it.")
        others = sorted(given_flags(argv) - {"verify", "workers"})
        if others:
            raise ConfigError(f"--{others[0].replace('_', '-')} has no effect with --verify.")
        from raytrain_ddp.tools.convert.destination import read_dataset_file, verify

        folder = expanded(args.verify)
        images = sum(read_dataset_file(folder)["rows"].values())
        with shown() as phase:
            dataset = verify(folder, cpus, phase("verifying", images))
        print(f"{folder}: {_counts(dataset)}: all as written")
        return 0
    if args.source is None or args.dest is None:
        raise ConfigError("SRC and DST must be given (or --verify DST); see --help.")
    from raytrain_ddp.tools.convert.conversion import convert

    if args.address is None:
        from raytrain_ddp.tools.convert.task_runners import ProcessPool

        runner: AbstractContextManager[TaskRunner] = ProcessPool(cpus)
    else:
        from raytrain_ddp.tools.convert.task_runners import on_cluster

        runner = on_cluster(args.address, args.workers)
    try:
        with shown() as phase, runner as run:
            done = convert(args.source, args.dest, args.shards, run, phase)
    except KeyboardInterrupt:
        print("Finished work is kept: run the same command again to continue.", file=sys.stderr)
        raise
    except RaytrainError as error:
        raise type(error)(_with_own_flags(str(error))) from error.__cause__
    if done.found:
        print(f"{args.dest} is complete already (--verify {shlex.quote(args.dest)} checks it)")
    if done.note:
        print(f"note: {done.note}")
    print(f"{args.dest}: {_counts(done.dataset)}")
    found = " (before skipping)" if done.dataset["skipped"] else ""
    for title, text in format_data(done.summary, "images"):
        print(f"  {title}{found * (title != 'note')}: {text}")
    for record in done.dataset["skipped"]:
        print(f"  skipped {record['where']}: {record['why']}")
    print(f"Train with:\n  {fit_command(args.dest, done.dataset)}")
    return 0


def fit_command(folder: str, dataset: Mapping[str, Any]) -> str:
    """How to train on a converted data set, ready to paste."""
    flags = ["--data.source", shlex.quote(folder)]
    for name in ("mean", "std"):
        values = [f"{value:.4f}" for value in dataset[name]]
        if name == "std":  # of a channel that is the same everywhere, it does not matter
            values = ["1.0" if value == "0.0000" else value for value in values]
        flags += [f"--data.{name}", *values]
    sampled = dataset["sampled"]
    if any(least != most for least, most in (sampled["height"], sampled["width"])):
        flags += ["--data.image-size", "224", "--augment.crop", "random"]
        flags += ["--model.name", "resnet18"]
    return f"python -m raytrain_ddp.fit {' '.join(flags)}"


def _with_own_flags(text: str) -> str:
    """The text of an error with convert's flags in place of those of fit."""
    names = "|".join(each.name.replace("_", "-") for each in fields(ConvertConfig))
    return re.sub(rf"--data\.({names})\b", r"--\1", text)


def _counts(dataset: Mapping[str, Any]) -> str:
    """``1,437 train and 360 test images of 10 classes in 2 files``"""
    rows = " and ".join(f"{count:,} {split}" for split, count in dataset["rows"].items())
    files, classes = len(dataset["files"]), len(dataset["class_names"])
    return f"{rows} images of {classes:,} classes in {files:,} file{'s' * (files > 1)}"


if __name__ == "__main__":
    run_command(main)
