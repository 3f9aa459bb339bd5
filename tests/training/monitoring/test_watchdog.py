"""What the watchdog of one rank finds, with made-up statuses of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.training.monitoring.step_timing import EXCHANGING, Clock
from raytrain_ddp.training.monitoring.watchdog import Hang, RankStatus, Watchdog, diagnose
from raytrain_ddp.training.runtime.world import World


def status(rank: int, **changes: Any) -> RankStatus:
    """The status of a rank that waits in the all-reduce of step 9, beyond its time limit."""
    usual: dict[str, Any] = {"step": 9, "collective": 40, "waits": True}
    usual |= {"where": "the all-reduce of step 9 (gradient exchange, collective 40)"}
    return RankStatus(rank, **{**usual, "still_s": 31.0, "patience_s": 30.0, **changes})


def watch(folder: Path, others: Callable[[], list[RankStatus]], wait_s: float) -> Hang | None:
    """The hang that rank 0, which waits, finds within `wait_s`; the others are on another host."""
    found: list[Hang] = []
    ended = threading.Event()
    cpu = torch.device("cpu")
    clock = Clock(cpu)
    clock.steps, clock.doing = 1, EXCHANGING
    owners = [Owner(f"{n}", "far", 1 + n, "now", "its boot", 0) for n in range(3)]
    owners[0] = Owner.here()

    def exchange(mine: RankStatus | None) -> dict[int, RankStatus]:
        kept = mine is not None and mine.kept
        return {each.rank: replace(each, kept=kept) for each in others()}

    def end(hang: Hang) -> None:
        found.append(hang)
        ended.set()

    world, storage = World(0, 3, 0, cpu, 1), open_storage(str(folder))
    dog = Watchdog(clock, 1.0, world, owners, storage, exchange, end)
    ended.wait(wait_s)
    dog.close()
    return found[0] if found else None


def test_fault_33_a_rank_that_is_silent_or_falls_silent_is_named(tmp_path: Path):
    before = status(1, still_s=1.0)

    def new(rank: int, **changes: Any) -> RankStatus:
        return status(rank, still_s=31 + time.monotonic() % 10, **changes)

    cases: dict[str, Callable[[], list[RankStatus]]] = {
        "rank 2 says nothing": lambda: [new(1)],
        "rank 1 has said something before": lambda: [replace(before, patience_s=4.0), new(2)],
        "rank 1 said that it takes long": lambda: [before, new(2)],
        "rank 1 writes a checkpoint": lambda: [new(1, waits=False, patience_s=60), new(2)],
    }
    expected = [(2,), (1,), None, None]

    def found(number: int, name: str) -> tuple[int, ...] | None:
        hang = watch(tmp_path / name, cases[name], 60.0 if expected[number] else 4.0)
        return hang and hang.ranks

    with ThreadPoolExecutor(len(cases)) as pool:
        assert [*pool.map(found, range(len(cases)), cases)] == expected


def diagnosis(*signs: RankStatus, size: int = 3) -> tuple[str, tuple[int, ...]]:
    owners = [Owner(f"{n}", f"h{n}", 1 + n, "now", "another machine", 0) for n in range(size)]
    hang = diagnose({each.rank: each for each in signs}, owners)
    return hang.text, hang.ranks


def test_fault_33_the_rank_that_the_others_wait_for_is_found_from_all_statuses():
    idle = {"waits": False, "where": "data wait (a.py:1 in f)", "collective": 39}
    text, ranks = diagnosis(status(0), status(1), status(2, **idle))
    assert ranks == (2,)
    assert text.startswith("rank 2 (h2) did not enter the all-reduce of step 9")
    assert "it is in data wait (a.py:1 in f)" in text
    assert diagnosis(status(0), status(2))[1] == (1,)
    assert diagnosis(status(0), status(1, where="the barrier of step 9"), status(2))[1] == (1,)
    behind = status(0, collective=39)  # of two ranks
    assert diagnosis(behind, status(1), size=2)[1] == (0,)
    assert diagnosis(status(0), status(1), status(2))[1] == ()
    assert diagnosis(*(status(rank, **idle) for rank in range(3)))[1] == ()
