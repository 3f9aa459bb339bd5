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
from raytrain_ddp.tools.sweep.space import Dimension, grid, parse_space, random_points, with_point

WORDS = ["optim.lr=log:1e-3:1", "model.dropout=0:0.5", "augment.policy=none,trivial", "epochs=2:9"]


def test_each_form_of_values_becomes_a_dimension_of_its_field():
    words = ["optim.nesterov=true,false", "micro-batch=8,16,auto", "model.name=timm:a,timm:b"]
    assert parse_space([*WORDS, *words, "task-options.width=log:4:64", "model.args.x=0:1.5"]) == [
        Dimension("optim.lr", (), 1e-3, 1.0, log=True),
        Dimension("model.dropout", (), 0.0, 0.5),
        Dimension("augment.policy", ("none", "trivial")),
        Dimension("epochs", (), 2.0, 9.0, whole=True),
        Dimension("optim.nesterov", (True, False)),
        Dimension("micro_batch", (8, 16, "auto")),
        Dimension("model.name", ("timm:a", "timm:b")),
        Dimension("task_options.width", (), 4, 64, whole=True, log=True),
        Dimension("model.args.x", (), 0, 1.5),
    ]


REFUSED = {  # a word of --space, and what the error names
    "optim.lrr=0.1,0.2": "optim.lrr optim.lr",
    "nothing.like.it=1,2": "nothing.like.it",
    "optim.lr": "FIELD=VALUES",
    "optim.lr=": "FIELD=VALUES",
    "optim.lr=log:0:1": "above 0",
    "optim.lr=1:0.1": "larger",
    "optim.lr=1:1": "larger",
    "optim.lr=a:b": "LOW:HIGH",
    "optim.lr=0:inf": "LOW:HIGH",
    "optim.lr=0.1": "LOW:HIGH",
    "optim.lr=0.1,0.1": "different",
    "task_options.=1,2": "no field",
    "name=a,b": "name",
    "seed=1,2": "--seeds",
    "scaling.num_workers=1,2": "scaling.num_workers",
    "log.wandb=true,false": "log.wandb",
}


def test_an_invalid_space_is_refused_in_one_line_that_names_the_word():
    for word, names in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            parse_space([word])
        message = str(caught.value)
        assert word in message
        assert "\n" not in message
        assert all(name in message for name in names.split()), message
    for words, name in {("optim.lr=1:2", "optim.lr=2:3"): "optim.lr", (): "--space"}.items():
        with pytest.raises(ConfigError, match=name):
            parse_space(words)


def test_a_point_changes_its_fields_and_nothing_else():
    base = replace(load("digits"), task_options={"width": "1", "kept": "x"})
    point = {"optim.lr": 0.5, "optim.nesterov": True, "batch_size": 32, "task_options.width": 8}
    made = with_point(base, point)
    assert (made.optim.lr, made.optim.nesterov, made.batch_size) == (0.5, True, 32)
    assert made.task_options == {"width": "8", "kept": "x"}
    assert made.optim.label_smoothing == base.optim.label_smoothing
    assert with_point(made, {name: base_value(base, name) for name in point}) == base
    for wrong in ({"batch_size": 40}, {"epochs": 1.5}, {"optim.name": "x"}, {"optim.betas": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            with_point(TrainConfig(), wrong)


def base_value(config: TrainConfig, name: str) -> object:
    if name == "task_options.width":
        return config.task_options["width"]
    section = config.optim if name.startswith("optim.") else config
    return getattr(section, name.rpartition(".")[2])


def test_a_point_depends_only_on_its_number_and_the_seed():
    space = parse_space(WORDS)
    forty = random_points(space, 7, 40)
    assert forty[:5] == random_points(space, 7, 5)
    assert forty[:5] != random_points(space, 8, 5)
    # The same on each machine and version of Python: these were drawn on another one.
    assert random_points(space[:3], 0, 1) == [
        {"optim.lr": 0.02492, "model.dropout": 0.4878, "augment.policy": "none"}
    ]


@pytest.mark.timeout(20)
def test_no_point_is_drawn_twice_and_a_small_space_is_exhausted():
    points = random_points(parse_space(["optim.name=sgd,adamw", "epochs=1:3"]), 0, 9)
    assert len({tuple(point.values()) for point in points}) == 6
    narrow = random_points(parse_space(["optim.lr=0.1:0.1002"]), 0, 20)
    assert {point["optim.lr"] for point in narrow} == {0.1, 0.1001, 0.1002}


def test_numbers_are_uniform_in_the_range_or_in_its_logarithm():
    space = parse_space(["optim.lr=log:1e-4:1", "model.dropout=0.1:0.5", "epochs=1:4"])
    points = random_points(space, 0, 4000)
    logs = [math.log10(point["optim.lr"]) for point in points]
    for low in (-4, -3, -2, -1):
        assert sum(low <= each < low + 1 for each in logs) == pytest.approx(1000, abs=110)
    dropouts = [point["model.dropout"] for point in points]
    assert 0.1 <= min(dropouts) < 0.102
    assert 0.498 < max(dropouts) <= 0.5
    for epochs in (1, 2, 3, 4):
        assert sum(p["epochs"] == epochs for p in points) == pytest.approx(1000, abs=110)


@given(st.floats(1e-6, 1e3), st.floats(1.001, 1e4), st.booleans(), st.integers(0, 2**40))
def test_a_drawn_number_is_in_its_range(low: float, ratio: float, log: bool, seed: int):
    dimension = Dimension("optim.lr", (), low, low * ratio, log=log)
    (point,) = random_points([dimension], seed, 1)
    assert low <= point["optim.lr"] <= low * ratio


def test_a_grid_has_all_combinations_and_refuses_ranges():
    space = parse_space(["optim.lr=0.1,0.2,0.3", "augment.flip=true,false"])
    assert len(grid(space)) == 6
    assert grid(space)[1] == {"optim.lr": 0.1, "augment.flip": False}
    with pytest.raises(ConfigError, match=r"model\.dropout"):
        grid([*space, *parse_space(["model.dropout=0:0.5"])])
    ten = ",".join(map(str, range(10)))
    with pytest.raises(ConfigError, match="100,000,000"):
        grid(parse_space([f"task_options.a{n}={ten}" for n in range(8)]))
