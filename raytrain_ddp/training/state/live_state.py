"""The state after the last complete step, in memory: survivors of a death continue from it.

It has the files of a checkpoint, so a start loads it as it loads one. Each survivor takes its own
when it loses a peer; in the next process group the ranks agree on the most advanced one, and all
receive it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import STATE_FILE
from raytrain_ddp.checkpoint.snapshot import Snapshot, encode
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.checkpoint.streams import BytesLike, joined
from raytrain_ddp.checkpoint.tensor_places import Existing, TensorPlaces
from raytrain_ddp.training.runtime.fingerprints import fingerprints
from raytrain_ddp.training.runtime.world import World, from_all_ranks
from raytrain_ddp.training.state.shared_checkpoint import Relay, tensors_in

OWED_FILE = "owed.json"
"""What was due after the step and has not been done; see `Run.make_up`."""


@dataclass(frozen=True)
class LiveState:
    """The state of one rank.

    Args:
        files: file name -> content, in pieces, most of which are the snapshot's memory.
        tensors: those in the files.
        records: of the log so far: of ranks at the same step, the one with more is ahead.
        best_step: the step of the best evaluation so far, whose checkpoint must exist to continue;
            0: none.
    """

    manifest: Manifest
    files: Mapping[str, Sequence[BytesLike]] = field(repr=False)
    tensors: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    records: int
    best_step: int

    @staticmethod
    def of(snapshot: Snapshot) -> LiveState:
        contents = encode(snapshot).items()
        files = {n: [c] if isinstance(c, bytes) else [*c] for n, c in contents}
        tensors = {f"{stem}.safetensors": t for stem, t in snapshot.tensors.items()}
        return LiveState(
            manifest=snapshot.manifest,
            files=files,
            tensors=tensors,
            records=len(snapshot.log),
            best_step=snapshot.documents.get(STATE_FILE, {}).get("best_step", 0),
        )

    def progress(self) -> _Progress:
        return _Progress(self.manifest.step, self.records, self.best_step)

    def digest(self) -> bytes:
        """Of the bits of all tensors; the other files have times of this rank."""
        named = {(f, name): t for f, held in self.tensors.items() for name, t in held.items()}
        every = fingerprints([named[place] for place in sorted(named)])
        return hashlib.sha256(every.numpy().tobytes()).digest()


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """A live state in the form of a checkpoint that was never stored.

    Args:
        files: as they were received; those of tensors are given away once.
        own: the tensors of files that this rank had itself, given away once.
        stored_step: of the newest stored checkpoint; -1: there is none.
        newcomers: the ranks that had no state.
        timer_runs: rank 0's timer of checkpoints goes on.
    """

    files: dict[str, memoryview | TensorPlaces] = field(repr=False)
    own: dict[str, Mapping[str, Tensor]] = field(repr=False)
    stored_step: int
    newcomers: tuple[int, ...]
    timer_runs: bool = False

    def has(self, filename: str) -> bool:
        return filename in self.files or filename in self.own

    def view(self, filename: str) -> memoryview:
        content = self.files[filename]
        assert isinstance(content, memoryview)  # not one of tensors
        return content

    def tensors(self, filename: str) -> dict[str, Tensor]:
        if filename in self.own:
            return dict(self.own.pop(filename))
        return tensors_in(self.files.pop(filename))


class _Progress(NamedTuple):
    step: int
    records: int
    best_step: int


def most_advanced(
    mine: LiveState | None,
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
    progress = from_all_ranks(None if mine is None else mine.progress(), world)
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
        digests = from_all_ranks(mine.digest() if mine and alike[world.rank] else None, world)
        if len({*digests} - {None}) > 1:
            return None
    known = dict(mine.tensors) if mine is not None and alike[world.rank] else {}
    # The same bytes again change nothing, if a rank has them already.
    relay = Relay(world, source, known or existing)
    if mine is not None and source == world.rank:
        for name, pieces in mine.files.items():
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
