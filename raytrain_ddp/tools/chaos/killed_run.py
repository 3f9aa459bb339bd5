"""Drives a run to its end although it is killed: starts its command again, and again.

Its processes are started on Ray or without it, by the command that a person would use.
"""

from __future__ import annotations

import os
import random
import runpy
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_ddp.checkpoint.run_folder import METRICS_FILE
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, RaytrainError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE, arm_from_environment
from raytrain_ddp.tools.chaos.fault_plan import Fault
from raytrain_ddp.tools.formatting import format_seconds
from raytrain_ddp.warm.fork_client import Forked, forked, own_state, start_server

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
    address, modules = f"raytrain-fork-chaos-{uuid.uuid4().hex}", [__name__, "matplotlib.pyplot"]
    server = start_server(address, os.getpid(), 1, {**environment, **_ONE_THREAD}, modules)

    def launch(recipe: Path, given: Mapping[str, str], workers: int) -> Sequence[Process]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        group = {**given, **_ONE_THREAD, **place, "WORLD_SIZE": str(workers)}
        processes = []
        with recipe.with_suffix(".log").open("ab") as log, open(os.devnull) as nothing:
            for rank in map(str, range(workers)):
                ranked = {**group, "RANK": rank, "LOCAL_RANK": rank}
                state = own_state([__file__, str(recipe), "--local"], ranked) | {"waits": True}
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


STUCK_S = 300.0
_POLL_S = 0.02


@dataclass
class KilledRun:
    """A run and its faults. Each is printed when it occurs.

    Args:
        config: with a name and a storage of its own.
        environment: of its processes.
        next_sizes: the number of workers of each start.
        sizes: those of the starts so far.
        fired: the faults so far.
    """

    config: TrainConfig
    launch: Launch
    environment: Mapping[str, str]
    plan: Sequence[Fault]
    next_sizes: Iterator[int]
    sizes: list[int] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)

    def drive(self) -> None:
        """Restarts the run as long as a fault ends it.

        Raises:
            RaytrainError: it failed without a fault, or logged nothing for `STUCK_S`.
        """
        folder = Path(self.config.storage) / str(self.config.name)
        self._recipe, self._log = folder.with_suffix(".toml"), folder / METRICS_FILE
        self._recipe.write_text(dumps(self.config), encoding="utf-8")
        self._marks = folder.with_name(f"{folder.name}-fired")
        self._marks.mkdir()
        self._open = {f"fired-{number}": fault for number, fault in enumerate(self.plan)}
        self._began = time.monotonic()
        while not self._is_done():
            pass

    def _is_done(self) -> bool:
        """Starts the run once; False: a fault has ended it."""
        self.sizes.append(next(self.next_sizes))
        before, seen = len(self.fired), time.time()
        armed_by = {VARIABLE: ";".join(map(str, self.plan)), FOLDER_VARIABLE: str(self._marks)}
        processes = self.launch(self._recipe, {**self.environment, **armed_by}, self.sizes[-1])
        see = f"see {self._recipe.with_suffix('.log')}"
        try:
            while None in (statuses := [process.poll() for process in processes]):
                self._note_faults()
                if any(statuses):  # one that has failed ends the others, as by torchrun
                    _end(processes)
                with suppress(FileNotFoundError):  # each start writes it anew
                    seen = max(seen, self._log.stat().st_mtime)
                if time.time() - seen > STUCK_S:
                    raise RaytrainError(f"{self.config.name}: no step in {STUCK_S:.0f} s: {see}.")
                time.sleep(_POLL_S)
        finally:
            _end(processes)
        self._note_faults()
        if any(statuses) and len(self.fired) == before:
            raise RaytrainError(f"{self.config.name}: ended ({statuses}) without a fault: {see}.")
        return not any(statuses)

    def _note_faults(self) -> None:
        for name in sorted(self._open.keys() & {*os.listdir(self._marks)}):
            self.fired.append(fault := self._open.pop(name))
            after = format_seconds(time.monotonic() - self._began)
            print(f"{len(self.fired):>4}  {after:>8}  {fault}", flush=True)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)


if __name__ == "__main__":  # a worker without Ray: `fit`, in a fork that has loaded this module
    sys.path[0] = os.getcwd()
    arm_from_environment()  # the module was loaded in another environment
    # Its classes are looked up in sys.modules["__main__"] when their flags are read.
    runpy.run_module("raytrain_ddp.fit", run_name="__main__", alter_sys=True)
