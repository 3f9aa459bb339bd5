"""Messages between workers, driver and display that are not written to files."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ddp.events import LogRecord, StoredEvent

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
    """Ray has found workers dead: what it says of each rank, and which were preempted."""

    texts: Mapping[int, str]
    preempted: Sequence[int]


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
