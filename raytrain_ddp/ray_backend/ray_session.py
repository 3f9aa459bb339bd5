"""The session under Ray Train."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.recorder import Best, Recorder
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.events import Checkpoint, LogRecord, Note, Plan, Preempted
from raytrain_ddp.membership.generations import NewcomerWaits, Place
from raytrain_ddp.messages import Evaluating, Event, InProgress, Outcome, Phase, WorkerFailed
from raytrain_ddp.ray_backend.mailbox import Answer, Outbox
from raytrain_ddp.ray_backend.preemption import STOP, Notice
from raytrain_ddp.ray_backend.worker_log import WorkerLog
from raytrain_ddp.training.monitoring.watchdog import Exchange, Hang, RankStatus
from raytrain_ddp.training.runtime.world import World, broadcast
from raytrain_ddp.training.session import Requests, Session
from raytrain_ddp.training.state.live_state import LiveState

_PUSH_EVERY_S = 0.2
_MEET_S = 10.0
_LAST_S = 20.0  # time limit for the driver to take the last events
_CONFIRM_EVERY_S = 0.05
_HELD_LONGER_S = 60.0  # beyond the announced end of a node


class RaySession(Session):
    """Ray Train places the workers, and learns nothing of the checkpoints.

    Args:
        mailbox: handle of the Mailbox actor.
        look_every_s: how often to check for preemption notices; 0: never.
        start: an id shared by the workers of this start only; a generation has one.
        live: see Session.
        place: in the generations, if dead workers are replaced.
        before: this process's session in the generation before: its last events are sent by this.

    Attributes:
        step: the current one; None before the first.
    """

    only_main_asks = True

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        mailbox: Any,
        best: Best,
        look_every_s: float = 0.0,
        start: str = "",
        live: LiveState | None = None,
        place: Place | None = None,
        before: RaySession | None = None,
    ) -> None:
        seat = place.seat if place else None
        start = seat.generation if seat else start
        self._outbox: Outbox = before._outbox if before else Outbox()
        alone = world.size if seat else 1  # others continue without those of some nodes
        self._notice = Notice(look_every_s, self.tell, alone)
        self._training = threading.current_thread()
        self._words = WorkerLog(world)
        super().__init__(config, world, best, self._say, live)
        self.step: int | None = None
        self._mailbox, self._start, self._place = mailbox, start, place
        self._owners: Sequence[Owner] = ()
        self._newcomer = self._joins = False
        self._answer: Any = None
        self._pushed_at, self._signal = 0.0, 0

    def __exit__(self, *_: object) -> None:
        self.close()
        if self.is_continued:
            self.push()
        else:
            self.deliver()

    def take_over(self, recorder: Recorder | None) -> None:
        super().take_over(recorder)
        if not self.world.is_main:
            self.deliver()

    def deliver(self) -> None:
        """Waits until the driver has received the last events, of which only a process that is or
        was rank 0 has some."""
        deadline, wait_s = time.monotonic() + _LAST_S, _LAST_S / 2
        while not self._outbox.is_empty() and time.monotonic() < deadline:
            self.push(wait_s, to_say=False)
            time.sleep(_CONFIRM_EVERY_S)
            wait_s = 1.0

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        if self._place:  # Ray Train may not know this worker, and counts others
            return super().wrap(model, options)
        wrapped: nn.Module = ray.train.torch.prepare_model(
            model, parallel_strategy_kwargs=dict(options)
        )
        return wrapped

    def require_ranks(self) -> None:
        if self._place:
            self._place.require_ranks()

    def confirm(self) -> None:
        if self._place:
            self._place.confirm()

    def _say(self, event: Event) -> None:
        """Called for all events of rank 0, also from the committing thread."""
        self._words.take(event)
        if isinstance(event, Checkpoint):
            self._notice.committed(event.seconds or 0.0)
        self._outbox.add(event)
        if isinstance(event, Note) and threading.current_thread() is self._training:
            self.push()  # the caller may be about to block

    def log(self, record: LogRecord) -> None:
        super().log(record)
        if not self.world.is_main:
            self._words.take(record)

    def tell(self, event: Event) -> None:
        super().tell(event)
        if not self.world.is_main:
            self._words.take(event)
        if isinstance(event, Plan):
            self.step = event.start_step
        if isinstance(event, Phase | Plan | Evaluating):
            self.push()  # the next push, at a step, may be far off

    def requests(self) -> Requests:
        """Called once per step; also counts steps and pushes events."""
        self.step = (self.step or 0) + 1
        requests = self._asked(self._notice.requests)
        # A new generation needs the storage.
        fails = self.recorder is not None and self.recorder.committer.fails
        self._joins = self._newcomer and not fails
        return requests._replace(look=requests.look or self._joins)

    def requests_in_evaluation(self) -> Requests:
        self._joins = False  # the evaluation would be repeated
        return self._asked(self._notice.requests_in_evaluation)

    def _asked(self, notice: Callable[[], Requests]) -> Requests:
        if not self.world.is_main:
            return Requests()
        if time.monotonic() - self._pushed_at >= _PUSH_EVERY_S:
            self.push()
        requests = notice()
        return requests._replace(stop=self._signal) if self._signal else requests

    def look(self) -> None:
        """All ranks take part; raises NewcomerWaits on all or none."""
        if not self._place:
            self._notice.look(ray.train.get_preemption_info())
            return
        found = None
        if self.world.is_main:
            found = self._joins, ray.get(self._mailbox.preemption.remote())
        joins, preemption = broadcast(found, self.world)
        if joins:
            raise NewcomerWaits
        self._notice.look(preemption)

    def status_exchange(self, owners: Sequence[Owner]) -> Exchange:
        self._owners = owners

        def exchange(status: RankStatus | None) -> dict[int, RankStatus]:
            pending = self._mailbox.exchange_status.remote(
                self._start, self.world.rank, status and asdict(status)
            )
            answers = ray.get(pending, timeout=_MEET_S)
            return {rank: RankStatus(**each) for rank, each in answers.items()}

        return exchange

    def has_ended(self) -> bool:
        return self._place is not None and (self._place.is_broken or self._place.has_left)

    def report_hang(self, hang: Hang) -> None:
        """The driver is notified by each rank that responds. Ranks that block the others end if
        these can be replaced; otherwise, all end."""
        who = [f"rank {self.world.of_run(rank)}" for rank in hang.ranks]
        event = WorkerFailed(
            start=self._start,
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

    def is_taken_away(self, outcome: Outcome) -> bool:
        """Whether training stopped because nodes are preempted, with work left to do."""
        return outcome.signal == STOP

    def hold(self) -> int:
        """Waits until Ray ends this worker; everything is committed.

        Returns the number of a signal by which the user stops the run in the meantime.

        Raises:
            TimeoutError: Ray did not end it.
        """
        self.tell(Preempted("everything is saved; waiting for other nodes"))
        deadline = time.monotonic() + self._notice.left_s() + _HELD_LONGER_S
        while time.monotonic() < deadline:
            self.push(wait_s=1)
            if self._signal:
                return self._signal
            time.sleep(0.2)
        raise TimeoutError("the node that was to be preempted is still there")

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
