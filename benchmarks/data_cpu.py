"""Where the loader's CPU time goes, what its peers need, and what it does to a loop beside it.

    python benchmarks/data_cpu.py [--rounds N] [--images N] [--out FILE.md FILE.json]

All is CPU time (of a thread, or of a process and all below it), and interleaved: other work on the
machine disturbs it less. The bare loop decodes, crops, resizes and mirrors JPEGs that are in
memory, in one place, with the decoder that the peers have. Needs the extra `bench` for the peers.
JPEGs and their other forms are made once (--cache).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import data
import data_decode
import data_ours
import numpy as np
from data_decode import BATCH, SIZE
from data_measure import Size, small_operations, speed
from series import Series, describe_machine, spread, table

HERE = Path(__file__).resolve().parent
DISTINCT = 600
FORMS = {
    "images": "ImageFolder, 500 x 375",
    "parquet": "converted Parquet, 500 x 375",
    "small": "ImageFolder, shorter side 256",
}
LOADERS = {
    "limit-mirrored": "bare decode + crop + mirror, 2 threads",
    "ours-folder": "**this loader, ImageFolder, 2 threads**",
    "ours-2": "**this loader, converted Parquet, 2 threads**",
    "spdl": "SPDL, 2 threads",
    "litdata": "litdata, 2 processes",
    "folder-fast": "ImageFolder + DataLoader, simplejpeg, 2 processes",
}
SCALING = {
    f"{form}-{threads}": f"{title}, {threads} thread{'s' * (threads > 1)}"
    for form, title in (("images", FORMS["images"]), ("small", FORMS["small"]))
    for threads in (1, 2, 4)
}
BESIDE = {
    "alone": "no loader",
    **{
        f"{way}-{count}": f"{way}: {count}"
        for count in (1, 4, 8, 16)
        for way in ("threads", "processes")
    },
}
PARTS = {"split": FORMS, "scaling": SCALING, "loaders": LOADERS, "beside": BESIDE}
TARGET = 3000  # images/s that a GPU may train on
RATES = {"python_us": "Python", "images_per_s": "images/s"}
BESIDE_S = 6.0
OPERATIONS = 2000  # small ones of a look


@dataclass(frozen=True)
class Run:
    """Numbers of one job in one round."""

    part: str
    job: str
    round: int
    load: float
    found: Mapping[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=1500, help="that a peer loads in a round")
    parser.add_argument("--cache", type=Path, default=HERE.parent / "build/bench-data")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--out", type=Path, nargs="+", default=[])
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)  # a child of this
    args = parser.parse_args()
    folder = (args.cache / str(DISTINCT)).resolve()
    size = Size(str(folder), warm=16, images=args.images)
    if args.job:
        part, job = args.job
        works: dict[str, Callable[[], Mapping[str, float]]] = {
            "split": lambda: split(folder, job),
            "scaling": lambda: scales(size, job),
            "loaders": lambda: loads(size, job),
            "beside": lambda: beside(folder, job),
        }
        print(json.dumps(works[part]()), flush=True)
        return 0
    made = [sys.executable, str(HERE / "data_images.py"), str(folder), str(DISTINCT)]
    subprocess.run(made, check=True, env=data.job_environment(folder))
    series: Series[Run] = Series({**describe_machine(), "packages": data.describe()["packages"]})

    def child(part: str, job: str) -> dict[str, float]:
        command = [sys.executable, __file__, "--cache", str(args.cache)]
        done = subprocess.run(
            [*command, "--images", str(args.images), "--job", part, job],
            capture_output=True,
            text=True,
            check=False,
            env=data.job_environment(folder),
            timeout=data.LIMIT_S,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return dict(json.loads(done.stdout.splitlines()[-1]))

    jobs = [(part, job) for part in args.parts for job in PARTS[part]]
    for number in range(1, args.rounds + 1):
        for part, job in jobs:

            def measure(number: int = number, part: str = part, job: str = job) -> Run:
                return Run(part, job, number, os.getloadavg()[0], child(part, job))

            series.add(f"{part} {job}", measure, lambda r: f"{r.round} {r.part} {r.job} {r.found}")
    command = f"python benchmarks/data_cpu.py --rounds {args.rounds} --images {args.images}"
    if args.parts != [*PARTS]:
        command += f" --parts {' '.join(args.parts)}"
    return series.publish(report(command, series), args.out)


def loads(size: Size, job: str) -> dict[str, float]:
    """Measures a loader after its warm-up."""
    from data_probe import CONTENDERS

    return rate_of(CONTENDERS[job].open(Path(size.folder), size.needed), size)


def scales(size: Size, job: str) -> dict[str, float]:
    """Measures this loader, which leaves mirroring to the device."""
    import torch

    torch.set_num_threads(1)
    form, _, threads = job.partition("-")
    return rate_of(data_ours.ours(Path(size.folder), size.needed, form, int(threads), False), size)


def rate_of(batches: Any, size: Size) -> dict[str, float]:
    """Returns CPU seconds per 1,000 images, and images/s."""
    for _ in range(size.warm):
        next(batches)
    found = speed(batches, size, size.images)
    batches.close()
    return found


# ------------------------------------------------------------------ by cause, in one thread


def split(folder: Path, form: str) -> dict[str, float]:
    """us of CPU time an image: of the bare loop, of a batch, and of its parts; medians."""
    import torch

    from raytrain_ddp.data.order.sample_rng import Draws
    from raytrain_ddp.data.pixels import decoding
    from raytrain_ddp.data.pixels.cropping import random_box
    from raytrain_ddp.data.pixels.image_batches import BatchMemory, device_augmentation

    torch.set_num_threads(1)
    loader = data_ours.train_loader(folder, form, 0, mirror=False)
    order, memory, steps = loader.order(0), BatchMemory(), loader.plan.steps_per_epoch - 1
    images = folder / ("small" if form == "small" else "images")
    encoded = [file.read_bytes() for file in sorted(images.glob("*/*.jpg"))]
    outs = data_decode.new_batch(BATCH).split(1)
    region = decoding._region_decoder()
    spent: dict[str, list[float]] = {}
    kept: list[Any] = []  # as a loop keeps batches while they are copied

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = work()
        spent.setdefault(name, []).append(1e6 * (time.thread_time() - began) / BATCH)
        return result

    def bare(number: int) -> None:
        random.seed(number)
        for place in range(BATCH):
            chosen = encoded[(number * BATCH + place) % len(encoded)]
            data_decode.decode_into_mirrored(outs[place], chosen)

    def numbers_of(draws: Draws) -> Any:
        device_augmentation(loader.data.collate.augment, draws, (SIZE, SIZE))  # type: ignore[attr-defined]
        return draws.uniform(22, 0).tolist()

    def step(number: int) -> None:
        draws = Draws(0, number, order.read(*loader.plan.span(number % steps, 0)))
        timed("bare loop", lambda: bare(number))
        kept.append(timed("batch", lambda: loader.data.batch(draws)))
        decoding._region_decoder = lambda: None
        kept.append(timed("batch, whole images", lambda: loader.data.batch(draws)))
        decoding._region_decoder = lambda: region
        records = timed("read", lambda: loader.data.source.read(draws.rows))
        numbers = timed("random numbers", lambda: numbers_of(draws))
        timed("memory of the batch", lambda: memory.empty(BATCH, SIZE, SIZE).split(1))
        pictures = timed(
            "headers",
            lambda: [decoding.open_encoded_image(image, once=True) for image, _ in records],
        )
        sized = [(each.height, each.width, (0.08, 1.0)) for each in pictures]
        boxes = timed(
            "boxes", lambda: [random_box(*p, n) for p, n in zip(sized, numbers, strict=True)]
        )
        for name, spent_us in zip(("decode", "resize"), made(pictures, boxes, outs), strict=True):
            spent.setdefault(name, []).append(spent_us)
        del kept[:-4]

    for number in range(2 * steps):
        step(number)
    found = {name: median(values) for name, values in spent.items()}
    others = ("bare loop", "batch", "batch, whole images")
    found["other Python"] = found["batch"] - sum(found[n] for n in found if n not in others)
    found["plan and hand-over (not in the batch)"] = handed_over()
    return found


def made(pictures: Any, boxes: Any, outs: Any) -> tuple[float, float]:
    """us of CPU time an image to decode, and to resize."""
    from raytrain_ddp.data.pixels.cropping import resize_into, shrink_for, to_tensor

    clock, decode_s, resize_s = time.thread_time, 0.0, 0.0
    for picture, box, out in zip(pictures, boxes, outs, strict=True):
        began = clock()
        by = shrink_for(box[2:], (SIZE, SIZE))
        part = picture.part(*box) if by == 1 else picture.pixels(by)
        decoded = clock()
        resize_into(out, to_tensor(part), *part.shape[:2])
        decode_s, resize_s = decode_s + decoded - began, resize_s + clock() - decoded
    return 1e6 * decode_s / BATCH, 1e6 * resize_s / BATCH


def handed_over() -> float:
    """us of CPU time an image for all that the loader does but reading records and making a batch
    of them."""
    from raytrain_ddp.data.loading.loader import TrainLoader
    from raytrain_ddp.data.loading.loader_threads import LoaderThreads
    from raytrain_ddp.data.loading.own_sources import ArraySource
    from raytrain_ddp.data.loading.sources import Data
    from raytrain_ddp.data.order.epoch_order import Plan

    nothing = {"label": np.zeros(10**5, np.int64)}
    loader_data = Data(ArraySource(nothing), lambda _, draws: {"label": ready[: len(draws.rows)]})
    ready = data_decode.new_batch(BATCH)
    plan = Plan(loader_data.rows, 1, BATCH)
    steps = TrainLoader(loader_data, plan, "full", 1, 0, 1, 0, LoaderThreads(1)).steps(0, 600)
    for _ in range(100):
        next(steps)
    began = time.process_time()
    for _ in range(400):
        next(steps)
    spent_s = time.process_time() - began
    steps.close()
    return 1e6 * spent_s / 400 / BATCH


# ------------------------------------------------------------------ beside a loop


class Asleep:
    """A source whose images take 1 ms of sleep to decode and resize, which needs no CPU and no GIL:
    what is left is the Python of loading them, as on a machine with enough CPUs."""

    def __init__(self, source: Any, shared: bool) -> None:
        self._source, self.blocks, self.shared = source, source.blocks, shared

    def read(self, rows: Any) -> Any:
        from raytrain_ddp.data.pixels import cropping, decoding

        def decode(*_: Any) -> int:
            time.sleep(0.0008)
            return 0

        decoding._region_decoder = lambda: decode
        cropping.resize_into = lambda *_: time.sleep(0.0002)
        return self._source.read(rows)

    def fingerprint(self) -> str:
        return ""


def beside(folder: Path, job: str) -> dict[str, float]:
    """Times a loop of small torch operations, like one that launches kernels: us of each round on a
    CPU, ready but without one, and blocked (waiting for the GIL); and us of Python in the loader's
    threads for each image."""
    import torch

    torch.set_num_threads(1)
    way, _, workers = job.partition("-")
    next_batch: Callable[[], int] = lambda: 0  # noqa: E731
    if workers:
        loader = data_ours.train_loader(folder, "images", int(workers), mirror=False)
        source = Asleep(loader.data.source, shared=way == "threads")
        steps = replace(loader, data=replace(loader.data, source=source)).steps(0, 10**6)
        next_batch = lambda: next(steps)[0].samples  # noqa: E731
    small_operations(OPERATIONS)
    for _ in range(8 * int(workers or 1)):
        next_batch()
    rounds, images, wall_s, began = 0, 0, 0.0, time.monotonic()
    others_s = time.thread_time() - time.process_time()
    on_cpu_s = ready_s = 0.0
    while time.monotonic() - began < BESIDE_S:
        images += next_batch()
        started, before = time.monotonic(), scheduled_s()
        small_operations(OPERATIONS)
        after = scheduled_s()
        wall_s += time.monotonic() - started
        on_cpu_s, ready_s = on_cpu_s + after[0] - before[0], ready_s + after[1] - before[1]
        rounds += OPERATIONS
    spent_s = time.monotonic() - began
    others_s += time.process_time() - time.thread_time()
    if workers:
        steps.close()
    python_us = 1e6 * others_s / images if way == "threads" else 0.0
    found = {"cpu_us": on_cpu_s, "ready_us": ready_s, "blocked_us": wall_s - on_cpu_s - ready_s}
    found = {name: 1e6 * value / rounds for name, value in found.items()}
    found |= {"wall_us": 1e6 * wall_s / rounds, "python_us": python_us}
    return {**found, "images_per_s": images / spent_s}


def scheduled_s() -> tuple[float, float]:
    """How long this thread was on a CPU, and ready without one."""
    path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    on_cpu, ready, _ = Path(path).read_text().split()
    return int(on_cpu) / 1e9, int(ready) / 1e9


# ------------------------------------------------------------------ the page


def report(command: str, series: Series[Run]) -> list[str]:
    def runs(part: str, job: str) -> dict[int, Mapping[str, float]]:
        return {r.round: r.found for r in series.runs if (r.part, r.job) == (part, job)}

    def shares(part: str, job: str, key: str, base: str, base_key: str = "") -> str:
        """Of `base`, in the same round."""
        below = runs(part, base)
        found = runs(part, job).items()
        return spread([run[key] / below[n][base_key or key] for n, run in found if n in below], 2)

    forms = {form: runs("split", form) for form in FORMS if runs("split", form)}
    names = [*next(iter(next(iter(forms.values())).values()))] if forms else []
    rows = [
        [name, *(spread([run[name] for run in found.values()], 0) for found in forms.values())]
        for name in names
    ]
    for title, key in (("batch", "batch"), ("batch, whole images", "batch, whole images")):
        ratios = [[r["bare loop"] / r[key] for r in found.values()] for found in forms.values()]
        rows.append([f"bare loop / {title}", *(spread(each, 2) for each in ratios)])
    loaders = [
        [
            title,
            spread([run["cpu_s"] for run in runs("loaders", job).values()], 2),
            shares("loaders", "limit-mirrored", "cpu_s", job),
        ]
        for job, title in LOADERS.items()
    ]
    cores = []
    for job, title in SCALING.items():
        found = [*runs("scaling", job).values()]
        needed = [TARGET * run["cpu_s"] / 1000 for run in found]
        per_core = [1000 / run["cpu_s"] for run in found]
        wall = spread([run["images_per_s"] for run in found], 0)
        cores.append([title, spread(per_core, 0), spread(needed, 1), wall])
    keys = ("wall_us", "cpu_us", "ready_us", "blocked_us")
    alone = runs("beside", "alone")
    loops = []
    for job, title in BESIDE.items():
        found = runs("beside", job)
        slower = [
            (run["cpu_us"] + run["blocked_us"]) / (alone[n]["cpu_us"] + alone[n]["blocked_us"])
            for n, run in found.items()
            if n in alone
        ]
        columns = [spread([run[key] for run in found.values()], 1) for key in keys]
        rest = [spread([run[key] for run in found.values()], 0) for key in RATES]
        loops.append([title, *columns, spread(slower, 2), *rest])
    sections = {
        "scaling": [
            "## Cores",
            "Computed from CPU time, as if the cores had no other work. The last column was"
            " measured on this machine under its actual load.",
            table(["", "images/s of a core", f"cores for {TARGET:,} images/s", "images/s"], cores),
        ],
        "split": [
            "## By cause: us of CPU time an image, one thread",
            "The bare loop mirrors; this loader leaves that to the device. Whole images: as if"
            " built without `_jpeg_region.c`.",
            table(["", *(FORMS[form] for form in forms)], rows),
        ],
        "loaders": [
            "## Loaders: CPU seconds per 1,000 images, of the process and all below it",
            "All mirror. A ratio above 1 needs less than the bare loop.",
            table(["", "CPU s per 1,000", "images per CPU second, of the bare loop"], loaders),
        ],
        "beside": [
            "## Beside a loop of small torch operations",
            "us for one round of the loop (two operations), by the scheduler's clocks: on a CPU;"
            " ready, but the CPU had other work; blocked, which is waiting for the GIL. Decoding"
            " and resizing an image is replaced by 1 ms of sleep, so that the workers use a CPU"
            " only for Python, as on a machine with enough cores. Slower: on a CPU or blocked,"
            " compared with no loader. Python: us per image in the loader's threads, most of it"
            " with the GIL.",
            table(["", "time", "on a CPU", "ready", "blocked", "slower", *RATES.values()], loops),
        ],
    }
    measured = {run.part for run in series.runs}
    return [
        "# CPU time of loading images",
        f"`{command}`",
        series.place(),
        "Medians over the rounds (min .. max), ratios within a round. Random resized crop to 224,"
        " mirror, batches of 64, files in the page cache.",
        *(text for part in sections if part in measured for text in sections[part]),
    ]


if __name__ == "__main__":
    sys.exit(main())
