"""Stamps what a process does on its way to the first optimizer step; for recovery.py.

sitecustomize.py imports it at Python's start wherever this folder is on PYTHONPATH, so that all
contenders are stamped alike, in their own processes, without a word in their code. But Python has
long been there in a forked process, which task.py stamps as soon as the task is loaded. A line is
``TIME PID EVENT [RANK]``; the monotonic clock is one for all processes of a machine.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_FILE = os.environ.get("RECOVERY_STAMPS", "")


def stamp(event: str) -> None:
    line = f"{time.monotonic()} {os.getpid()} {event}\n".encode()
    file = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line)
    os.close(file)


def stamped(function: Callable[..., Any], event: str) -> Callable[..., Any]:
    """`function`, which stamps `event` when it is done."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        stamp(event)
        return result

    return wrapper


def watch_group(module: Any) -> None:
    module.init_process_group = stamped(module.init_process_group, "group")


def watch_ddp(module: Any) -> None:
    kind = module.DistributedDataParallel
    kind.__init__ = stamped(kind.__init__, "ddp")


def watch_optimizer(module: Any) -> None:
    def step(*_: Any) -> None:
        from torch.distributed import get_rank, is_initialized

        rank = os.environ.get("RECOVERY_RANK")  # of a process without a group of torch's
        stamp(f"step {rank or (get_rank() if is_initialized() else 0)}")

    module.register_optimizer_step_post_hook(step)
    kind = module.Optimizer
    kind.load_state_dict = stamped(kind.load_state_dict, "loaded")


WATCHED: dict[str, Callable[[Any], None]] = {
    "torch": lambda _: stamp("torch"),
    "torch._dynamo": lambda _: stamp("dynamo"),
    "torch.distributed.distributed_c10d": watch_group,
    "torch.nn.parallel.distributed": watch_ddp,
    "torch.optim.optimizer": watch_optimizer,
    "raytrain_ddp.training.loop": lambda _: stamp("loop"),
}


class Finder:
    """Finds the watched modules as Python does, and has them watched once they are executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            WATCHED[name](module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if _FILE:
    stamp("python")
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    for watched in WATCHED.keys() & sys.modules.keys():
        WATCHED[watched](sys.modules[watched])
