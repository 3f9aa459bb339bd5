"""Runs a config twice, undisturbed and with faults, and compares the results."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from random import Random

from raytrain_ddp.checkpoint.run_folder import (
    EVENTS_FILE,
    METRICS_FILE,
    newest_manifest,
    read_history,
    run_storage,
)
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, RaytrainError
from raytrain_ddp.events import Plan
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.files import absolute
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.records import stored_events
from raytrain_ddp.tools.chaos.comparison import RunResults, results_of
from raytrain_ddp.tools.chaos.fault_plan import Fault, RunShape, draw_faults, one_of
from raytrain_ddp.tools.chaos.observation import (
    DriveResult,
    FaultMonitor,
    LogFollower,
    Watcher,
    drive,
    tag,
    tagged,
)
from raytrain_ddp.tools.chaos.runners import (
    KillableNodes,
    LocalRunner,
    RayRunner,
    Runner,
    Zygote,
    with_failpoints,
)
from raytrain_ddp.uri import without_secrets

SAVE_EVERY_STEPS = 5  # if the config does not set it
_MOST_LIVE_ON_S = 90.0  # Ray's agents notice after a minute that their node is gone

Make = Callable[[TrainConfig, Sequence[Fault], Path], Runner]


@dataclass(frozen=True)
class ChaosOptions:
    """The experiment to run.

    Args:
        kills, drivers, node_kills: how many workers, drivers and nodes are killed.
        workers: their number; at least three, as two can sum in only one order.
        resize: each start of the disturbed run has another number of workers, up to `workers`;
            the undisturbed run has one.
        local: without Ray.
        nodes: 0, or the number of one-worker nodes of a cluster on this machine.
    """

    config: TrainConfig
    kills: int
    drivers: int = 0
    node_kills: int = 0
    workers: int = 3
    resize: bool = False
    local: bool = False
    nodes: int = 0


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison: a value of each run, and whether the second is correct."""

    what: str
    undisturbed: str
    disturbed: str
    right: bool


@dataclass(frozen=True)
class ChaosOutcome:
    """Both runs, side by side; `folder` holds them, unless they are equal."""

    rows: Sequence[ComparisonRow]
    total_steps: int
    undisturbed: DriveResult
    disturbed: DriveResult
    planned: int
    fired: int
    folder: Path

    @property
    def equal(self) -> bool:
        return all(row.right for row in self.rows)


def chaos(options: ChaosOptions, watcher: Watcher) -> ChaosOutcome:
    """Runs both and compares them.

    Raises:
        PreflightError: the storage is not a folder on this machine that can be written to.
        RaytrainError: the undisturbed run failed.
    """
    token = uuid.uuid4().hex
    folder = _new_folder(options.config.storage)
    config = _resolved_config(options, folder)
    plain_config, faulty_config = (
        replace(config, name=name) for name in ("undisturbed", "disturbed")
    )
    if options.resize:
        plain_config = replace(plain_config, scaling=replace(plain_config.scaling, num_workers=1))
    with _runners(options, tag(token, _environment())) as make:
        watcher.phase("undisturbed")
        nothing = FaultMonitor([], folder / "fired-undisturbed")
        undisturbed = _drive(make, plain_config, [], nothing, watcher)
        if undisturbed.problem:
            raise RaytrainError(f"the undisturbed run: {undisturbed.problem} (see {folder}).")
        shape = _shape(plain_config, 1 if options.resize else options.workers)
        counts = (options.kills, options.drivers, options.node_kills)
        plan = draw_faults(options.config.seed, shape, *counts)
        if options.resize:  # any rank: a specific one may not exist
            plan = [replace(fault, rank=None) for fault in plan]
        watcher.phase("disturbed", len(plan), shape.total_steps)
        faults = FaultMonitor(plan, folder / "fired")
        disturbed = _drive(make, faulty_config, plan, faults, watcher)
    watcher.phase("comparing")
    orphans = _orphans(token)
    rows = _compared(plain_config, faulty_config, disturbed, shape.total_steps)
    if not options.local:  # on Ray the run itself must survive the end of a worker
        most = 1 + options.drivers
        rows.append(
            ComparisonRow("starts", "1", str(disturbed.starts), right=disturbed.starts <= most)
        )
    named = ", ".join(orphans.values())
    rows.append(
        ComparisonRow("processes left behind", "", f"{len(orphans)} {named}".strip(), not orphans)
    )
    outcome = ChaosOutcome(
        rows, shape.total_steps, undisturbed, disturbed, len(plan), faults.count, folder
    )
    if outcome.equal:
        shutil.rmtree(folder)
    return outcome


@contextmanager
def _runners(options: ChaosOptions, environment: Mapping[str, str]) -> Iterator[Make]:
    """Yields a function that makes a runner from a config, a plan and the folder of fired
    faults."""
    if options.local:
        with Zygote(environment) as zygote:
            yield lambda config, plan, fired: LocalRunner(
                zygote, config, plan, fired, _sizes(options, config)
            )
        return
    with ExitStack() as stack:

        def on_ray(config: TrainConfig, plan: Sequence[Fault], fired: Path) -> Runner:
            if not plan:
                return RayRunner(config, environment)
            own, nodes = with_failpoints(environment, plan, fired), None
            if options.nodes:
                cpus = ceil(config.scaling.cpus_without_gpu)
                nodes = stack.enter_context(KillableNodes(options.nodes, cpus, own))
            return RayRunner(config, own, nodes)

        yield on_ray


def _sizes(options: ChaosOptions, config: TrainConfig) -> Callable[[int], int]:
    """The number of workers of a start, counted from 1."""
    most = config.scaling.worker_range()[1]
    if not options.resize:
        return lambda start: most
    random, sizes = Random(options.config.seed), [0]

    def another(start: int) -> int:
        while len(sizes) <= start:
            others = [size for size in range(1, most + 1) if size != sizes[-1]] or [most]
            sizes.append(one_of(random, others))
        return sizes[start]

    return another


def _drive(
    make: Make, config: TrainConfig, plan: Sequence[Fault], faults: FaultMonitor, watcher: Watcher
) -> DriveResult:
    log = LogFollower(Path(config.storage) / str(config.name) / METRICS_FILE)
    runner = make(config, plan, faults.folder)
    try:
        ran = drive(runner, log, faults, watcher)
    finally:
        log.close()
        runner.close()
    records = read_history(run_storage(config), EVENTS_FILE)
    plans = [timed.event for timed in stored_events(records) if isinstance(timed.event, Plan)]
    later = plans[1:]
    in_memory = sum(plan.replaced is not None for plan in later)
    return replace(ran, in_memory=in_memory, restored=len(later) - in_memory)


def _environment() -> dict[str, str]:
    """The environment without variables that select another Ray or arm other failpoints."""
    unwanted = ("RAY_ADDRESS", VARIABLE, FOLDER_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in unwanted}


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


def _resolved_config(options: ChaosOptions, folder: Path) -> TrainConfig:
    """The config, with all free choices set as the comparison needs them."""
    config, checkpoint = options.config, options.config.checkpoint
    every = checkpoint.every_steps or SAVE_EVERY_STEPS
    scaling = replace(
        config.scaling,
        num_workers=f"1:{options.workers}" if options.resize and options.nodes else options.workers,
        max_failures=config.scaling.max_failures + options.kills + options.node_kills,
    )
    if options.local:
        scaling = replace(scaling, use_gpu=False)
    else:  # so that they also fit on a small machine
        cpus = local_resources()["CPU"] / options.workers
        scaling = replace(scaling, cpus_per_worker=min(scaling.cpus_without_gpu, cpus))
    return replace(
        config,
        storage=str(folder),
        scaling=scaling,
        checkpoint=replace(checkpoint, every_steps=every, every_s=0.0),
        log=LogConfig(every_steps=1, tensorboard=False, audit=True),
    )


def _shape(config: TrainConfig, workers: int) -> RunShape:
    manifest = newest_manifest(run_storage(config))
    assert manifest is not None  # the run has ended well
    return RunShape(manifest.step, workers, config.checkpoint.every_steps)


def _compared(
    plain_config: TrainConfig, faulty_config: TrainConfig, ran: DriveResult, total_steps: int
) -> list[ComparisonRow]:
    if ran.problem:
        return [ComparisonRow("finishes", "yes", ran.problem, False)]
    ours = results_of(run_storage(plain_config))
    try:
        theirs = results_of(run_storage(faulty_config))
    except RaytrainError as error:
        return [ComparisonRow("newest checkpoint", "whole", str(error), False)]
    named = ("weights", "optimizer", "samples", "log")
    rows = [_equal_hashes(name, ours, theirs) for name in named]
    once = list(range(1, total_steps + 1))
    our_steps, their_steps = ("each once" if r.steps == once else "no" for r in (ours, theirs))
    what, right = f"steps 1 to {total_steps} in the log", theirs.steps == once
    rows.append(ComparisonRow(what, our_steps, their_steps, right))
    rest = theirs.leftovers
    counted = f"{len(rest)} {', '.join(rest[:3])}".strip()
    rows.append(ComparisonRow("leftover files", str(len(ours.leftovers)), counted, right=not rest))
    return rows


def _equal_hashes(name: str, ours: RunResults, theirs: RunResults) -> ComparisonRow:
    pair = getattr(ours, name), getattr(theirs, name)
    return ComparisonRow(f"{name} (sha256)", pair[0][:16], pair[1][:16], right=pair[0] == pair[1])


def _orphans(token: str) -> dict[int, str]:
    """Processes of the runs that are still alive at the end; they are killed now."""
    deadline = time.monotonic() + _MOST_LIVE_ON_S
    while (left := tagged(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
