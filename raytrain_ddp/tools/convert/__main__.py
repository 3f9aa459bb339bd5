"""``raytrain convert SRC DST``: converts images to Parquet shards for training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.process import run_command
from raytrain_ddp.formatting import format_data
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.tools.convert.options import ConvertArgs

COMMAND = Command(
    "convert",
    ConvertArgs,
    "SRC DST [--FLAG VALUE ...]",
    {
        "What is read": ["eval-source", "train-split", "eval-split", "root", "bad-records"],
        "What is written": ["resize-short", "quality", "shuffle", "shard-mib"],
        "How": ["workers", "address"],
    },
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    # Messages about the data name the flags of fit, which work here, too.
    args = COMMAND.parse(
        [
            f"--{word.removeprefix('--data.')}" if word.startswith("--data.") else word
            for word in argv
        ]
    )
    from raytrain_ddp.ray_backend.cluster import ray_connection
    from raytrain_ddp.tools.convert.conversion import convert
    from raytrain_ddp.tools.convert.shard_writer import in_threads, on_ray
    from raytrain_ddp.tools.display.work_meter import shown

    write: Any = partial(in_threads, args.workers or int(local_resources()["CPU"]))
    with ExitStack() as stack:
        phase = stack.enter_context(shown())
        if args.address is not None:
            stack.enter_context(ray_connection(args.address, {}, {}, tell=lambda _: None))
            write = on_ray
        dataset, summary = convert(args, write, phase)
    if summary is None:
        print(f"{args.dest} is complete already")
    rows = " and ".join(f"{count:,} {split}" for split, count in dataset["rows"].items())
    files, classes = len(dataset["files"]), len(dataset["class_names"])
    counts = f"{rows} images of {classes:,} classes in {files:,} file{'s' * (files > 1)}"
    print(f"{args.dest}: {counts}")
    found = " (before skipping)" if dataset["skipped"] else ""
    for title, text in format_data(summary, "images"):
        print(f"  {title}{found * (title != 'note')}: {text}")
    for record in dataset["skipped"]:
        print(f"  skipped {record['where']}: {record['why']}")
    print(f"To train on this data set: --data.source {shlex.quote(args.dest)}")
    return 0


if __name__ == "__main__":
    run_command(main)
