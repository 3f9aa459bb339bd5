"""Processes for tests: commands in a separate process, and groups of gloo workers."""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "100",
    # The package of this tree, not the installed one.
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
CALL_TIMEOUT_S = 200.0

# A process that ignores SIGTERM and has children of its own: one in its group, one a daemon. It
# writes their PIDs into a file.
STUBBORN = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [os.getpid(), subprocess.Popen(sleep).pid]
pids.append(subprocess.Popen(sleep, start_new_session=True).pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """And not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], object], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


# ------------------------------------------------------------------ commands

_RUN_CLI = """
import json, os, sys, time
from importlib import import_module
from raytrain_ddp.config.process import run_command

sys.argv = ["raytrain", *sys.argv[2:]]
before, status = {*sys.modules}, None
module = import_module(os.environ["TEST_COMMAND"])
if not hasattr(module, "main"):
    module = import_module(module.__name__ + ".__main__")
try:
    run_command(module.main)
except SystemExit as stop:
    status = stop.code
heavy = {"torch", "ray", "torchvision", "matplotlib"} & {*sys.modules} - before
with open(os.environ["TEST_NOTE"], "w") as note:
    json.dump({"status": status, "heavy": sorted(heavy), "cpu_s": time.process_time()}, note)
"""


@dataclass(frozen=True)
class Answer:
    """The result of a command: exit status, output, heavy modules loaded, CPU seconds."""

    status: int
    out: str
    err: str
    heavy: Sequence[str]
    cpu_s: float


def module_of(name: str) -> str:
    """The module of a command."""
    is_tool = (ROOT / "raytrain_ddp" / "tools" / name).exists()
    return f"raytrain_ddp.{'tools.' * is_tool}{name}"


def run_cli(name: str, *argv: str, cwd: Path, warm: bool = False) -> Answer:
    """Runs ``raytrain <name> argv...`` in a separate process.

    Args:
        warm: fork the process from one that has loaded torch and matplotlib, which are then
            missing in `Answer.heavy`. For commands that need them.
    """
    import warm_python  # not available where this file is used alone, with a task

    note = cwd / ".note.json"
    environment = {**os.environ, **ENVIRONMENT, "TEST_COMMAND": module_of(name)}
    environment.pop("RAY_ADDRESS", None)
    run = warm_python.run if warm else subprocess.run
    done = run(
        [sys.executable, "-c", _RUN_CLI, "raytrain", *argv],
        cwd=cwd,
        env={**environment, "TEST_NOTE": str(note)},
        capture_output=True,
        text=True,
        timeout=CALL_TIMEOUT_S,
        check=False,
    )
    assert note.exists(), done.stderr
    reported = json.loads(note.read_text())
    note.unlink()
    return Answer(
        reported["status"], done.stdout, done.stderr, reported["heavy"], reported["cpu_s"]
    )


# ------------------------------------------------------------------ groups of gloo workers


class WorkerError(Exception):
    """A function raised on a worker; the message is its traceback."""


@dataclass(frozen=True)
class Raised:
    """What a function raised on a worker."""

    name: str
    exit_status: int
    text: str


@dataclass(frozen=True)
class Died:
    """A worker's process ended; the next call starts a fresh one."""

    exit_code: int


# What most workers import. The only thread is that of pyarrow's jemalloc, which supports forks.
PRELOADED = [
    *("pytest", "hypothesis", "hypothesis.strategies", "torch", "torch.distributed.nn"),
    *("torch._dynamo", "torchmetrics.classification", "torchvision"),
    *("raytrain_ddp.training.membership", "raytrain_ddp.training.loop"),
    *("raytrain_ddp.membership.generations", "raytrain_ddp.ray_backend.failure_causes"),
    # What Ray imports, without Ray: its random numbers would be equal in all processes.
    *("google.protobuf.descriptor_pb2", "google.protobuf.json_format"),
    *("google.protobuf.struct_pb2", "google.protobuf.timestamp_pb2"),
    *("pydantic.json_schema", "pydantic.type_adapter"),
    *("click", "colorful", "filelock", "jsonschema", "logging.config", "packaging.version"),
    *("psutil", "requests", "yaml"),
]


class Group:
    """Long-lived processes; each call forms a new process group of the given size.

    Importing torch takes seconds, forming a process group milliseconds. Therefore all tests share
    the processes, and dead ones are replaced by forks of a process that only imports.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []
        self._folder = Path(mkdtemp(prefix="raytrain-test-"))
        self._calls = 0

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, size, *args) on each of `size` workers; their results, by rank.

        Raises:
            WorkerError: the function raised on a worker, or a worker ended.
        """
        results = self.outcomes(size, function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, Raised | Died):
                reported = result.text if isinstance(result, Raised) else str(result)
                raise WorkerError(f"rank {rank} of {size}:\n{reported}")
        return results

    def outcomes(
        self, size: int, function: Callable[..., Any], *args: Any, wait_s: float = 30.0
    ) -> list[Any]:
        """Like a call, but a rank that raised has `Raised` as its result, one that died `Died`.

        Args:
            wait_s: how long a collective waits for a missing rank.
        """
        self._start(size)
        self._calls += 1
        self._folder.mkdir(exist_ok=True)
        store = str(self._folder / f"store-{self._calls}")
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((store, rank, size, function, args, wait_s))
        try:
            results = [self._answer(rank) for rank in range(size)]
        except BaseException:
            self.end()  # a process that has not responded is in an unknown state
            raise
        self._workers = [
            worker
            for rank, worker in enumerate(self._workers)
            if rank >= size or not isinstance(results[rank], Died)
        ]
        return results

    def _answer(self, rank: int) -> Any:
        process, pipe = self._workers[rank]
        if not pipe.poll(CALL_TIMEOUT_S):
            raise WorkerError(f"rank {rank}: no answer in {CALL_TIMEOUT_S} s")
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            return Died(process.exitcode)

    def end(self) -> None:
        """Ends all processes; the next call starts fresh ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            with patch.dict(os.environ, ENVIRONMENT):
                process = context.Process(
                    target=_serve, args=(theirs, dict(os.environ)), daemon=True
                )
                process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(pipe: Any, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # otherwise, a garbage collection would scan all imported objects
    import torch.distributed as dist
    import torch.distributed.nn  # noqa: F401  (its first import keeps the group that exists then)

    from raytrain_ddp.membership.connections import Connections

    warnings.simplefilter("error")
    while True:
        try:
            file, rank, size, function, args, wait_s = pipe.recv()
        except (EOFError, ConnectionError):
            return
        if size > 1:
            connections = Connections()
            store, wait = dist.FileStore(file, size), timedelta(seconds=wait_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
            # A rank that destroys the group at once would cut off one that is still connecting.
            store.set(f"connected-{rank}", "")
            store.wait([f"connected-{each}" for each in range(size)], wait)
            connections.opened(dist.group.WORLD)
        try:
            result = function(rank, size, *args)
        except Exception as error:
            status = getattr(error, "exit_status", 1)
            result = Raised(type(error).__name__, status, traceback.format_exc())
            traceback.clear_frames(error.__traceback__)
            if size > 1:  # leftover processes may keep them open, and the others would wait
                connections.cut()
        finally:
            if size > 1:
                dist.destroy_process_group()
        pipe.send(result)
