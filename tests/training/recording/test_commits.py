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

import pytest
from commits import THROTTLED, Record, notes, snapshot
from event_records import event, record, to

from raytrain_ddp.checkpoint.async_checkpoint import AsyncCheckpointer
from raytrain_ddp.checkpoint.metrics_log import MetricsLog
from raytrain_ddp.checkpoint.run_folder import read_history
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.trackers import TensorBoard
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.retries import with_backoff


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
    """A fake store: commits block until `free` is set, and fail as scripted."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.errors: Iterator[Exception | None] = iter([])
        self.done: list[int] = []

    def __call__(self, given: Snapshot, number: int) -> None:
        assert self.free.wait(10)
        error = next(self.errors, None)
        if error is not None:
            raise error
        self.done.append(given.manifest.step)


@pytest.fixture
def reported() -> list[Record]:
    return []


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def commits(store: Store, reported: list[Record]) -> Iterator[AsyncCheckpointer]:
    made = AsyncCheckpointer(store, 3, to(reported), lambda _: True)
    yield made
    store.free.set()
    made.close()


def test_fault_16_a_second_commit_waits_for_the_first_and_the_wait_is_reported(
    commits: AsyncCheckpointer, store: Store, reported: list[Record]
):
    store.free.clear()
    commits.submit(snapshot(1))
    assert commits.is_busy()
    assert commits.postpones()
    assert commits.postpones()
    assert len(notes(reported)) == 1
    threading.Timer(0.1, store.free.set).start()
    commits.submit(snapshot(2))
    assert store.done[0] == 1
    commits.finish()
    assert store.done == [1, 2]
    assert not commits.postpones()


def test_fault_08_consecutive_failures_end_the_training_and_a_success_resets_the_count(
    commits: AsyncCheckpointer, store: Store, reported: list[Record]
):
    full = OSError(errno.ENOSPC, "No space left on device")
    store.errors = iter([full, full, None, full, full, full])
    for step in range(1, 6):
        commits.submit(snapshot(step)).result()
        commits.require()
    commits.submit(snapshot(6)).result()
    with pytest.raises(CheckpointError, match=r"step 6.*No space left") as caught:
        commits.require()
    assert caught.value.exit_status == 5
    failed = [e for e in reported if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["in_a_row"]) for e in failed] == [(1, 1), (2, 2), (4, 1), (5, 2), (6, 3)]


def test_nonfinite_values_are_null_in_metrics_jsonl_and_nan_when_read_back(
    tmp_path: Path, reported: list[Record]
):
    run = open_storage(str(tmp_path))
    book = MetricsLog(run, {}, to(reported))
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
    book = MetricsLog(
        run, {"TensorBoard": partial(TensorBoard, tmp_path / "tensorboard")}, to(reported)
    )
    book.restore([event({"kind": "train", "step": 1, "loss": 0.5})])
    book.add(event({"kind": "train", "step": 2, "loss": 0.25}))
    assert len(notes(reported)) == 1
    (tmp_path / "metrics.jsonl").rmdir()
    book.publish()
    book.add(event({"kind": "train", "step": 3, "loss": 0.125}))
    book.close()
    assert [record["step"] for record in read_history(run)] == [1, 2, 3]
    assert events_of(tmp_path) == [(1, 0.5), (2, 0.25), (3, 0.125)]
