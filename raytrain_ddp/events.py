"""The events of a run: one frozen dataclass for each kind.

- `LogRecord`: the lines of ``metrics.jsonl``. They are part of each checkpoint.
- `StoredEvent`: the lines of ``events.jsonl``, each with the ``time`` at which it was written.
- The others are only passed between workers, driver and display.

records.py converts the first two to and from JSON. A field marked `OPTIONAL` is left out of a line
where it has its default. Fields that older versions did not write have a default. A plan names the
`SCHEMA` with which a run's files were written.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

SCHEMA = 1
OPTIONAL = {"optional": True}


# ------------------------------------------------------------------ metrics.jsonl


@dataclass(frozen=True)
class Slowest:
    """The rank whose own work took longest since the last record.

    Args:
        phase: the phase in which it stands out most.
        ratio: its time as a multiple of the median of the other ranks.
    """

    rank: int
    phase: str
    ratio: float


@dataclass(frozen=True)
class Timing:
    """Where the time went since the last record.

    Args:
        step_s: seconds of a step, without evaluations and checkpoints.
        split_s: seconds of a step by phase, including both; means over the ranks.
        peak_memory_bytes: the most of any rank: of its GPU, or else of its process.
        slowest: None with one rank.
        flops_per_s: of a rank; None if unknown.
        mfu: model FLOPs utilization (Chowdhery et al. 2022), 0 to 1; None if unknown.
    """

    step_s: float = 0.0
    split_s: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    slowest: Slowest | None = field(default=None, metadata={"type": Slowest, **OPTIONAL})
    flops_per_s: float | None = field(default=None, metadata=OPTIONAL)
    mfu: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Train:
    """A training step, once every ``log.every_steps``.

    Args:
        step: optimizer steps done. epoch: from 0.
        loss: mean over the global batch of this step. lr: of this step.
        samples_per_s: of all workers, since the last record. timing: for the same steps.
        skipped: bad records so far. nonfinite: steps so far that were not applied.
        seconds: since the workers began to train in this start. seconds_total: in all starts.
        scalars: those that the task's loss returned with it, by name; means over the global batch.
    """

    kind: ClassVar[str] = "train"
    step: int
    epoch: int = 0
    loss: float = float("nan")
    lr: float = float("nan")
    samples_per_s: float = float("nan")
    skipped: int = 0
    nonfinite: int = 0
    seconds: float = float("nan")
    seconds_total: float = float("nan")
    timing: Timing = field(default_factory=Timing, metadata={"type": Timing})
    scalars: Mapping[str, float] = field(default_factory=dict, metadata=OPTIONAL)


@dataclass(frozen=True)
class Eval:
    """An evaluation after a step.

    Args:
        metrics: name -> value. tables: metrics that are not scalars, as nested lists.
        monitor: the metric that decides which is best. best: whether this is the best so far.
        seconds: how long it took.
    """

    kind: ClassVar[str] = "eval"
    step: int
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict, metadata=OPTIONAL)
    monitor: str = ""
    best: bool = False
    seconds: float = float("nan")


@dataclass(frozen=True)
class Audit:
    """SHA-256 of a step's sample ids and pixels (``log.audit``)."""

    kind: ClassVar[str] = "audit"
    step: int
    sha256: str


# ------------------------------------------------------------------ events.jsonl


@dataclass(frozen=True)
class SplitSummary:
    """The rows of a split. `smallest` and `largest`: (class, rows); None if not counted.

    Args:
        origin: where an evaluation split comes from.
        empty: classes without rows.
    """

    rows: int
    origin: str = field(default="", metadata={"key": "from", **OPTIONAL})
    smallest: tuple[str, int] | None = field(default=None, metadata=OPTIONAL)
    largest: tuple[str, int] | None = field(default=None, metadata=OPTIONAL)
    empty: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class DataSummary:
    """The data of a run. `names`: of the first of `classes`; `predicted`: what these are."""

    train: SplitSummary = field(metadata={"type": SplitSummary})
    eval: SplitSummary | None = field(metadata={"type": SplitSummary})
    classes: int
    names: Sequence[str]
    notes: Sequence[str] = ()
    predicted: str = field(default="classes", metadata=OPTIONAL)


@dataclass(frozen=True)
class Plan:
    """The workers of a start are about to train.

    Args:
        start_step: optimizer steps done before.
        slots: micro-batches per step. device: name of rank 0's device.
        unit: of samples, for people.
        resumed_from: name of a checkpoint. replaced: new ranks, if others kept their state.
        hosts: of all ranks. versions: of packages on rank 0.
    """

    kind: ClassVar[str] = "plan"
    run: str | None = None
    start_step: int = 0
    total_steps: int = 0
    steps_per_epoch: int = 0
    epochs: int = 0
    batch_size: int = 0
    slots: int = 0
    micro_batch: int = 0
    world_size: int = 0
    device: str = ""
    parameters: int = 0
    train_samples: int = 0
    eval_samples: int = 0
    unit: str = "samples"
    data: DataSummary | None = field(default=None, metadata={"type": DataSummary})
    resumed_from: str | None = None
    replaced: Sequence[int] | None = field(default=None, metadata=OPTIONAL)
    hosts: Sequence[str] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint is committed.

    Args:
        seconds: duration of its background commit. tries: more than 1 if the storage failed.
    """

    kind: ClassVar[str] = "checkpoint"
    step: int = 0
    name: str = ""
    seconds: float | None = None
    size_bytes: int | None = None
    tries: int = 1


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; training continues for now."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int
    message: str = ""
    in_a_row: int = 1


@dataclass(frozen=True)
class Interval:
    """``checkpoint.every_s = "auto"`` has chosen another interval.

    Args:
        stall_s: how long a checkpoint stops training. commit_s: how long its commit takes.
        mtbf_s: mean time between failures, as estimated.
    """

    kind: ClassVar[str] = "interval"
    seconds: float
    stall_s: float = 0.0
    commit_s: float = 0.0
    mtbf_s: float = 0.0


@dataclass(frozen=True)
class Failed:
    """Workers have failed, and the run continues.

    Args:
        rank: of the worker that failed first; None if it is not known, as after a hang.
        step: in progress; None if there was none.
        error: class of the failure.
    """

    kind: ClassVar[str] = "failed"
    rank: int | None = None
    step: int | None = None
    message: str = ""
    node: str = field(default="", metadata=OPTIONAL)
    error: str = field(default="", metadata=OPTIONAL)
    traceback: str = field(default="", metadata=OPTIONAL)
    hung: bool = field(default=False, metadata=OPTIONAL)


@dataclass(frozen=True)
class Preempted:
    """Nodes are preempted, after a notice."""

    kind: ClassVar[str] = "preempted"
    text: str


@dataclass(frozen=True)
class Note:
    """A line for people."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class SweepStop:
    """The sweep of this run stops it, with a checkpoint."""

    kind: ClassVar[str] = "sweep_stop"


@dataclass(frozen=True)
class Straggler:
    """A rank that repeatedly slows the others down; `rank` None: there is none anymore."""

    kind: ClassVar[str] = "straggler"
    step: int = 0
    rank: int | None = None
    text: str = ""
    host: str = field(default="", metadata=OPTIONAL)
    phase: str = field(default="", metadata=OPTIONAL)
    ratio: float | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class End:
    """The command has ended.

    Args:
        status: its exit status. step: optimizer steps done.
        message: the error. rank, node, error: of the worker that failed first.
    """

    kind: ClassVar[str] = "end"
    status: int = 0
    step: int | None = field(default=None, metadata=OPTIONAL)
    message: str = field(default="", metadata=OPTIONAL)
    rank: int | None = field(default=None, metadata=OPTIONAL)
    node: str = field(default="", metadata=OPTIONAL)
    error: str = field(default="", metadata=OPTIONAL)


LogRecord = Train | Eval | Audit
LOG_RECORDS = (Train, Eval, Audit)
Trouble = CheckpointFailed | Failed | Preempted | Straggler
StoredEvent = Plan | Checkpoint | Interval | Note | SweepStop | End | Trouble
STORED_EVENTS = (Plan, Checkpoint, Interval, Note, SweepStop, End, *get_args(Trouble))


# ------------------------------------------------------------------ between processes

Cause = Literal["error", "outside", "peer", "hang"]


@dataclass(frozen=True)
class Phase:
    """A part of the start-up begins."""

    name: str


@dataclass(frozen=True)
class Evaluating:
    """An evaluation begins after `step`."""

    step: int


@dataclass(frozen=True)
class Pause:
    """A checkpoint blocked the training for this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Joined:
    """A worker of a start is there.

    Args:
        start: identifies the start: all workers that form one process group.
        node: its host name.
    """

    start: str
    rank: int
    node: str


@dataclass(frozen=True)
class InProgress:
    """Rank 0 is computing `step`."""

    step: int


@dataclass(frozen=True)
class WorkerFailed:
    """The last message of a worker that fails.

    Args:
        start, rank: see `Joined`.
        step: in progress; None while starting.
        error: class of the failure. traceback: of the user's code; "" for errors of this package.
        status: the exit status that the error stands for.
        cause: error: it would happen again; outside: it may pass; peer: this worker only lost its
            peers; hang: it has found that workers make no progress.
    """

    start: str
    rank: int
    step: int | None
    error: str
    message: str
    traceback: str
    status: int
    cause: Cause


@dataclass(frozen=True)
class Died:
    """Ray has found workers dead.

    Args:
        texts: what it says of each rank.
        preempted: ranks of nodes that were taken away.
        for_memory: ranks that it has ended because their node ran out of memory.
    """

    texts: Mapping[int, str]
    preempted: Sequence[int]
    for_memory: Sequence[int] = ()


@dataclass(frozen=True)
class Alive:
    """The number of workers that send heartbeats, if dead ones are replaced."""

    count: int


@dataclass(frozen=True)
class ControllerStarted:
    """Ray Train's controller; `handle` is pickled, as loading it imports Ray Train."""

    handle: bytes

    @property
    def actor(self) -> Any:
        return pickle.loads(self.handle)


@dataclass(frozen=True)
class Placed:
    """The placement group of Ray Train's workers."""

    group: Any


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Args:
        signal: of an interruption that left something to do, be it an evaluation after the last
            step; else 0.
        best: the best value of the monitor, after `best_step`.
        metrics: of the last evaluation.
        seconds: by phase, and "total".
        of_ray: Ray Train's own Result, pickled; b"" if there is none.
    """

    step: int
    total_steps: int
    signal: int
    best: float | None
    best_step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    of_ray: bytes = b""


Event = (
    (LogRecord | StoredEvent)
    | (Phase | Evaluating | Pause | Joined | InProgress | WorkerFailed)
    | (Died | Alive | ControllerStarted | Placed | Outcome)
)
