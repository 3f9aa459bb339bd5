"""Contender "by hand": plain DistributedDataParallel, for torchrun."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import SEED, mlp, stamp_steps, train_by_hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--checkpoint", required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    stamp_steps(args.stamps)
    torch.manual_seed(SEED)
    model = mlp()
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)  # fit's default
    optimizer = train_by_hand(net, args.steps, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
