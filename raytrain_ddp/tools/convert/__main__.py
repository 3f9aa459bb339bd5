"""``raytrain convert SRC DST``: converts images to Parquet shards for training."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from raytrain_ddp.config.command_line import Command, positional
from raytrain_ddp.config.field_types import ADDRESS, MAY_BE_EMPTY, require, require_least
from raytrain_ddp.config.process import run_command
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.tools.formatting import format_data

_QUALITY = 90


@dataclass(frozen=True)
class ConvertArgs:
    """Convert images to Parquet shards for training.

    The shards have the layout of Hugging Face `datasets`. They depend on SRC and the flags only,
    not on the number of threads. The same command again resumes where it was stopped. DST appears
    when it is complete.
    """

    source: str = field(metadata=positional("SRC"))
    """Any --data.source of fit: folder, Parquet, tar files, list, torchvision:NAME, or URI."""
    dest: str = field(metadata=positional("DST"))
    """Folder to create."""
    workers: int | None = None
    """Number of threads. Default: one per CPU."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Convert on a running Ray cluster. SRC and DST must be shared folders."""
    eval_source: str | None = None
    """Source of the evaluation split. Default: the validation and test splits of SRC."""
    train_split: str = "auto"
    """Split to train on, as --data.train-split of fit."""
    eval_split: str = "auto"
    """Split to evaluate on, as --data.eval-split of fit. auto: validation and test."""
    config: str = "auto"
    """Data set to use from a repository with several, as --data.config of fit."""
    root: str | None = None
    """Folder of the images that a list names, or of torchvision data sets, as --data.root of fit.
    """
    image_column: str = field(default="image", metadata=MAY_BE_EMPTY)
    """Column with the images, or with their paths."""
    label_column: str = field(default="label", metadata=MAY_BE_EMPTY)
    """Column with the labels."""
    resize_short: int = 0
    """Resize larger images to this many pixels on the shorter side, and make all images RGB JPEG.
    0: keep the bytes as they are."""
    quality: int = _QUALITY
    """JPEG quality with --resize-short, 1 to 100."""
    seed: int = 0
    """Random seed of the shuffle."""
    shuffle: bool = True
    """Shuffle each split once, over all its rows."""
    shard_mib: float = 256.0
    """Approximate total size of the images in a file, in MiB, before they are resized."""
    bad_records: Literal["error", "skip"] = "error"
    """What to do with images that cannot be decoded. error: stop (exit status 4); skip: leave them
    out, and list them in dataset.json."""
    check: bool = True
    """Decode each image, to find those that cannot be decoded."""

    def __post_init__(self) -> None:
        require_least(self, workers=1, resize_short=0)
        require(1 <= self.quality <= 100, "--quality", self.quality, "must be 1 to 100")
        ok = self.resize_short > 0 or self.quality == _QUALITY
        require(ok, "--quality", self.quality, "has no effect without --resize-short")
        require(0 <= self.seed < 2**64, "--seed", self.seed, "must be 0 or more, below 2**64")
        require(self.shard_mib > 0, "--shard-mib", self.shard_mib, "must be above 0")
        ok = self.address is None or self.workers is None
        require(ok, "--workers", self.workers, "has no effect with --address")


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
    from raytrain_ddp.tools.display.terminal import shown

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
