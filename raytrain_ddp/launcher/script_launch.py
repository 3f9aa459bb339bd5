"""Runs a script on the cluster's workers and reports how it ended; or previews it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from types import FrameType

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.launcher.attempt import Attempt
from raytrain_ddp.launcher.capacity import connected, layout_for
from raytrain_ddp.launcher.exit_report import format_ranks, report_exit
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import (
    RankedGroup,
    Seat,
    Worker,
    assign_ranks,
    base_environment,
    rank_variables,
)
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions
from raytrain_ddp.launcher.worker_group import NodeLost, WorkerGroup
from raytrain_ddp.ray_backend.capacity_watch import LiveNodes
from raytrain_ddp.ray_backend.placement import local_resources
from raytrain_ddp.signals import handling, heeded

_NOTE = """\
# Shown as if all workers ran on this machine; Ray decides the placement. MASTER_PORT is chosen
# at the start. Variables that are the same in this shell are omitted."""


def run_script(options: RunOptions) -> int:
    """Runs the script to its end; returns its exit status (128 + n if signal n ended it).

    Raises:
        ConfigError: the script does not exist.
        PreflightError: there is no Ray, not enough resources, or a folder too large to copy.
        RetriesExhausted: the cluster's head is lost.
        KeyboardInterrupt: a signal arrived before the script was started; the argument is its
            number.
        BrokenPipeError: the reader of our output is gone.
    """
    driver = dict(os.environ)  # before we or Ray add anything
    options.require_script(Path.cwd())
    ours = heeded(signal.Signals[name] for name in options.flags.signals)
    stops: list[int] = []  # an exception in a handler could not pass through Ray's own code

    def note(number: int, _: FrameType | None) -> None:
        stops.append(number)

    def note_or_stop(number: int, _: FrameType | None) -> None:
        stops.append(number)
        if len(stops) > 1:  # while Ray is started or joined, which may hang
            raise KeyboardInterrupt(stops[0])

    # Ray installs its own handler, so ours is installed again.
    with handling(ours, note_or_stop), connected(options.flags, _tell), handling(ours, note):
        return _attempts(options, driver, stops)


def preview(options: RunOptions, driver: Mapping[str, str] = os.environ) -> str:
    """Each worker's environment and command for a shell, without Ray.

    Raises:
        ConfigError, PreflightError: as in a real run, as far as this machine can tell.
    """
    options.require_script(Path.cwd())
    layout = layout_for(options.flags, [local_resources()])
    gpus = int(layout.per_worker.get("GPU", 0))
    seats = [
        Seat(n, "here", "127.0.0.1", "", [str(gpu) for gpu in range(n * gpus, (n + 1) * gpus)])
        for n in range(layout.count)
    ]
    group = RankedGroup(assign_ranks(seats), options.flags.master_port or 29500, "0" * 32)
    base = base_environment(driver, {}, is_local=True)
    lines = [_NOTE]
    for worker in group.workers:
        added = rank_variables(options.flags, group, worker, base).items() - driver.items()
        lines += ["", f"# rank {worker.rank}"]
        lines += [f"{name}={shlex.quote(value)} \\" for name, value in sorted(added)]
        lines.append(shlex.join(options.command(sys.executable, group.placeholders(worker))))
    return "\n".join(lines)


def _attempts(options: RunOptions, driver: Mapping[str, str], stops: list[int]) -> int:
    flags, run_id = options.flags, str(uuid.uuid4())
    nodes = LiveNodes(kept="All ranks are ended.")

    def check() -> None:
        nodes()
        if stops:
            raise KeyboardInterrupt(stops[0])

    logs = _log_folder(flags, run_id) if flags.files else None
    status = 0
    with closing(nodes):
        check()
        for attempt in range(flags.max_restarts + 1):
            if attempt:
                _tell(f"starting all again: restart {attempt} of {flags.max_restarts}")
            try:
                layout = layout_for(flags, nodes())
                with closing(WorkerGroup(options, layout, driver, _tell, check)) as group:
                    _tell(_places(group.workers))
                    group.start(run_id, attempt)
                    folder = logs / f"attempt_{attempt}" if logs else None
                    with Output(flags, group.workers, folder, lambda: stops) as output:
                        ends = Attempt(group, output, flags.grace_s, stops, _tell).run(nodes)
                    status = report_exit(ends, group.workers, output)
            except NodeLost as error:
                _tell(str(error))
                status = error.exit_status
            if stops:
                return 128 + stops[0]
            if not status:
                break
    return status


def _log_folder(flags: RunFlags, run_id: str) -> Path:
    """A new folder for this run in LOG_DIR (or, as under torchrun, among the temporary files).

    Raises:
        PreflightError: it cannot be created.
    """
    try:
        top = Path(flags.log_dir or tempfile.mkdtemp(prefix="torchelastic_")).absolute()
        folder = top / f"{flags.rdzv_id or 'none'}_{run_id[:8]}".replace("/", "_")
        folder.mkdir(parents=True)
    except OSError as error:
        raise PreflightError(f"--log-dir {flags.log_dir}: {error}") from None
    _tell(f"output of each rank: {folder}")
    return folder


def _places(workers: Sequence[Worker]) -> str:
    """``ranks 0-1 on head (10.0.0.1), ranks 2-3 on w1 (10.0.0.2)``"""
    nodes = [[*here] for _, here in groupby(workers, lambda worker: worker.node_rank)]
    return ", ".join(f"{format_ranks(w.rank for w in here)} on {here[0].where}" for here in nodes)


def _tell(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)
