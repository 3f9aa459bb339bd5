"""Who trains with this process under Ray, its log, and what it does if its node will be taken."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.events import (
    Checkpoint,
    Eval,
    Evaluating,
    Event,
    InProgress,
    Note,
    Outcome,
    Phase,
    Plan,
    Preempted,
    Train,
    WorkerFailed,
)
from raytrain_ddp.membership.generations import NewcomerWaits, Place
from raytrain_ddp.membership.roster import Seat
from raytrain_ddp.ray_backend.failure_causes import cause_of
from raytrain_ddp.ray_backend.mailbox import Answer, Draining, Outbox
from raytrain_ddp.ray_backend.worker import WorkerSettings
from raytrain_ddp.tools.formatting import format_count, format_metric, format_number
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.monitoring.watchdog import Exchange, Hang, RankStatus
from raytrain_ddp.training.runtime.world import World, broadcast

_PUSH_EVERY_S = 0.2
_MEET_S = 10.0
_LAST_S = 20.0  # time limit for the driver to take the last events
_CONFIRM_EVERY_S = 0.05
_HELD_LONGER_S = 60.0  # how much longer than the announced end of a node
_LINE_EVERY_S = 10.0
STOP = 128  # used as a signal number that no signal has
_UNKNOWN_S = 120.0  # Ray's own limit for a notice without an end
_LEAST_MARGIN_S = 5.0

_log = logging.getLogger("raytrain_ddp")  # Ray Train writes log records to its files


class RayMembership(Membership):
    """Connects a worker on Ray with the others. Ray Train learns of checkpoints only at the end.

    Args:
        place: the place in the generations.

    Attributes:
        step: the current step; None before the first.
    """

    only_main_asks = True

    def __init__(self, given: WorkerSettings, place: Place) -> None:
        self._outbox, self._given = Outbox(), given
        super().__init__(
            _world(Seat(0, size=1, ranks=(place.rank,)), given.threads), self._outbox.add
        )
        self._mailbox, self._place = given.mailbox, place
        self._training = threading.current_thread()
        self.step: int | None = None
        self._owners: Sequence[Owner] = ()
        self._newcomer = self._joins = False
        self._answer: Any = None
        self._pushed_at = 0.0

    def join(self) -> bool:
        self.step = None
        if not self._outbox.is_empty():
            self.push()
        if not self._place.join():
            return False
        set_environment(self._place.seat)
        self.world = _world(self._place.seat, self._given.threads)
        self._words = WorkerLog(self.world)
        # Those that are left continue without the nodes that are taken away.
        least = self.world.size if self._given.replaced else 1
        self._notice = Notice(self._given.look_every_s, self.show, least)
        return True

    def leave(self) -> None:
        if self._given.replaced:  # else, this process ends, and Ray restarts all
            self._place.leave()

    def end(self, outcome: Outcome) -> Outcome:
        if outcome.signal == STOP:  # nodes are preempted, with work left to do
            outcome = replace(outcome, signal=self._hold())
        self.show(outcome)
        self._deliver()
        self._place.part()
        return outcome

    def close(self) -> None:
        """Waits until the driver has received the last events."""
        self._place.close()
        self._deliver()

    def goes_on(self, error: BaseException) -> bool:
        if not self._given.replaced or not isinstance(error, Exception):
            return False
        return self._place.has_lost_ranks(error) or cause_of(error) == "peer"

    def show(self, event: Event) -> None:
        self._words.take(event)
        if isinstance(event, Plan):
            self.step = event.start_step
        is_own = threading.current_thread() is self._training
        if is_own and not self.world.is_main:
            return
        if isinstance(event, Checkpoint):
            self._notice.committed(event.seconds or 0.0)
        self._outbox.add(event)
        if is_own and isinstance(event, Note | Phase | Plan | Evaluating):
            self.push()  # the next push, at a step, may be far off

    # ------------------------------------------------------------------ during a step

    def require_ranks(self) -> None:
        self._place.require_ranks()

    def confirm(self) -> None:
        self._place.confirm()

    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        self.step = step or self.step
        if time.monotonic() - self._pushed_at >= _PUSH_EVERY_S:
            self.push()
        if not self.world.is_main:
            return Requests()
        self._joins = self._newcomer and may_join
        notice = self._notice
        requests = notice.requests_in_evaluation() if step is None else notice.requests()
        look = requests.look or self._joins
        return requests._replace(stop=self._signal or requests.stop, look=look)

    def look(self) -> None:
        """All ranks take part; raises NewcomerWaits on all or none."""
        found = None
        if self.world.is_main:
            found = self._joins, ray.get(self._mailbox.preemption.remote())
        joins, preemption = broadcast(found, self.world)
        if joins:
            raise NewcomerWaits
        self._notice.look(preemption)

    # ------------------------------------------------------------------ hangs

    def status_exchange(self, owners: Sequence[Owner], run: Storage) -> Exchange:
        self._owners = owners

        def exchange(status: RankStatus | None) -> dict[int, RankStatus]:
            pending = self._mailbox.exchange_status.remote(
                self._place.seat.generation, self.world.rank, status and asdict(status)
            )
            answers = ray.get(pending, timeout=_MEET_S)
            return {rank: RankStatus(**each) for rank, each in answers.items()}

        return exchange

    def has_ended(self) -> bool:
        return self._place.has_ended

    def report_hang(self, hang: Hang) -> None:
        """The driver is notified by each rank that responds. Ranks that block the others end if
        these can be replaced; otherwise, all end."""
        who = [f"rank {self.world.of_run(rank)}" for rank in hang.ranks]
        event = WorkerFailed(
            start=self._place.seat.generation,
            rank=self.world.of_run(self.world.rank),
            step=hang.step,
            error=f"the hang of {', '.join(who) or 'all ranks'}",
            message=hang.text,
            traceback="",
            status=RetriesExhausted.exit_status,
            cause="hang",
        )
        with suppress(Exception):
            ray.get(self._mailbox.push.remote([event]), timeout=_MEET_S)
        if self._given.replaced and hang.ranks and self.world.rank not in hang.ranks:
            others = [rank for rank in range(self.world.size) if rank not in hang.ranks]
            with suppress(Exception):  # no more than an attempt: the node may be gone
                for rank in hang.ranks:
                    if self.world.rank == others[0] and not self._owners[rank].is_here():
                        ray.get(_on_its_node(Owner.kill, self._owners[rank]), timeout=_MEET_S)
            if not self._place.is_broken:
                self._place.break_off()
                return
        os._exit(RetriesExhausted.exit_status)

    # ------------------------------------------------------------------ the driver

    def push(self, wait_s: float = 0, to_say: bool = True) -> None:
        """Sends events without waiting, and handles the reply to the previous push.

        A mailbox that is restarting does not respond in the meantime; see mailbox.py.
        """
        if not self.world.is_main and self._outbox.is_empty():
            return
        if self._answer is not None:
            ready, _ = ray.wait([self._answer], timeout=wait_s)
            if not ready:
                return  # the mailbox's machine is busy: send more next time
            answer: Answer = ray.get(ready[0])
            self._signal, self._newcomer = answer.stop, answer.newcomer
            self._outbox.answered(answer)
        to_say = to_say and self.world.is_main
        if self.step is not None and to_say:  # shows where a silently killed worker was
            self._outbox.add(InProgress(self.step))
        self._answer = self._mailbox.push.remote(*self._outbox.letter())
        self._pushed_at = time.monotonic()

    def _deliver(self) -> None:
        """Waits until the driver has received the last events, of which only a process that is or
        was rank 0 has some."""
        deadline, wait_s = time.monotonic() + _LAST_S, _LAST_S / 2
        while not self._outbox.is_empty() and time.monotonic() < deadline:
            self.push(wait_s, to_say=False)
            time.sleep(_CONFIRM_EVERY_S)
            wait_s = 1.0

    def _hold(self) -> int:
        """Waits until Ray ends this worker; everything is committed.

        Returns the number of a signal by which the user stops the run in the meantime.

        Raises:
            TimeoutError: Ray did not end it.
        """
        self.show(Preempted("everything is saved; waiting for other nodes"))
        deadline = time.monotonic() + self._notice.left_s() + _HELD_LONGER_S
        while time.monotonic() < deadline:
            self.push(wait_s=1)
            if self._signal:
                return self._signal
            time.sleep(0.2)
        raise TimeoutError("the node that was to be preempted is still there")


def _on_its_node(call: Callable[[Owner], Any], owner: Owner) -> list[Any]:
    """Runs `call` for the process on the nodes of its name, one in general; the pending results."""
    task = ray.remote(num_cpus=0, max_retries=0)(call)
    return [
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(owner)
        for node in ray.nodes()
        if node["Alive"] and node["NodeManagerHostname"] == owner.host
    ]


def _world(seat: Seat, threads: int) -> World:
    return World(seat.rank, seat.size, seat.local_rank, _device(), threads, seat.ranks)


def set_environment(seat: Seat) -> None:
    """A task may read these. For Ray Train, each worker may be a group of its own."""
    os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(seat.size))
    os.environ.update(LOCAL_RANK=str(seat.local_rank), LOCAL_WORLD_SIZE=str(seat.local_size))
    os.environ.update(NODE_RANK=str(seat.node_rank))


def _device() -> torch.device:
    """The GPU that Ray gave to this process, if any; as `ray.train.torch.get_device`, but also for
    actors that are not Ray Train's."""
    mine = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not mine:
        return torch.device("cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return torch.device("cuda", int(mine[0]))
    if mine[0] not in (devices := visible.split(",")):
        raise PreflightError(
            f"Ray gave GPU {mine[0]} to this worker, but CUDA_VISIBLE_DEVICES={visible} in "
            f"{socket.gethostname()}'s environment lacks it: unset it there."
        )
    return torch.device("cuda", devices.index(mine[0]))


class Notice:
    """Decides what to do about notices of preemption, and when: a checkpoint at the notice, and
    another before the node ends.

    In between, training continues. After the second one the worker waits until Ray ends it: Ray
    would treat a return as the end of the run, and an exception as a failure.

    Args:
        look_every_s: 0: never. Each poll costs all ranks a round trip to an actor.
        show: receives a note.
        least: how many ranks a notice must concern to stop the training.
    """

    def __init__(self, look_every_s: float, show: Callable[[Note], None], least: int = 1) -> None:
        self._every_s, self._show, self._least = look_every_s, show, least
        self._looked_at = self._asked_at = time.monotonic()
        self._step_s = self._commit_s = 0.0
        self._nodes: list[str] = []
        self._ends_at: float | None = None  # by this host's monotonic clock
        self._save = False

    def requests(self) -> Requests:
        """Rank 0's requests, called once per step."""
        save, self._save = self._save, False
        return self.requests_in_evaluation()._replace(save=save)

    def requests_in_evaluation(self) -> Requests:
        """Called by rank 0 once per step or evaluation chunk; a requested checkpoint waits."""
        now = time.monotonic()
        # The longest of the recent steps or chunks, as an estimate for the next one.
        self._step_s = max(now - self._asked_at, 0.9 * self._step_s)
        self._asked_at = now
        stop = self._ends_at is not None and now >= self._ends_at - self.margin_s()
        look = 0 < self._every_s <= now - self._looked_at
        return Requests(STOP if stop else 0, look=look)

    def look(self, found: Draining | None) -> None:
        """Takes the notice that all ranks have found, if there is one."""
        self._looked_at = time.monotonic()
        if found is None:
            return
        left_s = _UNKNOWN_S if found.deadline_ms is None else found.deadline_ms / 1e3 - time.time()
        stops = len(found.ranks) >= self._least
        if stops and (self._ends_at is None or found.deadline_ms is not None):
            self._ends_at = self._looked_at + left_s
        if found.nodes != self._nodes:
            self._nodes, self._save = found.nodes, True
            ranks = ", ".join(map(str, found.ranks))
            then = "and again before then" if stops else "and the others keep their state"
            text = f"the node of rank {ranks} will be preempted in {max(0.0, left_s):.0f} s"
            self._show(Note(f"{text}: saving now, {then}"))

    def left_s(self) -> float:
        """How long the nodes will remain."""
        return max(0.0, (self._ends_at or 0.0) - time.monotonic())

    def committed(self, seconds: float) -> None:
        """Records the time of a commit: the last one may take as long."""
        self._commit_s = max(seconds, self._commit_s)

    def margin_s(self) -> float:
        """The time for the last checkpoint: the current step, the commit, and a reserve as long."""
        return max(_LEAST_MARGIN_S, 2 * (self._step_s + self._commit_s))


class WorkerLog:
    """Logs a line for each important event; for steps, evaluations and checkpoints at most one per
    kind in ten seconds."""

    def __init__(self, world: World) -> None:
        self._world, self._total = world, 0
        self._logged_at: dict[type, float] = {}  # time of the last line, by kind

    def take(self, event: Event) -> None:
        """Handles an event of any kind; on rank 0 also from the committing thread."""
        line, now = self._line(event), time.monotonic()
        if isinstance(event, Train | Eval | Checkpoint):
            if now - self._logged_at.get(type(event), -math.inf) < _LINE_EVERY_S:
                return
            self._logged_at[type(event)] = now
        if line:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            _log.info("%s  rank %d: %s", date, self._world.of_run(self._world.rank), line)

    def _line(self, event: Event) -> str:
        line = ""
        match event:
            case Plan():
                self._total = event.total_steps
                line = (
                    f"one of {self._world.size} on {socket.gethostname()}, {event.device}, process "
                    f"{os.getpid()}; from step {event.start_step} to {self._total}"
                )
            case Train():
                speed = f"{format_count(event.samples_per_s)} samples/s"
                loss = format_number(event.loss)
                line = f"step {event.step}/{self._total}, loss {loss}, {speed}"
            case Eval():
                line = f"step {event.step}/{self._total}, evaluation: {_as_text(event.metrics)}"
            case Checkpoint():
                line = f"checkpoint of step {event.step} is committed"
            case Outcome():
                metrics = _as_text(event.metrics)  # of the last evaluation, even if it had no line
                line = f"ended at step {event.step}" + (metrics and f", evaluation: {metrics}")
            case Note() | Preempted():
                line = event.text
        return line


def _as_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())
