"""Values of wrong types in a config created in Python or read from a file."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain_ddp import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
    fit_locally,
)
from raytrain_ddp.config.recipe import changed_fields, from_dict, to_dict
from raytrain_ddp.errors import ConfigError


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: TrainConfig(epochs=1.5), "epochs = 1.5: must be an integer."),
        (lambda: TrainConfig(epochs=True), "epochs = True: must be an integer."),
        (
            lambda: TrainConfig(optim={"lr": 1}),
            "optim = {'lr': 1}: must be an OptimConfig, in a file a table [optim].",
        ),
        (lambda: DataConfig(image_size="224"), "data.image_size = '224': must be an integer."),
        (lambda: ModelConfig(freeze="fc"), "model.freeze = 'fc': must be a list of texts."),
        (lambda: OptimConfig(betas=(0.9,)), "optim.betas = (0.9,): must be 2 numbers."),
        (lambda: OptimConfig(name="adam"), "optim.name = 'adam': must be sgd or adamw."),
        (lambda: ScheduleConfig(gamma=None), "schedule.gamma = None: must be a number."),
        (
            lambda: ModelConfig(args={"layers": [2, 2]}),
            "model.args = {'layers': [2, 2]}: must be a table whose values are text, true or "
            "false, an integer or a number.",
        ),
    ],
)
def test_a_value_of_a_wrong_type_in_python_is_refused_in_one_line(
    made: Callable[[], Any], message: str
):
    with pytest.raises(ConfigError) as caught:
        made()
    assert str(caught.value) == message


def test_equivalent_python_values_are_accepted():
    config = TrainConfig(
        storage=Path("runs"),
        epochs=np.int64(3),
        task_options={"a": 3, "b": True, "c": 0.5, "d": "x"},
        exact=np.bool_(True),
        data=DataConfig(source=Path("photos"), mean=[0.5, 0.5, 1], std=np.array([1, 0.5, 0.25])),
        optim=OptimConfig(lr=np.float32(0.5)),
    )
    assert (config.storage, config.data.source) == ("runs", "photos")
    assert (config.epochs, type(config.epochs)) == (3, int)
    assert (config.data.mean, config.data.std) == ((0.5, 0.5, 1.0), (1.0, 0.5, 0.25))
    assert config.exact is True
    assert (config.optim.lr, type(config.optim.lr)) == (0.5, float)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_options_as_text_and_as_numbers_are_the_same_on_a_resume():
    then = to_dict(TrainConfig(task_options={"a": 3, "b": True}))
    assert changed_fields(then, TrainConfig(task_options={"a": "3", "b": "true"})) == []
    changed = changed_fields(then, TrainConfig(task_options={"a": "4", "b": "true"}))
    assert [name for name, _, _ in changed] == ["task_options"]


@pytest.mark.parametrize(
    "values",
    [{"epochs": True}, {"epochs": "3"}, {"exact": 1}, {"optim": {"lr": "0.1"}}, {"name": 3.5}],
)
def test_a_recipe_file_is_checked_equally_strictly(values: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"^mine.toml: .* = .*: must be .*\.$"):
        from_dict(values, where="mine.toml")


@pytest.mark.parametrize("given", [{"epochs": 1}, "digits", OptimConfig()])
def test_fit_accepts_only_a_config(given: Any):
    with pytest.raises(ConfigError, match="fit takes a TrainConfig, not a "):
        fit_locally(given)
