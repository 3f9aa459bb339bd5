"""Contender "torchft": two replicas of one process each; one continues when the other dies.

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
from workload import LR, MOMENTUM, SEED, batch, loss, mlp, parse, watch

REPLICAS = 2


def main() -> None:
    args = parse(__doc__)
    if args.replica is None:
        launch()
    else:
        train(args)


def launch() -> None:
    """Starts the lighthouse and the replicas. The lighthouse has torchft_lighthouse's defaults, but
    one replica may train alone."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60000, quorum_tick_ms=100
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command += ["--standalone", "--max-restarts", "3", *sys.argv]
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    numbers = map(str, range(REPLICAS))
    started = [subprocess.Popen([*command, "--replica", number], env=env) for number in numbers]
    sys.exit(max(each.wait() for each in started))


def train(args: argparse.Namespace) -> None:
    """Trains as torchft's example train_ddp.py does."""
    watch(args.stamps, args.replica)
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
        replica_id=f"replica_{args.replica}",
        timeout=timedelta(seconds=30),
    )
    net, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()
        loss(net, *batch(args.steps, step, args.replica, REPLICAS)).backward()
        optimizer.step()
    manager.shutdown()


if __name__ == "__main__":
    main()
