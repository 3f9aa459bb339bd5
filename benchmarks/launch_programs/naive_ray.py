"""Contender "naive": the same loop in a TorchTrainer, as Ray's documentation has it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from workload import SEED, mlp, stamp_steps, train_by_hand


def train_function(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    stamp_steps(config["stamps"])
    torch.manual_seed(SEED)
    model = mlp()
    net = ray.train.torch.prepare_model(model)
    optimizer = train_by_hand(
        net, config["steps"], context.get_world_rank(), context.get_world_size()
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"steps": config["steps"]}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--address", default="local")
    args = parser.parse_args()

    ray.init(address=args.address)
    trainer = TorchTrainer(
        train_function,
        train_loop_config={"steps": args.steps, "stamps": args.stamps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="naive", storage_path=args.storage),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
