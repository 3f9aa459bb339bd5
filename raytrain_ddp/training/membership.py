"""Who trains with this process: here without Ray, in one process or in those of torchrun.

ray_backend/ray_membership.py has the other one; training differs in nothing else.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import NamedTuple

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.events import Event, Failed, Note, Outcome
from raytrain_ddp.signals import handling, heeded
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.monitoring.watchdog import Exchange, Hang, Watchdog, through_folder
from raytrain_ddp.training.runtime.world import World, from_all_ranks


class Requests(NamedTuple):
    """What one rank requests after the current step; all ranks then do what any rank requests.

    Args:
        stop: the number of the signal that stops the run, else 0.
        save: whether to make a checkpoint, even if none is due.
        look: whether all ranks check together what none can see alone; see `Membership.look`.
    """

    stop: int = 0
    save: bool = False
    look: bool = False


class Membership:
    """Connects this process with those that train together, and with the user: it passes on their
    requests, and the events of the training.

    Args:
        show: receives each event of rank 0, also from the committing and watching threads.

    Attributes:
        world: the place of this process in the process group that it has joined.
        hosts: the hosts of all ranks; empty before `watch`.
        only_main_asks: whether `requests` of ranks other than 0 are always empty.
    """

    only_main_asks = False
    _signal = 0  # the signal that requests a stop
    _reported = False

    def __init__(self, world: World, show: Callable[[Event], None]) -> None:
        self.world, self.hosts, self._show = world, list[str](), show
        self._handlers = ExitStack()

    def join(self) -> bool:
        """Waits for a process group, and enters it; returns False if the run is over."""
        return True

    def leave(self) -> None:
        """Ends this process's part after an error; the other ranks notice."""
        self._handlers.close()

    def end(self, outcome: Outcome) -> Outcome:
        """Leaves once no rank needs this one any more; returns how the run has ended."""
        self.leave()
        return outcome

    def goes_on(self, error: BaseException) -> bool:
        """Whether those that are left, this process among them, join again after `error`."""
        return False

    def show(self, event: Event) -> None:
        """Shows an event. All ranks tell theirs, but that of rank 0 is shown."""
        if self.world.is_main:
            self._show(event)

    # ------------------------------------------------------------------ during a step

    def require_ranks(self) -> None:
        """Called during a step; raises an error if another rank is gone, so that the step cannot
        end. It is cheap, and does not wait for the device."""

    def confirm(self) -> None:
        """Called before the results of a step's collectives change the state; raises an error if a
        rank was lost before all of them were done."""

    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        """This rank's requests. Called once per step, before its compute; must be cheap.

        Args:
            step: counted from 1; None: before a chunk of an evaluation, when nothing can be saved.
            may_join: whether other processes may join after this step.
        """
        if self._signal and not self._reported:
            self._reported = True
            self.show(Note("Stopping after this step; the checkpoint follows."))
        return Requests(stop=self._signal)

    def look(self) -> None:
        """Checks what the ranks can see only together; all take part, after the same step.

        The consequences are among the next `requests`.
        """

    def stop_on_signals(self) -> None:
        """Lets Ctrl-C, SIGTERM, SIGHUP (not after `nohup`) and Slurm's warnings (SIGUSR1, SIGUSR2)
        request a checkpoint and a stop from now on. A second signal ends the process at once, but
        not SIGHUP: both the shell and the kernel send one when a terminal is closed."""
        numbers = heeded()

        def ask(number: int, _: FrameType | None) -> None:
            self._signal = number  # reported later: the handler may have interrupted the display
            for each in numbers:
                signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)

        self._handlers.enter_context(handling(numbers, ask))

    # ------------------------------------------------------------------ hangs

    def watch(self, clock: Clock, config: TrainConfig) -> Watchdog | None:
        """Ends workers that make no progress, until the watchdog is closed. All ranks take part."""
        owners, run = from_all_ranks(Owner.here(), self.world), run_storage(config)
        self.hosts = [owner.host for owner in owners]
        hang_s, exchange = config.scaling.hang_s, self.status_exchange(owners, run)
        if not hang_s or exchange is None:
            return None
        world, end = self.world, self.report_hang
        return Watchdog(clock, hang_s, world, owners, run, exchange, end, self.has_ended)

    def status_exchange(self, owners: Sequence[Owner], run: Storage) -> Exchange | None:
        """The exchange for ranks that make no progress. None for a single process, which may stop
        in a debugger for as long as it likes."""
        return through_folder(run, self.world.rank, owners) if self.world.size > 1 else None

    def has_ended(self) -> bool:
        """Whether the other ranks have left the process group, because a rank was lost."""
        return False

    def report_hang(self, hang: Hang) -> None:
        """Reports the hang, and ends this process, or its collectives. torchrun, if present, ends
        the other processes and restarts them all."""
        text = f"{hang.text} A launcher that restarts all workers resumes from there."
        with suppress(Exception):
            self.show(Failed(None, hang.step, text, hung=True))
        os._exit(RetriesExhausted.exit_status)
