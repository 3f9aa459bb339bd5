"""The scripts of examples/launchers under their own launchers, and through `run`."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.launcher.script_launch import run_script
from raytrain_ddp.launcher.torchrun_flags import parse

EXAMPLES = Path(__file__).parents[1] / "examples" / "launchers"


def free_port() -> str:
    """A port outside the range of outgoing connections, so it stays free for some seconds."""
    for port in random.sample(range(20_000, 30_000), 20):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return str(port)
    raise OSError("no free port")


def at_once(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    """Runs all of these side by side, as a shell loop or srun does; if one fails, all are ended."""
    processes = [
        subprocess.Popen(command, env={**os.environ, **environment})
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        deadline = time.monotonic() + 200
        while any(process.poll() is None for process in processes):
            assert not any(process.returncode for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [process.returncode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def by_torchrun(script: str, size: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    at_once([[*torchrun, script]], [{}])


def by_launch(script: str, size: int) -> None:
    module = ["-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", str(size)]
    at_once([[sys.executable, *module, script]], [{}])


def by_itself(script: str, size: int) -> None:
    at_once([[sys.executable, script, "--gpus", str(size), "--port", free_port()]], [{}])


def by_hand(script: str, size: int) -> None:
    where = ["--dist-url", f"tcp://127.0.0.1:{free_port()}", "--world-size", str(size)]
    command = [sys.executable, script, *where]
    at_once([[*command, "--rank", str(rank)] for rank in range(size)], [{}] * size)


def by_srun(script: str, size: int) -> None:
    """The variables of srun and the output of scontrol on a single node."""
    (folder := Path.cwd() / "bin").mkdir()
    (folder / "scontrol").write_text('#!/bin/sh\ntest "$1 $2" = "show hostnames" && echo $3\n')
    (folder / "scontrol").chmod(0o755)
    common = {
        "SLURM_NTASKS": str(size),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    tasks = [{**common, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(size)]
    at_once([[sys.executable, script]] * size, tasks)


@dataclass(frozen=True)
class LaunchMethod:
    """How a script is started by its own launcher, and by `run` with {size} processes. An entry of
    `MANNERS` is named by its script, with ":" and more where a script has several."""

    own: Callable[[str, int], None]
    flags: str = "--num-workers {size}"
    args: str = ""
    out: str = "result.json"


MANNERS = {
    "torchrun_env.py": LaunchMethod(by_torchrun),
    "torchrun_env.py:launch": LaunchMethod(by_launch, "--num-workers {size} --legacy-local-rank"),
    "spawn.py": LaunchMethod(
        by_itself,
        "--num-workers 1 --per node",
        "--gpus {size} --nodes {world_size} --nr {node_rank} "
        "--master {master_addr} --port {master_port}",
    ),
    "slurm_env.py": LaunchMethod(by_srun, "--num-workers {size} --env slurm", out="slurm_run.json"),
    "tcp_rank_flags.py": LaunchMethod(
        by_hand, args="--rank {rank} --world-size {world_size} --dist-url {init_method}"
    ),
}


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def compare(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manner, script = MANNERS[name], EXAMPLES / name.partition(":")[0]
    in_folder(monkeypatch, tmp_path / "own")
    manner.own(str(script), size)
    own: dict[str, Any] = json.loads(Path(manner.out).read_text())
    in_folder(monkeypatch, tmp_path / "ray")
    words = f"{manner.flags} {script} {manner.args}".replace("{size}", str(size))
    assert run_script(parse(words.split())) == 0
    assert json.loads(Path(manner.out).read_text()) == own
    assert own["accuracy"] > 0.7
    if "lines" in own:  # each of 401 once, except those that would give one rank an extra sample
        assert own["lines"] == 401 - 401 % size
