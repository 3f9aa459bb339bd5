"""What a start continues from: the state of survivors, or the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointStore
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.training.recording.recorder import Recorder
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.state.async_checkpoint import OUTAGE_S
from raytrain_ddp.training.state.live_state import LiveState, most_advanced
from raytrain_ddp.training.state.shared_checkpoint import Relay, SharedCheckpoint, failing

T = TypeVar("T")


@dataclass
class NewestState:
    """Finds it; all ranks take part in everything.

    Args:
        recorder: of rank 0.
        live: the state that this process has, if it survived others.
        pause: waits before a retry, see `with_backoff`.
    """

    world: World
    store: CheckpointStore
    recorder: Recorder | None
    live: LiveState | None
    pause: Callable[[float, OSError], bool]

    def find(self, existing: Existing | None) -> Checkpoint | None:
        """From the storage, not from Ray's register: that lags behind by one poll, and may list a
        damaged checkpoint. A recorder that goes on from the generation before has claimed the run
        already, and reads nothing.

        Raises:
            CheckpointError: there is none although there must be one, or the storage fails.
            RunLockedError: another start is claiming the run.
        """
        relay = Relay(self.world, existing=existing)
        # A state that survivors have must not be lost to an outage of the storage.
        outage_s = OUTAGE_S * any(from_all_ranks(self.live is not None, self.world))
        steps, begun = self._of_main(lambda r: (r.steps(outage_s), r.may_go_on()), relay)
        place = self.store.storage
        live = most_advanced(self.live, steps, place, self.world, existing)
        if live is not None and begun:
            return replace(live, timer_runs=True)
        stored, now = self._stored(relay, may_read=live is None)
        if now != steps:  # a damaged one was set aside
            before = live
            live = most_advanced(self.live, now, place, self.world, existing)
            if before is not None and live is None:
                stored, _ = self._stored(relay, may_read=True)
        return live or stored

    def _stored(self, relay: Relay, may_read: bool) -> tuple[SharedCheckpoint | None, list[int]]:
        """The newest stored checkpoint, and the steps of all. Survivors that continue from their
        own state do not read it."""

        def begin(recorder: Recorder) -> tuple[Any, list[int]]:
            newest = recorder.begin(relay.read_all if may_read else lambda _: None)
            return newest and (newest.name, newest.manifest), recorder.steps()

        found, steps = self._of_main(begin, relay)
        if found is None:
            return None, steps
        place = self.store.storage.join(str(found[0]))
        return SharedCheckpoint(found[0], found[1], place, self.pause, self.world, relay), steps

    def _of_main(self, ask: Callable[[Recorder], T], relay: Relay) -> T:
        """What rank 0's recorder answers, on all ranks; they receive what it reads."""
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
            raise failing(self.store.storage, answer) from answer
        return cast(T, answer)
