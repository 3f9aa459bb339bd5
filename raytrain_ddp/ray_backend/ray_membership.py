"""Who trains with this process under Ray: Ray Train's workers, or the generations of a roster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.events import (
    Checkpoint,
    Evaluating,
    Event,
    InProgress,
    Note,
    Outcome,
    Phase,
    Plan,
    Preempted,
    WorkerFailed,
)
from raytrain_ddp.membership.generations import NewcomerWaits, Place
from raytrain_ddp.membership.roster import Seat
from raytrain_ddp.ray_backend.failure_causes import cause_of
from raytrain_ddp.ray_backend.mailbox import Answer, Outbox
from raytrain_ddp.ray_backend.preemption import STOP, Notice
from raytrain_ddp.ray_backend.worker import group_name
from raytrain_ddp.ray_backend.worker_log import WorkerLog
from raytrain_ddp.ray_backend.worker_process import set_environment, world_of_worker
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.monitoring.watchdog import Exchange, Hang, RankStatus
from raytrain_ddp.training.runtime.world import broadcast

_PUSH_EVERY_S = 0.2
_MEET_S = 10.0
_LAST_S = 20.0  # time limit for the driver to take the last events
_CONFIRM_EVERY_S = 0.05
_HELD_LONGER_S = 60.0  # how much longer than the announced end of a node


class RayMembership(Membership):
    """Connects a worker on Ray with the others. Ray Train learns of checkpoints only at the end.

    Args:
        mailbox: handle of the Mailbox actor.
        threads: CPUs of the worker.
        look_every_s: how often to check for preemption notices; 0: never.
        place: the place in the generations; None: the worker is in Ray Train's process group,
            where all workers restart if one dies.

    Attributes:
        step: the current step; None before the first.
    """

    only_main_asks = True

    def __init__(
        self, mailbox: Any, threads: int, look_every_s: float = 0.0, place: Place | None = None
    ) -> None:
        self._outbox = Outbox()
        alone = Seat(0, size=1, ranks=(place.rank,)) if place else None
        super().__init__(world_of_worker(threads, alone), self._outbox.add)
        self._mailbox, self._place = mailbox, place
        self._threads, self._look_every_s = threads, look_every_s
        self._training = threading.current_thread()
        self.step: int | None = None
        self._owners: Sequence[Owner] = ()
        self._newcomer = self._joins = False
        self._answer: Any = None
        self._pushed_at = 0.0

    def join(self) -> bool:
        self.step = None
        others = 1
        if self._place is not None:
            if not self._outbox.is_empty():
                self.push()
            if not self._place.join():
                return False
            set_environment(self._place.seat)
            self.world = world_of_worker(self._threads, self._place.seat)
            others = self.world.size  # they continue without those of some nodes
        self._words = WorkerLog(self.world)
        self._notice = Notice(self._look_every_s, self.show, others)
        return True

    def leave(self) -> None:
        if self._place is not None:
            self._place.leave()

    def end(self, outcome: Outcome) -> Outcome:
        if outcome.signal == STOP:  # nodes are preempted, with work left to do
            outcome = replace(outcome, signal=self._hold())
        self.show(outcome)
        self._deliver()
        if self._place is not None:
            self._place.part()
        return outcome

    def close(self) -> None:
        """Waits until the driver has received the last events."""
        if self._place is not None:
            self._place.close()
        self._deliver()

    def goes_on(self, error: BaseException) -> bool:
        if self._place is None or not isinstance(error, Exception):
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
        if self._place is not None:
            self._place.require_ranks()

    def confirm(self) -> None:
        if self._place is not None:
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
        if self._place is None:
            from ray.train import get_preemption_info

            self._notice.look(get_preemption_info())
            return
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
                group_name(self._place), self.world.rank, status and asdict(status)
            )
            answers = ray.get(pending, timeout=_MEET_S)
            return {rank: RankStatus(**each) for rank, each in answers.items()}

        return exchange

    def has_ended(self) -> bool:
        return self._place is not None and self._place.has_ended

    def report_hang(self, hang: Hang) -> None:
        """The driver is notified by each rank that responds. Ranks that block the others end if
        these can be replaced; otherwise, all end."""
        who = [f"rank {self.world.of_run(rank)}" for rank in hang.ranks]
        event = WorkerFailed(
            start=group_name(self._place),
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
        if self._place and hang.ranks and self.world.rank not in hang.ranks:
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
