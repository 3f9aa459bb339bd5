"""The state after the last complete step, in memory: survivors of a death go on from it.

It has the files of a checkpoint, so a start loads it as it loads one. Each survivor takes its own
when it loses a peer; in the next process group the ranks agree on the most advanced one, and all
receive it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
        taken_s: when it was taken, by this process's monotonic clock.
    """

    manifest: Manifest
    files: Mapping[str, bytes] = field(repr=False)
    records: int
    taken_s: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(snapshot: Snapshot) -> LiveState:
        files = {name: _joined(content) for name, content in encode(snapshot).items()}
        return LiveState(snapshot.manifest, files, len(snapshot.log))


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """A live state in the form of a checkpoint that was never stored.

    Args:
        stored_step: of the newest stored checkpoint; -1: there is none.
        newcomers: the ranks that had no state.
        stood_s: how long the survivors have not trained.
    """

    files: Mapping[str, bytes] = field(repr=False)
    stored_step: int
    newcomers: tuple[int, ...]
    stood_s: float

    def has(self, filename: str) -> bool:
        return filename in self.files

    def read(self, filename: str) -> bytes:
        return self.files[filename]


class _Progress(NamedTuple):
    step: int
    records: int
    stood_s: float


def most_advanced(
    mine: LiveState | None, stored: Checkpoint | None, place: Storage, world: World
) -> LiveCheckpoint | None:
    """The most advanced state of all ranks; None if there is none, or a newer stored checkpoint.

    All ranks take part, and all get the same.

    Args:
        stored: the newest checkpoint, the same on all ranks.
        place: where it would be stored; for messages.
    """
    stood_s = 0.0 if mine is None else time.monotonic() - mine.taken_s
    own = None if mine is None else _Progress(mine.manifest.step, mine.records, stood_s)
    progress: list[_Progress | None] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(progress, own)
    survivors = {rank: each for rank, each in enumerate(progress) if each is not None}
    stored_step = -1 if stored is None else stored.manifest.step
    if not survivors or max(survivors.values()).step < stored_step:
        return None
    source = max(survivors, key=lambda rank: (survivors[rank][:2], -rank))
    found = _broadcast(mine if source == world.rank else None, source, world)
    return LiveCheckpoint(
        name=CheckpointName(found.manifest.step, 0),
        manifest=found.manifest,
        storage=place,
        files=found.files,
        stored_step=stored_step,
        newcomers=tuple(rank for rank in range(world.size) if rank not in survivors),
        stood_s=max(each.stood_s for each in survivors.values()),
    )


def _broadcast(live: LiveState | None, source: int, world: World) -> LiveState:
    """The state of rank `source`, which passes it, on all ranks."""
    sizes = {name: len(data) for name, data in live.files.items()} if live else {}
    head = broadcast((replace(live, files={}), sizes) if live else None, world, source)
    received, sizes = head
    files: dict[str, bytes] = {}
    for name, size in sizes.items():
        data = torch.empty(size, dtype=torch.uint8)
        if live is not None:
            data.numpy()[:] = np.frombuffer(live.files[name], dtype=np.uint8)
        if size:
            dist.broadcast(data, source)
        files[name] = data.numpy().tobytes()
    return LiveState(received.manifest, files, received.records, received.taken_s)


def _joined(content: Content) -> bytes:
    return content if isinstance(content, bytes) else b"".join(map(bytes, content))
