"""Configs made in Python: values of another type are one line, lists are as good as tuples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp import DataConfig, ModelConfig, TrainConfig
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"epochs": 1.5}, "epochs = 1.5"),
        ({"storage": Path("runs")}, "storage = "),
        ({"data": DataConfig(source=Path("photos"))}, "data.source = "),  # type: ignore[arg-type]
        ({"model": ModelConfig(freeze="backbone")}, "model.freeze = 'backbone'"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_one_line(given: dict[str, Any], field: str):
    with pytest.raises(ConfigError, match=field) as caught:
        check(TrainConfig(**given))
    assert "\n" not in str(caught.value)


def test_lists_and_dicts_become_what_the_fields_are():
    given: dict[str, Any] = {"optim": {"lr": 0.3}, "data": DataConfig(mean=[0.5] * 3)}  # type: ignore[arg-type]
    config = check(TrainConfig(**given))
    assert config.optim.lr == 0.3
    assert config.data.mean == (0.5, 0.5, 0.5)
