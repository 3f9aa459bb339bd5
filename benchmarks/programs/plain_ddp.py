"""Contender "plain" of exact.py: DistributedDataParallel with gradient accumulation."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from wide_digits import wide_mlp


def main(slots: int, micro_batch: int, steps: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = DistributedDataParallel(wide_mlp(10), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9, nesterov=True)
    images, labels = torch.randn(micro_batch, 3, 8, 8), torch.arange(micro_batch) % 10
    own = len(range(rank * slots // size, (rank + 1) * slots // size))
    records = []  # the same as in the log of fit
    for _ in range(steps):
        optimizer.zero_grad()
        for slot in range(own):
            with nullcontext() if slot == own - 1 else net.no_sync():
                (cross_entropy(net(images), labels) * size / slots).backward()
        optimizer.step()
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        timing = {"peak_memory_bytes": memory_bytes}
        records.append({"kind": "train", "seconds": time.monotonic(), "timing": timing})
    if rank == 0:
        (folder / "run").mkdir()
        (folder / "run/metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
