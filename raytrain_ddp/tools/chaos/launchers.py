"""Starts the processes of a run, on Ray or without it, by the command that a person would use."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.warm.fork_client import Forked, forked, own_state, start_server

_WORKER = str(Path(__file__).with_name("forked_fit.py"))
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# The system gives higher ones to outgoing connections: one could be taken before rank 0 listens.
_PORTS = range(15000, 32000)

Process = Forked | subprocess.Popen[bytes]
Launch = Callable[[Path, Mapping[str, str], int], Sequence[Process]]
"""Starts or resumes the run of a recipe, with these variables, on that many workers."""


def on_ray(recipe: Path, environment: Mapping[str, str], _: int) -> Sequence[Process]:
    """Starts the driver, with a Ray of its own, which replaces workers that die."""
    with recipe.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "raytrain_ddp.fit", str(recipe)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for this process, which kills it
        )
    return [process]


@contextmanager
def without_ray(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Starts workers that gloo connects, as torchrun does. They are forks of a process that has
    loaded torch and this package, and start in a tenth of a second.

    Args:
        environment: of that process, which is ended afterward.
    """
    address, modules = f"raytrain-fork-chaos-{uuid.uuid4().hex}", [f"{__package__}.forked_fit"]
    server = start_server(address, os.getpid(), 1, {**environment, **_ONE_THREAD}, modules)

    def launch(recipe: Path, given: Mapping[str, str], workers: int) -> Sequence[Process]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        group = {**given, **_ONE_THREAD, **place, "WORLD_SIZE": str(workers)}
        processes = []
        with recipe.with_suffix(".log").open("ab") as log, open(os.devnull) as nothing:
            for rank in map(str, range(workers)):
                ranked = {**group, "RANK": rank, "LOCAL_RANK": rank}
                state = own_state([_WORKER, str(recipe), "--local"], ranked) | {"waits": True}
                files = [nothing.fileno(), log.fileno(), log.fileno()]
                found = forked(address, lambda: server, state, files)
                if found is None:
                    raise PreflightError("the process that forks the workers has ended.")
                processes.append(found)
        return processes

    try:
        yield launch
    finally:
        with suppress(OSError):
            os.kill(server, 9)
            os.waitpid(server, 0)


def _free_port() -> str:
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.choice(_PORTS))) as found:
            return str(found.getsockname()[1])
