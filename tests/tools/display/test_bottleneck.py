"""What limits a run, in words."""

from __future__ import annotations

from typing import Any

import pytest
from event_records import event

from raytrain_ddp.events import Train
from raytrain_ddp.tools.report.bottleneck import StepSplit, split_of


def line(step: int, slowest: dict[str, Any] | None = None, **split_s: float) -> Train:
    timing = {"step_s": 1.0, "split_s": split_s} | ({"slowest": slowest} if slowest else {})
    made: Train = event({"kind": "train", "step": step, "timing": timing})
    return made


@pytest.mark.parametrize(
    ("shares", "reported"),
    [
        ({"data": 0.38, "compute": 0.62}, "waits for data 38 % of the time: more scaling.cpus"),
        ({"copy": 0.2, "compute": 0.8}, "waits for copies of batches to the GPU 20 %"),
        (
            {"communication": 0.4, "compute": 0.6},
            "waits for all-reduces 40 % of the time: a",
        ),
        ({"optimizer": 0.3, "compute": 0.7}, "updates weights 30 %"),
        ({"checkpoint": 0.06, "compute": 0.94}, "is blocked by checkpoints 6 %"),
        ({"evaluation": 0.5, "compute": 0.5}, "evaluates 50 %"),
        ({"other": 0.25, "compute": 0.75}, "spends time between steps 25 %"),
        ({"data": 0.05, "communication": 0.1, "compute": 0.85}, "computes 85 % of the time"),
        ({"data": 0.3, "communication": 0.3, "compute": 0.4}, "waits for data 30 %"),
    ],
)
def test_the_limit_is_the_largest_share(shares: dict[str, float], reported: str):
    assert split_of([line(1, **shares)]).limit().startswith(reported)


def test_a_rank_that_slows_down_all_others_is_named():
    slow = {"rank": 3, "phase": "data", "ratio": 1.8}
    noise = {"rank": 0, "phase": "compute", "ratio": 1.3}
    lines = [line(n, slow if n % 4 else noise, communication=0.5, compute=0.5) for n in range(1, 9)]
    reported = "waits for rank 3 50 % of the time: its data takes 1.8 x as long as on the others"
    assert split_of(lines).limit() == reported


def test_ranks_that_are_slow_in_turns_are_not_named():
    lines = [
        line(n, {"rank": n % 3, "phase": "data", "ratio": 1.8}, communication=0.5, compute=0.5)
        for n in range(1, 10)
    ]
    assert split_of(lines).slowest() is None


def test_shares_are_weighted_by_steps_over_the_newest_lines():
    split = StepSplit(10.0)
    split.begin(100)
    split.add(line(110, data=1.0))
    assert split.is_settled
    assert split.shares() == {"data": 1.0}
    split.add(line(115, compute=1.0))
    assert split.shares() == {"data": 10 / 15, "compute": 5 / 15}
    split.add(line(120, compute=1.0))
    assert split.shares() == {"compute": 1.0}


def test_nothing_is_reported_before_the_first_line():
    assert split_of([]).limit() == ""
    assert not StepSplit().is_settled
