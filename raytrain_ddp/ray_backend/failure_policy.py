"""What the failure of workers means: go on, or give up. Is told events, and speaks no Ray.

Ray replaces dead workers as often as it must; whether it is worth it is judged here, as only here
it is known whether the run gets on:

- Failures count against `scaling.max_failures`, and a new checkpoint sets the count back: what
  comes once a day may come for a year, but what lets no checkpoint come about ends the run.
- The same failure at the same step twice, and no checkpoint between them: it would come for ever.
- The user's own exceptions, and memory that does not suffice, come again: they are not retried.
- Workers that Ray ends because their node runs out of memory are replaced once.
- Hangs are failures of the rank that the others waited for.
- Preemptions are counted by Ray, against `scaling.max_preemptions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytrain_ddp import errors
from raytrain_ddp.events import Checkpoint, Failed, Plan, Preempted
from raytrain_ddp.messages import Died, Event, InProgress, Joined, WorkerFailed

KEPT = "The last committed checkpoint is kept; the same command goes on from there."
_MEMORY = (
    "Lower --micro-batch (the global batch stays) or --data.prefetch-mib, put fewer workers on a "
    f"node (--scaling.cpus-per-worker), or take one with more memory. {KEPT}"
)
_BY_RAY_FOR_MEMORY = ("running low on memory", "NODE_OUT_OF_MEMORY", "OutOfMemoryError")


class FailurePolicy:
    """Judges the failures of one run.

    Args:
        most: scaling.max_failures.
        committed: the step of the newest checkpoint, 0 without one.
    """

    def __init__(self, most: int, committed: int = 0) -> None:
        self._most = most
        self._in_a_row = 0
        self._before: tuple[int | None, str] | None = None  # (step, what) of the failure before
        self._for_memory = 0
        self._committed = committed
        self._start: _Start = _Start("")

    def take(self, event: Event) -> Failed | Preempted | None:
        """Takes in an event of any kind; returns what is to be shown of a failure, if it is one.

        Kinds: joined (start, rank, node), at (the step in progress), failed (a worker's last
        words), died (what Ray says of all that have failed: texts by rank, and which ranks were
        preempted), and those of the display.

        Raises:
            RaytrainError: the run shall end.
        """
        start = self._start
        match event:
            case Joined():
                if event.start != start.name:
                    start = self._start = _Start(event.start)
                start.nodes[event.rank] = event.node
            case Checkpoint():
                self._got_on(event.step)
            case Plan():
                # Lower if a newer checkpoint is damaged.
                self._committed = min(self._committed, event.start_step)
                self._got_on(event.start_step)  # the checkpoint's event may have died with rank 0
                start.step = event.start_step + 1
            case InProgress():
                start.step = event.step
            case WorkerFailed() if event.start == start.name:  # not of an earlier start
                # A worker that reports a hang may lose its peers afterwards.
                start.words.setdefault(event.rank, event)
                if event.cause == "error":
                    raise as_error(event, start.node(event.rank))
            case Died() if not start.judged & {*event.texts.values()}:
                if start.judged:  # another start, which died before it sent any event
                    start = self._start = _Start("")
                start.judged |= {*event.texts.values()}
                return self._judge(event)
        return None

    def ended(self, why: str) -> Failed:
        """Ray Train itself has failed, as when the workers could not form a group; returns what is
        to be shown before it is tried again.

        Raises:
            RetriesExhausted: it has failed too often.
        """
        if "interrupted by node preemption" in why:
            raise errors.RetriesExhausted(
                "nodes were taken away more often than scaling.max_preemptions allows: "
                f"{why} {KEPT}"
            )
        said = "" if self._start.judged else self._start.own_words()
        why = said or why or "Ray Train ended, and no worker said why."
        self._in_a_row += 1
        if self._in_a_row > self._most:
            raise errors.RetriesExhausted(f"{why} {KEPT}")
        last = [line.strip() for line in why.splitlines() if line.strip()][-1]
        self._start = _Start("")
        return Failed(None, None, f"{last}; {self._going()}")

    def _got_on(self, step: int) -> None:
        if step > self._committed:
            self._committed, self._in_a_row, self._before, self._for_memory = step, 0, None, 0

    def _judge(self, event: Died) -> Failed | Preempted:
        if event.preempted:
            return Preempted(self._start.preempted(event.preempted))
        hang = self._start.hang()
        if hang is not None:
            return self._hung(hang)
        rank, what, said = self._start.cause(event.texts)
        step = self._start.step_of(rank)
        node = self._start.node(rank)
        where = f"on {node} {f'at step {step}' if step else 'while starting'}"
        cause = {"rank": rank, "node": node, "step": step, "error": what}
        if any(sign in event.texts.get(rank, "") for sign in _BY_RAY_FOR_MEMORY):
            self._for_memory += 1
            said = "was ended by Ray, as its node ran out of memory,"
            if self._for_memory > 1:
                raise _exhausted(f"rank {rank} {said} {where}, again. {_MEMORY}", cause)
        if step and self._before == (step, what):
            raise _exhausted(
                f"rank {rank} {said} {where}, as it did before, with no checkpoint between: it "
                f"would do so for ever. {_advice(what)} {KEPT}",
                cause,
            )
        self._in_a_row += 1
        if self._in_a_row > self._most:
            raise _exhausted(
                f"workers failed {self._in_a_row} times with no new checkpoint between "
                f"(scaling.max_failures = {self._most}); at last rank {rank} {said} {where}. "
                f"{KEPT}",
                cause,
            )
        self._before = (step, what) if step else None
        return Failed(rank, step, f"{said} {where}; {self._going()}", node, what)

    def _hung(self, hang: WorkerFailed) -> Failed:
        step, what, said = hang.step, hang.error, hang.message.rstrip(".")
        if self._before == (step, what):
            raise errors.RetriesExhausted(
                f"{said}; as before, with no checkpoint between: it would do so for ever. {KEPT}"
            )
        self._in_a_row += 1
        if self._in_a_row > self._most:
            raise errors.RetriesExhausted(
                f"workers failed {self._in_a_row} times with no new checkpoint between "
                f"(scaling.max_failures = {self._most}); at last {said}. {KEPT}"
            )
        self._before = (step, what)
        return Failed(None, step, f"{said}; {self._going()}", hung=True)

    def _going(self) -> str:
        place = f"step {self._committed}" if self._committed else "the start"
        return f"going on from {place} (failure {self._in_a_row} of at most {self._most} in a row)"


class _Start:
    """What is known of one start of the workers, which all die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: dict[int, str] = {}
        self.words: dict[int, WorkerFailed] = {}  # the last ones of each rank
        self.step: int | None = None  # in progress, by what the driver has heard of it
        self.judged: set[str] = set()

    def node(self, rank: int) -> str:
        return self.nodes.get(rank, "its node")

    def step_of(self, rank: int) -> int | None:
        """The step that a rank was at: by its own words, by its peers', or by the last line."""
        said = self.words[rank].step if rank in self.words else None
        theirs = [event.step for event in self.words.values() if event.step]
        return said or max(theirs, default=self.step)

    def hang(self) -> WorkerFailed | None:
        """What one of those that found it said of it."""
        return next((event for event in self.words.values() if event.cause == "hang"), None)

    def cause(self, texts: Mapping[int, str]) -> tuple[int, str, str]:
        """Which rank failed first, the class of its failure, and what it did.

        One that speaks of its peers suffers from them; one that says nothing crashed or was killed.
        """
        own = [event for event in self.words.values() if event.cause != "peer"]
        if own:
            line = next(iter(own[0].message.splitlines()), "")
            return own[0].rank, own[0].error, f"failed ({line})"
        # Ray knows of a dead process before its peers speak, of a dead node after.
        silent = [rank for ranks in (texts, self.nodes) for rank in ranks if rank not in self.words]
        if silent:
            return silent[0], f"the end of rank {silent[0]}", "crashed, or was killed,"
        return min(texts), "the end of a connection", "lost its peers"

    def own_words(self) -> str:
        """What the first worker said that did not only suffer from another's end; or ``""``."""
        words = [*self.words.values()]
        own = [event for event in words if event.cause != "peer"]
        return (own or words)[0].message if words else ""

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
        return (
            "That rank's log may tell of a crash in native code, the kernel's of a lack of memory."
        )
    return "Cure that first."
