"""The seam between the loop and whatever runs it: Ray, torchrun or a plain process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.events import LogRecord
from raytrain_ddp.messages import Event
from raytrain_ddp.training.phase_clock import Clock
from raytrain_ddp.training.world import World


@dataclass(frozen=True)
class Snapshot:
    """What becomes a checkpoint: host copies that no later step changes.

    Args:
        manifest: without its files.
        tensors: file stem -> name -> tensor.
        documents: file name -> JSON-able value.
        log: all records so far.
        last: the run ends with it, as it should.
    """

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, Any]
    log: Sequence[LogRecord] = ()
    last: bool = False


class Requests(NamedTuple):
    """What one rank wants to follow the step that now begins; all ranks then do what any wants.

    Args:
        stop: the number of the signal by which the run shall end, else 0.
        save: a checkpoint, though none is due.
        look: that all ranks look together at what none sees alone; see `Session.look`.
    """

    stop: int = 0
    save: bool = False
    look: bool = False


class Session(Protocol):
    """What the loop needs from outside. RaySession and LocalSession are the two kinds.

    Attributes:
        hosts: of all ranks; empty before `watch`.
    """

    world: World
    hosts: list[str]

    def watch(self, clock: Clock) -> None:
        """From now on until `finish`, workers that get on no more are ended. All take part."""

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """The model in DistributedDataParallel with `options`; itself if it is alone."""

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole. All ranks take part and get the same."""

    def restore_log(self, records: Sequence[LogRecord]) -> None:
        """Makes the log what it was at a checkpoint. Only rank 0 acts."""

    def log(self, record: LogRecord) -> None:
        """Adds a record to the run's log and shows it; cheap. Only rank 0 acts."""

    def tell(self, event: Event) -> None:
        """Shows something that is not part of the log. Only rank 0 acts."""

    def records(self) -> Sequence[LogRecord]:
        """The log so far; empty but on rank 0."""

    def time_to_save(self) -> bool:
        """Whether the clock asks for a checkpoint, and none is under way. Only rank 0 knows.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """

    def drain(self) -> None:
        """Waits until no snapshot is being committed: its memory is free. Only rank 0 waits."""

    def report(self, metrics: Mapping[str, float], snapshot: Snapshot | None) -> None:
        """Commits a snapshot in the background. All ranks take part; rank 0 brings the snapshot."""

    def saved(self, stall_s: float) -> None:
        """Notes for how long a checkpoint has stopped the training. Only rank 0 acts."""

    def finish(self) -> None:
        """Waits until the last snapshot is committed; CheckpointError if it was not. Rank 0's."""

    def wishes(self) -> Requests:
        """Asked on each rank, once a step, before its compute; cheap."""

    def meanwhile(self) -> Requests:
        """As `wishes`, but before a chunk of an evaluation: no step begins, and nothing can be
        saved; cheap."""

    def look(self) -> None:
        """Looks at what the ranks can see only together; all take part, after the same step.

        What follows from it is among the next `wishes`.
        """

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; a note says where. Only rank 0 acts.

        A storage that fails is told in a note, too, and raises nothing.
        """
