"""Runs a config twice, undisturbed and with faults, and compares the results."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from raytrain_ddp.checkpoint.run_folder import newest_manifest, run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, RaytrainError
from raytrain_ddp.files import absolute
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.tools.chaos.comparison import Row, compare
from raytrain_ddp.tools.chaos.fault_plan import draw_faults
from raytrain_ddp.tools.chaos.killed_run import KilledRun, on_ray, without_ray
from raytrain_ddp.uri import without_secrets

if TYPE_CHECKING:
    from raytrain_ddp.tools.chaos.__main__ import ChaosArgs

SAVE_EVERY_STEPS = 5  # if the config does not set it
TAG = "RAYTRAIN_DDP_CHAOS"  # a variable of all processes of the runs
_MAX_LIVE_ON_S = 90.0  # two of Ray's own agents notice late that their node is gone


class ChaosOutcome(NamedTuple):
    """The comparison of both runs; `folder` holds them, unless they are equal."""

    rows: list[Row]
    disturbed: KilledRun
    folder: Path

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)


def chaos(args: ChaosArgs) -> ChaosOutcome:
    """Runs both and compares them. Prints what it does.

    Raises:
        PreflightError: the storage is not a folder on this machine that can be written to.
        RaytrainError: the undisturbed run failed.
        KeyboardInterrupt: Ctrl-C; the processes are ended, and the folder of the runs is removed.
    """
    folder = _new_folder(args.config.storage)
    try:
        outcome = _both(args, folder)
    except (PreflightError, KeyboardInterrupt):
        end_tagged(str(folder), 0.0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    left = end_tagged(str(folder), _MAX_LIVE_ON_S)
    outcome.rows.append(Row("processes left behind", "0", f"{len(left)} {' '.join(left)}".strip()))
    if outcome.equal:
        shutil.rmtree(folder)
    return outcome


def _both(args: ChaosArgs, folder: Path) -> ChaosOutcome:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {TAG: str(folder)}
    config = _resolved_config(args, folder)
    calm, wild = (replace(config, name=name) for name in ("undisturbed", "disturbed"))
    size = 1 if args.resize else args.workers
    with without_ray(environment) if args.local else nullcontext(on_ray) as launch:
        print("undisturbed", flush=True)
        first = KilledRun(calm, launch, environment, [], cycle([size]))
        first.drive()
        newest = newest_manifest(run_storage(calm))
        every, steps = config.checkpoint.every_steps, newest.step if newest else 0
        sizes, ranks = [size], size
        if args.resize:  # each differs from the one before
            sizes, ranks = Random(config.seed).sample(range(1, args.workers + 1), args.workers), 0
        plan = draw_faults(config.seed, steps, ranks, every, *args.faults)
        print(f"disturbed: {len(plan)} faults in {steps} steps", flush=True)
        second = KilledRun(wild, launch, environment, plan, cycle(sizes))
        try:
            second.drive()
            rows = compare(run_storage(calm), run_storage(wild))
        except RaytrainError as error:  # also a damaged checkpoint
            rows = [Row("ends well", "yes", str(error))]
    if not args.local:  # on Ray, the run itself must survive the end of a worker
        most = 1 + args.faults[1]
        rows.append(Row("most starts", str(most), str(max(len(second.sizes), most))))
    return ChaosOutcome(rows, second, folder)


def _new_folder(storage: str) -> Path:
    if "://" in storage:
        shown = without_secrets(storage)
        raise PreflightError(f"storage = {shown}: chaos needs a folder on this machine.")
    parent = Path(absolute(storage))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="chaos-", dir=parent))
    except OSError as error:
        raise PreflightError(f"storage = {storage}: cannot be written: {error.strerror}.") from None


def _resolved_config(args: ChaosArgs, folder: Path) -> TrainConfig:
    """The config, with all free choices set as the comparison needs them."""
    config, checkpoint = args.config, args.config.checkpoint
    most = config.scaling.max_failures + args.faults[0]
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
