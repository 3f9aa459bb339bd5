"""Where the time of a step goes: the clock of one rank, and the summary of all ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from processes import Group
from tiny import ScriptedMembership, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.run_folder import read_history, run_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Slowest
from raytrain_ddp.training.monitoring.step_timing import PHASES, Stragglers, summary
from raytrain_ddp.training.runtime.world import World

THREE = World(0, 3, 0, torch.device("cpu"), 1)


def measured(*ranks: Mapping[str, float]) -> torch.Tensor:
    """What the ranks have measured in ten seconds."""
    rows = [[10.0, 1000.0, *(each.get(phase, 0.0) for phase in PHASES)] for each in ranks]
    return torch.tensor(rows, dtype=torch.float64)


def test_the_split_is_the_mean_over_ranks_per_step():
    reported = summary(measured({"data": 2, "compute": 8}, {"compute": 10}), 10, 0.0, None)
    assert reported.split_s == {"data": 0.1, "compute": 0.9}
    assert reported.step_s == 1.0
    assert reported.peak_memory_bytes == 1000
    assert reported.flops_per_s is None
    two = summary(measured({"compute": 1}, {"data": 9, "compute": 1}), 1, 0.0, None)
    assert two.slowest == Slowest(1, "data", 10.0)
    assert summary(measured({"compute": 1}), 1, 0.0, None).slowest is None


def log_lines(*ranks: int, phase: str = "data") -> list[Slowest]:
    """Log lines in which the given rank takes 3 times as long as the others; -1: no rank does."""
    return [Slowest(max(0, r), phase, 3.0 if r >= 0 else 1.1) for r in ranks]


def reported_of(*shown: Slowest) -> list[tuple[int, int | None]]:
    """(line, from 1; rank) of each event."""
    stragglers = Stragglers(3, THREE)
    events = [stragglers.look(n, each, ["a", "b", "c"]) for n, each in enumerate(shown, start=1)]
    return [(event.step, event.rank) for event in events if event is not None]


def test_fault_32_a_straggler_is_reported_once_and_again_when_it_changes():
    assert reported_of(*log_lines(*[1] * 20)) == [(5, 1)]
    assert reported_of(*log_lines(1, 1, 1, 1, -1, 1, 1, 1, 1, 0)) == []
    assert reported_of(*log_lines(*[1] * 8, *[2] * 8, *[-1] * 3, *[2] * 8)) == [(5, 1), (13, 2)]
    assert reported_of(*log_lines(*[1] * 6, *[-1] * 6, *[1] * 6)) == [(5, 1), (11, None), (17, 1)]
    stragglers = Stragglers(3, THREE)
    *_, event = (stragglers.look(10, each, ["a", "b", "c"]) for each in log_lines(*[1] * 5))
    assert event is not None
    assert "rank 1 on b takes 3.0 x" in event.text


def slow_down_rank_1(membership: ScriptedMembership) -> None:
    def pause(_: int) -> None:
        if membership.world.rank == 1:
            time.sleep(0.2)

    membership.before_step = pause


@pytest.fixture(scope="module")
def records(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The training lines of a run with a slow rank."""
    config: TrainConfig = tiny_config(tmp_path_factory.mktemp("slow"), "slow", epochs=2)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, slow_down_rank_1)
    reported = [event for event in ran[0].events if event["kind"] == "straggler"]
    named = [reported[0][field] for field in ("rank", "phase", "host")]
    assert named == [1, "compute", socket.gethostname()]
    return [r for r in read_history(run_storage(config)) if r["kind"] == "train"]


def test_a_slow_rank_is_named_with_its_slow_phase(records: list[dict[str, Any]]):
    named = [(r["timing"]["slowest"]["rank"], r["timing"]["slowest"]["phase"]) for r in records]
    assert named.count((1, "compute")) >= 0.9 * len(named), named


def test_the_split_accounts_for_the_whole_step(records: list[dict[str, Any]]):
    for record in records[1:]:
        timing, after_evaluation = record["timing"], record["step"] % 10 == 1
        spent = sum(timing["split_s"].values())
        assert spent == pytest.approx(timing["step_s"], rel=0.25) or after_evaluation
        assert set(timing["split_s"]) <= set(PHASES)
        assert timing["flops_per_s"] > 0
        assert timing["peak_memory_bytes"] > 50 * 2**20
