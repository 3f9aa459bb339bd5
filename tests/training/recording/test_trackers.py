"""The log is also sent to MLflow and Weights & Biases."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_records import event, to

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.recording.metrics_log import MetricsLog
from raytrain_ddp.training.recording.trackers import MLflow, openers, tracker_scalars

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
    """The reports of a start that resumes after `before` and logs `records`."""
    reported: list[Record] = []
    book = MetricsLog(open_storage(made.storage).join("digits"), openers(made), to(reported))
    book.restore(before)
    for record in records:
        book.add(record)
    if not fails:
        book.finish()
    book.close()
    return reported


def test_scalars_are_named_by_their_kind():
    assert dict(tracker_scalars(train(1, 0.5))) == {
        "train/loss": 0.5,
        "train/lr": 0.1,
        "time/step_s": 0.5,
        "time/peak_memory_bytes": 100.0,
        "time/data_s": 0.1,
        "time/compute_s": 0.4,
    }
    assert dict(tracker_scalars(EVALUATION)) == {"eval/top1": 0.75}
    counted = replace(EVALUATION, metrics={"top1": 0.75, "skipped": 3})
    assert dict(tracker_scalars(counted)) == {"eval/top1": 0.75, "eval/skipped": 3.0}


def test_a_restarted_run_is_one_mlflow_run_with_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made = config(tmp_path, mlflow=True)
    assert logged(made, [], train(1, 1.0), train(2, 0.5), EVALUATION, fails=True) == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("raytrain_ddp")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    # A resume from the checkpoint of step 1 logs step 2 again, with equal values.
    assert logged(made, [train(1, 1.0)], train(2, 0.5), EVALUATION, train(3, 0.25)) == []
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(
        run.info.run_id, "train/loss"
    )  # batches may arrive out of order
    assert sorted((each.step, each.value) for each in history) == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "eval/top1")] == [2]
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.lr"] == "0.1"
    assert run.info.run_name == "digits"


def test_a_restarted_run_is_one_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    made = config(tmp_path, wandb=True)
    assert logged(made, [], train(1, 1.0), train(2, 0.5), fails=True) == []
    assert logged(made, [train(1, 1.0)], train(2, 0.5), EVALUATION) == []
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert first.name == second.name, "one id"
    assert b"train/loss" in wait_for_content(first, b"train/loss")
    assert b"eval/top1" in wait_for_content(second, b"eval/top1")


def wait_for_content(path: Path, sign: bytes) -> bytes:
    """The content of a file that another process writes, once it contains `sign`."""
    deadline = time.monotonic() + 10
    while sign not in path.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_bytes()


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


def until(said: Sequence[Record], count: int) -> None:
    """Waits until `count` notes are reported."""
    deadline = time.monotonic() + 20
    while len(said) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(said) == count


def test_a_failing_service_is_reported_and_retried_at_the_next_checkpoint(tmp_path: Path):
    opened: list[FailingService] = []

    def open_it(records: Sequence[Record]) -> FailingService:
        opened.append(FailingService(records))
        return opened[-1]

    reported: list[Record] = []
    book = MetricsLog(open_storage(str(tmp_path)), {"Service": open_it}, to(reported))
    book.restore([])
    for step in (1, 2, 3):
        book.add(train(step, 1.0))
    until(reported, 1)
    assert [note["text"] for note in reported] == [
        "Service has failed (no route to host): it is retried with each checkpoint."
    ]
    book.publish()
    book.add(train(4, 1.0))
    book.close()
    assert [each.had for each in opened] == [[1], [1, 2, 3, 4]]


def test_an_unresponsive_service_does_not_block_the_training_or_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raytrain_ddp.training.recording.background_writer._LAST_S", 0.1)
    answers = threading.Event()

    def wait(_: Sequence[Record]) -> FailingService:
        answers.wait(20)
        raise ConnectionError("no answer")

    reported: list[Record] = []
    book = MetricsLog(open_storage(str(tmp_path)), {"Service": wait}, to(reported))
    book.restore([])
    began = time.monotonic()
    for step in (1, 2):
        book.add(train(step, 1.0))
        book.publish()
    book.close()
    assert time.monotonic() - began < 5
    assert [note["text"] for note in reported] == [
        "Service did not accept all records within 0 s: records may be missing there."
    ]
    answers.set()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_service_that_keeps_failing_is_retried_once_per_failure_and_reported_once(
    tmp_path: Path,
):
    tries: list[int] = []
    slowly = threading.Semaphore(0)

    def refuse(records: Sequence[Record]) -> FailingService:
        tries.append(len(records))
        slowly.acquire(timeout=20)
        raise ConnectionError("down")

    reported: list[Record] = []
    book = MetricsLog(open_storage(str(tmp_path)), {"Service": refuse}, to(reported))
    book.restore([])
    book.add(train(1, 1.0))
    for _ in range(5):  # checkpoints during the first try
        book.publish()
    slowly.release()
    until(reported, 1)
    book.add(train(2, 1.0))
    slowly.release()
    book.publish()
    book.close()
    assert tries == [1, 2]
    assert len(reported) == 1


def test_a_service_that_cannot_be_opened_does_not_end_the_training(tmp_path: Path):
    def refuse(_: Sequence[Record]) -> FailingService:
        raise ValueError("no API key")

    reported: list[Record] = []
    book = MetricsLog(open_storage(str(tmp_path)), {"Service": refuse}, to(reported))
    book.restore([])
    book.add(train(1, 1.0))
    book.add(train(2, 1.0))
    book.close()
    assert len(reported) == 1
    assert "no API key" in reported[0]["text"]
    assert [record.step for record in book.records] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_reported_by_the_check_before_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=rf"log\.{name}.*pip install 'raytrain_ddp\[{name}\]'"):
        check(config(tmp_path, **{name: True}))


def test_mlflow_gets_only_finite_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = MLflow(config(tmp_path, mlflow=True), [train(1, float("nan")), train(2, 0.5)])
    place.close(failed=False)
    (losses,) = (tmp_path / "mlruns").rglob("loss")
    assert losses.read_text().split()[1:] == ["0.5", "2"]


def test_metric_names_are_changed_to_those_that_mlflow_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made, named = config(tmp_path, mlflow=True), replace(EVALUATION, metrics={"acc@1": 0.5})
    assert logged(made, [], train(1, 1.0), named) == []
    assert logged(made, [train(1, 1.0), named], train(3, 0.5)) == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("raytrain_ddp")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "eval/acc_1")] == [2]
    assert run.data.metrics["train/loss"] == 0.5


def test_mlflow_without_a_usable_tracking_uri_tells_how_to_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import mlflow

    asked = config(tmp_path, mlflow=True)

    def refuse() -> None:
        raise mlflow.MlflowException("unsupported URI 'sqlite:////mlflow.db'")

    monkeypatch.setattr(mlflow, "MlflowClient", refuse)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(OSError, match=r"set MLFLOW_TRACKING_URI, as http.*unsupported URI"):
        MLflow(asked, [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////mlflow.db")
    with pytest.raises(mlflow.MlflowException, match=r"^unsupported URI"):
        MLflow(asked, [])
