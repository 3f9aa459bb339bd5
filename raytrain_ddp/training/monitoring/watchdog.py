"""Detects hangs: a thread in each worker checks that steps are finished.

A worker that hangs in a collective or in its task releases the GIL to other threads, and so can
report where it is. A worker that is stopped, or holds the GIL, cannot: it is identified by its
silence.

Nothing is exchanged while steps are finished. Otherwise, the ranks exchange their status, diagnose
the hang together (hang_diagnosis.py), save their stacks, and end.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from statistics import median

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import HANGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.training.monitoring.hang_diagnosis import (
    Hang,
    RankStatus,
    collectives,
    diagnose,
    innermost_line,
    is_compiling,
    is_hang,
    last_collective,
    on_device,
    open_stack_file,
    stack_of,
    stacks,
)
from raytrain_ddp.training.monitoring.phase_clock import STARTING, Clock

State = Callable[[Owner], str]
"""Returns the state of a process, as `Owner.state`; may raise anything."""
Exchange = Callable[[RankStatus | None], Mapping[int, RankStatus]]
"""Publishes this rank's status, or removes it (None), and returns the status of all ranks."""

_AUTO_S = 30.0
_MEDIANS = 10  # steps
_APART = 60  # multiple of the limit for what is not a step
# It also applies to waiting for a batch and to writing on rank 0: a store or a tracking server that
# does not respond for a minute is not a hang.
_OUTSIDE = 10
WRITING = "writing"
COMPILING = "compilation"  # which a step of a new size, such as an epoch's last, may cause
_STEPS = 51
_KEPT_S = 10.0  # for all ranks to write their stacks
_ASK_OF_MANY_S = 0.01  # per rank: each gets the status of all, from one process
_FAR_S = 10.0  # between two checks of processes on other machines


class Watchdog:
    """Watches one start of the training until `close`.

    Args:
        hang_s: scaling.hang_s, above 0.
        owners: the processes of all ranks.
        run: the run's folder.
        exchange: see Exchange; may raise anything.
        state: of a process on any machine; may take long for another machine. See State.
        end: reports a hang, and ends this process or its collectives.
        of_run: see `World.of_run`.
        is_over: whether the others have left this start already: then nobody is to blame.
    """

    def __init__(
        self,
        clock: Clock,
        hang_s: float | str,
        rank: int,
        owners: Sequence[Owner],
        run: Storage,
        exchange: Exchange,
        state: State,
        end: Callable[[Hang], None],
        of_run: Callable[[int], int] = int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._rank, self._owners = clock, rank, owners
        self._of_run, self._is_over = of_run, is_over
        self._least_s = _AUTO_S if isinstance(hang_s, str) else float(hang_s)
        self._run, self._exchange, self._end = run, exchange, end
        self._state = state
        self._forget()
        self._far: threading.Thread | None = None  # checks other machines
        self._far_s = -math.inf
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds of each, or of a few
        self._first = 0  # the first step of this start
        self._look_s = min(1.0, self._least_s / 20)
        self._ask_s = ask_s(self._least_s, len(owners))
        self._grace_s = max(2.0, self._least_s / 3, 2 * self._ask_s)
        self._training = threading.get_ident()
        self._closed = threading.Event()
        self._silent_stack = open_stack_file(rank, owners)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """The training starts at this step."""
        self._first = step

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_KEPT_S)

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        return max(self._least_s, _MEDIANS * median(self._steps) if self._steps else 0.0)

    def patience_s(self, doing: str, waits: bool) -> float:
        """How long a rank may do this, or wait in a collective."""
        times, is_first = 1, self._clock.steps == 0  # no step shows yet how long one takes
        if doing in (STARTING, COMPILING, "evaluation", "checkpoint") or (is_first and not waits):
            times = _APART
        elif is_first or (doing in ("data wait", WRITING) and not waits):
            times = _OUTSIDE
        return max(times * self._least_s, self.limit_s)

    def _is_less_patient(self, before: str, now: str) -> bool:
        return before != now and self.patience_s(now, False) < self.patience_s(before, False)

    def _watch(self) -> None:
        clock = self._clock
        looked_s, moved_s, steps, still_s = time.monotonic(), clock.moved_s, clock.steps, 0.0
        called_s, asked_s, doing, activity = None, 0.0, clock.doing, ""
        published: RankStatus | None = None
        while not self._closed.wait(self._look_s):
            self._arm()
            now_s = time.monotonic()
            # A process that is stopped for a while, with all its threads, does not hang: time in
            # which this thread did not run does not count.
            still_s += min(now_s - looked_s, 5 * self._look_s)
            looked_s = now_s
            before, doing = doing, clock.doing
            if self._is_less_patient(before, doing):  # a slow batch, which has arrived
                still_s = 0.0
            if clock.moved_s != moved_s:
                stepped = clock.steps > steps
                if stepped:
                    self._steps.append((clock.moved_s - moved_s) / (clock.steps - steps))
                moved_s, steps, still_s, activity = clock.moved_s, clock.steps, 0.0, ""
                called_s = None
                if published is not None:
                    self._forget()
                    # Until its step is finished, the others wait for this rank, which must not
                    # look as if it did not respond. (The stack of a thread that runs is not read.)
                    patience_s = self.patience_s(doing, False)
                    fresh = replace(published, doing=doing, waits=False, still_s=0.0)
                    published = None if stepped else replace(fresh, patience_s=patience_s)
                    self._ask(published)
            elif still_s >= self.limit_s and now_s - asked_s >= self._ask_s:
                status = self._own_status(still_s)
                before, activity = activity, status.doing
                if before and self._is_less_patient(before, activity):  # a compilation has ended
                    still_s = 0.0
                    continue
                asked_s, called_s, published = now_s, called_s or now_s, status
                statuses = self._receive(self._ask(status))
                complete = len(statuses) == len(self._owners)
                waited = time.monotonic() - called_s >= self._grace_s
                answering = {r: status for r, status in statuses.items() if self._is_new(r)}
                stopped = self._find_stopped(answering, waited)
                lost = is_hang(statuses) or bool(stopped)
                if lost and (complete or waited) and clock.moved_s == moved_s:
                    self._finish(answering, still_s, stopped)
                    break
        faulthandler.cancel_dump_traceback_later()
        if self._silent_stack is not None:
            os.close(self._silent_stack)

    def _forget(self) -> None:
        """Resets the exchange when the ranks make progress again."""
        self._received: dict[int, tuple[RankStatus, float]] = {}  # newest status, and since when
        self._stopped: frozenset[int] = frozenset()  # ranks that this one sees stopped
        self._stopped_far: frozenset[int] = frozenset()

    def _receive(self, statuses: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
        """The valid status of each rank. The status of a rank that can no longer report stays, and
        its patience runs out as well."""
        now_s = time.monotonic()
        for rank, status in statuses.items():
            if rank not in self._received or self._received[rank][0] != status:
                self._received[rank] = status, now_s
        return {
            rank: replace(status, still_s=status.still_s + now_s - self._received[rank][1])
            for rank, status in statuses.items()
        }

    def _is_new(self, rank: int) -> bool:
        """Whether a rank that has reported did so recently."""
        return rank == self._rank or time.monotonic() - self._received[rank][1] < self._grace_s

    def _find_stopped(self, answering: Mapping[int, RankStatus], far: bool) -> frozenset[int]:
        """The ranks that are stopped: no patience applies to them.

        Each rank checks those of its machine that do not respond; the lowest one also `far`. The
        others learn it from them.
        """
        silent = [rank for rank in range(len(self._owners)) if rank not in answering]
        here = [rank for rank in silent if self._owners[rank].is_here()]
        if far and self._rank == min(answering):
            self._find_stopped_far([rank for rank in silent if rank not in here])
        self._stopped = frozenset(filter(self._is_stopped, here)) | self._stopped_far
        stopped = self._stopped.union(*(status.stopped for status in answering.values()))
        return stopped.intersection(silent)  # a rank that responds has continued since

    def _find_stopped_far(self, ranks: Iterable[int]) -> None:
        """In a thread: an unreachable machine would keep this rank from reporting its own
        status."""

        def look() -> None:
            self._stopped_far = frozenset(filter(self._is_stopped, ranks))

        now_s = time.monotonic()
        if now_s - self._far_s >= _FAR_S and not (self._far and self._far.is_alive()):
            self._far_s = now_s
            self._far = threading.Thread(target=look, name="watchdog-far", daemon=True)
            self._far.start()

    def _is_stopped(self, rank: int) -> bool:
        with suppress(Exception):
            return self._state(self._owners[rank]) in ("T", "t")
        return False

    def _arm(self) -> None:
        """Makes a thread without Python write this process's stacks, in case this thread cannot
        run."""
        where = self._silent_stack if self._silent_stack is not None else sys.__stderr__
        with suppress(Exception):  # a stderr without a file
            faulthandler.dump_traceback_later(self.limit_s, file=where)  # type: ignore[arg-type]

    def _own_status(self, still_s: float) -> RankStatus:
        doing, (at, inside) = self._clock.doing, innermost_line(self._training)
        doing = COMPILING if is_compiling(self._training) else doing
        doing, waits, stuck = on_device(doing, inside)
        number, name = stuck or last_collective()
        step = self._first + self._clock.steps + 1
        patience_s = self.patience_s(doing, waits)
        status = (self._rank, step, doing, number, name, waits, at, still_s, patience_s)
        return RankStatus(*status, tuple(sorted(self._stopped)))

    def _ask(self, status: RankStatus | None) -> dict[int, RankStatus]:
        own = {} if status is None else {self._rank: status}
        with suppress(Exception):  # a failed exchange means no status
            return {**self._exchange(status), **own}
        return own

    def _finish(
        self, statuses: Mapping[int, RankStatus], still_s: float, stopped: Set[int]
    ) -> None:
        """Saves what all ranks know, and ends the ranks that block the others."""
        hang = diagnose(statuses, self._owners, stopped, self._of_run)
        is_over = self._is_over()
        if is_over:  # those that are silent wait for this rank elsewhere
            who = f"rank {self._of_run(self._rank)}"
            text = f"{who} is still in the process group that ended with a lost rank"
            hang = replace(hang, text=text, ranks=())
        folder = start_folder(self._owners)
        text = f"{hang.text}. The stacks of all ranks are in {self._run}/{HANGS}/{folder}."
        hang = replace(hang, text=text)
        mine = f"rank {self._of_run(self._rank)}: {hang.text}\n\n{stacks()}"
        print(mine, file=sys.stderr, flush=True)
        # In a thread, as the storage may be what hangs.
        keeping = threading.Thread(target=self._keep, args=(hang, mine, statuses), daemon=True)
        keeping.start()
        keeping.join(_KEPT_S)
        until_s = time.monotonic() + _KEPT_S
        status = replace(self._own_status(still_s), kept=True)
        while time.monotonic() < until_s:
            answers = self._ask(status)
            if all(rank in answers and answers[rank].kept for rank in statuses):
                break
            time.sleep(min(0.1, self._ask_s / 2) + _ASK_OF_MANY_S / 4 * len(self._owners))
        if len(statuses) > 1 and not is_over:
            for rank, owner in enumerate(self._owners):
                if rank not in statuses:
                    owner.kill()  # it cannot end by itself
        self._end(hang)

    def _keep(self, hang: Hang, mine: str, statuses: Mapping[int, RankStatus]) -> None:
        with suppress(OSError):
            folder = self._run.join(HANGS).join(start_folder(self._owners))
            folder.mkdir()
            name = f"rank-{self._of_run(self._rank)}"
            folder.write_atomic(f"{name}.txt", mine.encode())
            with suppress(Exception):
                newest = json.dumps(collectives(), indent=1)
                folder.write_atomic(f"{name}-collectives.json", newest.encode())
            if self._rank != min(statuses):
                return
            for rank, owner in enumerate(self._owners):
                if rank not in statuses and (stack := stack_of(owner, rank)):
                    folder.write_atomic(f"rank-{self._of_run(rank)}.txt", stack)
            ranks = [self._of_run(rank) for rank in hang.ranks]
            signs = [{**asdict(s), "rank": self._of_run(r)} for r, s in statuses.items()]
            document = {**asdict(hang), "ranks": ranks, "signs": signs}
            folder.write_atomic("hang.json", json.dumps(document, indent=1).encode())


def ask_s(least_s: float, size: int) -> float:
    """The time between two exchanges of a rank's status while there is no progress."""
    return min(2.0, least_s / 5) + _ASK_OF_MANY_S * size


def start_folder(owners: Sequence[Owner]) -> str:
    """The folder name that the ranks of one start share, and no other start uses."""
    first = owners[0]
    return f"{''.join(c for c in first.since if c.isdigit())}-{first.token[:4]}"


def through_folder(run: Storage, rank: int, owners: Sequence[Owner]) -> Exchange:
    """An exchange through files in the run's folder; nothing is written before a hang."""
    folder = run.join(HANGS).join(start_folder(owners))

    def exchange(status: RankStatus | None) -> dict[int, RankStatus]:
        if status is None:
            folder.delete_file(f"rank-{rank}.json")
            return {}
        folder.mkdir()
        folder.write_atomic(f"rank-{rank}.json", json.dumps(asdict(status)).encode())
        names = [(r, f"rank-{r}.json") for r in range(len(owners))]
        found = [(r, folder.read(name)) for r, name in names if folder.exists(name)]
        return {r: RankStatus(**json.loads(data)) for r, data in found}

    return exchange
