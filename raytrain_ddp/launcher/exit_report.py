"""Reports how an attempt ended, and which rank failed first."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from raytrain_ddp.errors import RetriesExhausted, first_names, signal_name
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Worker

_UNRECORDED = (
    "hint: this is the rank that exited first. Put torch's @record on the main function "
    "(torch.distributed.elastic.multiprocessing.errors) to see the one that raised first."
)
_KILLED = "hint: the system often sends SIGKILL when memory runs out: see dmesg or the system log."


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
        at = min(self.at, self.raised_at) if self.raised else self.at
        return None if self.status == 0 or (self.asked and at >= self.asked_at) else at

    @property
    def said(self) -> str:
        """``exit status 1``, ``killed by SIGKILL (we sent SIGTERM)``, or why it is lost."""
        if self.status is None:
            return f"lost: {self.lost}"
        killed = f"killed by {signal_name(-self.status)}"
        sent = f" (we sent {signal_name(self.asked)})" if self.asked else ""
        return (killed if self.status < 0 else f"exit status {self.status}") + sent

    @property
    def exit_status(self) -> int:
        """The exit status as a shell would report it."""
        if self.status is None:
            return RetriesExhausted.exit_status
        if self.asked:
            return 1  # it had raised an exception before; we sent the signal
        return self.status if self.status >= 0 else 128 - self.status


def failures(ends: Mapping[int, RankExit]) -> list[int]:
    """The ranks that failed by themselves, the first one first.

    As in torchrun, the time of a failure is that of torch's error file, or else of the exit. A lost
    node is the cause of its peers' errors, even if it was noticed later.
    """
    failed = {rank: at for rank, end in ends.items() if (at := end.failed_at) is not None}
    return sorted(failed, key=lambda rank: (ends[rank].status is not None, failed[rank]))


def report_exit(ends: Mapping[int, RankExit], workers: Sequence[Worker], output: Output) -> int:
    """Shows the first failing rank, if any: where, how, its last lines; and how the others ended.

    Returns:
        Its exit status, or 0.
    """
    failed = failures(ends)
    if not failed:
        return 0
    rank, end = failed[0], ends[failed[0]]
    last = {each: ends[each].raised.splitlines() or output.last(each) for each in failed}
    lines = [f"rank {rank} failed first, on {workers[rank].where}: {end.said}"]
    lines += [f"  {line}" for line in last[rank]]
    if end.status == -signal.SIGKILL and not end.asked:
        lines.append(_KILLED)
    groups: dict[str, list[int]] = {}
    for other in sorted(ends.keys() - {rank}):
        text = ": ".join([ends[other].said, *last.get(other, ())[-1:]])
        groups.setdefault(text, []).append(other)
    if groups:
        said = [f"{format_ranks(ranks)} {text}" for text, ranks in groups.items()]
        lines.append(f"the others: {first_names(said, by='; ')}")
    if len(failed) > 1 and end.status is not None and not any(ends[each].raised for each in failed):
        lines.append(_UNRECORDED)
    print("\n".join(lines), file=sys.stderr, flush=True)
    return end.exit_status


def format_ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-2, 5`` for [0, 1, 2, 5]."""
    placed = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])  # alike in a run
    runs = [[rank for _, rank in run] for _, run in placed]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {shown}"
