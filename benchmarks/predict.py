"""Images/s of `predict` beside the run's own evaluation, a loop by hand, and Ray Data.

    python benchmarks/predict.py [--images 1000] [--rounds 3] [--out FILE.md FILE.json]
    python benchmarks/predict.py --quick

All compute the classes of the same JPEGs (about 95 KB) with the same weights, batches of 64, and as
many threads as there are cores; each round runs one after another, in another order. `predict` is
counted with its start in a warm process, its listing of the folder and its file; Ray Data and
`predict --address` with the start of their workers, but not of Ray.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from data_images import make_images, once
from series import Series, describe_machine, in_turn, spread, table

from raytrain_ddp import TrainConfig, fit_locally, load
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.sections import EvalConfig, LogConfig, ModelConfig
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.tasks.task_check import metrics_of
from raytrain_ddp.tools.predict.__main__ import main as predict
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.metrics.evaluation import evaluate
from raytrain_ddp.training.runtime.world import World

BATCH, SIZE, RESIZED = 64, 224, 256
OWN = "the run's evaluation"
THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Run:
    """One round of one contender."""

    contender: str
    round: int
    load: float  # of the machine (1 minute) before
    images_s: float


def main() -> int:
    args = parse()
    machine = describe_machine()
    del machine["bytecode"]
    series: Series[Run] = Series(machine)
    images = args.data / f"{args.images}" / "images"
    images.parent.mkdir(parents=True, exist_ok=True)
    once(images, lambda place: make_images(place, args.images))
    with tempfile.TemporaryDirectory() as folder:
        run = trained(images, folder, args.model)
        contenders = contenders_of(run, images, Path(folder))
        for number in range(args.rounds):
            for name in in_turn([*contenders], number):
                torch.set_num_threads(THREADS)
                one = partial(measure, name, number, contenders[name], args.images)
                series.add(name, one, line)
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--model", default="timm:test_resnet", help="as --model.name of fit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("build/bench-data"))
    parser.add_argument("--quick", action="store_true", help="one round of 130 images")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.images = 1, 130
    return args


def measure(name: str, number: int, seconds: Callable[[], float], images: int) -> Run:
    load_before = os.getloadavg()[0]
    return Run(name, number + 1, load_before, images / seconds())


def line(run: Run) -> str:
    return f"round {run.round}  {run.contender:<28} {run.images_s:8.0f} images/s"


def trained(images: Path, folder: str, model: str) -> str:
    """A run of two steps on these images."""
    config = TrainConfig(
        name="run",
        storage=folder,
        steps=2,
        batch_size=2 * BATCH,
        micro_batch=BATCH,
        data=DataConfig(source=str(images), image_size=SIZE, holdout=0.1),
        model=ModelConfig(name=model),
        log=LogConfig(tensorboard=False),
    )
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        fit_locally(config)
    torch.use_deterministic_algorithms(False)
    return f"{folder}/run"


def contenders_of(run: str, images: Path, folder: Path) -> dict[str, Callable[[], float]]:
    """What takes part: a function that returns the seconds for all images."""
    return {
        OWN: lambda: own_evaluation(run, images),
        "predict": lambda: predicted(run, images, folder / "p.parquet"),
        "DataLoader by hand, PIL": lambda: by_hand(run, images),
        "predict --address": lambda: on_ray(
            lambda: predicted(run, images, folder / "r.parquet", "--address", "auto")
        ),
        "Ray Data map_batches": lambda: on_ray(lambda: ray_data(run, images)),
    }


def own_evaluation(run: str, images: Path) -> float:
    model = load(run, device="cpu")
    source = open_splits(DataConfig(source=str(images), image_size=SIZE)).train
    data = model.data_of(source, lambda row, why: None)
    world = World(0, 1, 0, torch.device("cpu"), THREADS)
    began = time.perf_counter()
    metrics = metrics_of(model.task)
    threads = LoaderThreads(THREADS)
    config = TrainConfig(eval=EvalConfig(micro_batch=BATCH))
    build = Build(config, world, model.task)
    build.model, build.eval_data = model.model, data
    evaluate(build, threads, metrics)
    return time.perf_counter() - began


def predicted(run: str, images: Path, out: Path, *flags: str) -> float:
    words = [run, str(images), "--out", str(out), "--overwrite"]
    words += ["--device", "cpu", "--batch-size", str(BATCH), *flags]
    began = time.perf_counter()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        status = predict(words)
    if status:
        raise RuntimeError(f"predict ended with status {status}")
    return time.perf_counter() - began


def transform(model: Any) -> Callable[[Any], torch.Tensor]:
    from torchvision.transforms import v2

    data = model.config.data
    steps = [v2.Resize(RESIZED), v2.CenterCrop(SIZE), v2.PILToTensor()]
    made: Callable[[Any], torch.Tensor] = v2.Compose(
        [*steps, v2.ToDtype(torch.float32, True), v2.Normalize(data.mean, data.std)]
    )
    return made


def by_hand(run: str, images: Path) -> float:
    """What people write: ImageFolder, DataLoader with a process per core, a loop."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    model = load(run, device="cpu")
    loader = DataLoader(ImageFolder(images, transform(model)), BATCH, num_workers=THREADS)
    began = time.perf_counter()
    classes: list[int] = []
    with torch.inference_mode():
        for batch, _ in loader:
            classes += model.model(batch).argmax(1).tolist()
    return time.perf_counter() - began


class Classify:
    """An actor of Ray Data."""

    def __init__(self, run: str) -> None:
        torch.set_num_threads(THREADS)
        self.model = load(run, device="cpu")
        self.transform = transform(self.model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image

        images = torch.stack([self.transform(Image.fromarray(one)) for one in batch["image"]])
        with torch.inference_mode():
            return {"class": self.model.model(images).argmax(1).numpy(), "path": batch["path"]}


def ray_data(run: str, images: Path) -> float:
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    began = time.perf_counter()
    rows = ray.data.read_images(str(images), mode="RGB", include_paths=True)
    made = rows.map_batches(
        Classify,
        fn_constructor_args=(run,),
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    with tempfile.TemporaryDirectory() as out:
        made.write_parquet(out)
    return time.perf_counter() - began


def on_ray(work: Callable[[], float]) -> float:
    import ray

    ray.init(
        address="local",
        num_cpus=THREADS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    try:
        return work()
    finally:
        ray.shutdown()


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    own = {run.round: run.images_s for run in series.runs if run.contender == OWN}
    rows = []
    for name in dict.fromkeys(run.contender for run in series.runs):
        runs = [run for run in series.runs if run.contender == name]
        ratios = [run.images_s / own[run.round] for run in runs if run.round in own]
        rows.append([name, spread([run.images_s for run in runs], 0), spread(ratios, 2)])
    rows.sort(key=lambda row: -float(row[2].split()[0]))
    head = ["", "images/s", f"ratio to {OWN}, same round"]
    flags = f"--images {args.images} --model {args.model} --rounds {args.rounds}"
    return [
        "# Predictions: images/s",
        f"`python benchmarks/predict.py {flags}`",
        series.place(),
        f"{args.model} at {SIZE} pixels, batches of {BATCH}. Medians over the rounds (min .. max).",
        table(head, rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
