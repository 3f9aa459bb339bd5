"""The search space of a sweep: what it accepts, and that its points depend only on the seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raytrain_ddp.config.recipe import load
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.sweep.space import parse_space, random_points, with_point

WORDS = ["optim.lr=log:1e-3:1", "model.dropout=0:0.5", "augment.policy=none,trivial"]


def test_each_form_of_values_becomes_a_dimension_of_its_field():
    words = ["optim.nesterov=true,false", "micro-batch=8,16,auto", "model.args.x=0:1.5"]
    assert [*map(tuple, parse_space([*WORDS, *words]))] == [
        ("optim.lr", "loguniform", (1e-3, 1.0)),
        ("model.dropout", "uniform", (0.0, 0.5)),
        ("augment.policy", "choice", (["none", "trivial"],)),
        ("optim.nesterov", "choice", ([True, False],)),
        ("micro_batch", "choice", ([8, 16, "auto"],)),
        ("model.args.x", "uniform", (0.0, 1.5)),
    ]


REFUSED = {  # a word of --space, and what the error names besides
    **dict.fromkeys(("optim.lr", "optim.lr=", "optim.lr=log:0:1", "optim.lr=1:0.1"), "LOW:HIGH"),
    **dict.fromkeys(("batch_size=32:256", "optim.betas=0.1:0.2"), "list"),
    **dict.fromkeys(("optim.lr=a:b", "optim.lr=0:inf", "optim.lr=0.1,0.1"), "LOW:HIGH"),
    "name=a,b": "name",
    "seed=1,2": "--seeds",
    "scaling.num_workers=1,2": "scaling.num_workers",
}


def test_an_invalid_space_is_refused_in_one_line_that_names_the_word():
    for word, name in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            parse_space([word])
        assert word in str(caught.value)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    for words in ([], ["optim.lr=1:2", "optim.lr=2:3"]):
        with pytest.raises(ConfigError, match="--space"):
            parse_space(words)


def test_a_point_changes_its_fields_and_nothing_else():
    base = replace(load("digits"), task_options={"width": "1", "kept": "x"})
    point = {"optim.lr": 0.5, "optim.nesterov": True, "batch_size": 32, "task_options.width": 8}
    made = with_point(base, point)
    assert made.task_options == {"width": "8", "kept": "x"}
    optim = replace(base.optim, lr=0.5, nesterov=True)
    assert made == replace(base, optim=optim, batch_size=32, task_options=made.task_options)


def test_a_point_depends_only_on_its_number_and_the_seed():
    space = parse_space(WORDS)
    forty = random_points(space, 7, 40)
    assert forty[:5] == random_points(space, 7, 5)
    assert forty[:5] != random_points(space, 8, 5)
    # The same on each machine and version of Python.
    assert random_points(space, 0, 1) == [
        {"optim.lr": 0.3414, "model.dropout": 0.379, "augment.policy": "trivial"}
    ]


@pytest.mark.timeout(20)
def test_no_point_is_drawn_twice_and_a_small_space_is_exhausted():
    points = random_points(parse_space(["optim.name=sgd,adamw", "epochs=1,2,3"]), 0, 9)
    assert len({tuple(point.values()) for point in points}) == len(points) == 6
    narrow = random_points(parse_space(["optim.lr=0.1:0.1002"]), 0, 20)
    assert {point["optim.lr"] for point in narrow} == {0.1, 0.1001, 0.1002}


def test_numbers_are_uniform_in_the_range_or_in_its_logarithm():
    points = random_points(parse_space(["optim.lr=log:1e-4:1", "model.dropout=0.1:0.5"]), 0, 4000)
    logs = [math.log10(point["optim.lr"]) for point in points]
    for low in (-4, -3, -2, -1):
        assert sum(low <= each < low + 1 for each in logs) == pytest.approx(1000, abs=110)
    dropouts = [point["model.dropout"] for point in points]
    assert 0.1 <= min(dropouts) < 0.102
    assert 0.498 < max(dropouts) <= 0.5
