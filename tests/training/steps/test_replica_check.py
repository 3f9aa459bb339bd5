"""Weights that differ between workers are found and named, and end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import Group, Raised
from tiny import bits, kept_steps, plain, run_armed, run_tiny, tiny_config

from raytrain_ddp.config.sections import DdpConfig, OptimConfig, ScalingConfig
from raytrain_ddp.errors import DivergedError

FLIP = "train.weights:flip@rank={},step=13"
CHECKED = ScalingConfig(check_every_steps=5)
WAYS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "exact-adamw": {"exact": True, "optim": OptimConfig(name="adamw", lr=0.01)},
    "bf16": {"ddp": DdpConfig(compression="bf16")},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_in_a_weight_ends_the_run_before_the_next_checkpoint(
    workers: Group, tmp_path: Path, way: str
):
    config = tiny_config(tmp_path, "flipped", scaling=CHECKED, **WAYS[way])
    ends = workers.outcomes(3, run_armed, FLIP.format(1), str(tmp_path / "fired"), plain(config))
    for end in ends:
        assert isinstance(end, Raised)
        assert (end.name, end.exit_status) == ("DivergedError", DivergedError.exit_status)
        assert "rank 1 (" in end.text
        assert "step 15" in end.text
        assert "conv.weight" in end.text
    assert max(kept_steps(config)) == 10


def test_comparing_equal_replicas_raises_nothing_and_changes_no_bit(workers: Group, tmp_path: Path):
    found = []
    for every in (1, 0):
        scaling = ScalingConfig(check_every_steps=every)
        config = tiny_config(tmp_path, f"{every}", epochs=1, scaling=scaling)
        workers(3, run_tiny, plain(config))
        found.append(bits(config))
    assert found[0] == found[1]


def test_differing_weights_are_never_written_to_a_checkpoint(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "rare", scaling=ScalingConfig(check_every_steps=1000))
    ends = workers.outcomes(3, run_armed, FLIP.format(0), str(tmp_path / "fired"), plain(config))
    assert all(isinstance(end, Raised) and "step 20" in end.text for end in ends)
    assert max(kept_steps(config)) == 10
