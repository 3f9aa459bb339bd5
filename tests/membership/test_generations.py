"""A rank is killed, a new process replaces it, and the others keep their state: no step is
repeated, and the bits are those of an undisturbed run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_runs import W, assert_same, disturbed, starts
from processes import Group
from tiny import TOTAL_STEPS, TinyTask, log_of, plain, run_tiny, tiny_config
from torch import nn

from raytrain_ddp.config.sections import (
    DataConfig,
    EmaConfig,
    LogConfig,
    OptimConfig,
    ScalingConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.events import Plan
from raytrain_ddp.membership.generations import RankLost
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.runtime.world import World


@pytest.fixture(scope="module")
def undisturbed(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("undisturbed"), "run")
    workers(W, run_tiny, plain(config))
    return config


@pytest.fixture(scope="module")
def exact_alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("alone"), "alone", exact=True)
    run_tiny(0, 1, plain(config), {})
    return config


def test_fault_49_50_a_killed_rank_is_replaced_and_survivors_repeat_no_step(
    undisturbed: TrainConfig, tmp_path: Path
) -> None:
    """Also if the new rank, or another one, dies while it starts."""
    points = (
        "train.after_backward:kill@rank=1,step=7",
        "train.compare:kill@rank=2,step=10",
        "train.before_step:kill@rank=1,step=14;start.met:kill@rank=2,after=3",
        "train.before_step:kill@rank=1,step=21;start.loaded:kill@rank=1,after=5",
        "train.after_step:kill@rank=2,step=30",
    )
    notes = disturbed(undisturbed, tmp_path, ";".join(points))
    assert starts(notes) == [[0, 6, 10, 13, 20, 20, 30]]
    assert all(note["step"] == TOTAL_STEPS for note in notes)


def test_fault_49_50_a_killed_rank_0_is_replaced_and_survivors_repeat_no_step(
    undisturbed: TrainConfig, tmp_path: Path
) -> None:
    points = (
        "start.met:kill@rank=0",
        "train.log:kill@rank=0,step=4",
        "checkpoint.payload:kill@rank=0,step=20",
        "checkpoint.committed:kill@rank=0,step=30",
    )
    disturbed(undisturbed, tmp_path / "several", ";".join(points))
    notes = disturbed(undisturbed, tmp_path / "one", "train.after_step:kill@rank=0,step=9")
    assert starts(notes) == [[9]]


def test_fault_15_survivors_keep_their_state_during_a_storage_outage(
    undisturbed: TrainConfig, tmp_path: Path
) -> None:
    point = "train.after_backward:kill@rank=1,step=15"
    assert starts(disturbed(undisturbed, tmp_path, point, outages=12)) == [[0, 14]]


def test_fault_49_with_averages_and_bad_records_killed_ranks_do_not_change_the_bits(
    tmp_path: Path,
) -> None:
    """Compared with one process that is left alone."""
    changes: dict[str, Any] = {
        "exact": True,
        "ema": EmaConfig(decay=0.9),
        "data": DataConfig(workers=1, prefetch=2, bad_records="skip", max_bad=100),
        "log": LogConfig(every_steps=5, tensorboard=False, audit=True),
    }
    bad_rows = [3, 70, 71, 150]
    alone = tiny_config(tmp_path / "alone", "alone", **changes)
    run_tiny(0, 1, plain(alone), {"bad_rows": bad_rows})
    points = (
        "train.after_backward:kill@rank=2,step=14;train.before_step:kill@rank=0,after=1,step=17"
    )
    disturbed(alone, tmp_path, points, bad_rows=bad_rows)
    assert any(record.get("skipped") for record in log_of(alone))


def test_fault_50_all_resume_from_the_newest_checkpoint_if_rank_0_dies_committing_the_best_weights(
    undisturbed: TrainConfig, tmp_path: Path
) -> None:
    points = "checkpoint.payload:sleep(30)@rank=0,step=20;train.before_step:kill@rank=0,step=25"
    assert starts(disturbed(undisturbed, tmp_path, points)) == [[10]]


def test_fault_49_50_after_a_kill_a_slow_commit_of_rank_0_continues_during_the_next_steps(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    """The commit of the best weights so far; with exact, survivors do not wait for the new rank."""
    points = (
        "checkpoint.payload:sleep(8)@step=10;checkpoint.manifest:eio@step=10"
        ";train.after_backward:kill@rank=1,step=13"
    )
    notes = disturbed(exact_alone, tmp_path, points, least=1)
    last = ["Train", TOTAL_STEPS]
    (told,) = [note["told"] for note in notes if last in note["told"]]
    assert told.count(["Checkpoint", 10]) == 1
    assert told.index(["Train", 13]) < told.index(["Checkpoint", 10])


def test_fault_50_without_a_survivor_the_checkpoint_is_loaded(
    undisturbed: TrainConfig, tmp_path: Path
) -> None:
    points = ";".join(f"train.before_step:kill@rank={rank},step=27" for rank in range(W))
    notes = disturbed(undisturbed, tmp_path, points)
    assert starts(notes) in ([[10]], [[20]])  # the commit of step 20 runs during training
    assert all(each is None for note in notes for each in note["replaced"])


def test_fault_49_with_exact_survivors_do_not_wait_for_the_replacement(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    """Compared with one process that is left alone."""
    points = "train.after_backward:kill@rank=2,step=3;train.after_step:kill@rank=1,step=5"
    notes = disturbed(exact_alone, tmp_path, points, least=1, after_others=True)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert min(sizes) == 1
    assert sizes[0] == sizes[-1] == 3
    assert all(note["steps"] == sorted(note["steps"]) for note in notes)


@pytest.mark.parametrize(
    "points", ["", "start.loaded:kill@rank=2;train.after_step:kill@rank=0,step=17"]
)
def test_fault_28_a_further_rank_joins_between_two_steps(
    exact_alone: TrainConfig, tmp_path: Path, points: str
) -> None:
    notes = disturbed(exact_alone, tmp_path, points, least=1, late_s=1.0, size=2)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert max(sizes) == 3
    if not points:
        assert sizes == [2, 3]
        assert [note["replaced"] for note in notes if note["replaced"]] == [[None, [2]]]


# ------------------------------------------------------------------ in one process


class SometimesNan(TinyTask):
    """The loss of a batch with certain rows is NaN."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        is_odd = model.training and (batch["row"] % 50 == 7).any()
        return loss * math.nan if is_odd else loss


class CountingTask(TinyTask):
    """Counts how often the model and the data are created."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.calls: Counter[str] = Counter()

    def model(self) -> nn.Module:
        self.calls["model"] += 1
        return super().model()

    def train_data(self) -> Data:
        self.calls["data"] += 1
        return super().train_data()


class LosesPeers(Membership):
    """Loses its peers in some steps, and then trains on, alone.

    Args:
        at: these steps, in order, counted from 1.
        late: loses them only in the collectives at the end of the step.
    """

    def __init__(self, at: Sequence[int], late: bool = False) -> None:
        super().__init__(ALONE, self.shown)
        self.at, self.late, self.begins = [*at], late, list[int]()

    def shown(self, event: Any) -> None:
        if isinstance(event, Plan):
            self.begins.append(event.start_step)

    def goes_on(self, error: BaseException) -> bool:
        return isinstance(error, RankLost)

    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        self.is_lost = step in self.at[:1]
        if self.is_lost and not self.late:
            self.confirm()
        return Requests()

    def confirm(self) -> None:
        if self.is_lost:
            self.at.pop(0)
            self.is_lost = False
            raise RankLost

    is_lost = False


ALONE = World(0, 1, 0, torch.device("cpu"), 1)


def test_with_exact_a_survivor_keeps_its_data_and_model(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    task, membership = CountingTask(config), LosesPeers([7, 13, 19])
    take_part(membership, config, pytest.fail, Build(config, ALONE, task))
    assert membership.begins == [0, 6, 12, 18]
    assert task.calls == {"model": 1, "data": 1}
    assert_same(config, exact_alone)


def test_a_kept_model_does_not_keep_a_nonfinite_loss(tmp_path: Path) -> None:
    """The peers are lost in a step that would have been refused."""
    changes: dict[str, Any] = {
        "exact": True,
        "optim": OptimConfig(lr=0.05, nonfinite="skip", max_nonfinite=9),
    }

    def trained(name: str, at: Sequence[int]) -> tuple[TrainConfig, list[int]]:
        config = tiny_config(tmp_path, name, epochs=1, **changes)
        membership = LosesPeers(at, late=True)
        take_part(membership, config, pytest.fail, Build(config, ALONE, SometimesNan(config)))
        return config, membership.begins

    whole, _ = trained("whole", ())
    logged = [(record["step"], record.get("nonfinite") or 0) for record in log_of(whole)]
    first = min(step for step, refused in logged if refused)
    for step in sorted({max(1, first - 1), first, first + 1}):
        config, begins = trained(f"run-{step}", [step])
        assert begins == [0, step - 1]
        assert_same(config, whole)


def test_losses_in_a_row_without_a_step_end_the_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", scaling=ScalingConfig(max_failures=3), exact=True)
    membership = LosesPeers([5] * 9)
    with pytest.raises(RankLost):
        take_part(membership, config, pytest.fail, Build(config, ALONE, TinyTask(config)))
    assert membership.begins == [0, 4, 4, 4]
