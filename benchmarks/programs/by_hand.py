"""Contender "by hand": plain DistributedDataParallel, for torchrun, which restarts it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import SEED, Loop, mlp, parse, watch


def main() -> None:
    args = parse(__doc__)
    watch(args.stamps)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = mlp()
    net = DistributedDataParallel(model, gradient_as_bucket_view=True)  # fit's default
    loop = Loop(model, net, args.steps)
    file = args.storage / "newest.pt"
    if file.exists():
        loop.load(file)
    for step in loop.run():
        if step % args.every == 0 and dist.get_rank() == 0:
            loop.save(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
