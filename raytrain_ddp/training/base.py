"""The half of a session that is alike with Ray and without: what rank 0 writes and says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain_ddp.checkpoint.layout import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.training.recorder import Best, Recorder
from raytrain_ddp.training.session import Record
from raytrain_ddp.training.world import World, broadcast


class RecordingSession:
    """A session but for `wrap`, `report`, `wishes` and `look`; only rank 0 has a recorder.

    Args:
        show: is given each event on rank 0, also from the thread that commits.
    """

    def __init__(
        self, config: TrainConfig, world: World, best: Best, show: Callable[[Record], None]
    ) -> None:
        self.world = world
        self._show = show
        self._store = checkpoint_store(run_storage(config))
        self.recorder = Recorder(config, world, best, show) if world.is_main else None

    def latest(self) -> Checkpoint | None:
        """From the storage, not from Ray's register: that lags behind by a poll, and a checkpoint
        that it lists may be damaged."""
        found: tuple[CheckpointName | None, RaytrainError | OSError | None] = (None, None)
        if self.recorder is not None:
            try:
                newest = self.recorder.begin()
                found = (newest.name if newest else None, None)
            except (RaytrainError, OSError) as error:
                found = (None, error)
        name, problem = broadcast(found, self.world)
        if problem is not None:
            raise problem
        return self._store.open(name) if name is not None else None

    def restore_log(self, records: Sequence[Record]) -> None:
        if self.recorder is not None:
            self.recorder.log.restore(records)

    def log(self, record: Record) -> None:
        if self.recorder is not None:
            self.recorder.log.add(record)
            self.tell(record)

    def tell(self, event: Record) -> None:
        if self.world.is_main:
            self._show(event)

    def records(self) -> Sequence[Record]:
        return self.recorder.log.records if self.recorder is not None else ()

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.keep(name, document)

    def time_to_save(self) -> bool:
        return self.recorder is not None and self.recorder.time_to_save()

    def drain(self) -> None:
        if self.recorder is not None:
            self.recorder.drain()

    def saved(self, stall_s: float) -> None:
        if self.recorder is not None:
            self.recorder.saved(stall_s)

    def finish(self) -> None:
        if self.recorder is not None:
            self.recorder.finish()

    def close(self) -> None:
        """Waits for the commit that is under way."""
        if self.recorder is not None:
            self.recorder.close()
