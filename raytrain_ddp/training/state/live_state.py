"""The state that a start begins with: the newest checkpoint, or that of survivors of a death.

Each survivor takes a snapshot of the state after its last complete step when it loses a peer. In
the next process group the ranks agree on the most advanced one, and all receive it. It has the
files of a checkpoint, so a start loads it as it loads one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.run_folder import STATE_FILE
from raytrain_ddp.checkpoint.snapshot import Snapshot, encode
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.checkpoint.streams import joined
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.errors import OUTAGE_S, CheckpointError, RaytrainError
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.state.shared_checkpoint import ReceivedCheckpoint, Relay
from raytrain_ddp.training.steps.replica_check import fingerprints

T = TypeVar("T")

OWED_FILE = "owed.json"
"""What was due after the step and has not been done; see `Run.make_up`."""


@dataclass(frozen=True)
class LiveCheckpoint(ReceivedCheckpoint):
    """A live state in the form of a checkpoint that was never stored.

    Args:
        stored_step: the step of the newest stored checkpoint; -1: there is none.
        newcomers: the ranks that had no state.
        timer_runs: whether rank 0's timer of checkpoints continues.
    """

    stored_step: int
    newcomers: tuple[int, ...]
    timer_runs: bool = False


class _Progress(NamedTuple):
    """How far a survivor is. Of those at the same step, the one with more log records is ahead. The
    checkpoint of `best_step` must exist to continue; 0: there was no evaluation."""

    step: int
    records: int
    best_step: int

    @staticmethod
    def of(mine: Snapshot) -> _Progress:
        best_step = mine.documents.get(STATE_FILE, {}).get("best_step", 0)
        return _Progress(mine.manifest.step, len(mine.log), best_step)


def newest_state(
    checkpoints: Checkpoints,
    rated_by: tuple[str, str],
    mine: Snapshot | None,
    world: World,
    existing: Existing | None = None,
) -> Checkpoint | None:
    """The state of survivors, or the newest good checkpoint. All ranks take part and get the same.

    Checkpoints come from the storage, not from Ray's register, which lags behind by one poll and
    may list a damaged checkpoint. If rank 0 has begun already, in the process group before, a state
    of survivors is used without reading any.

    Args:
        rated_by: see `Checkpoints.begin`.
        mine: the state of this process, if it has survived.
        existing: tensors to read into; they must then be loaded from the result, or the run
            must end.

    Raises:
        CheckpointError: there is none although there must be one, or the storage fails.
        RunLockedError: another start is claiming the run.
    """
    relay, place = Relay(world, existing=existing), checkpoints.store.storage

    def of_main(ask: Callable[[], T]) -> T:
        """The answer of rank 0, on all ranks, which also receive what it reads."""
        answer: Any = None
        if world.is_main:
            try:
                answer = ask()
            except (RaytrainError, OSError) as error:
                answer = error
        answer = relay.agree(answer)
        if isinstance(answer, RaytrainError):
            raise answer
        if isinstance(answer, OSError):
            raise CheckpointError(
                f"the storage of {place} fails: {' '.join(str(answer).split())}. Fix it or free "
                "space, then run the same command again to resume from the newest checkpoint."
            ) from answer
        return cast(T, answer)

    def stored(may_read: bool) -> tuple[Checkpoint | None, list[int]]:
        """The newest stored checkpoint, and the steps of all."""

        def begin() -> tuple[Any, list[int]]:
            verify = relay.read_all if may_read else lambda _: None
            newest = checkpoints.begin(rated_by, world.size, verify)
            return newest and (newest.name, newest.manifest), checkpoints.steps()

        found, steps = of_main(begin)
        if found is None:
            return None, steps
        name, manifest = found
        return ReceivedCheckpoint(name, manifest, place.join(str(name)), relay.kept, {}), steps

    # The state of survivors must not be lost because of a storage outage.
    outage_s = OUTAGE_S * any(from_all_ranks(mine is not None, world))
    steps, begun = of_main(lambda: (checkpoints.steps(outage_s), checkpoints.attempt > 0))
    live = _most_advanced(mine, steps, place, world, existing)
    if live is not None and begun:
        return replace(live, timer_runs=True)
    newest, now = stored(may_read=live is None)
    if now != steps:  # a damaged checkpoint was set aside
        before, live = live, _most_advanced(mine, now, place, world, existing)
        if before is not None and live is None:
            newest, _ = stored(may_read=True)
    return live or newest


def _most_advanced(
    mine: Snapshot | None,
    stored: Sequence[int],
    place: Storage,
    world: World,
    existing: Existing | None = None,
) -> LiveCheckpoint | None:
    """Returns the most advanced state of all ranks, the same on each. All ranks take part.

    Returns None if there is none, or if the newest checkpoint is to be used instead: it is newer;
    or the best weights are lost (rank 0 died while it committed them), but training from the
    checkpoint computes them again; or survivors at the same step have different weights, and it is
    unknown which are right.

    Args:
        stored: the steps of all checkpoints, the same on all ranks.
        place: where they are stored; for messages.
        existing: see `Relay`.
    """
    progress = from_all_ranks(None if mine is None else _Progress.of(mine), world)
    survivors = {rank: each for rank, each in enumerate(progress) if each is not None}
    stored_step = max(stored, default=-1)
    if not survivors:
        return None
    source = max(survivors, key=lambda rank: (survivors[rank][:2], -rank))
    newest = survivors[source]
    alike = [each is not None and each.step == newest.step for each in progress]
    is_lost = newest.step != newest.best_step > max(stored_step, 0)
    if newest.step < stored_step or is_lost:
        return None
    if sum(alike) > 1:
        digests = from_all_ranks(_digest(mine) if mine and alike[world.rank] else None, world)
        if len({*digests} - {None}) > 1:
            return None
    known = dict[str, Mapping[str, Tensor]]()
    if mine is not None and alike[world.rank]:
        known = {f"{stem}.safetensors": tensors for stem, tensors in mine.tensors.items()}
    # The same bytes again change nothing, if a rank has them already.
    relay = Relay(world, source, known or existing)
    if mine is not None and source == world.rank:
        for name, content in encode(mine).items():
            pieces = [content] if isinstance(content, bytes) else [*content]
            if name not in known:
                relay.send(name, pieces)
                relay.kept[name] = joined(pieces)
            elif not all(alike):
                relay.send(name, pieces, head=bytes(pieces[0]))
    manifest = relay.agree(None if mine is None else mine.manifest)
    assert manifest is not None  # the source has one
    return LiveCheckpoint(
        name=CheckpointName(manifest.step, 0),
        manifest=manifest,
        storage=place,
        files={n: content for n, content in relay.kept.items() if n not in known},
        own=known,
        stored_step=stored_step,
        newcomers=tuple(rank for rank in range(world.size) if rank not in survivors),
    )


def _digest(mine: Snapshot) -> bytes:
    """A digest of the bits of all tensors; the other files have times of this rank."""
    named = {(stem, name): t for stem, held in mine.tensors.items() for name, t in held.items()}
    every = fingerprints([named[place] for place in sorted(named)])
    return hashlib.sha256(every.numpy().tobytes()).digest()
