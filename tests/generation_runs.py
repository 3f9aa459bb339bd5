"""Runs of three ranks in separate processes: a killed process is replaced, and the others keep
their state."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from processes import PRELOADED
from tiny import TinyTask, bits, log_of, plain

from raytrain_ddp import failpoints
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Checkpoint, Train
from raytrain_ddp.membership.roster import Member, Roster, Seat

W = 3
_LIMIT_S = 120.0


class _RosterManager(BaseManager):
    """Serves a roster to other processes, like an actor under Ray."""


_RosterManager.register("roster")


def _work(
    rank: int,
    port: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    folder: str,
    points: str,
    least: int,
    size: int,
    backend: str,
    outages: int,
) -> None:
    """The process of one rank; also the first code that a forked process runs."""
    gc.freeze()  # like workers: a generation starts with a garbage collection
    import torch

    from raytrain_ddp.events import Outcome
    from raytrain_ddp.membership.generations import NewcomerWaits, Place
    from raytrain_ddp.ray_backend.failure_causes import cause_of
    from raytrain_ddp.tasks.task import OwnLoop
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import made_ahead, take_part
    from raytrain_ddp.training.membership import Membership, Requests
    from raytrain_ddp.training.runtime.world import World, broadcast

    torch.set_num_threads(1)
    failpoints.arm(points, folder)
    _make_storage_fail(Path(folder), outages)
    manager = _RosterManager(("127.0.0.1", port), b"test")
    manager.connect()
    roster = manager.roster()  # type: ignore[attr-defined]

    class Registry:
        def meet(self, member: Member) -> Seat | None:
            return roster.meet(member)[0]  # type: ignore[no-any-return]

        def is_over(self, member: Member) -> bool:
            return roster.is_over(member)  # type: ignore[no-any-return]

    made, on_gpus = from_dict(config), "cuda" in backend
    events: list[Any] = []
    sizes: list[int] = []

    def device() -> torch.device:
        return torch.device(f"cuda:{rank % torch.cuda.device_count()}" if on_gpus else "cpu")

    class Replacing(Membership):
        """Looks for joining workers at each step; Ray's does so only occasionally."""

        step = 0  # before the first of a generation

        def join(self) -> bool:
            if not place.join():
                return False
            self.step, seat = 0, place.seat
            sizes.append(seat.size)
            self.world = World(seat.rank, seat.size, rank, device(), 1)
            return True

        def leave(self) -> None:
            place.leave()

        def end(self, outcome: Outcome) -> Outcome:
            place.part()
            return outcome

        def goes_on(self, error: BaseException) -> bool:
            if not isinstance(error, Exception):
                return False
            return place.has_lost_ranks(error) or cause_of(error) == "peer"

        def requests(self, step: int | None, may_join: bool = False) -> Requests:
            self.step = step or self.step
            if self.world.size < W:
                time.sleep(0.2)  # so that a new process starts in the meantime
            return super().requests(step)._replace(look=least < W and step is not None)

        def look(self) -> None:
            if broadcast(self.world.is_main and roster.has_newcomer(), self.world):
                raise NewcomerWaits

        def require_ranks(self) -> None:
            place.require_ranks()

        def confirm(self) -> None:
            place.confirm()

    def make(is_begun: bool = False) -> Build:
        if "loop" in options:
            return Build(made, membership.world, OwnLoop(options["loop"]), is_begun)
        task = TinyTask(made, **options)
        task.membership = membership  # type: ignore[assignment]
        return Build(made, membership.world, task, is_begun)

    membership = Replacing(World(0, 1, 0, device(), 1, (rank,)), events.append)
    ahead = made_ahead(make()) if least < W and roster.has_formed() else None
    member = Member(rank, size, least, os.urandom(8).hex(), 0, "here", most=W)
    place = Place(member, "127.0.0.1", Registry(), backend)
    outcome = take_part(membership, made, make, ahead)
    plans = [e for e in events if type(e).__name__ == "Plan"]
    note = {
        "steps": [plan.start_step for plan in plans],
        "sizes": sizes,
        "replaced": [plan.replaced for plan in plans],
        "step": outcome.step if outcome else None,
        "told": [[type(e).__name__, e.step] for e in events if isinstance(e, Train | Checkpoint)],
    }
    (Path(folder) / f"note-{rank}-{os.getpid()}.json").write_text(json.dumps(note))


def _make_storage_fail(folder: Path, times: int) -> None:
    """Makes the storage fail a given number of times in this process once a failpoint fires; does
    nothing if one has fired already."""
    if not times or failpoints.fired(folder):
        return
    from raytrain_ddp import errors
    from raytrain_ddp.checkpoint import run_folder
    from raytrain_ddp.checkpoint.store import CheckpointStore
    from raytrain_ddp.errors import UnreachableError

    names, opened = CheckpointStore.names, run_folder.open_storage
    left = [times]

    def failing_names(store: CheckpointStore) -> Any:
        if left[0] and failpoints.fired(folder):
            left[0] -= 1
            raise OSError(errno.EIO, "the storage fails")
        return names(store)

    def failing_open(uri: str) -> Any:
        if left[0] and failpoints.fired(folder):
            raise UnreachableError("the storage cannot be opened")
        return opened(uri)

    CheckpointStore.names = failing_names  # type: ignore[method-assign]
    run_folder.open_storage = failing_open
    errors.retry_pauses = lambda: iter([0.01] * 100)


class Run:
    """Three ranks, of which `size` start first; a killed process is replaced.

    Args:
        late_s: how long after its death a process is replaced.
        after_others: replace none before all kills have happened and the others have continued.
        backend: of the process groups; those of GPUs name cuda.
        outages: how often the storage fails in processes that started before a failpoint fired.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        points: str,
        least: int = W,
        late_s: float = 0.0,
        after_others: bool = False,
        size: int = W,
        backend: str = "gloo",
        outages: int = 0,
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given = points, least, size, backend, outages
        self._arguments = plain(config), options, str(folder), *given
        self._forks = mp.get_context("forkserver")
        self._forks.set_forkserver_preload(PRELOADED)
        self.folder, self._late_s = folder, late_s
        self._least, self._awaited = least, points.count(":kill@") if after_others else 0
        self.roster = roster = Roster()
        self._dead: dict[int, float] = {}  # rank -> when it is replaced
        manager = BaseManager(("127.0.0.1", 0), b"test")
        manager.register("roster", callable=lambda: roster)
        server = manager.get_server()
        self._port = server.address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.deaths = 0
        self._ranks = {rank: self._begin(rank) for rank in range(size)}

    def _begin(self, rank: int) -> Any:
        process = self._forks.Process(target=_work, args=(rank, self._port, *self._arguments))
        process.start()
        return process

    def _others_continued(self) -> bool:
        left = W - self._awaited
        if not self._awaited or left < self._least:
            return True
        if self.deaths == self._awaited and len(self.roster.node_ids) == left:
            self._awaited = 0
        return not self._awaited

    def wait(self) -> list[dict[str, Any]]:
        """Waits until all ranks have ended; returns the notes of processes that ended normally."""
        until = time.monotonic() + _LIMIT_S
        while any(process.exitcode != 0 for process in self._ranks.values()):
            assert time.monotonic() < until, "not done in time"
            if self.roster.node_ids and len(self._ranks) < W:  # the first ranks train
                self._ranks |= {rank: self._begin(rank) for rank in range(len(self._ranks), W)}
            for rank, process in self._ranks.items():
                if process.exitcode not in (0, None):
                    assert process.exitcode == -9, f"rank {rank} failed: {process.exitcode}"
                    if rank not in self._dead:
                        self.deaths += 1
                        self._dead[rank] = time.monotonic() + self._late_s
                        self.roster.died(rank)
            for rank, at in [*self._dead.items()]:
                if time.monotonic() >= at and self._others_continued():
                    del self._dead[rank]
                    self._ranks[rank] = self._begin(rank)
            time.sleep(0.02)
        return [json.loads(path.read_text()) for path in self.folder.glob("note-*.json")]


def assert_same(config: TrainConfig, whole: TrainConfig) -> None:
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)


def disturbed(whole: TrainConfig, folder: Path, points: str, **given: Any) -> list[dict[str, Any]]:
    """The notes of the processes of a run with the config of `whole` that ended normally."""
    config = replace(whole, name="run", storage=str(folder))
    run = Run(config, folder / "fired", points, **given)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert_same(config, whole)
    return notes


def starts(notes: list[dict[str, Any]]) -> list[list[int]]:
    """The steps at which each process that was rank 0 began in its generations."""
    return [note["steps"] for note in notes if note["steps"]]
