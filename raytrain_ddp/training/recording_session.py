"""The half of a session that is alike with Ray and without: what rank 0 writes and says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, RaytrainError
from raytrain_ddp.events import LogRecord, Note, Plan
from raytrain_ddp.messages import Event
from raytrain_ddp.training.async_checkpoint import with_backoff
from raytrain_ddp.training.hang_diagnosis import Hang
from raytrain_ddp.training.phase_clock import STARTING, Clock
from raytrain_ddp.training.recorder import Best, Recorder
from raytrain_ddp.training.rendezvous import Exchange, exchange_owners
from raytrain_ddp.training.watchdog import WRITING, Watchdog
from raytrain_ddp.training.world import World, broadcast

Pause = Callable[[float, OSError], bool]


@dataclass(frozen=True)
class PatientCheckpoint(Checkpoint):
    """A checkpoint whose files are asked for again where the storage does not answer.

    Args:
        pause: see `with_backoff`.
    """

    pause: Pause

    def read(self, filename: str) -> bytes:
        """Raises a CheckpointError, also where the storage fails for good."""
        try:
            return with_backoff(lambda _: Checkpoint.read(self, filename), self.pause)
        except OSError as error:
            raise _failing(self.storage, error) from error


class RecordingSession:
    """A session but for `wrap`, `report`, `wishes` and `look`; only rank 0 has a recorder.

    Args:
        show: is given each event on rank 0, also from the threads that commit and watch.

    Attributes:
        hosts: of all ranks; empty before `watch`.
    """

    def __init__(
        self, config: TrainConfig, world: World, best: Best, show: Callable[[Event], None]
    ) -> None:
        self.world = world
        self._show = show
        self._run, self._hang_s = run_storage(config), config.scaling.hang_s
        self._storage = checkpoint_store(self._run).storage
        self._watchdog: Watchdog | None = None
        self._clock: Clock | None = None
        self.hosts: list[str] = []
        self.recorder = Recorder(config, world, best, show) if world.is_main else None

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        owners = exchange_owners(self.world)
        self.hosts = [owner.host for owner in owners]
        exchange = self.meeting(owners)
        if self._hang_s and exchange is not None:
            self._watchdog = Watchdog(
                clock,
                self._hang_s,
                self.world.rank,
                owners,
                self._run,
                exchange,
                self.state,
                self.hung,
            )

    def meeting(self, owners: Sequence[Owner]) -> Exchange | None:
        """Where ranks that get on no more say so; None: nobody watches."""
        raise NotImplementedError

    def state(self, owner: Owner) -> str:
        """Of a worker's process, as `Owner.state` has it; "" where nobody sees it."""
        return owner.state()

    def hung(self, hang: Hang) -> None:
        """Tells of it, and ends this process."""
        raise NotImplementedError

    def latest(self) -> Checkpoint | None:
        """From the storage, not from Ray's register: that lags behind by a poll, and a checkpoint
        that it lists may be damaged.

        Raises:
            CheckpointError: there is none where there must be one, or the storage fails.
            RunLockedError: another start claims the run at this moment.
        """
        found: tuple[CheckpointName, Manifest] | RaytrainError | OSError | None = None
        if self.recorder is not None:
            try:
                newest = self.recorder.begin()
                found = (newest.name, newest.manifest) if newest is not None else None
            except (RaytrainError, OSError) as error:
                found = error
        found = broadcast(found, self.world)
        if isinstance(found, RaytrainError):
            raise found
        if isinstance(found, OSError):
            raise _failing(self._storage, found) from found
        if found is None:
            return None
        name, manifest = found
        place = self._storage.join(str(name))
        return PatientCheckpoint(name, manifest, place, self._trying_again)

    def restore_log(self, records: Sequence[LogRecord]) -> None:
        if self.recorder is not None:
            self.recorder.log.restore(records)

    def log(self, record: LogRecord) -> None:
        if self.recorder is not None:
            with self._doing(WRITING):
                self.recorder.log.add(record)
            self.tell(record)

    def tell(self, event: Event) -> None:
        if self._watchdog is not None and isinstance(event, Plan):
            self._watchdog.begin(event.start_step)
        if self.world.is_main:
            with self._doing(WRITING):
                self._show(event)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Has the watchdog know what rank 0 does while the others wait for it."""
        if self._clock is None or self._clock.doing in ("checkpoint", "evaluation", STARTING):
            yield
            return
        before, self._clock.doing = self._clock.doing, what
        try:
            yield
        finally:
            self._clock.doing = before

    def records(self) -> Sequence[LogRecord]:
        return self.recorder.log.records if self.recorder is not None else ()

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        if self.recorder is not None:
            with self._doing(WRITING):
                self.recorder.keep(name, document)

    def time_to_save(self) -> bool:
        return self.recorder is not None and self.recorder.time_to_save()

    def drain(self) -> None:
        if self.recorder is not None:
            with self._doing("checkpoint"):
                self.recorder.drain()

    def saved(self, stall_s: float) -> None:
        if self.recorder is not None:
            self.recorder.saved(stall_s)

    def finish(self) -> None:
        self._watch_no_more()
        if self.recorder is not None:
            self.recorder.finish()

    def close(self) -> None:
        """Waits for the commit that is under way; after an error the others wait meanwhile."""
        if self.recorder is not None:
            with self._doing("checkpoint"):
                self.recorder.close()
        self._watch_no_more()

    def _watch_no_more(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def _trying_again(self, wait_s: float, error: OSError) -> bool:
        text = f"{self._storage} does not answer ({error}): trying again in {wait_s:.1f} s."
        self.tell(Note(text))
        time.sleep(wait_s)
        return True


def _failing(storage: Storage, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the storage of {storage} fails: {' '.join(str(error).split())}. Mend it or make room: "
        "the same command then goes on from the newest checkpoint."
    )
