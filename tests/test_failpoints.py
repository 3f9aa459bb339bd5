"""Failpoints: refused if invalid, and fired once per run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_ddp.failpoints import arm, failpoint


@pytest.fixture(autouse=True)
def _disarm(tmp_path: Path) -> Iterator[None]:
    yield
    arm("", str(tmp_path))


def fires(folder: Path, text: str, *visits: tuple[str, int, int]) -> list[bool]:
    """Whether each visit (site, rank, step) fires what was armed."""
    arm(text, str(folder))
    return [math.isnan(failpoint(*visit)) for visit in visits]


def test_a_failpoint_fires_once_when_all_conditions_hold(tmp_path: Path):
    visits = [("train.loss", 0, 7), ("train.loss", 1, 6), ("train.after_step", 1, 7)]
    visits += [("train.loss", 1, 7)] * 2
    armed = "train.loss:nan@rank=1,step=7"
    assert fires(tmp_path / "a", armed, *visits) == [False, False, False, True, False]
    # What has fired is recorded in the folder, not in memory.
    assert fires(tmp_path / "a", armed, *visits) == [False] * 5
    assert fires(tmp_path / "b", armed, *visits[-1:]) == [True]
    table: list[tuple[str, list[tuple[int, int]], list[int]]] = [
        ("@step=5,hit=3", [(0, 4), (0, 5), (0, 5), (0, 4), (0, 5), (0, 5)], [4]),
        ("@rank=2,from=7", [(2, 6), (0, 7), (1, 7), (0, 8), (2, 7), (2, 8)], [4]),
        ("@hit=1;train.loss:nan@hit=2", [(0, 1)] * 3, [0, 1]),
        ("@after=1;train.loss:nan@step=1", [(0, 0), (0, 1), (0, 2), (0, 3)], [1, 2]),
    ]
    for row, (conditions, places, fired) in enumerate(table):
        visits = [("train.loss", *place) for place in places]
        found = fires(tmp_path / f"{row}", f"train.loss:nan{conditions}", *visits)
        assert [place for place, each in enumerate(found) if each] == fired, conditions
