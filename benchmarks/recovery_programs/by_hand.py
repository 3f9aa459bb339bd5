"""Contender "by hand": DistributedDataParallel under torchrun, which restarts it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import SEED, Resumable, mlp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = mlp()
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loop = Resumable(model, net, args.steps)
    file = args.storage / "newest.pt"
    if file.exists():
        loop.load(file)
    for step in loop.steps():
        if step % args.every == 0 and dist.get_rank() == 0:
            temp = file.with_suffix(".temp")
            torch.save(loop.state(), temp)
            os.replace(temp, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
