"""The interface between the loop and what runs it: Ray, torchrun or a plain process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.events import LogRecord
from raytrain_ddp.messages import Event
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.runtime.world import World


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: host copies that later steps do not change.

    Args:
        manifest: without its files.
        tensors: file stem -> name -> tensor.
        documents: file name -> JSON-serializable value.
        log: all records so far.
        last: the run ends normally with it.
    """

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, Any]
    log: Sequence[LogRecord] = ()
    last: bool = False


class Requests(NamedTuple):
    """What one rank requests after the current step; all ranks then do what any rank requests.

    Args:
        stop: the number of the signal that stops the run, else 0.
        save: a checkpoint, even if none is due.
        look: that all ranks check together what none can see alone; see `Session.look`.
    """

    stop: int = 0
    save: bool = False
    look: bool = False


class Session(Protocol):
    """What the loop needs from its environment. Implemented by RaySession and LocalSession.

    Attributes:
        hosts: of all ranks; empty before `watch`.
        only_main_asks: whether `requests` of ranks other than 0 are always empty.
    """

    world: World
    hosts: list[str]
    only_main_asks: bool

    def watch(self, clock: Clock) -> None:
        """Until `finish`, workers that make no progress are ended. All ranks take part."""

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """The model in DistributedDataParallel with `options`; unchanged for a single worker."""

    def latest(self, existing: Existing | None = None) -> Checkpoint | None:
        """The newest good checkpoint. All ranks take part and get the same.

        Args:
            existing: may be read into; it is to be loaded from the result, or the run ends.
        """

    def begin(self, take_live: Callable[[], Snapshot | None]) -> None:
        """The training begins: from now on, a rank that loses a peer takes the state after the
        last complete step with `take_live`. If that returns None, no rank could continue from it.
        """

    def restore_log(self, records: Sequence[LogRecord]) -> None:
        """Restores the log of a checkpoint."""

    def log(self, record: LogRecord) -> None:
        """Adds a record to the run's log, the same on all ranks; rank 0 shows it. Cheap."""

    def tell(self, event: Event) -> None:
        """Shows an event that is not part of the log. Only rank 0 acts."""

    def records(self) -> Sequence[LogRecord]:
        """The log so far."""

    def time_to_save(self) -> bool:
        """Whether a checkpoint is due by time, and none is being committed. Only rank 0 knows.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """

    def drain(self) -> None:
        """Waits until no snapshot is being written: its memory is free. Only rank 0 acts."""

    def commit(self, snapshot: Snapshot | None) -> None:
        """Commits a snapshot in the background. Only rank 0 acts, and only it has one."""

    def is_committing(self) -> bool:
        """Whether this rank is committing a snapshot, whose memory is in use."""

    def saved(self, stall_s: float) -> None:
        """Records how long a checkpoint blocked the training. Only rank 0 acts."""

    def finish(self) -> None:
        """Waits for the last commit; CheckpointError if it failed. Only rank 0 acts."""

    def require_ranks(self) -> None:
        """Called during a step; raises an error if another rank is gone, so that the step cannot
        end. Cheap, and without waiting for the device."""

    def confirm(self) -> None:
        """Called before the results of a step's collectives change the state; raises an error if a
        rank was lost before all of them were done."""

    def requests(self) -> Requests:
        """This rank's requests; called once per step, before its compute; cheap."""

    def requests_in_evaluation(self) -> Requests:
        """Like `requests`, but before a chunk of an evaluation, where nothing can be saved;
        cheap."""

    def look(self) -> None:
        """Checks what the ranks can see only together; all take part, after the same step.

        The consequences are among the next `requests`.
        """

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; a note says where. Only rank 0 acts.

        A storage failure is reported in a note as well, and raises nothing.
        """
