"""Runs a config twice, undisturbed and with faults, and compares the results."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.files import absolute
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.tools.chaos.comparison import Row, compare
from raytrain_ddp.tools.chaos.fault_plan import draw_faults, one_of
from raytrain_ddp.tools.chaos.killed_run import KilledRun
from raytrain_ddp.tools.chaos.launchers import on_ray, without_ray
from raytrain_ddp.tools.chaos.screen import Screen
from raytrain_ddp.uri import without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.tools.chaos.__main__ import ChaosArgs

SAVE_EVERY_STEPS = 5  # if the config does not set it
TAG = "RAYTRAIN_DDP_CHAOS"  # a variable of all processes of the runs
_MAX_LIVE_ON_S = 90.0  # two of Ray's own agents notice late that their node is gone


class ChaosOutcome(NamedTuple):
    """Both runs, side by side; `folder` holds them, unless they are equal."""

    rows: list[Row]
    undisturbed: KilledRun
    disturbed: KilledRun
    folder: Path

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)


def chaos(args: ChaosArgs, screen: Screen) -> ChaosOutcome:
    """Runs both and compares them.

    Raises:
        PreflightError: the storage is not a folder on this machine that can be written to.
        ConfigError: the run is too short for so many faults; its folder is removed.
        RaytrainError: the undisturbed run failed.
        KeyboardInterrupt: Ctrl-C; the processes are ended, and the folder of the runs is removed.
    """
    folder, token = _new_folder(args.config.storage), uuid.uuid4().hex
    try:
        undisturbed, disturbed, problem = _both(args, folder, token, screen)
    except (ConfigError, PreflightError, KeyboardInterrupt):
        end_tagged(token, 0.0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    screen.phase("comparing")
    runs = run_storage(undisturbed.config), run_storage(disturbed.config)
    rows = [Row("finishes", "yes", problem)] if problem else compare(*runs)
    if not args.local:  # on Ray, the run itself must survive the end of a worker
        most = str(max(len(disturbed.sizes), 1 + args.drivers))
        rows.append(Row("most starts", str(1 + args.drivers), most))
    left = end_tagged(token, _MAX_LIVE_ON_S)
    rows.append(Row("processes left behind", "0", f"{len(left)} {', '.join(left)}".strip()))
    outcome = ChaosOutcome(rows, undisturbed, disturbed, folder)
    if outcome.equal:
        shutil.rmtree(folder)
    return outcome


def _both(
    args: ChaosArgs, folder: Path, token: str, screen: Screen
) -> tuple[KilledRun, KilledRun, str]:
    """Both runs, and why the second one was given up, if it was."""
    # Without variables that select another Ray or arm other failpoints.
    unwanted = ("RAY_ADDRESS", VARIABLE, FOLDER_VARIABLE)
    environment = {k: v for k, v in os.environ.items() if k not in unwanted} | {TAG: token}
    config = _resolved_config(args, folder)
    calm, wild = (replace(config, name=name) for name in ("undisturbed", "disturbed"))
    size = 1 if args.resize else args.workers
    calm = replace(calm, scaling=replace(calm.scaling, num_workers=size))
    with ExitStack() as stack:
        launch = stack.enter_context(without_ray(environment)) if args.local else on_ray
        screen.phase("undisturbed")
        first = KilledRun(calm, launch, environment, [], repeat(size), screen)
        if problem := first.drive():
            raise RaytrainError(f"the undisturbed run: {problem} (see {folder}).")
        every, steps = config.checkpoint.every_steps, len(first.logged)
        plan = draw_faults(config.seed, steps, size, every, args.kills or 0, args.drivers)
        if args.resize:  # any rank: a specific one may not exist
            plan = [replace(fault, rank=None) for fault in plan]
        screen.phase("disturbed", len(plan), steps)
        sizes = _changing(args.workers, config.seed) if args.resize else repeat(size)
        second = KilledRun(wild, launch, environment, plan, sizes, screen)
        return first, second, second.drive()


def _changing(most: int, seed: int) -> Iterator[int]:
    """Numbers of workers, each of which differs from the one before."""
    random, last = Random(seed), 0
    while True:
        last = one_of(random, [size for size in range(1, most + 1) if size != last] or [most])
        yield last


def _new_folder(storage: str) -> Path:
    if "://" in storage:
        shown = without_secrets(storage)
        raise PreflightError(f"storage = {shown}: chaos needs a folder on this machine.")
    parent = Path(absolute(storage))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="chaos-", dir=parent))
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise PreflightError(f"storage = {storage}: {why}.") from None


def _resolved_config(args: ChaosArgs, folder: Path) -> TrainConfig:
    """The config, with all free choices set as the comparison needs them."""
    config, checkpoint = args.config, args.config.checkpoint
    most = config.scaling.max_failures + (args.kills or 0)
    scaling = replace(config.scaling, num_workers=args.workers, max_failures=most)
    if args.local:
        scaling = replace(scaling, use_gpu=False)
    else:  # so that they also fit on a small machine
        cpus = local_resources()["CPU"] / args.workers
        scaling = replace(scaling, cpus_per_worker=min(scaling.cpus_without_gpu, cpus))
    every = checkpoint.every_steps or SAVE_EVERY_STEPS
    return replace(
        config,
        storage=str(folder),
        scaling=scaling,
        checkpoint=replace(checkpoint, every_steps=every, every_s=0.0),
        log=LogConfig(every_steps=1, tensorboard=False, audit=True),
    )


def end_tagged(token: str, after_s: float) -> list[str]:
    """Kills the processes with this token that live longer than that; returns their command lines.

    Finds none on a system without /proc.
    """
    deadline = time.monotonic() + after_s
    while (left := _tagged(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [*left.values()]


def _tagged(token: str) -> dict[int, str]:
    """Processes with this token in their environment: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip()
            if line and f"{TAG}={token}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = line.decode(errors="replace")  # no line: a zombie
    return found
