"""A rank is killed, a new process replaces it, and the others keep their state: no step is
repeated, and the bits are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generation_runs
import numpy as np
import pytest
import torch
from generation_runs import Run, W, log_of
from tiny import (
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyTask,
    bits,
    newest,
    plain,
    run_tiny,
    tiny_config,
)
from torch import nn
from torch.utils.data import Dataset

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.sections import EmaConfig, LogConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Data, MapSource
from raytrain_ddp.events import Plan
from raytrain_ddp.ray_backend.failure_causes import cause_of
from raytrain_ddp.training.loop import train
from raytrain_ddp.training.membership.generations import (
    NoStateLeft,
    Place,
    RankLost,
    through_generations,
)
from raytrain_ddp.training.membership.roster import Member, Seat
from raytrain_ddp.training.prepare import prepare_alone
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Kept, Requests
from raytrain_ddp.training.state import live_state
from raytrain_ddp.training.state.live_state import LiveState


@pytest.fixture(scope="module")
def forks() -> Any:
    return generation_runs.forks()


@pytest.fixture(scope="module")
def undisturbed(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny_config(folder, "run")
    run = Run(forks, config, folder / "fired", "")
    notes = run.wait()
    assert [note["step"] for note in notes] == [TOTAL_STEPS] * W
    return config


@pytest.mark.parametrize(
    ("points", "starts"),
    [  # starts: the steps at which the ranks that were not killed began, in order
        ("train.before_step:kill@rank=1,step=7", [0, 6]),
        ("train.loss:kill@rank=2,step=7", [0, 6]),
        ("train.after_backward:kill@rank=1,step=10", [0, 9]),
        ("train.after_step:kill@rank=1,step=10", [0, 10]),
        ("train.after_step:kill@rank=0,step=10", [0, 10]),
        ("checkpoint.snapshot:kill@rank=0,step=10", [0, 10]),
        ("checkpoint.payload:kill@rank=0,step=20", None),  # training continues meanwhile
        ("checkpoint.committed:kill@rank=0,step=30", [0, 30]),
        ("train.after_step:kill@rank=1,step=30", [0, 30]),
        ("train.log:kill@rank=1,step=10", [0, 10]),
        ("train.log:kill@rank=0,step=7", [0, 7]),
        ("train.compare:kill@rank=2,step=10", [0, 10]),
        ("start.met:kill@rank=1", [0]),
        ("start.met:kill@rank=0", [0, 0]),
        ("train.before_step:kill@rank=1,step=7;start.met:kill@rank=1,after=1", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;start.met:kill@rank=2,after=1", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;train.before_step:kill@rank=2,step=7", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;start.opened:kill@rank=1,after=1", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;start.loaded:kill@rank=1,after=1", [0, 6, 6]),
        ("train.before_step:kill@rank=1,step=7;start.warmed_up:kill@rank=2,after=1", [0, 6]),
        ("train.after_step:kill@rank=1,step=10;start.loaded:kill@rank=2,after=1", [0, 10, 10]),
    ],
)
def test_fault_49_50_a_killed_rank_is_replaced_and_survivors_repeat_no_step(
    forks: Any,
    undisturbed: TrainConfig,
    tmp_path: Path,
    points: str,
    starts: list[int] | None,
) -> None:
    config = tiny_config(tmp_path, "run")
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)
    on_main = [note["steps"] for note in notes if note["steps"]]
    survived = "rank=0" not in points
    assert starts is None or on_main == [starts if survived else starts[1:]]


def test_fault_15_survivors_keep_their_state_during_a_storage_outage(
    forks: Any, undisturbed: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run")
    point = "train.after_backward:kill@rank=1,step=15"
    run = Run(forks, config, tmp_path / "fired", point, outages=12)
    notes = run.wait()
    assert run.deaths == 1
    assert [note["steps"] for note in notes if note["steps"]] == [[0, 14]]
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)


@pytest.mark.each_version
def test_fault_49_with_averages_and_bad_records_killed_ranks_do_not_change_the_bits(
    forks: Any, tmp_path: Path
) -> None:
    """Compared with one process that is left alone."""
    changes: dict[str, Any] = {
        "exact": True,
        "ema": EmaConfig(decay=0.9),
        "data": DataConfig(workers=1, prefetch=2, bad_records="skip", max_bad=100),
        "log": LogConfig(every_steps=5, tensorboard=False, audit=True),
    }
    bad_rows = [3, 70, 71, 150]
    alone = tiny_config(tmp_path, "alone", **changes)
    run_tiny(0, 1, plain(alone), {"bad_rows": bad_rows})
    config = tiny_config(tmp_path, "run", **changes)
    points = (
        "train.after_backward:kill@rank=2,step=14;train.before_step:kill@rank=0,after=1,step=25"
    )
    run = Run(forks, config, tmp_path / "fired", points, bad_rows=bad_rows)
    run.wait()
    assert run.deaths == 2
    assert bits(config) == bits(alone)
    assert log_of(config) == log_of(alone)
    assert any(record.get("skipped") for record in log_of(config))


@pytest.mark.parametrize(
    ("points", "start"),
    [
        ("checkpoint.payload:sleep(30)@rank=0,step=10;train.before_step:kill@rank=0,step=15", 0),
        ("checkpoint.payload:sleep(30)@rank=0,step=10;evaluate:kill@rank=0,step=20", 0),
        ("checkpoint.payload:sleep(30)@rank=0,step=20;train.before_step:kill@rank=0,step=25", 10),
    ],
)
def test_fault_50_all_resume_from_the_newest_checkpoint_if_rank_0_dies_committing_the_best_weights(
    forks: Any, undisturbed: TrainConfig, tmp_path: Path, points: str, start: int
) -> None:
    config = tiny_config(tmp_path, "run")
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == 1
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)
    assert [note["steps"] for note in notes if note["steps"]] == [[start]]


@pytest.mark.parametrize(
    ("points", "survives"),
    [
        ("train.after_step:kill@rank=2,step=12", True),
        ("train.after_step:kill@rank=1,step=12;checkpoint.manifest:eio@step=10", True),
        ("train.after_step:kill@rank=2,step=12;train.after_step:kill@rank=0,step=14", False),
    ],
)
def test_fault_49_50_after_a_kill_a_slow_commit_of_rank_0_continues_during_the_next_steps(
    forks: Any, exact_alone: TrainConfig, tmp_path: Path, points: str, survives: bool
) -> None:
    """The commit of the best weights so far; with exact, survivors do not wait for the new rank."""
    config = tiny_config(tmp_path, "run", exact=True)
    points = f"checkpoint.payload:sleep(8)@step=10;{points}"
    run = Run(forks, config, tmp_path / "fired", points, least=1)
    notes = run.wait()
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)
    (told,) = [note["told"] for note in notes if ["Train", TOTAL_STEPS] in note["told"]]
    assert told.count(["Checkpoint", 10]) == 1
    if survives:
        assert newest(config).name.attempt == 1
        assert told.index(["Train", 13]) < told.index(["Checkpoint", 10])


def test_fault_50_without_a_survivor_the_checkpoint_is_loaded(
    forks: Any, undisturbed: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run")
    points = ";".join(f"train.before_step:kill@rank={rank},step=27" for rank in range(W))
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == W
    # The commit of step 20 runs during training.
    assert [note["steps"] for note in notes if note["steps"]] in ([[10]], [[20]])
    assert all(each is None for note in notes for each in note["replaced"])
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)


@pytest.mark.parametrize(
    ("points", "least", "smallest"),
    [  # smallest: the size of the smallest generation, if it is always the same
        ("train.before_step:kill@rank=1,step=3", 1, 2),
        ("train.after_step:kill@rank=0,step=4", 2, 2),
        ("train.after_backward:kill@rank=2,step=3;train.after_step:kill@rank=1,step=5", 1, 1),
        ("train.before_step:kill@rank=0,step=3;train.before_step:kill@rank=2,step=3", 1, 1),
        ("train.before_step:kill@rank=0,step=3;train.before_step:kill@rank=2,step=3", 2, None),
        (
            "checkpoint.payload:kill@rank=0,step=10",
            1,
            2,
        ),  # the only checkpoint, with the best weights
    ],
)
def test_fault_49_with_exact_survivors_do_not_wait_for_the_replacement(
    forks: Any,
    exact_alone: TrainConfig,
    tmp_path: Path,
    points: str,
    least: int,
    smallest: int | None,
) -> None:
    """Compared with one process that is left alone."""
    config = tiny_config(tmp_path, "run", exact=True)
    run = Run(forks, config, tmp_path / "fired", points, least, after_others=True)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert min(sizes) >= least
    assert smallest is None or min(sizes) == smallest
    assert sizes[0] == sizes[-1] == 3
    starts = [note["steps"] for note in notes]
    assert all(steps == sorted(steps) for steps in starts)


@pytest.mark.parametrize(
    "points",
    [
        "",
        "train.before_step:kill@rank=2,step=12;train.after_step:kill@rank=0,step=17",
        "start.alone:kill@rank=2",
        "start.loaded:kill@rank=2;train.after_backward:kill@rank=1,step=9",
    ],
)
def test_fault_28_a_further_rank_joins_between_two_steps(
    forks: Any, exact_alone: TrainConfig, tmp_path: Path, points: str
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    run = Run(forks, config, tmp_path / "fired", points, least=1, late_s=1.0, size=2)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert max(sizes) == 3
    if not points:
        assert sizes == [2, 3]
        assert [note["replaced"] for note in notes if note["replaced"]] == [[None, [2]]]


class _SometimesNan(TinyTask):
    """The loss of a batch with certain rows is NaN."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        is_odd = model.training and (batch["row"] % 50 == 7).any()
        return loss * math.nan if is_odd else loss


class _CountingTask(TinyTask):
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


class _LosesPeers(LocalSession):
    """Loses its peers in `step`, counted from 1; 0: never.

    Args:
        late: loses them only in the collectives at the end of the step.
    """

    step, late = 0, False

    def requests(self) -> Requests:
        self.step -= 1
        if self.step == 0 and not self.late:
            raise RankLost
        return super().requests()

    def confirm(self) -> None:
        if self.step == 0 and self.late:
            raise RankLost


ALONE = World(0, 1, 0, torch.device("cpu"), 1)


def _trained(
    config: TrainConfig,
    task: TinyTask,
    live: LiveState | None,
    step: int,
    kept: Kept | None = None,
    late: bool = False,
) -> Any:
    """Returns the step that the training began with and the live state after it."""
    plans: list[Any] = []
    session = _LosesPeers(config, ALONE, Best("loss", "min"), plans.append, live)
    session.step, session.late, session.kept = step, late, session.kept or kept
    with session, suppress(RankLost):
        train(config, task, session)
    return next(each.start_step for each in plans if isinstance(each, Plan)), session.live_state()


def test_with_exact_a_survivor_keeps_its_data_and_model(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    task = _CountingTask(config)
    live = None
    for begins in (0, 6, 12, 18):
        began, live = _trained(config, task, live, 7 if begins < 18 else 0)
        assert (began, task.calls) == (begins, {"model": 1, "data": 1})
    assert not any(parameter._backward_hooks for parameter in task.made.parameters())
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)


@pytest.mark.parametrize("changes", [{"exact": False}, {"exact": True}])
def test_with_ddp_or_loader_processes_survivors_keep_only_their_state(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Data for loader processes may be open in this process already."""
    kind = _LoaderProcessTask if changes["exact"] else TinyTask
    whole = tiny_config(tmp_path, "whole", epochs=1, **changes)
    _trained(whole, kind(whole), None, 0)
    config = tiny_config(tmp_path, "run", epochs=1, **changes)
    _, live = _trained(config, kind(config), None, 7)
    assert live.kept is None
    assert _trained(config, kind(config), live, 0)[0] == 6
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)


def test_a_kept_model_does_not_keep_a_nonfinite_loss(tmp_path: Path) -> None:
    """The peers are lost in a step that would have been refused."""
    changes: dict[str, Any] = {
        "exact": True,
        "optim": OptimConfig(lr=0.05, nonfinite="skip", max_nonfinite=9),
    }
    whole = tiny_config(tmp_path, "whole", epochs=1, **changes)
    _trained(whole, _SometimesNan(whole), None, 0)
    refused = {record.get("nonfinite") for record in log_of(whole)}
    assert max(filter(None, refused)) in range(1, STEPS_PER_EPOCH)
    for step in range(1, STEPS_PER_EPOCH + 1):
        config = tiny_config(tmp_path, f"run-{step}", epochs=1, **changes)
        task = _SometimesNan(config)
        _, live = _trained(config, task, None, step, late=True)
        assert _trained(config, task, live, 0)[0] == step - 1
        assert bits(config) == bits(whole)
        assert log_of(config) == log_of(whole)


def test_without_a_usable_state_or_checkpoint_a_survivor_raises_no_state_left(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    """The best weights are in no checkpoint: rank 0 died while it wrote them."""
    config = tiny_config(tmp_path, "run", exact=True)
    task = _CountingTask(config)
    _, live = _trained(config, task, None, 7)
    with pytest.raises(NoStateLeft):
        _trained(config, task, replace(live, needed=(5,)), 0)
    plain_config = tiny_config(tmp_path, "plain")  # a survivor keeps only its state
    _, live = _trained(plain_config, _CountingTask(plain_config), None, 7)
    assert live.kept is None
    with pytest.raises(NoStateLeft):
        _trained(plain_config, _CountingTask(plain_config), replace(live, needed=(5,)), 0)
    _, live = _trained(config, _CountingTask(config), None, 14)
    began, _ = _trained(config, task, replace(live, needed=(12,)), 0)
    assert began == 10
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)


class _ThreeStarts:
    """A fake `Place` that is alone in its generations."""

    starts, is_broken = 0, False

    def join(self) -> bool:
        self.starts += 1
        return self.starts <= 3

    def leave(self) -> None: ...

    def part(self) -> None: ...


class _SessionAtStep:
    """A fake session at a step, without a live state."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __enter__(self) -> _SessionAtStep:
        return self

    def __exit__(self, *_: object) -> None: ...

    def live_state(self) -> None: ...

    suspended = None

    def take_over(self, _: None) -> None: ...


class _ManyStarts(_ThreeStarts):
    def join(self) -> bool:
        self.starts += 1
        return self.starts <= 9


@pytest.mark.parametrize("each", [10, 0])
def test_lost_ranks_with_progress_in_between_do_not_count_toward_the_limit(each: int) -> None:
    place, steps = _ManyStarts(), []

    def start(_: LiveState | None) -> Any:
        steps.append(each * place.starts)
        return _SessionAtStep(steps[-1])

    def run(_: Any) -> None:
        raise RankLost("a rank is lost")

    loses = contextlib.nullcontext() if each else pytest.raises(RankLost)
    with loses:
        through_generations(place, start, run, lambda _: False, most=2)  # type: ignore[arg-type]
    assert len(steps) == (9 if each else 3)


@pytest.mark.parametrize(
    ("stored", "goes_on"),
    [([40, 80], True), ([40], False), ([40, 60], True), ([40, 80, 100], False)],
)
def test_a_state_is_usable_only_if_its_best_weights_or_a_later_checkpoint_are_stored(
    stored: list[int], goes_on: bool
) -> None:
    """The best weights so far are those of step 60, and the state is of step 85."""
    step, alone = 85, World(0, 1, 0, torch.device("cpu"), 1)
    progress = live_state._Progress(step, 1, (60,))
    mine: Any = SimpleNamespace(
        progress=lambda: progress, tensors={}, files={}, manifest=Manifest(step, 0, 1, 1, {}, "")
    )
    found = live_state.most_advanced(mine, stored, Any, alone)  # type: ignore[arg-type]
    assert (found is not None) == goes_on


def test_ranks_that_cannot_connect_raise_rank_lost_with_the_address() -> None:
    """The cause is outside the task, so another start may succeed."""
    registry = SimpleNamespace(meet=lambda _: Seat(1, "127.0.0.1:9", "key", 1, 2))
    place = Place.__new__(Place)
    place._registry, place._host, place.seat = registry, "127.0.0.1", Seat(0)
    place._member = Member(1, 2, 2, "token", 0, "host", "id", "")
    place._connect = place.leave = lambda *_: None  # type: ignore[method-assign]

    def fails(_: object) -> None:
        raise RuntimeError("a rank was lost before the generation was connected")

    place._connect = fails  # type: ignore[method-assign]
    text = r"not all of 2 ranks .* through 127\.0\.0\.1:9: a rank was"
    with pytest.raises(RankLost, match=text) as caught:
        place.join()
    assert cause_of(caught.value) == "outside"


def test_after_no_state_is_left_the_next_generation_starts_from_scratch(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    place, plans, seen, tasks = _ThreeStarts(), [], [], []

    def start(live: LiveState | None) -> LocalSession:
        seen.append(live.manifest.step if live else None)
        lost = replace(live, needed=(5,)) if live else None
        session = _LosesPeers(config, ALONE, Best("loss", "min"), plans.append, lost)
        session.step = 7 if place.starts == 1 else 0
        if session.kept is None:
            tasks.append(_CountingTask(config))
        return session

    def run(session: LocalSession) -> None:
        train(config, tasks[-1], session)

    through_generations(place, start, run, lambda _: False, most=1)  # type: ignore[arg-type]
    assert seen == [None, 6, None]
    assert [each.start_step for each in plans if isinstance(each, Plan)] == [0, 0]
    assert [each.calls["model"] for each in tasks] == [1, 1]
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)


def test_a_model_and_data_prepared_before_joining_are_reused(
    exact_alone: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    _trained(config, TinyTask(config), None, 14)
    task = _CountingTask(config)
    kept = prepare_alone(config, task, ALONE)
    began, _ = _trained(config, task, None, 0, kept)
    assert (began, task.calls) == (10, {"model": 1, "data": 1})
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)


class _OpensOnRead(Dataset[Any]):
    """Has an attribute that cannot be pickled once it was read from, as with HDF5 files."""

    lock: Any = None

    def __init__(self, data: Data) -> None:
        self.rows, self.records = data.rows, data.source.read(np.arange(data.rows))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.lock = self.lock or threading.Lock()
        return {name: array[index] for name, array in self.records.items()}


class _LoaderProcessTask(TinyTask):
    """Creates its data in the constructor, as a user's task may."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        made = super().train_data(), super().eval_data()
        self._sets = [Data(MapSource(_OpensOnRead(each))) for each in made if each]

    def train_data(self) -> Data:
        return self._sets[0]

    def eval_data(self) -> Data:
        return self._sets[1]


def test_data_that_loader_processes_copy_can_be_opened_before_joining(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path, "whole", epochs=1, exact=True)
    _trained(whole, _LoaderProcessTask(whole), None, 0)
    config = tiny_config(tmp_path, "run", epochs=1, exact=True)
    task = _LoaderProcessTask(config)
    _trained(config, task, None, 0, prepare_alone(config, task, ALONE))
    assert bits(config) == bits(whole)


@pytest.fixture(scope="module")
def exact_alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("alone"), "alone", exact=True)
    run_tiny(0, 1, plain(config), {})
    return config
