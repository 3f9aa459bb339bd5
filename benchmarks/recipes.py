"""Compares the examples' recipes, which need no GPU, with code that does not use this package.

    python benchmarks/recipes.py [--seeds N] [--steps N] [--out FILE.md FILE.json]
    python benchmarks/recipes.py --quick

char-lm: the GPT in the size that nanoGPT's README takes for a CPU, on the sources of Python's
asyncio, and the same network in a loop by hand as nanoGPT's train.py: windows at random places, the
same optimizer and schedule. Both evaluate the last tenth of the text. tabular: the breast cancer
table of scikit-learn (569 rows, 30 columns), and its MLPClassifier on standardized columns, trained
and evaluated on the same rows; needs scikit-learn. Each run is a process of its own, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from series import Series, describe_machine, environment, in_turn, spread, table
from torch.nn.functional import cross_entropy

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.sections import ComputeConfig, EvalConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig as Config
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.tasks.task_loading import load_task

TEXT = str(Path(str(asyncio.__file__)).parent / "*.py")
LENGTH, WIDTH, DEPTH, HEADS, BATCH = 64, 128, 4, 4, 12
WAYS = {"char-lm": ("recipe", "by hand"), "tabular": ("recipe", "scikit-learn")}


@dataclass(frozen=True)
class Run:
    """
    Args:
        result: what the evaluation measures.
        step_s: seconds of a step, in the fastest tenth of the stretches of ten steps; others use
            the machine, too.
    """

    task: str
    way: str
    seed: int
    load: float
    result: dict[str, float]
    step_s: float


def main() -> int:
    args = parse()
    if args.one:
        task, way, seed = args.one
        result, step_s = ONE[task, way](int(seed), args.steps)
        print(json.dumps({"result": result, "step_s": step_s}))
        return 0
    series: Series[Run] = Series(describe_machine())
    for task in args.only or WAYS:
        for seed in range(args.seeds):
            for way in in_turn(WAYS[task], seed):
                series.add(f"{task}, {way}, {seed}", lambda: measure(task, way, seed, args), line)  # noqa: B023
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="of char-lm")
    parser.add_argument("--only", nargs="+", choices=WAYS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps = 1, 20
    return args


def measure(task: str, way: str, seed: int, args: argparse.Namespace) -> Run:
    load = os.getloadavg()[0]
    command = [sys.executable, __file__, "--steps", str(args.steps), "--one", task, way, str(seed)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Run(task, way, seed, load, **json.loads(done.stdout.splitlines()[-1]))


def line(run: Run) -> str:
    reported = ", ".join(f"{name} {value:.4f}" for name, value in run.result.items())
    return f"{run.task}  seed {run.seed}  {run.way:<12}  {reported}  step {1e3 * run.step_s:.2f} ms"


def fastest(seconds: Sequence[float]) -> float:
    """The mean of the fastest tenth."""
    return mean(sorted(seconds)[: max(1, len(seconds) // 10)])


# ------------------------------------------------------------------ char-lm


def small_char_lm(seed: int, steps: int) -> TrainConfig:
    config = load("examples/char-lm.toml")
    sizes = {"length": LENGTH, "width": WIDTH, "depth": DEPTH, "heads": HEADS, "dropout": 0}
    return replace(
        config,
        seed=seed,
        steps=steps,
        batch_size=BATCH,
        micro_batch=BATCH,
        compute=ComputeConfig(),
        task_options={name: str(value) for name, value in sizes.items()},
        data=replace(config.data, source=TEXT),
    )


def char_lm(seed: int, steps: int) -> tuple[dict[str, float], float]:
    config = small_char_lm(seed, steps)
    steps_per_epoch = -(-load_task(config).train_data().rows // BATCH)
    warmup = replace(config.schedule, warmup_epochs=steps / 10 / steps_per_epoch)
    return trained(replace(config, schedule=warmup))


def trained(config: Config) -> tuple[dict[str, float], float]:
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            config,
            name="measured",
            storage=folder,
            eval=EvalConfig(every_epochs=0),
            log=LogConfig(tensorboard=False),
        )
        result = fit_locally(config)
    steps = [r["timing"]["step_s"] for r in result.history if r["kind"] == "train"]
    return {k: v for k, v in result.last.items() if k != "step"}, fastest(steps[1:])


def char_lm_by_hand(seed: int, steps: int) -> tuple[dict[str, float], float]:
    """As nanoGPT's train.py, but that all of the last tenth is evaluated."""
    task = load_task(small_char_lm(seed, steps))
    data, rest = task.train_data(), task.eval_data()
    assert rest is not None
    windows = data.batch(Draws(0, 0, np.arange(data.rows)))  # one after another
    text = torch.cat([windows["x"][0, :1], windows["y"].flatten()])
    torch.manual_seed(seed)
    model = task.model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    warmup, least, stretches = steps // 10, 1e-4, []
    began = time.perf_counter()
    for step in range(steps):
        done = (step - warmup) / (steps - warmup)
        rate = least + 0.5 * (1 + math.cos(math.pi * done)) * (1e-3 - least)
        for group in optimizer.param_groups:
            group["lr"] = rate if step >= warmup else 1e-3 * (step + 1) / (warmup + 1)
        places = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        x = torch.stack([text[i : i + LENGTH] for i in places])
        y = torch.stack([text[i + 1 : i + 1 + LENGTH] for i in places])
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            stretches.append((time.perf_counter() - began) / 10)
            began = time.perf_counter()
    model.eval()
    losses = []
    with torch.inference_mode():
        for first in range(0, rest.rows, BATCH):
            batch = rest.batch(Draws(0, 0, np.arange(first, min(first + BATCH, rest.rows))))
            x, y = batch["x"], batch["y"]
            losses.append(cross_entropy(model(x).transpose(1, 2), y, reduction="none").flatten())
    return {"loss": torch.cat(losses).mean().item()}, fastest(stretches)


# ------------------------------------------------------------------ tabular


def breast_cancer(folder: Path, seed: int) -> TrainConfig:
    """The config of the recipe on scikit-learn's table; which rows are held out depends on the
    seed."""
    from sklearn.datasets import load_breast_cancer

    path = folder / "table.csv"
    load_breast_cancer(as_frame=True).frame.to_csv(path, index=False)
    config = load("examples/tabular.toml")
    data = replace(
        config.data, source=str(path), label_column="target", holdout=0.2, holdout_seed=seed
    )
    return replace(config, seed=seed, data=data)


def tabular(seed: int, steps: int) -> tuple[dict[str, float], float]:
    with tempfile.TemporaryDirectory() as folder:
        return trained(breast_cancer(Path(folder), seed))


def tabular_of_scikit(seed: int, steps: int) -> tuple[dict[str, float], float]:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import log_loss, roc_auc_score
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    warnings.simplefilter("ignore", ConvergenceWarning)
    with tempfile.TemporaryDirectory() as folder:
        task: Any = load_task(breast_cancer(Path(folder), seed))
    train, rest = task._train, task._eval
    network = make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
    began = time.perf_counter()
    network.fit(train["x"], train["y"])
    seconds = time.perf_counter() - began
    x, y = rest["x"], rest["y"]
    chances = network.predict_proba(x)
    found = {
        "loss": log_loss(y, chances),
        "top1": float((chances.argmax(1) == y).mean()),
        "auroc": roc_auc_score(y, chances[:, 1]),
    }
    return found, seconds / (network[-1].n_iter_ * math.ceil(len(train["y"]) / 200))


ONE: dict[tuple[str, str], Callable[[int, int], tuple[dict[str, float], float]]] = {
    ("char-lm", "recipe"): char_lm,
    ("char-lm", "by hand"): char_lm_by_hand,
    ("tabular", "recipe"): tabular,
    ("tabular", "scikit-learn"): tabular_of_scikit,
}


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    parts = [
        "# The recipes that need no GPU, beside the same without this package",
        f"`python benchmarks/recipes.py --seeds {args.seeds} --steps {args.steps}`",
        series.place(),
        f"Medians over {args.seeds} seeds (min .. max). What is compared: the first lines of "
        "`benchmarks/recipes.py`.",
    ]
    for task, ways in WAYS.items():
        runs = [run for run in series.runs if run.task == task]
        if not runs:
            continue
        names = list(runs[0].result)
        rows = []
        for way in ways:
            own = [run for run in runs if run.way == way]
            values = [spread([run.result[name] for run in own], 4) for name in names]
            rows.append([way, *values, spread([1e3 * run.step_s for run in own], 2)])
        parts += [f"## {task}", table(["", *names, "step ms"], rows)]
        pairs = zip(*([r.step_s for r in runs if r.way == way] for way in ways), strict=False)
        ratios = [one / other for one, other in pairs]
        if ratios:
            parts.append(f"Step time, recipe / {ways[1]}: {spread(ratios, 3)}.")
    return parts


if __name__ == "__main__":
    sys.exit(main())
