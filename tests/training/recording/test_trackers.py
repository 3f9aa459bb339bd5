"""The log is also sent to MLflow and Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commits import notes
from event_records import event, to
from processes import wait_until

from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.trackers import openers
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig

Record = Any


def train(step: int, loss: float) -> Record:
    timing = {
        "step_s": 0.5,
        "split_s": {"data": 0.1, "compute": 0.4},
        "slowest": {"rank": 1, "phase": "data", "ratio": 1.5},
        "peak_memory_bytes": 100,
    }
    return event({"kind": "train", "step": step, "loss": loss, "lr": 0.1, "timing": timing})


EVALUATION = event(
    {"kind": "eval", "step": 2, "metrics": {"top1": 0.75}, "monitor": "top1", "best": True}
)


def config(folder: Path, **log: bool) -> TrainConfig:
    log = {"tensorboard": False, **log}
    (folder / "runs" / "digits").mkdir(parents=True)
    made = LogConfig(**log)  # type: ignore[arg-type]
    return TrainConfig(name="digits", storage=str(folder / "runs"), log=made)


def logged(
    made: TrainConfig, before: Sequence[Record], *records: Record, fails: bool = False
) -> list[Record]:
    """The notes of a start that resumes after `before` and logs `records`."""
    reported: list[Record] = []
    book = Log(open_storage(made.storage).join("digits"), openers(made), to(reported))
    book.restore(before)
    for record in records:
        book.add(record)
    book.close(failed=fails)
    return [each for each in reported if each["kind"] == "note"]


def test_a_restarted_run_is_one_mlflow_run_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    MlflowClient = pytest.importorskip("mlflow").MlflowClient  # noqa: N806

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made = config(tmp_path, mlflow=True)
    evaluated = replace(EVALUATION, metrics={"acc@1": 0.75})  # MLflow does not accept this name
    undefined = train(1, float("nan"))  # nor this value
    assert logged(made, [], undefined, train(2, 0.5), evaluated, fails=True) == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("raytrain_ddp")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    # A resume from the checkpoint of step 1 logs step 2 again, with equal values.
    assert logged(made, [undefined], train(2, 0.5), evaluated, train(3, 0.25)) == []
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(
        run.info.run_id, "train/loss"
    )  # batches may arrive out of order
    assert sorted((each.step, each.value) for each in history) == [(2, 0.5), (3, 0.25)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "eval/acc_1")] == [2]
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert run.info.run_name == "digits"


def test_a_restarted_run_is_one_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    made = config(tmp_path, wandb=True)
    assert logged(made, [], train(1, 1.0), train(2, 0.5), fails=True) == []
    assert logged(made, [train(1, 1.0)], train(2, 0.5), EVALUATION) == []
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert first.name == second.name, "one id"
    wait_until(lambda: b"train/loss" in first.read_bytes())  # another process writes
    wait_until(lambda: b"eval/top1" in second.read_bytes())


class FailingService:
    """A service that fails at step 2."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.had = [record.step for record in records]

    def add(self, record: Record) -> None:
        if record.step == 2:
            raise ConnectionError("no route to host")
        self.had.append(record.step)

    def close(self, failed: bool) -> None:
        raise ConnectionError("nor now")


def test_a_failing_service_is_reported_and_retried_at_the_next_checkpoint(tmp_path: Path):
    opened: list[FailingService] = []

    def open_it(records: Sequence[Record]) -> FailingService:
        opened.append(FailingService(records))
        return opened[-1]

    reported: list[Record] = []
    book = Log(open_storage(str(tmp_path)), {"Service": open_it}, to(reported))
    book.restore([])
    for step in (1, 2, 3):
        book.add(train(step, 1.0))
    wait_until(lambda: notes(reported))
    assert "no route to host" in notes(reported)[0]
    book.publish()
    book.add(train(4, 1.0))
    book.close()
    assert [each.had for each in opened] == [[1], [1, 2, 3, 4]]
