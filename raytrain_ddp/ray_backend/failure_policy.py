"""Decides after worker failures whether to retry or give up, by the events of the run.

Ray replaces dead workers without limit; whether that is worthwhile is decided here, since only
the driver knows whether the run makes progress:

- Failures count against `scaling.max_failures`, and a new checkpoint resets the count, or a further
  step if the others have kept their state: a run may survive a failure a day for a year, but
  failures that prevent all progress end it.
- The same error twice at one step, without a checkpoint in between, would repeat forever, as
  would a silent end three times: twice may be chance, if something outside ends processes.
- The user's own exceptions and a lack of memory would happen again: they are not retried.
- Workers that Ray ends because their node runs out of memory are replaced once.
- Hangs are failures of the rank that the others waited for.
- Workers that die together, before the others have gone on, are one failure.
- Preemptions do not count as failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from raytrain_ddp import errors
from raytrain_ddp.events import (
    Checkpoint,
    Died,
    Event,
    Failed,
    InProgress,
    Joined,
    Plan,
    Preempted,
    WorkerFailed,
)

KEPT = "Committed checkpoints are kept; run the same command again to resume."
_MEMORY = (
    "Lower --micro-batch (the global batch stays) or --data.prefetch-mib, put fewer workers on a "
    f"node (--scaling.cpus-per-worker), or use a node with more memory. {KEPT}"
)
_SILENTLY = "crashed, or was killed,"
_MOST_SILENT = 3


class FailurePolicy:
    """Handles the failures of one run.

    Args:
        most: scaling.max_failures.
        committed: the step of the newest checkpoint, 0 without one.
        replaced: the number of workers at first, if a dead one is replaced while others are left;
            else 0.
    """

    def __init__(self, most: int, committed: int = 0, replaced: int = 0) -> None:
        self._most, self._replaced = most, replaced
        self._in_a_row = 0
        self._seen: Counter[tuple[int | None, str]] = Counter()  # (step, what), since progress
        self._for_memory = 0
        self._committed = self._reached = committed
        self._start: _Start = _Start("")

    def take(self, event: Event) -> Failed | Preempted | None:
        """Handles an event of any kind; returns the event to show if it is a failure.

        Kinds: joined (start, rank, node), at (the step in progress), failed (a worker's last
        report), died (Ray's report of all failed workers: texts by rank, and which ranks were
        preempted), and those of the display.

        Raises:
            RaytrainError: the run must end.
        """
        start = self._start
        match event:
            case Joined():
                if event.start != start.name:
                    # The others may continue before Ray says who has died.
                    hang = None if start.handled else start.hang()
                    start = self._start = _Start(event.start, hang)
                start.nodes[event.rank] = event.node
            case Checkpoint():
                self._committed = event.step
                self._note_progress(event.step)
            case Plan():
                if event.replaced is None:
                    self._committed = event.start_step  # its event may have died with rank 0
                    self._reached = min(self._reached, event.start_step)  # a newer one is damaged
                self._note_progress(event.start_step)
                start.step = event.start_step + 1
            case InProgress():
                start.step = event.step
            # Not of an earlier start; "": of a worker that has joined none.
            case WorkerFailed() if event.start in (start.name, ""):
                # A worker that reports a hang may lose its peers afterwards.
                start.reports.setdefault(event.rank, event)
                if event.cause == "error":
                    raise as_error(event, start.node(event.rank))
            case Died() if event.texts and start.ending.issuperset(event.texts):
                start.ending -= {*event.texts}  # one of those that a hang ends one after another
            case Died() if not start.handled & {*event.texts.values()}:
                if start.handled and not self._others_stay(event):
                    # Another start, which died before it sent any event.
                    start = self._start = _Start("")
                start.handled |= {*event.texts.values()}
                return self._handle_death(event)
        return None

    def stops_training(self, event: Died) -> bool:
        """Whether one of the dead takes part in the training; a new worker may not do so yet."""
        return not event.texts or not self._start.nodes.keys().isdisjoint(event.texts)

    def _others_stay(self, event: Died) -> bool:
        """Whether workers are left, which keep their state."""
        return len(event.texts) < (self._replaced and max(self._replaced, len(self._start.nodes)))

    def ended(self, why: str) -> Failed:
        """Handles a failure of Ray Train itself, as when the workers could not form a group;
        returns the event to show before it is retried.

        Raises:
            RetriesExhausted: it has failed too often.
        """
        report = "" if self._start.handled else self._start.own_report()
        why = report or why or "Ray Train ended, and no worker reported why."
        self._in_a_row += not self._start.handled  # of which it may be a consequence
        if self._in_a_row > self._most:
            raise errors.RetriesExhausted(f"{why} {KEPT}")
        last = [line.strip() for line in why.splitlines() if line.strip()][-1]
        self._start = _Start("")
        return Failed(None, None, f"{last}; {self._resume_text()}")

    def _note_progress(self, step: int) -> None:
        if step > self._reached:
            self._reached, self._in_a_row, self._for_memory = step, 0, 0
            self._seen.clear()

    def _handle_death(self, event: Died) -> Failed | Preempted:
        if event.preempted:
            return Preempted(self._start.preempted(event.preempted))
        hang, before = self._start.hang(), self._start.hang_before
        self._start.hang_before = None
        others_stay = self._others_stay(event)
        if hang is not None:
            if hang is not before:  # else, those of the present start have gone on
                self._start.ending = {*self._start.nodes} - {*event.texts}
            return self._handle_hang(hang, others_stay)
        if others_stay and not self.stops_training(event):
            self._note_progress((self._start.step or 0) - 1)  # the others have not waited
        rank, what, said = self._start.cause(event.texts)
        lost, self._start.lost = self._start.lost, self._start.lost | event.texts.keys()
        never_joined = lost & event.texts.keys() if others_stay else set()
        step = None if rank in never_joined else self._start.step_of(rank)
        node = self._start.node(rank)
        where = f"on {node} {f'at step {step}' if step else 'while starting'}"
        cause = {"rank": rank, "node": node, "step": step, "error": what}
        if rank in event.for_memory:
            self._for_memory += 1
            said = "was ended by Ray because its node ran out of memory,"
            if self._for_memory > 1:
                raise _exhausted(f"rank {rank} {said} {where}, again. {_MEMORY}", cause)
        self._seen[step, what] += 1
        if step and self._seen[step, what] >= (_MOST_SILENT if said == _SILENTLY else 2):
            raise _exhausted(
                f"rank {rank} {said} {where}, as it did before, with no checkpoint in between: it "
                f"would repeat forever. {_advice(what)} {KEPT}",
                cause,
            )
        self._in_a_row += not (others_stay and lost and not never_joined)
        self._require_progress(f"the last: rank {rank} {said} {where}", cause)
        if others_stay:
            for each in event.texts:  # what it has said is not of the next one
                self._start.reports.pop(each, None)
        return Failed(rank, step, f"{said} {where}; {self._resume_text(others_stay)}", node, what)

    def _handle_hang(self, hang: WorkerFailed, others_stay: bool) -> Failed:
        step, what, text = hang.step, hang.error, hang.message.rstrip(".")
        self._seen[step, what] += 1
        if self._seen[step, what] > 1:
            raise errors.RetriesExhausted(
                f"{text}; as before, with no checkpoint in between: it would repeat forever. {KEPT}"
            )
        self._in_a_row += 1
        self._require_progress(f"the last time {text}", {})
        return Failed(None, step, f"{text}; {self._resume_text(others_stay)}", hung=True)

    def _require_progress(self, last: str, cause: Mapping[str, object]) -> None:
        if self._in_a_row > self._most:
            raise _exhausted(
                f"workers failed {self._in_a_row} times with no new checkpoint in between "
                f"(scaling.max_failures = {self._most}); {last}. {KEPT}",
                cause,
            )

    def _resume_text(self, others_stay: bool = False) -> str:
        place = f"step {self._committed}" if self._committed else "the start"
        then = "only its process is replaced" if others_stay else f"resuming from {place}"
        return f"{then} (failure {self._in_a_row} of at most {self._most} in a row)"


class _Start:
    """What is known of one start of the workers: those of one process group."""

    def __init__(self, name: str, hang: WorkerFailed | None = None) -> None:
        self.name = name
        self.hang_before = hang  # reported by those that have left the former one since
        self.nodes: dict[int, str] = {}
        self.reports: dict[int, WorkerFailed] = {}  # the last report of each rank
        self.step: int | None = None  # in progress, as far as the driver knows
        self.handled: set[str] = set()
        self.lost: set[int] = set()  # ranks of which a process has died
        self.ending: set[int] = set()  # ranks whose end is part of a failure that is handled

    def node(self, rank: int) -> str:
        return self.nodes.get(rank, "its node")

    def step_of(self, rank: int) -> int | None:
        """The step a rank was at: by its own report, its peers', or the last event."""
        reported_step = self.reports[rank].step if rank in self.reports else None
        theirs = [event.step for event in self.reports.values() if event.step]
        return reported_step or max(theirs, default=self.step)

    def hang(self) -> WorkerFailed | None:
        """The report of a rank that detected a hang."""
        hangs = (event for event in self.reports.values() if event.cause == "hang")
        return next(hangs, self.hang_before)

    def cause(self, texts: Mapping[int, str]) -> tuple[int, str, str]:
        """Which rank failed first, the class of its failure, and what happened.

        A rank that reports its peers is only affected by them; a silent one crashed or was killed.
        """
        own = [event for event in self.reports.values() if event.cause != "peer"]
        if own:
            line = next(iter(own[0].message.splitlines()), "")
            return own[0].rank, own[0].error, f"failed ({line})"
        # Ray reports a dead process before its peers do, a dead node after them.
        silent = [
            rank for ranks in (texts, self.nodes) for rank in ranks if rank not in self.reports
        ]
        if silent:
            return silent[0], f"the end of rank {silent[0]}", _SILENTLY
        return min(texts), "the end of a connection", "lost its peers"

    def own_report(self) -> str:
        """The report of the first worker that was not only affected by another; or ``""``."""
        reports = [*self.reports.values()]
        own = [event for event in reports if event.cause != "peer"]
        return (own or reports)[0].message if reports else ""

    def preempted(self, ranks: Iterable[int]) -> str:
        nodes = sorted({self.node(rank) for rank in ranks})
        return f"{', '.join(nodes)} preempted (rank {', '.join(map(str, sorted(ranks)))})"


def as_error(event: WorkerFailed, node: str = "its node") -> errors.RaytrainError:
    """The worker's exception, in the driver: one of ours, or the user's with its traceback."""
    rank, step = event.rank, event.step
    if event.traceback:
        when = f"at step {step}" if step else "while starting"
        text = f"the task failed {when} on {node}, rank {rank}:\n{event.traceback}"
        error: errors.RaytrainError = errors.TaskError(text)
    else:
        kinds = {kind.exit_status: kind for kind in errors.RaytrainError.__subclasses__()}
        # A user-defined class may define its own status.
        error = kinds.get(event.status, errors.RaytrainError)(event.message)
        error.exit_status = event.status
    error.cause = {"rank": rank, "node": node, "step": step, "error": event.error}
    return error


def _exhausted(text: str, cause: Mapping[str, object]) -> errors.RetriesExhausted:
    error = errors.RetriesExhausted(text)
    error.cause = cause
    return error


def _advice(what: str) -> str:
    if what.startswith("the end of"):
        return "That rank's log may show a native crash, and the kernel log a lack of memory."
    return "Fix that first."
