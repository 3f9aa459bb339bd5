"""What a run needs from its environment: other ranks, checkpoints, the log, and its observers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.recorder import Best, Recorder
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.events import LogRecord, Note, Plan
from raytrain_ddp.messages import Event
from raytrain_ddp.retries import OUTAGE_S
from raytrain_ddp.training.monitoring.step_timing import STARTING, Clock
from raytrain_ddp.training.monitoring.watchdog import WRITING, Exchange, Hang, Watchdog
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.state.live_state import LiveState, most_advanced
from raytrain_ddp.training.state.shared_checkpoint import Relay, SharedCheckpoint, failing

S = TypeVar("S", bound="Session")
T = TypeVar("T")


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


class Session:
    """What a run in one process group needs from its environment; only rank 0 has a recorder.

    `requests` and `look`, and how ranks are watched, depend on whether Ray is used: see RaySession
    and LocalSession.

    Args:
        show: receives each event on rank 0, also from the committing and watching threads.
        live: the state of this process, if it has survived the loss of other ranks.

    Attributes:
        hosts: the hosts of all ranks; empty before `watch`.
        only_main_asks: whether `requests` of ranks other than 0 are always empty.
        is_continued: whether another generation follows.
        suspended: the recorder that continues in the next generation; set by `close`.
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
        self.world, self.hosts = world, list[str]()
        self._show, self._live = show, live
        self._run, self._hang_s = run_storage(config), config.scaling.hang_s
        self._checkpoints = checkpoint_store(self._run).storage
        self._watchdog: Watchdog | None = None
        self._clock: Clock | None = None
        self._take_live: Callable[[], Snapshot | None] | None = None
        self.recorder = Recorder(config, world.size, best, show) if world.is_main else None
        self._closing = threading.Event()
        self._records = self.recorder.log.records if self.recorder else list[LogRecord]()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the other ranks

    def watch(self, clock: Clock) -> None:
        """Until `finish`, workers that make no progress are ended. All ranks take part."""
        self._clock = clock
        owners = from_all_ranks(Owner.here(), self.world)
        self.hosts = [owner.host for owner in owners]
        exchange = self.status_exchange(owners)
        if self._hang_s and exchange is not None:
            self._watchdog = Watchdog(
                clock,
                self._hang_s,
                self.world,
                owners,
                self._run,
                exchange,
                self.report_hang,
                self.has_ended,
            )

    def status_exchange(self, owners: Sequence[Owner]) -> Exchange | None:
        """The exchange for ranks that make no progress; None: there is no watchdog."""
        raise NotImplementedError

    def report_hang(self, hang: Hang) -> None:
        """Reports the hang, and ends this process, or its collectives."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Whether the other ranks have left this session, because a rank was lost."""
        return False

    def wrap(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """The model in DistributedDataParallel with `options`; unchanged for a single worker."""
        device = self.world.device
        model = model.to(device)
        if self.world.size == 1:
            return model
        devices = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, **options)

    def require_ranks(self) -> None:
        """Called during a step; raises an error if another rank is gone, so that the step cannot
        end. It is cheap, and does not wait for the device."""

    def confirm(self) -> None:
        """Called before the results of a step's collectives change the state; raises an error if a
        rank was lost before all of them were done."""

    def requests(self) -> Requests:
        """This rank's requests. Called once per step, before its compute; must be cheap."""
        raise NotImplementedError

    def requests_in_evaluation(self) -> Requests:
        """Like `requests`, but called before each chunk of an evaluation, when nothing can be
        saved. Must be cheap."""
        raise NotImplementedError

    def look(self) -> None:
        """Checks what the ranks can see only together; all take part, after the same step.

        The consequences are among the next `requests`.
        """

    # ------------------------------------------------------------------ states and checkpoints

    def latest(self, existing: Existing | None = None) -> Checkpoint | None:
        """The state of survivors, or the newest good checkpoint. All ranks take part and get the
        same result.

        Checkpoints come from the storage, not from Ray's register, which lags behind by one poll
        and may list a damaged checkpoint. A recorder that continues from the previous generation
        has already claimed the run, and reads nothing.

        Args:
            existing: tensors to read into; they must then be loaded from the result, or the run
                must end.

        Raises:
            CheckpointError: there is none although there must be one, or the storage fails.
            RunLockedError: another start is claiming the run.
        """
        world, relay = self.world, Relay(self.world, existing=existing)
        # The state of survivors must not be lost because of a storage outage.
        outage_s = OUTAGE_S * any(from_all_ranks(self._live is not None, world))
        steps, begun = self._of_main(lambda r: (r.steps(outage_s), r.may_go_on()), relay)
        live = most_advanced(self._live, steps, self._checkpoints, world, existing)
        if live is not None and begun:
            return replace(live, timer_runs=True)
        stored, now = self._stored(relay, may_read=live is None)
        if now != steps:  # a damaged checkpoint was set aside
            before = live
            live = most_advanced(self._live, now, self._checkpoints, world, existing)
            if before is not None and live is None:
                stored, _ = self._stored(relay, may_read=True)
        return live or stored

    def _stored(self, relay: Relay, may_read: bool) -> tuple[SharedCheckpoint | None, list[int]]:
        """The newest stored checkpoint, and the steps of all checkpoints. Survivors that continue
        from their own state do not read it."""

        def begin(recorder: Recorder) -> tuple[Any, list[int]]:
            newest = recorder.begin(relay.read_all if may_read else lambda _: None)
            return newest and (newest.name, newest.manifest), recorder.steps()

        found, steps = self._of_main(begin, relay)
        if found is None:
            return None, steps
        name, manifest = found
        place, again = self._checkpoints.join(str(name)), self._trying_again
        return SharedCheckpoint(name, manifest, place, again, self.world, relay), steps

    def _of_main(self, ask: Callable[[Recorder], T], relay: Relay) -> T:
        """The answer of rank 0's recorder, on all ranks, which also receive what it reads."""
        answer: Any = None
        if self.recorder is not None:
            try:
                answer = ask(self.recorder)
            except (RaytrainError, OSError) as error:
                answer = error
        answer = relay.agree(answer)
        if isinstance(answer, RaytrainError):
            raise answer
        if isinstance(answer, OSError):
            raise failing(self._checkpoints, answer) from answer
        return cast(T, answer)

    def _trying_again(self, wait_s: float, error: OSError) -> bool:
        said = f"{self._checkpoints} does not respond ({error})"
        self.tell(Note(f"{said}: retrying in {wait_s:.1f} s."))
        return not self._closing.wait(wait_s)

    def begin(self, take_live: Callable[[], Snapshot | None]) -> None:
        """Begins the training: from now on, a rank that loses a peer calls `take_live` to take the
        state after the last complete step. None means that no rank could continue from it.
        """
        self._live, self._take_live = None, take_live

    def live_state(self) -> LiveState | None:
        """The state of this process; None if other ranks could not continue from it."""
        take, self._take_live = self._take_live, None  # the run can be freed then
        if take is None:
            return self._live
        taken = take()
        return None if taken is None else LiveState.of(taken)

    def time_to_save(self) -> bool:
        """Whether a checkpoint is due by time, and none is being committed. Only rank 0 knows.

        Raises:
            CheckpointError: too many commits in a row have failed.
            RunLockedError: a later start of this run has taken over.
        """
        return self.recorder is not None and self.recorder.time_to_save()

    def drain(self) -> None:
        """Waits until no snapshot is being written: its memory is free. Only rank 0 acts."""
        if self.recorder is not None:
            with self._doing("checkpoint"):
                self.recorder.drain()

    def commit(self, snapshot: Snapshot | None) -> None:
        """Commits a snapshot in the background. Only rank 0 acts, and only it has one."""
        if self.recorder is not None and snapshot is not None:
            self.recorder.committer.submit(snapshot)

    def is_committing(self) -> bool:
        """Whether this rank is committing a snapshot, whose memory is in use."""
        return self.recorder is not None and self.recorder.committer.is_busy()

    def saved(self, stall_s: float) -> None:
        """Records how long a checkpoint blocked the training. Only rank 0 acts."""
        if self.recorder is not None:
            self.recorder.timer.saved(stall_s)

    # ------------------------------------------------------------------ what is shown and logged

    def restore_log(self, records: Sequence[LogRecord]) -> None:
        """Restores the log from a checkpoint."""
        if self.recorder is not None:
            self.recorder.log.restore(records)
        else:
            self._records[:] = records

    def log(self, record: LogRecord) -> None:
        """Adds a record, the same on all ranks, to the run's log; rank 0 shows it. It is cheap."""
        if self.recorder is None:
            self._records.append(record)
            return
        with self._doing(WRITING):
            self.recorder.log.add(record)
        self.tell(record)

    def records(self) -> Sequence[LogRecord]:
        """The log so far."""
        return self._records

    def tell(self, event: Event) -> None:
        """Shows an event that is not part of the log. Only rank 0 acts."""
        if self._watchdog is not None and isinstance(event, Plan):
            self._watchdog.begin(event.start_step)
        if self.world.is_main:
            with self._doing(WRITING):
                self._show(event)

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """Writes a JSON file into the run's folder; a note says where. Only rank 0 acts.

        A storage failure is reported in a note as well, and raises nothing.
        """
        if self.recorder is not None:
            with self._doing(WRITING):
                self.recorder.keep(name, document)

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

    # ------------------------------------------------------------------ its end

    def finish(self) -> None:
        """Waits for the last commit; raises CheckpointError if it failed. Only rank 0 acts."""
        self._watch_no_more()
        if self.recorder is not None:
            self.recorder.finish()

    def close(self) -> None:
        """Waits for the current commit, unless it continues in the next generation."""
        self._closing.set()
        with self._doing("checkpoint"):
            if self.recorder is not None:
                if self.is_continued and self.recorder.may_go_on():
                    self.suspended = self.recorder
                else:
                    self.recorder.close()
        self._watch_no_more()

    def take_over(self, recorder: Recorder | None) -> None:
        """Continues with the recorder of the previous generation, which this process has; or closes
        it, if another process is rank 0 now and has claimed nothing yet."""
        if recorder is not None and self.recorder is not None:
            recorder.resume(self.world.size, self._show)
            self.recorder, self._records = recorder, recorder.log.records
        elif recorder is not None:
            recorder.close()

    def _watch_no_more(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
