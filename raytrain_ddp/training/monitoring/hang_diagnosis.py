"""Diagnoses a hang: the status that each rank publishes, and which ranks block the others, in
which collective. Pure functions, apart from inspecting this process."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.errors import first_names
from raytrain_ddp.training.monitoring.phase_clock import AGREEING, EXCHANGING

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_OF_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_OF_COMPILERS = tuple(
    os.sep.join(("torch", *path))
    for path in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
_OF_TORCH = threading._DummyThread  # of no thread of Python's
_MOST_COLLECTIVES = 100
_STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel (a disk, or a network file system)",
    "Z": "its process is gone",
    "X": "its process is gone",
}


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank publishes when it makes no progress.

    Args:
        step: the current one, or the last one.
        doing: see `Clock.doing`.
        collective: the number of the last one that it entered; -1 if unknown.
        name: of that collective; "" if unknown.
        waits: whether it waits in a collective.
        at: the innermost source line that is not in a library.
        still_s: seconds since it last finished a step.
        patience_s: how long it may take before it counts as a hang.
        stopped: the ranks whose process it has seen stopped.
        kept: its stacks are written.
    """

    rank: int
    step: int
    doing: str
    collective: int
    name: str
    waits: bool
    at: str
    still_s: float
    patience_s: float
    stopped: Sequence[int] = ()
    kept: bool = False


@dataclass(frozen=True)
class Hang:
    """A diagnosis: as text, with ranks of the run; and the ranks of the process group that block
    the others, if they are known."""

    text: str
    step: int
    ranks: tuple[int, ...]


class _WaitPoint(NamedTuple):
    """Where a rank waits; ordered as training reaches these places."""

    step: int
    collective: int
    name: str
    doing: str


def is_hang(statuses: Mapping[int, RankStatus]) -> bool:
    """Whether all ranks that have published a status have exceeded their patience."""
    return all(status.still_s >= status.patience_s for status in statuses.values())


def diagnose(
    statuses: Mapping[int, RankStatus],
    owners: Sequence[Owner],
    stopped: Set[int] = frozenset(),
    of_run: Callable[[int], int] = int,
) -> Hang:
    """Finds the ranks that block the others.

    Args:
        statuses: by rank, for the ranks that respond; not empty.
        owners: the processes of all ranks.
        stopped: ranks that do not respond and are known to be stopped.
        of_run: see `World.of_run`; for the text.
    """
    waiting = [status for status in statuses.values() if status.waits]
    seen = waiting or list(statuses.values())
    usual, _ = Counter(_wait_point(status) for status in seen).most_common(1)[0]
    what = _collective(usual) if waiting else f"step {usual.step}"
    since = f"{min(status.still_s for status in seen):.0f} s"
    silent = [rank for rank in range(len(owners)) if rank not in statuses]
    if silent:
        states = {rank: "T" if rank in stopped else owners[rank].state() for rank in silent}
        unknown = "it does not respond: it is stopped, or dead, or one of its threads holds the GIL"
        here = "one of its threads holds the GIL and does not release it"
        why = [_STATES.get(s, here if s else unknown) for s in states.values()]
        return Hang(
            f"{_who(silent, owners, of_run)} did not enter {what}: {_joined(why)}; the others have "
            f"waited {since}",
            usual.step,
            tuple(silent),
        )
    busy = [status for status in statuses.values() if not status.waits]
    if busy and not waiting:
        text = f"no rank has finished {what} in {since}: {_places(busy)}"
        return Hang(text, usual.step, ())
    behind = busy or _outliers(waiting)
    if not behind:
        text = (
            f"all ranks are in {what}, and it has not ended in {since}: probably the network or a "
            "library lost a message"
        )
        return Hang(text, usual.step, ())
    ranks = [status.rank for status in behind]
    return Hang(
        f"{_who(ranks, owners, of_run)} did not enter {what}: {_places(behind)}; the others wait "
        f"{since}",
        usual.step,
        tuple(ranks),
    )


def _outliers(waiting: Sequence[RankStatus]) -> list[RankStatus]:
    """Those that wait in another collective than most; the ones behind if it is a tie."""
    places = Counter(_wait_point(status) for status in waiting)
    if len(places) < 2:
        return []
    most = max(places.values())
    usual = max(place for place, count in places.items() if count == most)
    return [status for status in waiting if _wait_point(status) != usual]


def _wait_point(status: RankStatus) -> _WaitPoint:
    return _WaitPoint(status.step, status.collective, status.name, status.doing)


def _collective(place: _WaitPoint) -> str:
    """``the all-reduce of step 12 (gradient exchange, collective 345)``."""
    named = place.name.replace("_", "-") or "collective"
    number = f", collective {place.collective}" if place.collective >= 0 else ""
    return f"the {named} of step {place.step} ({place.doing}{number})"


def _who(ranks: Sequence[int], owners: Sequence[Owner], of_run: Callable[[int], int]) -> str:
    return first_names([f"rank {of_run(rank)} ({owners[rank].host})" for rank in ranks], 4)


def _places(statuses: Sequence[RankStatus]) -> str:
    where = [
        f"in {_collective(_wait_point(status))}"
        if status.waits
        else f"in {status.doing} ({status.at})"
        for status in statuses
    ]
    return _joined([f"it is {place}" for place in where])


def _joined(texts: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


# ------------------------------------------------------------------ inspection of this process


def innermost_line(thread: int) -> tuple[str, bool]:
    """(the innermost line of a thread that is not in a library, whether the thread is in a call of
    torch.distributed)."""
    frame = sys._current_frames().get(thread)
    innermost, inside = frame, False
    while frame is not None:
        inside = inside or _OF_COLLECTIVES in frame.f_code.co_filename
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return _line(frame), inside
        frame = frame.f_back
    return _line(innermost) if innermost is not None else "its thread has ended", inside


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    short = os.sep.join(path.split(os.sep)[-2:])
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_compiling(thread: int) -> bool:
    """Whether torch.compile runs in this thread, or in one of torch's, as backward passes may.

    Other threads, such as the loader's, are left alone: they continue while their stacks are read,
    and CPython may then return anything for a frame.
    """
    known = {each.ident for each in threading.enumerate() if not isinstance(each, _OF_TORCH)}
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


def last_collective() -> tuple[int, str]:
    """Number and name of the last collective that this process entered; (-1, "") if unknown."""
    number, name = -1, ""
    with suppress(Exception):  # there is no public API
        number = int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    with suppress(Exception):
        name = str(collectives()[-1]["profiling_name"]).partition(":")[2]
    return number, name


def on_device(doing: str, inside: bool) -> tuple[str, bool, tuple[int, str] | None]:
    """What a rank does whose host waits for its GPU, which looks like an agreement: the host goes
    on after it has launched a collective of NCCL's, and waits for it later.

    Returns what it does, whether it waits for other ranks, and number and name of the collective
    that its GPU is in; None: in none, or unknown.
    """
    known = [each for each in collectives() if str(each["profiling_name"]).startswith("nccl:")]
    if inside or doing != AGREEING or not known:
        return doing, inside or doing in (EXCHANGING, AGREEING), None
    open_ones = [each for each in known if each.get("state") != "completed"]
    if not open_ones:  # its own kernels
        return "compute", False, None
    first = open_ones[0]
    name = str(first["profiling_name"]).partition(":")[2]
    return EXCHANGING, True, (int(first.get("collective_seq_id", -1)), name)


def collectives() -> list[dict[str, Any]]:
    """The newest entries of torch's flight recorder (NCCL's only; see nccl_settings.py). Not tested
    on several GPUs."""
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        read = getattr(torch._C._distributed_c10d, dump, None)
        entries = json.loads(read(True, False)).get("entries", []) if read is not None else []
        if entries:
            return list(entries[-_MOST_COLLECTIVES:])
    return []


def open_stack_file(rank: int, owners: Sequence[Owner]) -> int | None:
    """An in-memory file that another rank of this machine can read; None if nobody could."""
    others = [owner for owner in owners if owner.is_here()]
    if len(others) < 2 or not hasattr(os, "memfd_create"):
        return None
    return os.memfd_create(f"raytrain-ddp-stacks-{rank}")


def stack_of(owner: Owner, rank: int) -> bytes:
    """The stacks that a silent rank of this machine has left, if any."""
    if not owner.is_here():
        return b""
    with suppress(OSError):
        for link in Path(f"/proc/{owner.pid}/fd").iterdir():
            if f"raytrain-ddp-stacks-{rank} " in os.readlink(link):
                return link.read_bytes()
    return b""
