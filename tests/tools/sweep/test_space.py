"""The search space of a sweep: what it accepts, and that its points depend only on the seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.sweep.space import (
    Dimension,
    corners,
    grid,
    parse_space,
    random_points,
    with_point,
)

WORDS = ["optim.lr=log:1e-3:1", "model.dropout=0:0.5", "augment.policy=none,trivial", "epochs=2:9"]


def test_each_form_of_values_becomes_a_dimension_of_its_field():
    assert parse_space([*WORDS, "optim.nesterov=true,false", "micro-batch=8,16,auto"]) == [
        Dimension("optim.lr", "float", 1e-3, 1.0, log=True),
        Dimension("model.dropout", "float", 0.0, 0.5),
        Dimension("augment.policy", "choice", choices=("none", "trivial")),
        Dimension("epochs", "int", 2.0, 9.0),
        Dimension("optim.nesterov", "choice", choices=(True, False)),
        Dimension("micro_batch", "choice", choices=(8, 16, "auto")),
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lrr=0.1,0.2", r"there is no field optim.lrr. Did you mean optim.lr\?"),
        ("optim.learning-rate=1:2", r"Did you mean optim.lr\?"),
        ("nothing.like.it=1,2", "there is no field nothing.like.it"),
        ("optim.lr", "write FIELD=VALUES"),
        ("optim.lr=", "write FIELD=VALUES"),
        ("optim.lr=log:0:1", "must begin above 0, not at 0"),
        ("optim.lr=log:-1:1", "must begin above 0, not at -1"),
        ("optim.lr=1:0.1", "must end above 1"),
        ("optim.lr=1:1", "must end above 1"),
        ("optim.lr=a:b", "must be numbers"),
        ("optim.lr=0:inf", "must be numbers"),
        ("optim.lr=0:nan", "must be numbers"),
        ("epochs=1.5:3", "must be integers"),
        ("optim.lr=0.1", "it does not vary"),
        ("optim.lr=0.1,0.1", "listed twice"),
        ("optim.lr=0.1,x", "takes a number"),
        ("optim.name=sgd,adam", "takes sgd or adamw"),
        ("optim.name=log:1:2", "is not a number"),
        ("optim.betas=0.1,0.2", "takes several values"),
        ("task_options=1,2", "takes several values"),
        ("task_options.=1,2", "there is no field"),
        ("task_options.width=8", "it does not vary"),
        ("task_options.width=a:b", "it does not vary"),
        ("name=a,b", "cannot vary: the sweep names"),
        ("seed=1,2", "--seeds repeats"),
        ("scaling.num_workers=1,2", "a trial is one process"),
        ("log.wandb=true,false", "does not change the result"),
    ],
)
def test_an_invalid_search_space_is_refused(word: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_space([word])
    assert "\n" not in str(caught.value)


def test_entries_of_tables_can_be_searched_like_fields():
    words = ["task-options.width=log:4:64", "task_options.rate=0:0.5", "model.args.act=relu,gelu"]
    width, rate, act = parse_space(words)
    assert width == Dimension("task_options.width", "int", 4, 64, log=True)
    assert rate == Dimension("task_options.rate", "float", 0, 0.5)
    assert act == Dimension("model.args.act", "choice", choices=("relu", "gelu"))
    config = replace(TrainConfig(), task_options={"width": "1", "kept": "x"})
    point = {"task_options.width": 8, "task_options.rate": 0.123456789, "model.args.act": "gelu"}
    varied = with_point(config, point)
    assert varied.task_options == {"width": "8", "kept": "x", "rate": "0.123456789"}
    assert varied.model.args == {"act": "gelu"}
    assert config.task_options == {"width": "1", "kept": "x"}
    with pytest.raises(ConfigError, match=r"task_options\.width is given twice"):
        parse_space(["task-options.width=1,2", "task_options.width=3,4"])


def test_a_duplicate_field_and_an_empty_space_are_refused():
    with pytest.raises(ConfigError, match=r"optim\.lr is given twice"):
        parse_space(["optim.lr=1:2", "optim.lr=2:3"])
    with pytest.raises(ConfigError, match="give the space"):
        parse_space([])


def test_a_point_depends_only_on_its_number_and_the_seed():
    space = parse_space(WORDS)
    forty = random_points(space, 7, 40)
    assert forty[:5] == random_points(space, 7, 5)
    assert forty == random_points(space, 7, 40)
    assert forty[:5] != random_points(space, 8, 5)
    # The same on each machine and version of Python: these were drawn on another one.
    assert random_points(space[:3], 0, 1) == [
        {"optim.lr": 0.02492, "model.dropout": 0.4878, "augment.policy": "none"}
    ]


def test_no_point_is_drawn_twice_and_a_small_space_is_exhausted():
    space = parse_space(["optim.name=sgd,adamw", "epochs=1:3"])
    points = random_points(space, 0, 6)
    assert len({tuple(point.values()) for point in points}) == 6
    with pytest.raises(ConfigError, match="has 6 points, fewer than --trials 7"):
        random_points(space, 0, 7)


@pytest.mark.timeout(20)
def test_a_narrow_range_has_few_points():
    space = parse_space(["optim.lr=0.1:0.1002"])
    assert {point["optim.lr"] for point in random_points(space, 0, 3)} == {0.1, 0.1001, 0.1002}
    with pytest.raises(ConfigError, match="has 3 points with 4 significant digits, fewer than"):
        random_points(space, 0, 20)


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("optim.nesterov=maybe,no", "write a list such as true,false"),
        ("augment.policy=some,none", "write a list such as none,"),
        ("optim.lr=a,b", "write LOW:HIGH"),
    ],
)
def test_the_forms_that_a_field_takes_are_named(word: str, form: str):
    with pytest.raises(ConfigError, match=form):
        parse_space([word])


def test_numbers_are_uniform_in_the_range_or_in_its_logarithm():
    space = parse_space(["optim.lr=log:1e-4:1", "model.dropout=0.1:0.5", "epochs=1:4"])
    points = random_points(space, 0, 4000)
    logs = [math.log10(point["optim.lr"]) for point in points]
    assert min(logs) >= -4
    assert max(logs) <= 0
    for low in (-4, -3, -2, -1):
        assert sum(low <= each < low + 1 for each in logs) == pytest.approx(1000, abs=110)
    dropouts = [point["model.dropout"] for point in points]
    assert 0.1 <= min(dropouts) < 0.102
    assert 0.498 < max(dropouts) <= 0.5
    assert sum(dropouts) / 4000 == pytest.approx(0.3, abs=0.01)
    for epochs in (1, 2, 3, 4):
        assert sum(p["epochs"] == epochs for p in points) == pytest.approx(1000, abs=110)


@given(st.floats(1e-6, 1e3), st.floats(1.001, 1e4), st.booleans(), st.integers(0, 2**40))
def test_a_drawn_number_is_in_its_range(low: float, ratio: float, log: bool, seed: int):
    dimension = Dimension("optim.lr", "float", low, low * ratio, log)
    (point,) = random_points([dimension], seed, 1)
    assert low <= point["optim.lr"] <= low * ratio
    assert 0 <= dimension.share(point["optim.lr"]) <= 1


def test_a_grid_has_all_combinations_and_refuses_ranges():
    space = parse_space(["optim.lr=0.1,0.2,0.3", "augment.flip=true,false"])
    points = grid(space)
    assert len(points) == 6
    assert points[:2] == [
        {"optim.lr": 0.1, "augment.flip": True},
        {"optim.lr": 0.1, "augment.flip": False},
    ]
    with pytest.raises(ConfigError, match=r"model\.dropout has a range: list its values"):
        grid([*space, *parse_space(["model.dropout=0:0.5"])])
    ten = ",".join(map(str, range(10)))
    with pytest.raises(ConfigError, match="100,000,000 combinations, above the limit of 10,000"):
        grid(parse_space([f"task_options.a{n}={ten}" for n in range(8)]))


def test_corners_are_the_ends_of_ranges_and_all_choices():
    space = parse_space(["optim.lr=log:1e-3:1", "augment.policy=none,trivial,augmix"])
    found = [tuple(point.values()) for point in corners(space)]
    assert len(found) == 6
    assert (1e-3, "augmix") in found
    many = [Dimension(f"f{n}", "float", 0, 1) for n in range(12)]
    some = [tuple(point.values()) for point in corners(many, most=256)]
    assert 100 < len(some) <= 256
    assert all(len({corner[n] for corner in some}) == 2 for n in range(12))
    assert len([*corners([Dimension(f"f{n}", "float", 0, 1) for n in range(100)])]) <= 256


def test_a_point_changes_its_fields_and_nothing_else():
    base = load("digits")
    made = with_point(base, {"optim.lr": 0.5, "optim.nesterov": True, "batch_size": 32})
    assert (made.optim.lr, made.optim.nesterov, made.batch_size) == (0.5, True, 32)
    assert made.optim.label_smoothing == base.optim.label_smoothing
    with pytest.raises(ConfigError, match="batch_size = 40: must be a multiple"):
        with_point(TrainConfig(), {"batch_size": 40})
