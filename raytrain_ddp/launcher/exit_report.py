"""Reports how an attempt ended, and which rank failed first."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from raytrain_ddp.errors import RetriesExhausted, signal_name
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Worker

_MAX_OTHERS = 3  # failed ranks whose last line is shown
_RECORD = (
    "several ranks failed by themselves, and the first one that exited is shown. With torch's "
    "@record (torch.distributed.elastic.multiprocessing.errors) on the script's main function, it "
    "is the one that raised first."
)
_BY_SIGNAL = {
    signal.SIGKILL: "the system often sends it when memory runs out: see dmesg or the system log.",
    signal.SIGSEGV: "set PYTHONFAULTHANDLER=1 to see where it crashed.",
}


@dataclass(frozen=True)
class RankExit:
    """How one script ended. Times are in seconds, by the driver's monotonic clock.

    Args:
        status: as in subprocess: negative is a signal. None: its node or actor is lost.
        at: when it ended.
        asked: the signal that it had been sent, or 0; `asked_at` is the time of the first one.
        raised: what torch's @record wrote about the exception that ended it, at `raised_at`.
        lost: why it is lost.
    """

    status: int | None
    at: float
    asked: int = 0
    asked_at: float = 0.0
    raised: str = ""
    raised_at: float = 0.0
    lost: str = ""

    @property
    def failed_at(self) -> float | None:
        """When it failed by itself, by its exception or else its end; None: it did not."""
        if self.status == 0:
            return None
        if self.raised and (not self.asked or self.raised_at < self.asked_at):
            return min(self.at, self.raised_at)
        return None if self.asked else self.at

    @property
    def said(self) -> str:
        """``exit status 1``, ``killed by SIGKILL (we sent SIGTERM)``, or why it is lost."""
        sent = f" (we sent {signal_name(self.asked)})" if self.asked else ""
        if self.status is None:
            return f"lost: {self.lost}"
        if self.status >= 0:
            return f"exit status {self.status}{sent}"
        return f"killed by {signal_name(-self.status)}{sent}"

    @property
    def exit_status(self) -> int:
        """The exit status as a shell would report it."""
        if self.status is None:
            return RetriesExhausted.exit_status
        if self.asked:
            return 1  # it had raised an exception before; we sent the signal
        return self.status if self.status >= 0 else 128 - self.status


def first_failure(ends: Mapping[int, RankExit]) -> int | None:
    """The rank that failed first, or None if none did.

    As in torchrun, the time of a failure is that in torch's error file, or else of the exit. A lost
    node is the cause of its peers' errors, even if it was noticed later.
    """
    failed = {
        rank: (end.status is not None, at) for rank, end in ends.items() if (at := end.failed_at)
    }
    return min(failed, key=failed.__getitem__, default=None)


def failure_report(
    rank: int, ends: Mapping[int, RankExit], workers: Sequence[Worker], output: Output
) -> str:
    """The first failing rank: where, how, its last lines; and how the others ended."""
    end = ends[rank]
    how = end.said
    if end.asked:
        how = f"it raised an exception, and was still running when we sent {signal_name(end.asked)}"
    lines = [f"rank {rank} failed first, on {workers[rank].where}: {how}"]
    last = end.raised.rstrip().splitlines() or output.last(rank)
    lines += [f"  {line}" for line in last]
    if not end.asked and -(end.status or 0) in _BY_SIGNAL:
        lines.append(f"hint: {_BY_SIGNAL[signal.Signals(-(end.status or 0))]}")
    if len(ends) > 1:
        lines.append(f"the others: {_others(rank, ends)}")
    also = [other for other in ends if other != rank and ends[other].failed_at]
    for other in sorted(also, key=lambda each: ends[each].at)[:_MAX_OTHERS]:
        text = ends[other].raised.rstrip().splitlines() or output.last(other)
        if text:
            lines.append(f"the last line of rank {other}: {text[-1]}")
    if also and end.status is not None and not any(ends[each].raised for each in (rank, *also)):
        lines.append(f"hint: {_RECORD}")
    return "\n".join(lines)


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
            groups.setdefault(end.said, []).append(other)
    return "; ".join(f"{format_ranks(ranks)} {said}" for said, ranks in groups.items())
