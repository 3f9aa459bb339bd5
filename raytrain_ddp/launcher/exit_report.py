"""Reports how an attempt ended, and which rank failed first."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from raytrain_ddp.errors import RetriesExhausted, signal_name
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.tracebacks import is_peer_error

# Hints for the last lines of a failure.
_HINTS = (
    (
        r"bdb\.BdbQuit",
        "breakpoint() and pdb need a terminal, but the ranks have none. Either run a single "
        "process with the command that --dry-run --num-workers 1 prints, or use a debugger that "
        "listens on a port, such as debugpy.",
    ),
    (
        r"EOFError: EOF when reading a line",
        "only rank 0 gets the standard input of `run`, and only if it is a pipe or a file; a "
        "terminal is not passed on, and all other ranks have an empty standard input.",
    ),
    (
        r"terminate called without an active exception",
        "the script was already exiting, and its process group still existed. Its own exit "
        "status is lost: call torch.distributed.destroy_process_group() before it ends.",
    ),
)
_STORE_GONE = (
    "rank 0, which keeps the store of the process group, had ended: make all ranks end together, "
    "for example with torch.distributed.barrier(), or let rank 0 end last."
)
_BY_SIGNAL = {
    signal.SIGKILL: "the system often sends it when memory runs out: see dmesg or the system log.",
    signal.SIGSEGV: "set PYTHONFAULTHANDLER=1 to see where it crashed.",
}


@dataclass(frozen=True)
class RankExit:
    """How one script ended.

    Args:
        status: as in subprocess: negative is a signal. None: its node or actor is lost.
        at: time of the end in seconds, by its machine's monotonic clock.
        error: the content of torch's @record file, {"message", "extraInfo": {"py_callstack"}},
        plus {"at"}.
        asked: the signal sent to it before; `asked_at` is the time of the first one.
        lost: why it is lost.
    """

    status: int | None
    at: float
    error: Mapping[str, Any] | None = None
    asked: str = ""
    lost: str = ""
    asked_at: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it ended by itself with a failure."""
        return self.status != 0 and not self.asked

    @property
    def said(self) -> str:
        if self.status is None:
            return f"lost: {self.lost}"
        if self.status >= 0:
            return f"exit status {self.status}"
        return f"killed by {signal_name(-self.status)}"

    @property
    def exit_status(self) -> int:
        """The exit status as a shell would report it."""
        if self.status is None:
            return RetriesExhausted.exit_status
        if self.asked:
            return 1  # it had raised an error before; we sent the signal
        return self.status if self.status >= 0 else 128 - self.status


def first_failure(
    ends: Mapping[int, RankExit],
    output: Output,
    clocks: Callable[[Sequence[int]], Mapping[int, float]],
) -> int | None:
    """The rank that failed first, or None if none did.

    The time of a failure is that of the rank's traceback, or else of its end: a process may take
    longer to exit than its peers take to notice, and may receive a signal meanwhile. A rank that
    printed a traceback and continued did not fail. Errors about a lost peer rank behind all others,
    because their cause is elsewhere; so a lost node is the cause of its peers' errors. A thread
    that ended with an exception in a rank that continued also ranks before them.

    Times are those of each machine; `clocks` returns how far these ranks' clocks are ahead of a
    common one.
    """
    lost = [rank for rank, end in ends.items() if end.status is None]
    began = {rank: key for rank, end in ends.items() if (key := _began(rank, end, output))}
    if not any(weight != _THREAD for weight, _ in began.values()):
        began = {}
    if lost:
        return min(lost, key=lambda rank: ends[rank].at)
    ahead = clocks(list(began)) if len(began) > 1 else {}

    def order(rank: int) -> tuple[int, bool, float]:
        weight, at = began[rank]
        return weight, bool(ahead) and rank not in ahead, at - ahead.get(rank, 0.0)

    return min(began, key=order, default=None)


_OWN, _THREAD, _FOLLOWS = range(3)


def _began(rank: int, end: RankExit, output: Output) -> tuple[int, float] | None:
    """The rank of a failure's severity (lower is more severe) and its time; None: no failure."""
    raised = output.raised(rank)
    if end.status is None or end.status == 0:
        return None
    error_at = float((end.error or {}).get("at", end.at))
    if end.failed:
        at = min(end.at, error_at)
        if raised is not None and (
            not raised.goes_on or raised.ending or (raised.uncaught and end.status == 1)
        ):
            at, message = min(at, raised.at), raised.error
        else:  # the message of torch's watchdog before it aborts
            message = "\n".join(output.last(rank)) if end.status == -signal.SIGABRT else ""
        # A killed process did not end because of an error about its peers.
        killed = end.status in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
        return (_FOLLOWS if is_peer_error(message) and not killed else _OWN), at
    if raised is not None and raised.at < end.asked_at:
        if raised.ending:
            return (_FOLLOWS if is_peer_error(raised.error) else _OWN), raised.at
        if raised.in_thread and not raised.goes_on:
            return _THREAD, raised.at
    return (_OWN, error_at) if end.error and error_at < end.asked_at else None


def failure_report(
    rank: int, ends: Mapping[int, RankExit], workers: Sequence[Worker], output: Output
) -> str:
    """The first failing rank: where, how, its last lines; and how the others ended."""
    end, raised = ends[rank], output.raised(rank)
    how = end.said
    if end.asked:
        thread = raised is not None and raised.in_thread
        what = "an exception ended one of its threads" if thread else "it raised an error"
        how = f"{what}, and it was still running when we sent {end.asked}"
    lines = [f"rank {rank} failed first, on {workers[rank].where}: {how}"]
    record = end.error or {}
    stack = str(record.get("extraInfo", {}).get("py_callstack") or record.get("message", ""))
    if stack:
        last: Sequence[str] = stack.rstrip().splitlines()
    elif raised is not None and (end.asked or not raised.goes_on or raised.uncaught):
        last = raised.lines
    else:
        last = output.last(rank)
    lines += [f"  {line}" for line in last]
    lines += [f"hint: {hint}" for hint in _hints(end, last)]
    if rank != 0 and 0 in ends and ends[0].status == 0 and is_peer_error("\n".join(last[-3:])):
        lines.append(f"hint: {_STORE_GONE}")
    if len(ends) > 1:
        lines.append(f"the others: {_others(rank, ends)}")
    for other in sorted(ends):
        theirs = output.raised(other)
        if other != rank and theirs is not None and theirs.at < ends[other].asked_at:
            lines.append(f"rank {other} had also raised: {theirs.error}")
    return "\n".join(lines)


def _hints(end: RankExit, last: Sequence[str]) -> list[str]:
    text = "\n".join(last[-3:])
    hints = [hint for pattern, hint in _HINTS if re.search(pattern, text)]
    if end.status is not None and end.status < 0 and not end.asked:
        hints += [hint for number, hint in _BY_SIGNAL.items() if -end.status == number]
    return hints


def format_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-2, 5`` for [0, 1, 2, 5]."""
    placed = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])  # alike in a run
    runs = [[rank for _, rank in run] for _, run in placed]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {shown}"


def _others(rank: int, ends: Mapping[int, RankExit]) -> str:
    groups: dict[str, list[int]] = {}
    for other, end in ends.items():
        if other != rank:
            shown = f"{end.said} (we sent {end.asked})" if end.asked else end.said
            groups.setdefault(shown, []).append(other)
    return "; ".join(f"{format_ranks(ranks)} {shown}" for shown, ranks in groups.items())
