"""What parts cost: page checksums, random numbers of a sample, a plan, a conversion, text."""

from __future__ import annotations

import multiprocessing
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from data_measure import Size

ROWS = 10**9
GROUP = 128
PLAN_LIMIT_BYTES = 12 * 2**30
NUMBERS = 5  # that a crop and a flip need


def checksums(size: Size) -> dict[str, float]:
    """us an image to read all row groups, with and without checking, in turns."""
    import pyarrow.parquet as pq

    files = sorted((Path(size.folder) / "parquet").glob("*.parquet"))
    spent_s: dict[bool, list[float]] = {False: [], True: []}
    for number in range(42):
        check = bool(number % 2)
        rows, began = 0, time.perf_counter()
        for file in files:
            opened = pq.ParquetFile(file, memory_map=True, page_checksum_verification=check)
            for group in range(opened.num_row_groups):
                rows += opened.read_row_group(group, ["image", "label"], use_threads=False).num_rows
        if number >= 2:
            spent_s[check].append((time.perf_counter() - began) / rows)
    without, checked = (1e6 * median(spent_s[check]) for check in (False, True))
    return {
        "read without us": without,
        "read and checked us": checked,
        "cost us": checked - without,
    }


def seeding(size: Size) -> dict[str, float]:
    """us an image for the numbers of a crop and a flip that depend on the image only."""
    import numpy as np
    import torch

    from raytrain_ddp.data.order.sample_rng import Draws

    rows = np.arange(64, dtype=np.int64)
    generator = torch.Generator()

    def draws() -> None:
        Draws(0, 1, rows).uniform(4, 0).tolist()
        Draws(0, 1, rows).uniform(1, 1).tolist()

    def philox() -> None:
        for row in range(64):
            np.random.Generator(np.random.Philox(key=row)).random(NUMBERS).tolist()

    def own_generator() -> None:
        for row in range(64):
            torch.rand(NUMBERS, generator=generator.manual_seed(row)).tolist()

    def global_seed() -> None:
        for row in range(64):
            torch.manual_seed(row)
            torch.rand(NUMBERS).tolist()

    def python() -> None:
        for row in range(64):
            seeded = random.Random(row)
            [seeded.random() for _ in range(NUMBERS)]

    ways = {
        "our draws, a batch of 64 at once": draws,
        "torch.Generator seeded for each": own_generator,
        "torch.manual_seed for each": global_seed,
        "numpy Philox made for each": philox,
        "random.Random made for each": python,
    }
    spent_us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(20):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            spent_us[name].append(1e6 * (time.perf_counter() - began) / 64)
    return {f"{name}, us": median(values) for name, values in spent_us.items()}


def plan(shuffle: str, size: Size) -> dict[str, Any]:
    """Seconds and MiB for the order of an epoch of 10^9 rows, and to read it at three places."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # memory of its own to be measured
        found: dict[str, Any] = pool.apply(planned, (shuffle,))
    return found


def planned(shuffle: str) -> dict[str, Any]:
    import numpy as np

    from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan

    resource.setrlimit(resource.RLIMIT_AS, (PLAN_LIMIT_BYTES, PLAN_LIMIT_BYTES))
    blocks = np.full(ROWS // GROUP, GROUP, dtype=np.int64)
    before_mib = peak_mib()
    began = time.perf_counter()
    try:
        order = EpochOrder(blocks, shuffle, 0, 0)  # type: ignore[arg-type]
        cut = Plan(order.rows, 4, 64)
        found = {"order s": time.perf_counter() - began}
        for name, share in (("first", 0.0), ("middle", 0.5), ("last", 1.0)):
            began = time.perf_counter()
            order.read(*cut.span(round(share * (cut.steps_per_epoch - 1)), 0))
            found[f"read the {name} slot ms"] = 1e3 * (time.perf_counter() - began)
    except MemoryError:
        return {"memory above GiB": PLAN_LIMIT_BYTES / 2**30}
    return {**found, "peak MiB": peak_mib() - before_mib}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def conversion(size: Size) -> dict[str, float]:
    """The ImageFolder to Parquet shards, bytes kept as they are, in a process of its own."""
    source, dest = Path(size.folder) / "images", Path(size.folder) / "converted"
    images = list(source.glob("*/*.jpg"))
    shutil.rmtree(dest, ignore_errors=True)
    command = [sys.executable, "-m", "raytrain_ddp.tools.convert", str(source), str(dest)]
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finally:
        spent_s = time.perf_counter() - began
        shutil.rmtree(dest, ignore_errors=True)
    megabytes = sum(file.stat().st_size for file in images) / 1e6
    return {"s": spent_s, "images/s": len(images) / spent_s, "MB/s": megabytes / spent_s}


COSTS: Mapping[str, tuple[str, Callable[[Size], Mapping[str, Any]], int]] = {
    "checksums": ("page checksums", checksums, 0),
    "seeding": ("random numbers of a sample", seeding, 0),
    "plan-block": ("plan of 10^9 rows, block shuffle", partial(plan, "block"), 0),
    "plan-full": ("plan of 10^9 rows, full shuffle", partial(plan, "full"), 0),
    "convert": ("convert, ImageFolder to Parquet", conversion, 0),
}
