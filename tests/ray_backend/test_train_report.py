"""Ray Train is told of a run that has ended: its own Result, and never a failure. Real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("ray")
from ray_cluster import Ears, paced, processes, trained, two_nodes, wait_until

from raytrain_ddp import FitResult, fit
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

OWN = {"config.toml", "metrics.jsonl", "events.jsonl", "lease.json", "checkpoints", "curves.png"}


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def expect_result(result: FitResult, step: int) -> None:
    """Ray's Result is that of this run, and nothing of Ray Train's is in the run's folder."""
    import ray.train

    found = result.ray
    assert isinstance(found, ray.train.Result)
    assert found.error is None
    assert found.metrics == {**result.last, "step": step}
    assert found.checkpoint.path == result.last_checkpoint
    kept = [checkpoint.path for checkpoint, _ in found.best_checkpoints]
    assert kept == [*dict.fromkeys([result.best_checkpoint, result.last_checkpoint])]
    with found.checkpoint.as_directory() as folder:
        name = "model.safetensors"
        assert Path(folder, name).read_bytes() == Path(found.checkpoint.path, name).read_bytes()
    assert {path.name for path in Path(result.path).iterdir()} <= {*OWN, "logs"}
    assert not [*Path(result.path, "checkpoints").glob("checkpoint_*")]


def test_a_finished_run_has_ray_trains_result_also_when_it_is_continued(
    cluster: Any, tmp_path: Path
) -> None:
    config = paced(tmp_path, "run", "2")
    expect_result(fit(config, display=Ears()), 46)
    longer = replace(config, epochs=3)
    expect_result(fit(longer, display=Ears()), 69)
    again = fit(longer, display=Ears())
    assert (again.status, again.ray) == ("already complete", None)


def test_workers_that_ray_train_does_not_know_need_not_report(cluster: Any, tmp_path: Path) -> None:
    expect_result(fit(paced(tmp_path, "exact", "2", exact=True), display=Ears()), 46)


@pytest.mark.parametrize(
    ("armed", "also_killed"),
    [("kill@rank=1", ""), ("sleep(60)@rank=0", "ray::TrainController")],
    ids=["worker", "controller"],
)
def test_what_dies_during_the_report_does_not_fail_the_run(
    armed: str, also_killed: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = tmp_path / "fired"
    monkeypatch.setenv(VARIABLE, f"train.report:{armed}")
    monkeypatch.setenv(FOLDER_VARIABLE, str(fired))

    def kill() -> None:
        wait_until(fired.exists, 150)
        for process in processes(also_killed) if also_killed else []:
            process.kill()

    Thread(target=kill, daemon=True).start()
    config, ears = paced(tmp_path, "run", "2"), Ears()
    result = fit(config, display=ears)
    assert fired.exists()
    assert (result.status, result.exit_status, result.ray) == ("finished", 0, None)
    assert ears.of("failed") == []
    assert trained(config) == [*range(1, 47)]
    wait_until(lambda: not processes("ray::RayTrainWorker"))
