"""Which trials stop and which continue: asynchronous halving compared with Ray Tune, synchronous by
hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tools.sweep import policy
from raytrain_ddp.tools.sweep.space import parse_space, random_points
from raytrain_ddp.tools.sweep.sweep_state import Evaluated, Settings, Sweep, Trial

STEPS = 23


def sweep_of(trials: int, epochs: int = 9, **settings: Any) -> Sweep:
    config = to_dict(TrainConfig(epochs=epochs))
    made = Sweep(Settings(config=config, space=[], trials=trials, **settings), monitor="top1")
    made.trials = [Trial(n, f"trial-{n}", {}, 0) for n in range(trials)]
    for trial in made.trials:
        policy.begin(made.settings, trial)
    return made


def evaluate(sweep: Sweep, trial: Trial, value: float) -> str:
    epoch = len(trial.evaluations) + 1
    trial.evaluations.append(Evaluated(STEPS * epoch, float(epoch), value))
    return policy.stop_reason(sweep, trial)


@pytest.mark.parametrize(
    ("epochs", "first", "factor", "expected"),
    [(12, 1, 3, [1, 3, 9]), (9, 1, 3, [1, 3]), (10, 2, 2, [2, 4, 8]), (2, 1, 4, [1])],
)
def test_each_rung_is_factor_times_as_late_as_the_previous_one(
    epochs: int, first: int, factor: int, expected: Any
):
    sweep = sweep_of(1, epochs, scheduler="asha", first_rung=first, factor=factor)
    assert policy.rungs(sweep.settings) == expected
    assert policy.rungs(sweep_of(1, epochs).settings) == []


class TuneTrial:
    """The attributes of a trial that Ray Tune's scheduler reads."""

    def __init__(self, number: int) -> None:
        self.trial_id, self.status = str(number), "RUNNING"


@pytest.mark.parametrize("goal", ["min", "max"])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_asha_decides_like_ray_tunes_scheduler(goal: Any, factor: int):
    """The reference: AsyncHyperBandScheduler with one bracket, over the same order of results."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

    theirs = AsyncHyperBandScheduler(
        time_attr="epochs",
        metric="value",
        mode=goal,
        max_t=100,
        grace_period=1,
        reduction_factor=factor,
        brackets=1,
    )
    ours = sweep_of(40, epochs=100, scheduler="asha", factor=factor)
    ours.goal = goal
    numbers = random.Random(factor)
    peers = [TuneTrial(n) for n in range(40)]
    for peer in peers:
        theirs.on_trial_add(None, peer)
    running, stopped = list(range(40)), 0
    while running:
        number = numbers.choice(running[:6])
        trial, value = ours.trials[number], round(numbers.random(), 1)  # with ties
        why = evaluate(ours, trial, value)
        epochs = trial.evaluations[-1].epochs
        said = theirs.on_trial_result(None, peers[number], {"epochs": epochs, "value": value})
        if epochs < 100:
            assert bool(why) == (said == TrialScheduler.STOP), (number, epochs, value)
        stopped += bool(why)
        if why or epochs >= 100:
            running.remove(number)
    assert 10 < stopped < 40


def test_asha_stops_trials_with_nan_and_none_between_rungs():
    sweep = sweep_of(3, scheduler="asha")
    first, second, third = sweep.trials
    assert evaluate(sweep, first, 0.5) == ""
    assert "not among the best 1/3 of 2" in evaluate(sweep, second, 0.1)
    assert evaluate(sweep, first, 0.0) == ""  # epoch 2 is not a rung
    assert evaluate(sweep, third, float("nan")) != ""
    alone = sweep_of(1, scheduler="asha")
    assert evaluate(alone, alone.trials[0], float("nan")) != ""
    none = sweep_of(2)
    assert [evaluate(none, trial, 0.1) for trial in none.trials] == ["", ""]


def test_asha_compares_the_first_evaluation_after_a_rung():
    """Also of runs that are evaluated every few epochs."""
    sweep = sweep_of(2, epochs=20, scheduler="asha", first_rung=2, factor=3)  # rungs: 2, 6, 18
    first, second = sweep.trials
    for epochs, value in ((4.0, 0.4), (8.0, 0.9)):
        first.evaluations.append(Evaluated(1, epochs, value))
        assert policy.stop_reason(sweep, first) == ""
    second.evaluations.append(Evaluated(1, 4.0, 0.5))
    assert policy.stop_reason(sweep, second) == ""  # better than 0.4, which the first had there
    second.evaluations.append(Evaluated(2, 8.0, 0.8))
    assert "after epoch 8" in policy.stop_reason(sweep, second)


def test_halving_pauses_all_trials_at_a_rung_and_continues_the_best():
    sweep = sweep_of(9, epochs=9, scheduler="halving")
    values = [0.1, 0.9, 0.3, 0.9, 0.5, 0.8, 0.2, 0.4, float("nan")]
    for trial, value in zip(sweep.trials, values, strict=True):
        assert trial.until == 1
        assert (
            evaluate(sweep, trial, value) == "paused after epoch 1, to be compared with the others"
        )
        assert policy.promote(sweep) == ([], [])  # as long as one is to be trained
        trial.status, trial.message = "paused", "waits"
    stopped, clones = policy.promote(sweep)
    assert clones == []
    assert [t.number for t in sweep.trials if t.status == "waiting"] == [1, 3, 5]
    assert {t.until for t in sweep.trials if t.status == "waiting"} == {3}
    assert [t.number for t in stopped] == [4, 7, 2, 6, 0, 8]
    assert stopped[0].message == "place 4 of 9 after epoch 1; the first 3 continue"
    for trial in [t for t in sweep.trials if t.status == "waiting"]:
        assert evaluate(sweep, trial, 0.5) == ""  # epoch 2
        assert evaluate(sweep, trial, 0.6 - trial.number / 10) != ""
        trial.status = "paused"
    policy.promote(sweep)
    assert [(t.number, t.until) for t in sweep.trials if t.status == "waiting"] == [(1, 0)]
    last = sweep.trials[1]
    assert [evaluate(sweep, last, 0.1) for _ in range(6)] == [""] * 6  # to its end


def test_halving_counts_failed_trials_and_keeps_at_least_one():
    sweep = sweep_of(4, epochs=9, scheduler="halving", factor=4)
    for trial in sweep.trials:
        evaluate(sweep, trial, trial.number / 10)
        trial.status = "paused"
    sweep.trials[3].status = "failed"
    policy.promote(sweep)
    assert [t.status for t in sweep.trials] == ["stopped", "stopped", "waiting", "failed"]


def test_population_based_training_replaces_the_worst_by_perturbed_copies_of_the_best():
    space = parse_space(["optim.lr=log:1e-3:1", "augment.policy=none,trivial,augmix"])
    config = to_dict(TrainConfig(epochs=7))
    settings = Settings(
        config=config, space=space, trials=6, scheduler="pbt", first_rung=2, factor=3
    )
    assert policy.rungs(settings) == [2, 4, 6]
    sweep = Sweep(settings, monitor="top1")
    points = random_points(space, 0, 6)
    sweep.trials = [Trial(n, f"trial-{n:04}", points[n], 0) for n in range(6)]
    for trial in sweep.trials:
        policy.begin(settings, trial)
    values = [0.3, 0.9, 0.1, 0.8, 0.2, 0.5]
    for trial, value in zip(sweep.trials, values, strict=True):
        assert policy.promote(sweep) == ([], [])
        assert evaluate(sweep, trial, 0.0) == ""
        assert "paused after epoch 2" in evaluate(sweep, trial, value)
        trial.status = "paused"
    stopped, clones = policy.promote(sweep, seed=5)
    assert [trial.number for trial in stopped] == [4, 2]
    assert "place 5 of 6 after epoch 2; the first 4 continue" in stopped[0].message
    assert [(clone.name, clone.origin) for clone in clones] == [
        ("trial-0006", "trial-0001"),
        ("trial-0007", "trial-0003"),
    ]
    assert {trial.until for trial in [*clones, *sweep.trials]} == {2, 4}
    for clone in clones:
        origin = sweep.trials[int(clone.origin[-4:])]
        assert [*clone.point] == [*origin.point]
        rates = [clone.point["optim.lr"], origin.point["optim.lr"]]
        assert 1e-3 <= rates[0] <= 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("optim.lr=log:1e-3:1", 0.5),
        ("model.dropout=0:0.5", 0.45),
        ("data.image_size=8:64", 9),
        ("augment.policy=none,trivial,augmix", "trivial"),
    ],
)
def test_perturbed_values_are_in_the_space_and_mostly_close(word: str, value: Any):
    (dimension,) = parse_space([word])
    found = [dimension.near(value, random.Random(n)) for n in range(400)]
    if dimension.kind == "choice":
        assert {*found} == {*dimension.choices}
        return
    assert all(dimension.low <= each <= dimension.high for each in found)  # type: ignore[operator]
    assert {type(each) for each in found} == {type(value)}
    reach = 2 if dimension.kind == "int" else 0.2 * value
    low, high = value - 1.001 * reach, value + 1.001 * reach
    near = [each for each in found if low <= each <= high]  # type: ignore[operator]
    assert 0.7 < len(near) / len(found) < 0.95  # and a quarter is redrawn
