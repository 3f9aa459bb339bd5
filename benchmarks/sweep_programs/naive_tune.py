"""Contenders "tune" and "tune-trainer": Ray Tune as its documentation has it.

tune: the loop in a function. tune-trainer: each trial starts a TorchTrainer with one worker.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray import tune
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

WORKER_CPUS = 0.9  # of a trial's CPU; the rest is for the function that starts the trainer


def train_function(config: dict[str, Any]) -> None:
    import torch
    from digits_by_hand import train

    torch.set_num_threads(1)
    stamp(config["stamps"])
    for epoch, top1 in enumerate(train(config["lr"], config["dropout"], config["epochs"])):
        report = ray.train.report if config["trainer"] else tune.report
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"epoch": epoch}, Path(folder) / "state.pt")
            report({"top1": top1}, checkpoint=Checkpoint.from_directory(folder))


def stamp(folder: str) -> None:
    """When this trial began to train."""
    Path(folder, f"{time.time_ns()}").touch()


def with_trainer(config: dict[str, Any]) -> None:
    trainer = TorchTrainer(
        train_function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": WORKER_CPUS}),
        run_config=RunConfig(
            name=f"trial-{tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--trainer", action="store_true")
    args = parser.parse_args()
    path = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    ray.init(address="local", runtime_env={"env_vars": path})
    space = {
        "lr": tune.loguniform(1e-3, 1),
        "dropout": tune.uniform(0, 0.5),
        **{name: getattr(args, name) for name in ("epochs", "stamps", "storage", "trainer")},
    }
    function: Any = with_trainer if args.trainer else train_function
    resources = {"cpu": 1 - WORKER_CPUS if args.trainer else 1}
    results = tune.Tuner(
        tune.with_resources(function, resources),
        param_space=space,
        tune_config=tune.TuneConfig(
            num_samples=args.trials, metric="top1", mode="max", max_concurrent_trials=2
        ),
        run_config=tune.RunConfig(name="sweep", storage_path=args.storage),
    ).fit()
    if results.errors:
        raise SystemExit(f"{len(results.errors)} trials failed: {results.errors[0]}")
    print(results.get_best_result().metrics["top1"])


if __name__ == "__main__":
    main()
