"""The state after the last complete step, in memory: survivors of a death go on from it.

It has the files of a checkpoint, so a start loads it as it loads one. Each survivor takes its own
when it loses a peer; in the next process group the ranks agree on the most advanced one, and all
receive it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.storage import Content, Storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName
from raytrain_ddp.training.session import Snapshot
from raytrain_ddp.training.train_state import encode
from raytrain_ddp.training.world import World, broadcast

OWED_FILE = "owed.json"
"""What was due after the step and is not done; see `PreparedRun.make_up`."""


@dataclass(frozen=True)
class LiveState:
    """The state of one rank.

    Args:
        records: of the log so far: of ranks at the same step, the one with more is ahead.
        needed: the steps of checkpoints that must exist to go on: of the best evaluation so far,
            and of those that are yet to be evaluated by another worker.
    """

    manifest: Manifest
    files: Mapping[str, bytes] = field(repr=False)
    records: int
    needed: tuple[int, ...]

    @staticmethod
    def of(snapshot: Snapshot) -> LiveState:
        files = {name: _joined(content) for name, content in encode(snapshot).items()}
        best_step = snapshot.documents["state.json"]["best_step"]
        needed = {best_step, *snapshot.awaited} - {0}
        return LiveState(snapshot.manifest, files, len(snapshot.log), tuple(sorted(needed)))

    def progress(self) -> _Progress:
        digest = hashlib.sha256()
        for name in sorted(self.files):
            if name.endswith(".safetensors"):  # the log has times of this rank
                digest.update(self.files[name])
        step = self.manifest.step
        return _Progress(step, self.records, self.needed, digest.hexdigest())


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """A live state in the form of a checkpoint that was never stored.

    Args:
        stored_step: of the newest stored checkpoint; -1: there is none.
        newcomers: the ranks that had no state.
    """

    files: Mapping[str, bytes] = field(repr=False)
    stored_step: int
    newcomers: tuple[int, ...]

    def has(self, filename: str) -> bool:
        return filename in self.files

    def view(self, filename: str) -> memoryview:
        return memoryview(self.files[filename])


class _Progress(NamedTuple):
    step: int
    records: int
    needed: tuple[int, ...]
    digest: str  # of all tensors


def most_advanced(
    mine: LiveState | None, stored: Sequence[int], place: Storage, world: World
) -> LiveCheckpoint | None:
    """The most advanced state of all ranks. All ranks take part, and all get the same.

    None if there is none, or if the newest checkpoint is better: it is newer, or the best weights,
    or some that are to be evaluated, are in no checkpoint (rank 0 has died while it wrote one), or
    survivors at the same step have different weights, of which nobody knows which are right.

    Args:
        stored: the steps of all checkpoints, the same on all ranks.
        place: where they are stored; for messages.
    """
    own = None if mine is None else mine.progress()
    progress: list[_Progress | None] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(progress, own)
    survivors = {rank: each for rank, each in enumerate(progress) if each is not None}
    stored_step = max(stored, default=-1)
    if not survivors:
        return None
    source = max(survivors, key=lambda rank: (survivors[rank][:2], -rank))
    newest = survivors[source]
    equal = {each.digest for each in survivors.values() if each.step == newest.step}
    has_needed = {newest.step, *stored}.issuperset(newest.needed)
    if newest.step < stored_step or len(equal) > 1 or not has_needed:
        return None
    found = _broadcast(mine if source == world.rank else None, source, world)
    return LiveCheckpoint(
        name=CheckpointName(found.manifest.step, 0),
        manifest=found.manifest,
        storage=place,
        files=found.files,
        stored_step=stored_step,
        newcomers=tuple(rank for rank in range(world.size) if rank not in survivors),
    )


def _broadcast(live: LiveState | None, source: int, world: World) -> LiveState:
    """The state of rank `source`, which passes it, on all ranks."""
    sizes = {name: len(data) for name, data in live.files.items()} if live else {}
    head = broadcast((replace(live, files={}), sizes) if live else None, world, source)
    received: LiveState = head[0]
    files: dict[str, bytes] = {}
    for name, size in head[1].items():
        data = torch.empty(size, dtype=torch.uint8)
        if live is not None:
            data.numpy()[:] = np.frombuffer(live.files[name], dtype=np.uint8)
        if size:
            dist.broadcast(data, source)
        files[name] = data.numpy().tobytes()
    return replace(received, files=files)


def _joined(content: Content) -> bytes:
    return content if isinstance(content, bytes) else b"".join(map(bytes, content))
