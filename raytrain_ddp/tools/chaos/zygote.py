"""A process that has torch and this package imported, and forks workers from itself.

A worker then starts in a tenth of a second instead of five. Commands are lines of JSON, answered
with the workers' exit statuses; it ends the workers and itself when its input ends.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig

_POLL_S = 0.005
_GROUP_TIMEOUT_S = 30.0


def main() -> None:
    """Serves until the input ends. One order at a time:

    ``{"config", "size", "failpoints", "fired", "folder"}`` forks `size` workers; once one has
    failed, or on `kill`, the others are killed. The answer is the list of all statuses.
    """
    gc.disable()  # a fifth of the CPU of what follows
    _load()
    gc.enable()
    gc.collect()
    gc.freeze()  # otherwise each worker's garbage collector would copy shared pages
    _answer("ready")
    while line := sys.stdin.readline():
        order = json.loads(line)
        if order != "kill":  # those have already ended
            _answer(_supervise(order))
    os._exit(0)  # nothing to clean up; libraries complain about gc.freeze


def _load() -> None:
    """Imports all that a worker needs; nothing here may start a thread."""
    import matplotlib.pyplot  # noqa: F401
    import torch._dynamo  # noqa: F401  (DistributedDataParallel imports it)
    import torchmetrics.classification  # noqa: F401

    import raytrain_ddp.driver.fit_driver
    import raytrain_ddp.tasks.image_classification
    import raytrain_ddp.training.loop
    import raytrain_ddp.training.recording.local_session  # noqa: F401


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _supervise(order: Mapping[str, Any]) -> list[int]:
    """Forks the workers; returns their exit statuses (negative: the signal) when all have ended."""
    from raytrain_ddp.config.recipe import from_dict

    config = from_dict(order["config"])  # here, as it takes longer than the rest of a start
    workers = {_fork(order, config, rank): rank for rank in range(order["size"])}
    statuses: dict[int, int] = {}
    while len(statuses) < len(workers):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[workers[pid]] = os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([sys.stdin], [], [], 0 if pid else _POLL_S)
        if readable:  # `kill`, or the end of the input
            sys.stdin.readline()
        if readable or any(statuses.values()):
            for worker, rank in workers.items():
                if rank not in statuses:
                    os.kill(worker, signal.SIGKILL)
    return [statuses[rank] for rank in sorted(statuses)]


def _fork(order: Mapping[str, Any], config: TrainConfig, rank: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(
            Path(order["folder"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _end_with(os.getppid())
        status = _work(order, config, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(order: Mapping[str, Any], config: TrainConfig, rank: int) -> int:
    """Like ``fit --local`` under torchrun; returns the exit status."""
    import torch.distributed as dist

    from raytrain_ddp import failpoints
    from raytrain_ddp.driver.fit_driver import fit_locally
    from raytrain_ddp.errors import RaytrainError, status_of
    from raytrain_ddp.tools.display.progress_display import Display
    from raytrain_ddp.tools.display.terminal import terminal

    failpoints.arm(order["failpoints"], order["fired"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(order["size"]), LOCAL_RANK=str(rank))
    if order["size"] > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order['rendezvous']}",
            rank=rank,
            world_size=order["size"],
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
    try:
        display = Display(terminal(file=sys.stdout), live=False)
        return fit_locally(config, display=display).exit_status
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return status_of(error)


if __name__ == "__main__":
    main()
