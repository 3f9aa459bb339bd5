"""Detects hangs: a thread in each worker checks that steps are finished.

A worker that hangs in a collective or in its task releases the GIL to other threads, and so can
report where it is. A worker that is stopped, or holds the GIL, cannot: it is identified by its
silence.

Nothing is exchanged while steps are finished. Otherwise, the ranks exchange their status, find
those that block the others, save their stacks, and end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import HANGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import first_names
from raytrain_ddp.training.monitoring.step_timing import (
    AGREEING,
    EXCHANGING,
    STARTING,
    WRITING,
    Clock,
)
from raytrain_ddp.training.runtime.world import World

_AUTO_S = 30.0
_MEDIANS = 10  # steps
_APART = 60  # multiple of the limit for what is not a step
# It also applies to waiting for a batch and to writing on rank 0: a store or a tracking server that
# does not respond for a minute is not a hang.
_OUTSIDE = 10
COMPILING = "compilation"  # which a step of a new size, such as an epoch's last, may cause
_STEPS = 51
_KEPT_S = 10.0  # for all ranks to write their stacks
_ASK_OF_MANY_S = 0.01  # per rank: each gets the status of all, from one process
_MAX_COLLECTIVES = 100
_STOPPED = "its process is stopped (SIGSTOP, or a debugger)"
_GONE = "its process is gone"
_STATES = {  # Linux's letters
    "T": _STOPPED,
    "t": _STOPPED,
    "D": "its process is blocked in the kernel (a disk, or a network file system)",
    "Z": _GONE,
    "X": _GONE,
    "": "it does not respond: it is stopped, or dead, or one of its threads holds the GIL",
}
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_OF_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OF_COMPILERS = tuple(
    os.sep.join(("torch", *path))
    for path in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank publishes when it makes no progress.

    Args:
        rank: its number in the run.
        step: the current step, or the last one.
        collective: the number of the last collective that it entered; -1 if unknown.
        where: ``the all-reduce of step 12 (gradient exchange, collective 345)``, or what it does
            and in which line.
        waits: whether it waits in a collective.
        still_s: seconds since it last made progress.
        patience_s: how long it may take before it counts as a hang.
        kept: whether its stacks are written.
    """

    rank: int
    step: int
    collective: int
    where: str
    waits: bool
    still_s: float
    patience_s: float
    kept: bool = False

    @property
    def place(self) -> tuple[int, int, str]:
        """A key that orders places as training reaches them."""
        return self.step, self.collective, self.where


@dataclass(frozen=True)
class Hang:
    """A diagnosis.

    Args:
        text: the diagnosis, with ranks of the run.
        step: the step in which the ranks hang.
        ranks: those of the process group that block the others; empty if unknown.
    """

    text: str
    step: int
    ranks: tuple[int, ...]


Exchange = Callable[[RankStatus | None], Mapping[int, RankStatus]]
"""Publishes this rank's status, or removes it (None), and returns the status of all ranks."""


def diagnose(
    statuses: Mapping[int, RankStatus],
    owners: Sequence[Owner],
    of_run: Callable[[int], int] = int,
) -> Hang:
    """Finds the ranks that block the others.

    Args:
        statuses: by rank of the process group, for those that respond; not empty.
        owners: the processes of all ranks.
        of_run: see `World.of_run`; for the text.
    """
    waiting = {rank: status for rank, status in statuses.items() if status.waits}
    seen = waiting or statuses
    counts = Counter(status.place for status in seen.values())
    # Where most are; if it is a tie, those that came less far are behind.
    usual = max(seen.values(), key=lambda status: (counts[status.place], status.place))
    what = usual.where if waiting else f"step {usual.step}"
    since = f"{min(status.still_s for status in seen.values()):.0f} s"
    silent = [rank for rank in range(len(owners)) if rank not in statuses]
    holds = "one of its threads holds the GIL (its stacks are in its log)"
    behind = {rank: _STATES.get(owners[rank].state(), holds) for rank in silent}
    for rank, status in statuses.items() if not silent else ():
        if not status.waits or (len(waiting) == len(owners) and status.place != usual.place):
            behind[rank] = f"it is in {status.where}"
    why = " and ".join(dict.fromkeys(behind.values()))
    if not waiting and not silent:
        return Hang(f"no rank has finished {what} in {since}: {why}", usual.step, ())
    if not behind:
        why = "probably the network or a library lost a message"
        text = f"all ranks are in {what}, and it has not ended in {since}: {why}"
        return Hang(text, usual.step, ())
    who = first_names([f"rank {of_run(rank)} ({owners[rank].host})" for rank in behind], 4)
    text = f"{who} did not enter {what}: {why}; the others have waited {since}"
    return Hang(text, usual.step, tuple(behind))


class Watchdog:
    """Watches one start of the training until `close`.

    Args:
        hang_s: scaling.hang_s, above 0.
        world: the place of this process among `owners`, the processes of all ranks.
        run: the run's folder.
        exchange: see Exchange; may raise anything.
        end: reports a hang, and ends this process or its collectives.
        is_over: whether the others have left this start already: then nobody is to blame.
    """

    def __init__(
        self,
        clock: Clock,
        hang_s: float | str,
        world: World,
        owners: Sequence[Owner],
        run: Storage,
        exchange: Exchange,
        end: Callable[[Hang], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._world, self._owners = clock, world, owners
        self._exchange, self._end, self._is_over = exchange, end, is_over
        self._folder = _folder(run, owners)
        self._least_s = _AUTO_S if isinstance(hang_s, str) else float(hang_s)
        self._look_s = min(1.0, self._least_s / 20)
        # Between two exchanges of the status, while there is no progress.
        self._ask_s = min(2.0, self._least_s / 5) + _ASK_OF_MANY_S * len(owners)
        self._grace_s = max(2.0, self._least_s / 3, 2 * self._ask_s)
        self._heard: dict[int, tuple[RankStatus, float]] = {}  # the newest status, and since when
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds of each, or of a few
        self._first = 0  # the first step of this start
        self._training = threading.get_ident()
        self._closed = threading.Event()
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

    def patience_s(self, doing: str, waits: bool = False) -> float:
        """How long a rank may do this, or wait in a collective."""
        times, is_first = 1, self._clock.steps == 0  # no step shows yet how long one takes
        if doing in (STARTING, COMPILING, "evaluation", "checkpoint") or (is_first and not waits):
            times = _APART
        elif is_first or (doing in ("data wait", WRITING) and not waits):
            times = _OUTSIDE
        return max(times * self._least_s, self.limit_s)

    def _watch(self) -> None:
        clock = self._clock
        moved_s, steps, doing = clock.moved_s, clock.steps, clock.doing
        looked_s = time.monotonic()
        still_s = asked_s = 0.0
        called_s: float | None = None  # since when it has asked for what the others do
        is_public = False  # the others have a status of this rank
        while not self._closed.wait(self._look_s):
            with suppress(Exception):  # a stderr without a file
                # If this thread cannot run, one without Python writes the stacks.
                faulthandler.dump_traceback_later(self.limit_s, file=sys.__stderr__)  # type: ignore[arg-type]
            now_s = time.monotonic()
            # A process that is stopped for a while, with all its threads, does not hang: time in
            # which this thread did not run does not count.
            still_s += min(now_s - looked_s, 5 * self._look_s)
            looked_s = now_s
            before, doing = doing, clock.doing
            if still_s >= self.limit_s and is_compiling(self._training):
                doing = COMPILING
            if clock.moved_s != moved_s:
                if clock.steps > steps:
                    self._steps.append((clock.moved_s - moved_s) / (clock.steps - steps))
                    if is_public:
                        self._ask(None)
                        self._heard.clear()
                    is_public = False
                moved_s, steps = clock.moved_s, clock.steps
                still_s, called_s = 0.0, None
            elif self.patience_s(doing) < self.patience_s(before):
                still_s = 0.0  # a slow batch has arrived, or a compilation has ended
            is_late = still_s >= self.limit_s
            # Until its step is finished, the others wait for this rank, which must not look as if
            # it did not respond.
            if (is_public or is_late) and now_s - asked_s >= self._ask_s:
                is_public = True
                asked_s = now_s
                called_s = (called_s or now_s) if is_late else None
                mine = self._own_status(doing, still_s)
                statuses = self._aged(self._ask(mine))
                waited = called_s is not None and time.monotonic() - called_s >= self._grace_s
                is_complete = len(statuses) == len(self._owners)
                is_hang = all(each.still_s >= each.patience_s for each in statuses.values())
                if is_hang and (is_complete or waited) and clock.moved_s == moved_s:
                    self._finish(mine, statuses)
                    break
        faulthandler.cancel_dump_traceback_later()

    def _ask(self, status: RankStatus | None) -> dict[int, RankStatus]:
        own = {} if status is None else {self._world.rank: status}
        with suppress(Exception):  # a failed exchange means no status
            return {**self._exchange(status), **own}
        return own

    def _aged(self, statuses: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
        """Adds the last status of ranks that can no longer report; their patience runs out, too."""
        now_s = time.monotonic()
        for rank, status in statuses.items():
            if rank not in self._heard or self._heard[rank][0] != status:
                self._heard[rank] = status, now_s
        return {
            rank: replace(status, still_s=status.still_s + now_s - self._heard[rank][1])
            for rank, status in statuses.items()
        }

    def _own_status(self, doing: str, still_s: float) -> RankStatus:
        at, inside = innermost_line(self._training)
        doing, waits, number, name = _in_collective(doing, inside)
        step, where = self._first + self._clock.steps + 1, f"{doing} ({at})"
        if waits:
            which = f"{doing}, collective {number}" if number >= 0 else doing
            where = f"the {name.replace('_', '-') or 'collective'} of step {step} ({which})"
        rank, patience_s = self._world.of_run(self._world.rank), self.patience_s(doing, waits)
        return RankStatus(rank, step, number, where, waits, still_s, patience_s)

    def _finish(self, mine: RankStatus, statuses: Mapping[int, RankStatus]) -> None:
        """Saves what all ranks know, and ends the ranks that block the others."""
        now_s = time.monotonic()
        heard = {rank: now_s - since_s for rank, (_, since_s) in self._heard.items()}
        own = self._world.rank
        recent = {r: s for r, s in statuses.items() if r == own or heard[r] < self._grace_s}
        hang = diagnose(recent, self._owners, self._world.of_run)
        is_over, me = self._is_over(), f"rank {mine.rank}"
        if is_over:  # those that are silent wait for this rank elsewhere
            text = f"{me} is still in the process group that ended with a lost rank"
            hang = replace(hang, text=text, ranks=())
        text = f"{hang.text}. The stacks of all ranks are in {self._folder}."
        hang, found = replace(hang, text=text), f"{me}: {text}\n\n{stacks()}"
        print(found, file=sys.stderr, flush=True)
        # In a thread, as the storage may be what hangs.
        keeping = threading.Thread(target=self._keep, args=(hang, found, recent), daemon=True)
        keeping.start()
        keeping.join(_KEPT_S)
        until_s = time.monotonic() + _KEPT_S
        while time.monotonic() < until_s:
            answers = self._ask(replace(mine, kept=True))
            if all(rank in answers and answers[rank].kept for rank in recent):
                break
            time.sleep(min(0.1, self._ask_s / 2) + _ASK_OF_MANY_S / 4 * len(self._owners))
        if len(recent) > 1 and not is_over:
            for rank, owner in enumerate(self._owners):
                if rank not in recent:
                    owner.kill()  # it cannot end by itself
        self._end(hang)

    def _keep(self, hang: Hang, found: str, statuses: Mapping[int, RankStatus]) -> None:
        """Writes what this rank has found; the first one also writes the diagnosis."""
        of_run, own = self._world.of_run, self._world.rank
        with suppress(Exception):
            if newest := collectives():
                found += f"\n\nThe newest collectives:\n{json.dumps(newest, indent=1)}"
        with suppress(OSError):
            self._folder.mkdir()
            self._folder.write_atomic(f"rank-{of_run(own)}.txt", found.encode())
            if own == min(statuses):
                signs = [asdict(each) for each in statuses.values()]
                document = {**asdict(hang), "ranks": [*map(of_run, hang.ranks)], "signs": signs}
                self._folder.write_atomic("hang.json", json.dumps(document, indent=1).encode())


def _folder(run: Storage, owners: Sequence[Owner]) -> Storage:
    """The folder that the ranks of one start share, and no other start uses."""
    first = owners[0]
    digits = "".join(c for c in first.since if c.isdigit())
    return run.join(HANGS).join(f"{digits}-{first.token[:4]}")


def through_folder(run: Storage, rank: int, owners: Sequence[Owner]) -> Exchange:
    """An exchange through files in the run's folder; nothing is written before a hang."""
    folder = _folder(run, owners)

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


# ------------------------------------------------------------------ inspection of this process


def innermost_line(thread: int) -> tuple[str, bool]:
    """(the innermost line of a thread that is not in a library, whether the thread is in a call of
    torch.distributed)."""
    frame = sys._current_frames().get(thread)
    inside = False
    while frame is not None:
        path = frame.f_code.co_filename
        inside = inside or _OF_COLLECTIVES in path
        if not path.startswith((*_LIBRARIES, "<")) or frame.f_back is None:
            short = os.sep.join(path.split(os.sep)[-2:])
            return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}", inside
        frame = frame.f_back
    return "its thread has ended", inside


def is_compiling(thread: int) -> bool:
    """Whether torch.compile runs in this thread, or in one of torch's, as backward passes may.

    Other threads, such as the loader's, are left alone: they continue while their stacks are read,
    and CPython may then return anything for a frame.
    """
    dummy = threading._DummyThread  # stands for a thread that Python did not start
    known = {each.ident for each in threading.enumerate() if not isinstance(each, dummy)}
    frames = [f for ident, f in sys._current_frames().items() if ident not in known - {thread}]
    with suppress(Exception):
        return any(
            each.f_code.co_filename.endswith(_OF_COMPILERS)
            for frame in frames
            for each, _ in traceback.walk_stack(frame)
        )
    return False


def stacks() -> str:
    """The stacks of all Python threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def _in_collective(doing: str, inside: bool) -> tuple[str, bool, int, str]:
    """(what this rank does, whether it waits for other ranks, number and name of its newest
    collective, -1 and "" if unknown).

    A host that waits for its GPU looks as if it waited for an agreement: it goes on after it has
    launched a collective of NCCL's, and waits for it later.
    """
    entries: list[dict[str, Any]] = []
    number = -1
    with suppress(Exception):  # this is not public API
        number = int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    with suppress(Exception):
        entries = collectives()
    names = [str(each["profiling_name"]).partition(":") for each in entries]
    if doing == AGREEING and not inside and "nccl" in (kind for kind, _, _ in names):
        for entry, (kind, _, name) in zip(entries, names, strict=True):
            if kind == "nccl" and entry.get("state") != "completed":
                return EXCHANGING, True, int(entry.get("collective_seq_id", -1)), name
        doing = "compute"  # the host waits for its own kernels
    waits = inside or doing in (EXCHANGING, AGREEING)
    return doing, waits, number, names[-1][2] if names else ""


def collectives() -> list[dict[str, Any]]:
    """The newest entries of torch's flight recorder (NCCL's only; see process_group.py). Not tested
    on several GPUs."""
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        read = getattr(torch._C._distributed_c10d, dump, None)
        entries = json.loads(read(True, False)).get("entries", []) if read is not None else []
        if entries:
            return list(entries[-_MAX_COLLECTIVES:])
    return []
