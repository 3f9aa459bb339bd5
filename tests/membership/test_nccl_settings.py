"""The settings for NCCL, with and without Ray Train; the tests need no GPU."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from raytrain_ddp.config.sections import ComputeConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.membership.process_group import (
    ALWAYS,
    collective_timeout,
    nccl_settings,
    set_for_replacing,
)

PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


@pytest.mark.parametrize(
    ("config", "pins"),
    [
        (TrainConfig(), PINNED),
        (TrainConfig(exact=True), {}),
        (TrainConfig(compute=ComputeConfig(deterministic=False)), {}),
    ],
)
def test_the_nccl_algorithm_is_pinned_only_if_the_same_bits_depend_on_it(
    config: TrainConfig, pins: dict[str, str]
):
    assert nccl_settings(config) == ALWAYS | pins


@pytest.mark.parametrize(("hang_s", "limit_s"), [("auto", 3600), (0.0, 1800), (120.0, 14400)])
def test_the_watchdog_acts_before_the_time_limit_of_nccl(hang_s: Any, limit_s: int):
    assert collective_timeout(ScalingConfig(hang_s=hang_s)) == timedelta(seconds=limit_s)


def test_if_workers_are_replaced_torchs_own_error_handling_is_off(monkeypatch: pytest.MonkeyPatch):
    config, environ = TrainConfig(), {"NCCL_ALGO": "Tree"}
    monkeypatch.setattr(os, "environ", environ)
    set_for_replacing(config)
    wanted = {**ALWAYS, **PINNED, "NCCL_ALGO": "Tree", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    wanted["TORCH_GLOO_LAZY_INIT"] = "0"
    assert environ == wanted
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    with pytest.raises(PreflightError, match="TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        set_for_replacing(config)
