"""Runs a script on the cluster's workers, again if it must, and says how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raytrain_ddp.orchestration.cluster import Nodes
from raytrain_ddp.orchestration.run.attempt import Attempt
from raytrain_ddp.orchestration.run.crew import Crew, SeatLost
from raytrain_ddp.orchestration.run.order import Order
from raytrain_ddp.orchestration.run.output import Output
from raytrain_ddp.orchestration.run.plan import Worker
from raytrain_ddp.orchestration.run.room import connected, layout_for
from raytrain_ddp.orchestration.run.verdict import first_failure, ranks_said, report
from raytrain_ddp.rules import require


def launch(order: Order) -> int:
    """Runs the script to its end; returns its exit status (128 + n if signal n ended it).

    Raises:
        ConfigError: there is no such script, or no such variable.
        PreflightError: there is no Ray, no room, or a folder too large to be copied.
        RetriesExhausted: the cluster's head is lost.
        KeyboardInterrupt: a signal came before the script was started; its argument is the number.
    """
    order.require_script(Path.cwd())
    driver = dict(os.environ)  # before anything of ours or Ray's is added
    for name in order.flags.exported:
        require(name in driver, "--export", name, "is not set in this shell")
    try:
        # Ray puts a handler of its own in place, so ours comes again.
        with _signals() as stops, connected(order.flags, _tell), _signals(stops):
            return _attempts(order, driver, stops)
    except BrokenPipeError:  # whoever has read our output has gone: `run ... | head`
        return 128 + signal.SIGPIPE


def _attempts(order: Order, driver: dict[str, str], stops: list[int]) -> int:
    flags, run_id = order.flags, str(uuid.uuid4())
    nodes = Nodes(kept="All ranks are ended.")

    def check() -> None:
        nodes()
        if stops:
            raise KeyboardInterrupt(stops[0])

    logs = Path(flags.log_dir).absolute() / run_id[:8] if flags.log_dir else None
    if logs is not None:
        _tell(f"output of each rank: {logs}")
    crew: Crew | None = None
    status = 0
    try:
        check()
        layout = layout_for(flags, nodes())
        for attempt in range(flags.max_restarts + 1):
            if attempt:
                _tell(f"starting all again: restart {attempt} of {flags.max_restarts}")
            try:
                if crew is None:
                    crew = Crew(order, layout, driver, sys.executable, _tell, check)
                    _tell(_places(crew.workers))
                crew.start(run_id, attempt, check)
                folder = logs / f"attempt_{attempt}" if logs else None
                status, lost = _attempt(order, crew, folder, stops, nodes)
            except SeatLost as error:
                _tell(str(error))
                status, lost = error.exit_status, True
            if stops:
                status = 128 + stops[0]
            if stops or not status:
                break
            if lost and crew is not None:
                crew.close()
                crew = None
        return status
    finally:
        if crew is not None:
            crew.close()
        nodes.close()


def _attempt(
    order: Order, crew: Crew, logs: Path | None, stops: list[int], nodes: Nodes
) -> tuple[int, bool]:
    """The exit status of what has been started, and whether some agent is lost.

    Raises:
        RetriesExhausted: the cluster's head is lost.
    """
    with Output(order.flags.shown, logs, hurried=lambda: stops) as output:
        ends = Attempt(crew, output, order.flags.grace_s, stops, check=nodes).run()
    failed = first_failure(ends, output, crew.clocks)
    if failed is not None:
        print(report(failed, ends, crew.workers, output), file=sys.stderr, flush=True)
    status = 0 if failed is None else ends[failed].exit_status
    return status, any(end.status is None for end in ends.values())


def _places(workers: Sequence[Worker]) -> str:
    """``ranks 0-1 on head (10.0.0.1), ranks 2-3 on w1 (10.0.0.2)``"""
    nodes: dict[int, list[Worker]] = {}
    for worker in workers:
        nodes.setdefault(worker.node_rank, []).append(worker)
    places = [f"{ranks_said(w.rank for w in here)} on {here[0].where}" for here in nodes.values()]
    return ", ".join(places)


def _tell(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)


@contextmanager
def _signals(noted: list[int] | None = None) -> Iterator[list[int]]:
    """Collects the numbers of SIGINT, SIGTERM and SIGHUP, in `noted` if it is given: an exception
    from a handler could not pass through Ray's own code.

    Without it, while Ray is started or joined, a second signal ends that: it may hang.
    """
    stops: list[int] = [] if noted is None else noted

    def note(number: int, _: FrameType | None) -> None:
        stops.append(number)
        if noted is None and len(stops) > 1:
            raise KeyboardInterrupt(stops[0])

    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    ours = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else `nohup` wants it to live on
        ours.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in ours}
    try:
        yield stops
    finally:
        for number, old in before.items():
            signal.signal(number, old)
