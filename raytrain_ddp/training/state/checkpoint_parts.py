"""Parts of a checkpoint that ranks other than 0 write, each its share of the optimizer's state.

A large state is stored in several files, which depend on nothing but its tensors. They are divided
among a few ranks, on different hosts if there are some: all ranks have the same state, so nothing
is sent. For each of its files, a rank

    1. copies the tensors to the host, and training continues,
    2. writes `optimizer-3.safetensors` into the folder of the checkpoint, and hashes it meanwhile,
    3. seals it: writes `optimizer-3.seal.json`, with its size and sha256, in one move.

Rank 0 writes the other files, waits for all seals, and then writes the manifest: it alone decides
that there is a checkpoint. A file with a seal does not change any more. If a rank dies, no seal
appears; if it cannot write, the seal says why: then there is no checkpoint, and what was written is
a leftover, like that of a killed writer. The folder's name has the attempt, so a writer that was
replaced without knowing it never writes into its successor's folder. Ranks share nothing for this
but the storage: no collective runs in a background thread.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from raytrain_ddp.checkpoint.manifest import FileEntry
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.optimizer.optimizer_shares import deal
from raytrain_ddp.training.state.async_checkpoint import with_backoff

LEAST_BYTES = 2**30  # of an optimizer's state that is stored in several files
PARTS = 8
OPTIMIZER = "optimizer"
OPTIMIZER_STEMS = (OPTIMIZER, *(f"{OPTIMIZER}-{number}" for number in range(PARTS)))

_SEAL = ".seal.json"
_POLL_S = 0.1
_LONGEST_POLL_S = 1.0
_LONGEST_S = 300.0  # rank 0 waits so long, or several times as long as its own files took
_TIMES = 4
_CLOSING_S = 5.0  # after the last seal, as the session ends: a rank that lives may be a bit later

Names = Mapping[str, Sequence[str]]  # file's stem -> names of its tensors


def stems_of(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The files of an optimizer's state; the same for any number of workers."""
    if sum(each.nbytes for each in tensors.values()) < LEAST_BYTES:
        return {OPTIMIZER: [*tensors]}
    found: dict[str, list[str]] = {}
    for name, part in zip(tensors, deal([t.nbytes for t in tensors.values()], PARTS), strict=True):
        found.setdefault(f"{OPTIMIZER}-{part}", []).append(name)
    return dict(sorted(found.items()))


def divided(
    tensors: Mapping[str, Tensor], model: Collection[Tensor], hosts: Sequence[str], size: int
) -> Sequence[Names]:
    """By rank, the files of an optimizer's state that it writes; equal on all ranks.

    Args:
        model: what rank 0 has to write besides.
        hosts: of all ranks; empty: one.
    """
    stems, other_bytes = stems_of(tensors), sum(each.nbytes for each in model)
    found: list[dict[str, list[str]]] = [{} for _ in range(size)]
    ranks = _writers(hosts or [""] * size) if len(stems) > 1 else [0]
    loads = {rank: 0 if rank else other_bytes for rank in ranks}
    for stem, names in stems.items():
        rank = min(loads, key=lambda rank: (loads[rank], rank))
        loads[rank] += sum(tensors[name].nbytes for name in names)
        found[rank][stem] = names
    return found


def _writers(hosts: Sequence[str]) -> list[int]:
    """At most PARTS ranks, 0 among them: the first of each host, then the second ones."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rows = zip_longest(*by_host.values())
    return [rank for row in rows for rank in row if rank is not None][:PARTS]


def backup_rank(hosts: Sequence[str]) -> int:
    """The rank that keeps a copy of what rank 0 commits: on another host, if there is one."""
    return next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


class PartWriter:
    """Writes the files of a rank other than 0 in a background thread, one snapshot at a time."""

    def __init__(self, rank: int, sleep: Callable[[float], bool]) -> None:
        self._rank, self._sleep = rank, sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="part writer")
        self._under_way: Future[None] | None = None

    def submit(self, folder: Storage, step: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The tensors' memory is in use until `wait` returns.

        Args:
            files: stem -> name -> tensor.
        """
        self.wait()
        self._under_way = self._thread.submit(self._write, folder, step, files)

    def wait(self) -> None:
        """Until nothing is being written; raises nothing: rank 0 reports what has failed."""
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, folder: Storage, step: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        def write(stem: str, _: int) -> dict[str, object]:
            folder.mkdir()
            size_bytes, sha256 = folder.write(f"{stem}.safetensors", encode_tensors(files[stem]))
            failpoint("checkpoint.part", self._rank, step)
            return {"size_bytes": size_bytes, "sha256": sha256}

        def seal(stem: str, entry: Mapping[str, object], _: int) -> None:
            _seal(folder, stem, entry)
            failpoint("checkpoint.sealed", self._rank, step)

        def pause(wait_s: float, _: OSError) -> bool:
            return self._sleep(wait_s)

        for stem in files:
            try:
                entry = with_backoff(partial(write, stem), pause)
                # Apart: once there may be a seal, the file is not written again.
                with_backoff(partial(seal, stem, entry), pause)
            except Exception as error:
                try:
                    _seal(folder, stem, {"error": f"rank {self._rank}: {error}"})
                except OSError:
                    logging.getLogger(__name__).warning(f"{folder}: {error}")
                return


def _seal(folder: Storage, stem: str, content: Mapping[str, object]) -> None:
    folder.write_atomic(stem + _SEAL, json.dumps(content).encode())


def _seal_of(folder: Storage, stem: str) -> dict[str, Any]:
    """Empty if there is none, or half of one, as a file system without atomic writes may show."""
    try:
        found: dict[str, Any] = json.loads(folder.read(stem + _SEAL))
        return found
    except (FileNotFoundError, ValueError):
        return {}


def sealed(
    folder: Storage, stems: Collection[str], step: int, wait: Callable[[float], bool], own_s: float
) -> dict[str, FileEntry]:
    """The files that other ranks write into the folder of a checkpoint, once all are sealed.

    Args:
        wait: this many seconds; returns False if the session is ending.
        own_s: how long this rank took for its files.

    Raises:
        OSError: a rank could not write its file, or none appeared in time. To try again is of no
            use.
    """
    found: dict[str, FileEntry] = {}
    progress_at, closing_at = time.monotonic(), math.inf
    latest_at = progress_at + max(_LONGEST_S, _TIMES * own_s)
    pause_s = _POLL_S
    while True:
        there = {*folder.names()}
        for stem in stems:
            if stem not in found and stem + _SEAL in there:
                seal = _seal_of(folder, stem)
                if "error" in seal:
                    raise OSError(errno.ECANCELED, seal["error"])
                if seal:
                    found[stem] = FileEntry(**seal)
                    progress_at = time.monotonic()
        missing = [stem for stem in stems if stem not in found]
        if not missing:
            break
        if time.monotonic() > min(latest_at, max(progress_at, closing_at) + _CLOSING_S):
            raise OSError(errno.ECANCELED, f"other ranks have not written {', '.join(missing)}")
        if not wait(pause_s):
            closing_at = min(closing_at, time.monotonic())
            time.sleep(pause_s)
        pause_s = min(_LONGEST_POLL_S, 1.2 * pause_s)
    for stem, entry in found.items():
        if folder.size_bytes(f"{stem}.safetensors") != entry.size_bytes:
            raise OSError(errno.ECANCELED, f"{folder}: {stem}.safetensors is not what was sealed")
    failpoint("checkpoint.parts", step=step)
    return {f"{stem}.safetensors": found[stem] for stem in stems}
