"""Real Ray, opt-in because it takes minutes: crash loops, hangs, and clusters that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray_cluster import Ears, paced, two_nodes, weights

from raytrain_ddp import fit
from raytrain_ddp.config.sections import CheckpointConfig, ScalingConfig
from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


@pytest.mark.slow
def test_fault_48_a_worker_that_dies_at_the_same_step_three_times_ends_the_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, ";".join(["train.before_step:kill@rank=1,step=5"] * 8))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    scaling = ScalingConfig(num_workers=2, max_failures=100)
    config = paced(tmp_path, "loop", checkpoint=CheckpointConfig(every_s=0), scaling=scaling)
    ears = Ears()
    with pytest.raises(RetriesExhausted, match=r"rank 1 .* step [1-5]"):
        fit(config, display=ears)
    # On a busy machine, Ray may end rank 0 before it has reported its step: then the driver knows
    # the step only roughly, and needs one more death.
    died = len(list((tmp_path / "fired").iterdir()))
    assert 3 <= died < 8
    assert [event["rank"] for event in ears.of("failed")] == [1] * (died - 1)


@pytest.mark.slow
def test_fault_33_a_stopped_worker_is_named_and_replaced_with_the_same_bits(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = ScalingConfig(num_workers=3, hang_s=2.0)
    whole, hung = (paced(tmp_path, name, scaling=scaling) for name in ("whole", "hung"))
    fit(whole, display=Ears())
    monkeypatch.setenv(VARIABLE, "train.before_step:stop@rank=2,step=30")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    ears = Ears()
    assert fit(hung, display=ears).status == "finished"
    (failed,) = ears.of("failed")
    assert failed["hung"]
    assert failed["step"] == 30
    assert "rank 2" in failed["message"]
    assert [plan["start_step"] for plan in ears.of("plan")] == [0, 29]
    assert weights(hung) == weights(whole)
