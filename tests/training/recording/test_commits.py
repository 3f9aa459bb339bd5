"""Commits off the training path: retries, one at a time, failures, and the log."""

from __future__ import annotations

import errno
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commits import BEST, THROTTLED, Record, checkpoints_of, notes, snapshot
from event_records import event, record, to
from tiny import tiny_config

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import read_history
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.trackers import TensorBoard
from raytrain_ddp.config.sections import CheckpointConfig
from raytrain_ddp.errors import CheckpointError, with_backoff


def failing(times: int, error: OSError) -> Callable[[int], int]:
    def act(number: int) -> int:
        if number < times:
            raise error
        return number

    return act


def test_fault_15_retries_continue_for_the_given_outage_time(monkeypatch: pytest.MonkeyPatch):
    now, waited = [1.0], []

    def pause(wait_s: float, _: OSError) -> bool:
        now[0] += wait_s
        waited.append(wait_s)
        return True

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttled = OSError(THROTTLED)
    assert with_backoff(failing(30, throttled), pause, 600.0) == 30
    assert sum(waited) > 300
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_backoff(failing(1000, throttled), pause, 600.0)
    assert 900 < now[0] < 1100
    with pytest.raises(OSError, match="SLOW_DOWN"):  # the session ends
        with_backoff(failing(1, throttled), lambda _, __: False, 600.0)
    assert with_backoff(failing(30, OSError(errno.ENOSPC, "full")), pause, 600.0) == 30


class Store:
    """Commits block until `free` is set, and fail as scripted."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.errors: Iterator[Exception | None] = iter([])
        self.done: list[int] = []

    def act(self, step: int) -> None:
        assert self.free.wait(10)
        error = next(self.errors, None)
        if error is not None:
            raise error
        self.done.append(step)


@pytest.fixture
def reported() -> list[Record]:
    return []


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def checkpoints(
    store: Store, reported: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Checkpoints]:
    timed = CheckpointConfig(every_s=0.001, max_failed=3)
    made = checkpoints_of(tiny_config(tmp_path, "run", checkpoint=timed), reported)
    made.begin(BEST, 1)
    commit = made.store.commit

    def acted(manifest: Manifest, files: Any) -> Any:
        store.act(manifest.step)
        return commit(manifest, files)

    monkeypatch.setattr(made.store, "commit", acted)
    yield made
    store.free.set()
    made.close()


def test_fault_16_a_second_commit_waits_for_the_first_and_the_wait_is_reported(
    checkpoints: Checkpoints, store: Store, reported: list[Record]
):
    store.free.clear()
    checkpoints.save(snapshot(1))
    assert checkpoints.is_saving()
    while not notes(reported):
        assert not checkpoints.time_to_save()
    assert not checkpoints.time_to_save()
    assert len(notes(reported)) == 1
    threading.Timer(0.1, store.free.set).start()
    checkpoints.save(snapshot(2))
    assert store.done[0] == 1
    checkpoints.finish()
    assert store.done == [1, 2]
    assert not checkpoints.is_saving()


def test_fault_08_consecutive_failures_end_the_training_and_a_success_resets_the_count(
    checkpoints: Checkpoints, store: Store, reported: list[Record]
):
    full = OSError(errno.ENOSPC, "No space left on device")
    store.errors = iter([full, full, None, full, full, full])
    for step in range(1, 6):
        checkpoints.save(snapshot(step))
        checkpoints.drain()
    checkpoints.save(snapshot(6))
    with pytest.raises(CheckpointError, match=r"step 6.*No space left") as caught:
        checkpoints.drain()
    assert caught.value.exit_status == 5
    failed = [e for e in reported if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["in_a_row"]) for e in failed] == [(1, 1), (2, 2), (4, 1), (5, 2), (6, 3)]


def test_nonfinite_values_are_null_in_metrics_jsonl_and_nan_when_read_back(
    tmp_path: Path, reported: list[Record]
):
    run = open_storage(str(tmp_path))
    book = Log(run, {}, to(reported))
    first = event({"kind": "train", "step": 1, "loss": math.nan, "lr": 0.1, "seconds": 1.0})
    shown = {"kind": "eval", "step": 1, "epoch": 0, "metrics": {"loss": math.inf, "top1": 0.5}}
    book.restore([first])
    book.add(event({**shown, "best": False, "monitor": "loss"}))
    book.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    train, evaluated = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    undefined = dict.fromkeys(("loss", "samples_per_s", "seconds_total"))
    assert train == {**record(first), **undefined}
    assert evaluated["metrics"] == {"loss": None, "top1": 0.5}
    assert math.isnan(book.records[0].loss)  # the checkpoint keeps the value
    train, evaluated = read_history(run)
    assert math.isnan(train["loss"])
    assert math.isnan(evaluated["metrics"]["loss"])


def events_of(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (run / "tensorboard").iterdir()
    events = EventFileLoader(str(path)).Load()
    return [(e.step, e.summary.value[0].tensor.float_val[0]) for e in events if e.summary.value]


def test_fault_08_a_log_that_cannot_be_restored_is_rewritten_at_the_next_checkpoint(
    tmp_path: Path, reported: list[Record]
):
    run = open_storage(str(tmp_path))
    (tmp_path / "metrics.jsonl").mkdir()  # makes writing fail
    book = Log(run, {"TensorBoard": partial(TensorBoard, tmp_path / "tensorboard")}, to(reported))
    book.restore([event({"kind": "train", "step": 1, "loss": 0.5})])
    book.add(event({"kind": "train", "step": 2, "loss": 0.25}))
    assert len(notes(reported)) == 1
    (tmp_path / "metrics.jsonl").rmdir()
    book.publish()
    book.add(event({"kind": "train", "step": 3, "loss": 0.125}))
    book.close()
    assert [record["step"] for record in read_history(run)] == [1, 2, 3]
    assert events_of(tmp_path) == [(1, 0.5), (2, 0.25), (3, 0.125)]
