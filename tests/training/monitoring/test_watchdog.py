"""What the watchdog of one rank finds, with made-up signs of the others."""

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
from raytrain_ddp.training.monitoring.hang_diagnosis import Hang, RankStatus, diagnose, is_hang
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.watchdog import State, Watchdog


def status(rank: int, **changes: Any) -> RankStatus:
    """Of a rank that waits in the all-reduce of step 9, beyond its time limit."""
    usual: dict[str, Any] = {"step": 9, "doing": "gradient exchange", "collective": 40}
    usual |= {"name": "all_reduce", "waits": True, "at": "a.py:1 in f"}
    return RankStatus(rank, **{**usual, "still_s": 31.0, "patience_s": 30.0, **changes})


def watch(
    folder: Path,
    others: Callable[[], list[RankStatus]],
    state: State,
    doing: str = "evaluation",
    rank: int = 0,
    of_run: Callable[[int], int] = int,
    wait_s: float = 60.0,
) -> Hang | None:
    """The hang that a rank finds within `wait_s`; the other two are on another machine."""
    found: list[Hang] = []
    ended = threading.Event()
    clock = Clock(torch.device("cpu"))
    clock.steps, clock.doing = 1, doing
    owners = [Owner(f"{n}", "far", 1 + n, "now", "its boot", 0) for n in range(3)]
    owners[rank] = Owner.here()

    def exchange(mine: RankStatus | None) -> dict[int, RankStatus]:
        kept = mine is not None and mine.kept
        return {each.rank: replace(each, kept=kept) for each in others()}

    def end(hang: Hang) -> None:
        found.append(hang)
        ended.set()

    storage = open_storage(str(folder))
    dog = Watchdog(clock, 1.0, rank, owners, storage, exchange, state, end, of_run)
    ended.wait(wait_s)
    dog.close()
    return found[0] if found else None


def test_fault_33_a_rank_stopped_on_another_host_in_an_evaluation_is_named(tmp_path: Path):
    said_before = [status(n, doing="evaluation", patience_s=60.0, still_s=1.0) for n in (1, 2)]

    def new(rank: int, **changes: Any) -> list[RankStatus]:
        return [replace(said_before[rank - 1], still_s=time.monotonic() % 10, **changes)]

    def cannot_look(_: Owner) -> str:
        raise OSError

    cases: dict[str, tuple[Callable[[], list[RankStatus]], State]] = {
        "rank 2 is silent and stopped": (
            lambda: new(1),
            lambda owner: "T" if owner.pid == 3 else "S",
        ),
        "rank 1 was stopped after a sign": (
            lambda: [said_before[0], *new(2)],
            lambda owner: "T" if owner.pid == 2 else "S",
        ),
        "rank 2 sees that rank 1 is stopped": (lambda: new(2, stopped=[1]), lambda _: ""),
        "rank 2 is silent and runs": (lambda: new(1), lambda _: "S"),
        "rank 2 is silent, nobody can look": (lambda: new(1), cannot_look),
        "all say something new": (lambda: [*new(1), *new(2)], lambda _: "T"),
        "rank 1 has gone on since": (lambda: [*new(1), *new(2, stopped=[1])], lambda _: ""),
    }
    expected = [(2,), (1,), (1,), None, None, None, None]

    def found(number: int, name: str) -> tuple[int, ...] | None:
        limit_s = 60.0 if expected[number] else 4.0
        hang = watch(tmp_path / name, *cases[name], wait_s=limit_s)
        return hang and hang.ranks

    with ThreadPoolExecutor(len(cases)) as pool:
        assert [*pool.map(found, range(len(cases)), cases)] == expected


def diagnosis(*signs: RankStatus, size: int = 3) -> tuple[str, tuple[int, ...]]:
    owners = [Owner(f"{n}", f"h{n}", 1 + n, "now", "another machine", 0) for n in range(size)]
    hang = diagnose({each.rank: each for each in signs}, owners)
    return hang.text, hang.ranks


def test_fault_33_the_rank_that_the_others_wait_for_is_found_from_all_statuses():
    idle = {"waits": False, "doing": "data wait", "name": "broadcast", "collective": 39}
    text, ranks = diagnosis(status(0), status(1), status(2, **idle))
    assert ranks == (2,)
    assert text.startswith("rank 2 (h2) did not enter the all-reduce of step 9")
    assert "it is in data wait (a.py:1 in f)" in text
    assert diagnosis(status(0), status(2))[1] == (1,)
    assert diagnosis(status(0), status(1, name="barrier"), status(2))[1] == (1,)
    behind = status(0, collective=39)  # of two ranks
    assert diagnosis(behind, status(1), size=2)[1] == (0,)
    assert diagnosis(status(0), status(1), status(2))[1] == ()
    assert diagnosis(*(status(rank, **idle) for rank in range(3)))[1] == ()


def test_it_is_not_a_hang_while_one_rank_is_within_its_time_limit():
    """For example, rank 0 waits for the storage while the others wait for it."""
    assert is_hang({0: status(0), 1: status(1)})
    assert not is_hang({0: status(0, doing="checkpoint", patience_s=1800.0), 1: status(1)})
