"""Runs a script on the cluster's workers, again if it fails, and reports how it ended."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from raytrain_ddp.errors import PreflightError, signal_name
from raytrain_ddp.launcher.capacity import connected, layout_for
from raytrain_ddp.launcher.exit_report import RankExit, format_ranks, report_exit
from raytrain_ddp.launcher.output import Output, tell
from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions
from raytrain_ddp.launcher.worker_group import NodeLost, WorkerGroup, reason
from raytrain_ddp.ray_backend.capacity_watch import LiveNodes
from raytrain_ddp.signals import handling, heeded

_TAKE_S = 5.0
_POLL_S = 0.1
_SETTLE_S = 0.3  # simultaneous failures are all reported before we send a signal
_SAY_AFTER_S = 2.0  # when to report which ranks have not ended
_NEVER = float("inf")


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
    with handling(ours, note_or_stop), connected(options.flags), handling(ours, note):
        return _attempts(options, driver, stops)


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
                tell(f"starting all again: restart {attempt} of {flags.max_restarts}")
            try:
                layout = layout_for(flags, nodes())
                with closing(WorkerGroup(options, layout, driver, check)) as group:
                    tell(_places(group.workers))
                    group.start(run_id, attempt)
                    folder = logs / f"attempt_{attempt}" if logs else None
                    with Output(flags, group.workers, folder, lambda: stops) as output:
                        ends = Attempt(group, output, flags.grace_s, stops).run(nodes)
                    status = report_exit(ends, group.workers, output)
            except NodeLost as error:
                tell(str(error))
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
    tell(f"output of each rank: {folder}")
    return folder


def _places(workers: Sequence[Worker]) -> str:
    """``ranks 0-1 on head (10.0.0.1), ranks 2-3 on w1 (10.0.0.2)``"""
    nodes = [[*here] for _, here in groupby(workers, lambda worker: worker.node_rank)]
    return ", ".join(f"{format_ranks(w.rank for w in here)} on {here[0].where}" for here in nodes)


class Attempt:
    """One attempt; it ends when every rank has ended: on its own, by our signal, or with its node.

    Args:
        grace_s: from the first signal to SIGKILL.
        stops: the numbers of the signals that the driver has received, in order; grows during the
            attempt.
    """

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        grace_s: float,
        stops: Sequence[int],
    ) -> None:
        self._group, self._output, self._grace_s, self._stops = group, output, grace_s, stops
        self._sent = self._stops_seen = 0  # the last signal
        self._failed_at = self._say_at = _NEVER
        # How far the driver's clock is ahead of each node's: the least seen, as news takes a while.
        self._ahead_s: dict[int, float] = {}
        self._ends: dict[int, RankExit] = {}
        self._waiting = {self._ask(w.rank): w.rank for w in group.workers}

    def run(self, check: Callable[[], object]) -> dict[int, RankExit]:
        """How each rank has ended.

        Args:
            check: called continuously; if it raises, the remaining ranks end with their agents.
        """
        while self._waiting and self._stops_seen < 3:  # at the third, nobody waits anymore
            check()
            self._listen()
            self._decide(time.monotonic())
        return {rank: self._by_our_clock(rank, end) for rank, end in self._ends.items()}

    def _listen(self) -> None:
        import ray

        for answer in ray.wait([*self._waiting], num_returns=1, timeout=_POLL_S)[0]:
            rank = self._waiting.pop(answer)
            try:
                theirs, news = ray.get(answer)
            except ray.exceptions.RayError as error:
                if rank not in self._ends:
                    self._note(rank, RankExit(None, time.monotonic(), lost=reason(error)))
                continue
            node, ahead_s = self._group.workers[rank].node_rank, time.monotonic() - theirs
            self._ahead_s[node] = min(self._ahead_s.get(node, _NEVER), ahead_s)
            for kind, value in news:
                if kind == "end":
                    self._note(rank, RankExit(**value))
                elif kind != "closed":
                    self._output.take(rank, kind, value)
            if ("closed", None) not in news[-1:]:
                self._waiting[self._ask(rank)] = rank

    def _note(self, rank: int, end: RankExit) -> None:
        self._ends[rank] = end
        if end.failed_at is not None:
            self._failed_at = min(self._failed_at, time.monotonic())

    def _decide(self, now: float) -> None:
        """Sends the signals that are due; a second one of the user's is SIGKILL."""
        if len(self._stops) > self._stops_seen:
            self._stops_seen = len(self._stops)
            is_first = self._stops_seen == 1
            self._send(self._stops[0] if is_first else signal.SIGKILL, now)
        elif now - self._failed_at > _SETTLE_S and not self._sent:
            self._send(signal.SIGTERM, now)
        left = [rank for rank in self._waiting.values() if rank not in self._ends]
        if now > self._say_at and left:
            self._say_at = _NEVER
            sent, ranks = signal_name(self._sent), format_ranks(left)
            then = f"SIGKILL {self._grace_s:g} s after it, or at the next Ctrl-C"
            tell(f"{sent} sent; waiting for {ranks} to end ({then})")

    def _send(self, number: int, now: float) -> None:
        grace_s = 0 if number == signal.SIGKILL else self._grace_s
        for rank in self._waiting.values():
            if not grace_s or rank not in self._ends:  # its leftovers have a limit of their own
                self._group.agent(rank).signal.remote(int(number), grace_s)
        self._sent, self._say_at = number, now + _SAY_AFTER_S

    def _by_our_clock(self, rank: int, end: RankExit) -> RankExit:
        if end.status is None:
            return end
        ahead_s = self._ahead_s[self._group.workers[rank].node_rank]
        times = {name: getattr(end, name) + ahead_s for name in ("at", "asked_at", "raised_at")}
        return replace(end, **times)

    def _ask(self, rank: int) -> Any:
        return self._group.agent(rank).take.remote(_TAKE_S)
