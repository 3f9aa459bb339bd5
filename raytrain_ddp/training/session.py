"""The seam between the loop and whatever runs it: Ray, torchrun or a plain process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.training.world import World

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """What becomes a checkpoint: host copies that no later step changes.

    Args:
        manifest: without its files.
        tensors: file stem -> name -> tensor.
        documents: file name -> JSON-able value.
    """

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, Any]


class Session(Protocol):
    """What the loop needs from outside. RaySession and LocalSession are the two kinds."""

    world: World

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """The model in DistributedDataParallel with `options`; itself if it is alone."""

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole. All ranks take part and get the same."""

    def restore_log(self, records: Sequence[Record]) -> None:
        """Makes the log what it was at a checkpoint. Only rank 0 acts."""

    def log(self, record: Record) -> None:
        """Adds a record to the run's log and shows it; cheap. Only rank 0 acts."""

    def tell(self, event: Record) -> None:
        """Shows something that is not part of the log. Only rank 0 acts."""

    def records(self) -> Sequence[Record]:
        """The log so far; empty but on rank 0."""

    def drain(self) -> None:
        """Waits until the last reported snapshot is committed. Only rank 0 waits."""

    def report(self, metrics: Mapping[str, float], snapshot: Snapshot | None) -> None:
        """Commits a snapshot in the background. All ranks take part; rank 0 brings the snapshot."""

    def stop_requested(self) -> int:
        """The number of the signal that asked this run to stop, else 0."""
