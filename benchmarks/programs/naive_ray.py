"""Contender "naive": the loop in a TorchTrainer with retries, as in Ray's documentation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from workload import SEED, Loop, mlp, parse, watch


def train_function(config: dict[str, Any]) -> None:
    watch(config["stamps"])
    torch.manual_seed(SEED)
    model = mlp()
    net = ray.train.torch.prepare_model(model)
    loop = Loop(model, net, config["steps"])
    newest = ray.train.get_checkpoint()
    if newest:
        with newest.as_directory() as folder:
            loop.load(Path(folder) / "state.pt")
    is_main = ray.train.get_context().get_world_rank() == 0
    for step in loop.run():
        if step % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if is_main:
                    loop.save(Path(folder) / "state.pt")
                    checkpoint = Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    args = parse(__doc__)
    ray.init(address=args.address)
    trainer = TorchTrainer(
        train_function,
        train_loop_config={"steps": args.steps, "every": args.every, "stamps": args.stamps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="naive",
            storage_path=str(args.storage),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
