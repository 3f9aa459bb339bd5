"""Contender "torchft": two replicas of one process each, which go on without one that dies.

Without --replica, this starts the lighthouse and torchrun for each replica, which restarts it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
from torch.optim import SGD
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from workload import LR, MICRO_BATCH, MOMENTUM, SEED, arrays, loss, mlp

REPLICAS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replica", type=int)
    args, _ = parser.parse_known_args()
    if args.replica is None:
        launch(args.steps)
    else:
        train(args.steps, args.replica)


def launch(steps: int) -> None:
    """The lighthouse has the defaults of torchft_lighthouse, but one replica may train alone."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60000, quorum_tick_ms=100
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command += ["--standalone", "--max-restarts", "3", __file__, "--steps", str(steps)]
    replicas = [
        subprocess.Popen(
            [*command, "--replica", str(number)],
            env={
                **os.environ,
                "TORCHFT_LIGHTHOUSE": lighthouse.address(),
                "RECOVERY_RANK": str(number),
            },
        )
        for number in range(REPLICAS)
    ]
    sys.exit(max(replica.wait() for replica in replicas))


def train(steps: int, replica: int) -> None:
    """As torchft's example train_ddp.py."""
    torch.manual_seed(SEED)
    model = mlp()
    inner = SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
    )
    net, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    data = {
        name: torch.from_numpy(array)
        for name, array in arrays(steps * MICRO_BATCH * REPLICAS).items()
    }
    order = torch.randperm(len(data["x"]), generator=torch.Generator().manual_seed(SEED))
    while manager.current_step() < steps:
        start = (manager.current_step() * REPLICAS + replica) * MICRO_BATCH
        chosen = order[start : start + MICRO_BATCH]
        optimizer.zero_grad()
        loss(net, data["x"][chosen], data["y"][chosen]).backward()
        optimizer.step()
    manager.shutdown()


if __name__ == "__main__":
    main()
