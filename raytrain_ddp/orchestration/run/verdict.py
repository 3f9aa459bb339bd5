"""How an attempt has ended, and whose fault it was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.orchestration.run.output import Output
from raytrain_ddp.orchestration.run.plan import Worker


@dataclass(frozen=True)
class End:
    """How one script has ended.

    Args:
        status: as subprocess has it: negative is a signal. None: its node or its actor is lost.
        at: when, in seconds, by its machine's monotonic clock.
        error: what torch's @record wrote: {"message", "extraInfo": {"py_callstack"}}.
        asked: the signal that it had been sent before.
        lost: why it is lost.
    """

    status: int | None
    at: float
    error: Mapping[str, Any] | None = None
    asked: str = ""
    lost: str = ""

    @property
    def failed(self) -> bool:
        """Whether it has ended by itself, and not well."""
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
        """What the shell would say of it."""
        if self.status is None:
            return RetriesExhausted.exit_status
        return self.status if self.status >= 0 else 128 - self.status


def first_failure(
    ends: Mapping[int, End], output: Output, clocks: Callable[[Sequence[int]], Mapping[int, float]]
) -> int | None:
    """The rank that failed first, or None if none did.

    Only those count that had not been asked to end, by the times that their machines took; `clocks`
    tells how far these ranks' clocks are ahead of a common one.

    A lost node is the cause of what its peers suffer, though it is often noticed after them. Of
    those that raised an error, the time of its first line counts: taking the process down takes
    longer than its peers' noticing.
    """

    failed = [rank for rank, end in ends.items() if end.failed]
    lost = [rank for rank in failed if ends[rank].status is None]
    ahead = clocks(failed) if len(failed) > 1 and not lost else {}

    def began(rank: int) -> tuple[bool, float]:
        end, raised_at = ends[rank], output.raised_at(rank)
        at = end.at if end.status != 1 or raised_at is None else min(raised_at, end.at)
        return bool(ahead) and rank not in ahead, at - ahead.get(rank, 0.0)

    return min(lost or failed, key=began, default=None)


def report(rank: int, ends: Mapping[int, End], workers: Sequence[Worker], output: Output) -> str:
    """The first failing rank: where, how, its last words; and how the others ended."""
    end = ends[rank]
    lines = [f"rank {rank} failed first, on {workers[rank].where}: {end.said}"]
    told = end.error or {}
    stack = str(told.get("extraInfo", {}).get("py_callstack", "")) or str(told.get("message", ""))
    last = stack.rstrip().splitlines() if stack else output.last(rank)
    lines += [f"  {line}" for line in last]
    if len(ends) > 1:
        lines.append(f"the others: {_others(rank, ends)}")
    return "\n".join(lines)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_said(ranks: Iterable[int]) -> str:
    """``ranks 0-2, 5`` for [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {said}"


def _others(rank: int, ends: Mapping[int, End]) -> str:
    groups: dict[str, list[int]] = {}
    for other, end in ends.items():
        if other != rank:
            said = f"{end.said} (we sent {end.asked})" if end.asked else end.said
            groups.setdefault(said, []).append(other)
    return "; ".join(f"{ranks_said(ranks)} {said}" for said, ranks in groups.items())
