"""What sessions with and without Ray have in common: recording on rank 0, and the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import LogRecord, Note, Plan
from raytrain_ddp.messages import Event
from raytrain_ddp.training.monitoring.hang_diagnosis import Hang
from raytrain_ddp.training.monitoring.phase_clock import STARTING, Clock
from raytrain_ddp.training.monitoring.rendezvous import Exchange
from raytrain_ddp.training.monitoring.watchdog import WRITING, Watchdog
from raytrain_ddp.training.recording.newest_state import NewestState
from raytrain_ddp.training.recording.recorder import Best, Recorder
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.session import Snapshot
from raytrain_ddp.training.state.live_state import LiveState

S = TypeVar("S", bound="RecordingSession")


class RecordingSession:
    """A session except for `requests` and `look`; only rank 0 has a recorder.

    Args:
        show: receives each event on rank 0, also from the committing and watching threads.
        live: the state that this process has, if it survived others.

    Attributes:
        hosts: of all ranks; empty before `watch`.
        is_continued: another generation follows.
        suspended: the recorder that goes on in it, after `close`.
    """

    only_main_asks = is_continued = False
    suspended: Recorder | None = None

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        best: Best,
        show: Callable[[Event], None],
        live: LiveState | None = None,
    ) -> None:
        self.world = world
        self._show = show
        self._run, self._hang_s = run_storage(config), config.scaling.hang_s
        self._store = checkpoint_store(self._run)
        self._watchdog: Watchdog | None = None
        self._clock: Clock | None = None
        self.hosts: list[str] = []
        self._take_live: Callable[[], Snapshot | None] | None = None
        self._live = live
        self.recorder = Recorder(config, world, best, show) if world.is_main else None
        self._closing = threading.Event()
        self._records = self.recorder.log.records if self.recorder else list[LogRecord]()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, clock: Clock) -> None:
        self._clock = clock
        owners = from_all_ranks(Owner.here(), self.world)
        self.hosts = [owner.host for owner in owners]
        exchange = self.status_exchange(owners)
        if self._hang_s and exchange is not None:
            self._watchdog = Watchdog(
                clock,
                self._hang_s,
                self.world.rank,
                owners,
                self._run,
                exchange,
                self.state,
                self.report_hang,
                self.world.of_run,
                self.has_ended,
            )

    def has_ended(self) -> bool:
        """Whether the other ranks have left this session, because a rank was lost."""
        return False

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        device = self.world.device
        model = model.to(device)
        if self.world.size == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **options)

    def require_ranks(self) -> None: ...

    def confirm(self) -> None: ...

    def status_exchange(self, owners: Sequence[Owner]) -> Exchange | None:
        """The exchange for ranks that make no progress; None: there is no watchdog."""
        raise NotImplementedError

    def state(self, owner: Owner) -> str:
        """The state of a worker's process, as `Owner.state`; "" if unknown."""
        return owner.state()

    def report_hang(self, hang: Hang) -> None:
        """Reports the hang, and ends this process, or its collectives."""
        raise NotImplementedError

    def latest(self, existing: Existing | None = None) -> Checkpoint | None:
        search = NewestState(
            self.world,
            self._store,
            self.recorder,
            self._live,
            self._trying_again,
        )
        return search.find(existing)

    def begin(self, take_live: Callable[[], Snapshot | None]) -> None:
        self._live, self._take_live = None, take_live

    def live_state(self) -> LiveState | None:
        """The state that this process has; None if others could not continue from it."""
        take, self._take_live = self._take_live, None  # the run is free then
        if take is None:
            return self._live
        taken = take()
        return None if taken is None else LiveState.of(taken)

    def restore_log(self, records: Sequence[LogRecord]) -> None:
        if self.recorder is not None:
            self.recorder.log.restore(records)
        else:
            self._records[:] = records

    def log(self, record: LogRecord) -> None:
        if self.recorder is None:
            self._records.append(record)
            return
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
        """Tells the watchdog what rank 0 does while the others wait for it."""
        if self._clock is None or self._clock.doing in ("checkpoint", "evaluation", STARTING):
            yield
            return
        before, self._clock.doing = self._clock.doing, what
        try:
            yield
        finally:
            self._clock.doing = before

    def records(self) -> Sequence[LogRecord]:
        return self._records

    def commit(self, snapshot: Snapshot | None) -> None:
        if self.recorder is not None and snapshot is not None:
            self.recorder.committer.submit(snapshot)

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
            self.recorder.timer.saved(stall_s)

    def finish(self) -> None:
        self._watch_no_more()
        if self.recorder is not None:
            self.recorder.finish()

    def close(self) -> None:
        """Waits for the current commit, unless it goes on in the next generation."""
        self._closing.set()
        with self._doing("checkpoint"):
            if self.recorder is not None:
                if self.is_continued and self.recorder.may_go_on():
                    self.suspended = self.recorder
                else:
                    self.recorder.close()
        self._watch_no_more()

    def take_over(self, recorder: Recorder | None) -> None:
        """Continues with the recorder of the generation before, which this process has; or closes
        it, if another process is rank 0 now and has claimed nothing yet."""
        if recorder is not None and self.recorder is not None:
            recorder.resume(self.world, self._show)
            self.recorder, self._records = recorder, recorder.log.records
        elif recorder is not None:
            recorder.close()

    def is_committing(self) -> bool:
        return self.recorder is not None and self.recorder.committer.is_busy()

    def _watch_no_more(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    def _trying_again(self, wait_s: float, error: OSError) -> bool:
        said = f"{self._store.storage} does not respond ({error})"
        self.tell(Note(f"{said}: retrying in {wait_s:.1f} s."))
        return not self._closing.wait(wait_s)
