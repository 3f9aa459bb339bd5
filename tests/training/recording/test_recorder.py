"""What rank 0 writes: checkpoints off the training path, on slow, full and failing storage."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from event_records import event, record, to
from faulty_storage import Faults, FaultyHandler
from logs import log_of
from processes import Group, Raised
from pyarrow import fs as pafs
from tiny import (
    TOTAL_STEPS,
    ScriptedSession,
    WorkerResult,
    bits,
    kept_steps,
    newest,
    plain,
    run_tiny,
    tiny_config,
)

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    checkpoint_store,
    read_history,
    read_log,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config.sections import CheckpointConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.display.curves_png import draw_curves
from raytrain_ddp.errors import CheckpointError, RunLockedError
from raytrain_ddp.report.run_files import claims_in
from raytrain_ddp.training.recording import recorder as recorder_module
from raytrain_ddp.training.recording import recording_session
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.metrics_log import MetricsLog
from raytrain_ddp.training.recording.recorder import Best, Recorder
from raytrain_ddp.training.recording.trackers import TensorBoard
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Snapshot
from raytrain_ddp.training.state import async_checkpoint
from raytrain_ddp.training.state.async_checkpoint import (
    TRIES,
    AsyncCheckpointer,
    retry_pauses,
    with_backoff,
)
from raytrain_ddp.training.state.checkpoint_interval import LONGEST_S, Life, SaveTimer
from raytrain_ddp.training.state.train_state import encode

Record = Any

THROTTLED = "AWS Error SLOW_DOWN during PutObject operation: Please reduce your request rate."
ALONE = World(0, 1, 0, torch.device("cpu"), threads=1)


def snapshot(step: int, **changes: Any) -> Snapshot:
    manifest = Manifest(
        step=step,
        epoch=0,
        attempt=0,
        world_size=1,
        config={},
        data_fingerprint="x",
        metrics={},
        written_by="test",
    )
    tensors = {"model": {"w": torch.full((1000,), float(step))}}
    return Snapshot(manifest, tensors, {"state.json": {"step": step}}, **changes)


# ------------------------------------------------------------------ retries


def test_pauses_double_with_jitter_and_are_bounded():
    firsts = set()
    for _ in range(100):
        random.seed(0)  # like training scripts, on every machine
        before = random.getstate()
        waits = list(retry_pauses())
        assert random.getstate() == before
        assert len(waits) == TRIES - 1
        assert all(2**n / 2 <= wait_s <= 2**n for n, wait_s in enumerate(waits))
        firsts.add(waits[0])
    assert len(firsts) > 50


def failing(times: int, error: OSError) -> Callable[[int], int]:
    def act(number: int) -> int:
        if number < times:
            raise error
        return number

    return act


def no_pause(_: float, __: OSError) -> bool:
    return True


def test_fault_15_a_transient_error_is_retried_up_to_five_attempts():
    throttled = OSError(THROTTLED)
    for times in range(TRIES):
        assert with_backoff(failing(times, throttled), no_pause) == times
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_backoff(failing(TRIES, throttled), no_pause)


def test_fault_15_retries_continue_for_the_given_outage_time(
    monkeypatch: pytest.MonkeyPatch,
):
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
    assert with_backoff(failing(30, OSError(errno.ENOSPC, "full")), pause, 600.0) == 30


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS])
def test_fault_08_a_full_disk_is_not_retried_immediately(number: int):
    with pytest.raises(OSError, match="full"):
        with_backoff(failing(1, OSError(number, "full")), no_pause)


def test_fault_15_retries_stop_when_the_session_ends_and_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_backoff(failing(1, OSError(THROTTLED)), lambda _, __: False)
    clock = iter([0.0, 59.9])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_backoff(failing(1, OSError(THROTTLED)), no_pause)


# ------------------------------------------------------------------ one commit at a time


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


def notes(reported: list[Record]) -> list[str]:
    return [str(event["text"]) for event in reported if event["kind"] == "note"]


def test_fault_16_a_second_commit_waits_for_the_first_and_the_wait_is_reported(
    commits: AsyncCheckpointer, store: Store, reported: list[Record]
):
    store.free.clear()
    commits.submit(snapshot(1))
    assert commits.is_busy()
    assert commits.postpones()
    assert commits.postpones()
    assert [("step 1 is still being written" in note) for note in notes(reported)] == [True]  # once
    threading.Timer(1.2, store.free.set).start()
    commits.submit(snapshot(2))
    assert store.done[0] == 1
    assert "training waited 1." in notes(reported)[1]
    commits.finish()
    assert store.done == [1, 2]
    assert not commits.postpones()


def test_fault_16_a_hanging_commit_is_reported_while_the_training_waits_for_it(
    commits: AsyncCheckpointer,
    store: Store,
    reported: list[Record],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(async_checkpoint, "_HANGS_S", 0.1)
    store.free.clear()
    threading.Timer(0.6, store.free.set).start()
    commits.submit(snapshot(9))
    commits.finish()
    assert {note.split(" for the")[0] for note in notes(reported)} == {"training waits"}
    assert len(notes(reported)) > 1
    assert all("step 9" in note and "does not respond" in note for note in notes(reported))


def test_fault_16_a_hanging_commit_is_reported_at_the_end_of_a_session_too(
    commits: AsyncCheckpointer,
    store: Store,
    reported: list[Record],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(async_checkpoint, "_HANGS_S", 0.05)
    store.free.clear()

    def end_when_reported() -> None:
        until_s = time.monotonic() + 30
        while not reported and time.monotonic() < until_s:
            time.sleep(0.01)
        store.free.set()

    threading.Thread(target=end_when_reported).start()
    commits.submit(snapshot(9))
    commits.close()
    assert store.done == [9]
    assert {"does not respond" in note for note in notes(reported)} == {True}


def test_fault_08_consecutive_failures_end_the_training_and_a_success_resets_the_count(
    commits: AsyncCheckpointer, store: Store, reported: list[Record]
):
    full = OSError(errno.ENOSPC, "No space left on device")
    store.errors = iter([full, full, None, full, full, full])
    for step in range(1, 6):
        commits.submit(snapshot(step)).result()
        commits.require()
    commits.submit(snapshot(6)).result()
    with pytest.raises(CheckpointError, match=r"step 6.*No space left.*Free space"):
        commits.require()
    failed = [e for e in reported if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["in_a_row"]) for e in failed] == [(1, 1), (2, 2), (4, 1), (5, 2), (6, 3)]
    assert all("No space left on device" in str(event["message"]) for event in failed)
    assert "checkpoint.max_failed = 3 fail in a row; this was number 1" in notes(reported)[0]


def test_a_failure_of_the_last_commit_is_an_error(commits: AsyncCheckpointer, store: Store):
    store.errors = iter([OSError(errno.ENOSPC, "No space left on device")])
    commits.submit(snapshot(30))
    with pytest.raises(CheckpointError, match="step 30") as caught:
        commits.finish()
    assert caught.value.exit_status == 5


def test_fault_15_each_retry_is_reported_and_does_not_fail_the_training(
    commits: AsyncCheckpointer, store: Store, reported: list[Record]
):
    store.errors = iter([OSError(THROTTLED)] * 3)
    commits.submit(snapshot(7))
    commits.finish()
    assert store.done == [7]
    assert len(notes(reported)) == 3
    assert all("SLOW_DOWN" in note and "retrying in" in note for note in notes(reported))


@pytest.mark.parametrize("error", [RunLockedError("taken over"), ValueError("a bug")])
def test_a_commit_error_unrelated_to_storage_ends_the_training_at_the_next_step(
    error: Exception, commits: AsyncCheckpointer, store: Store
):
    store.errors = iter([error])
    commits.submit(snapshot(1)).result()  # does not raise: Ray's upload thread waits for this
    with pytest.raises(type(error), match=str(error)):
        commits.require()


@pytest.mark.parametrize(
    "failure", [RunLockedError("the lease is lost"), BrokenPipeError(32, "gone")]
)
def test_an_event_that_cannot_be_delivered_ends_the_training_at_the_next_step(
    failure: Exception, store: Store
):
    def tell(_: Record) -> None:
        raise failure

    commits = AsyncCheckpointer(store, 3, tell, lambda _: True)
    store.errors = iter([OSError(errno.ENOSPC, "No space left on device")])
    commits.submit(snapshot(1)).result()  # does not raise
    commits.close()
    with pytest.raises(type(failure)):
        commits.require()


# ------------------------------------------------------------------ the log


def test_the_log_is_encoded_in_pieces_that_join_to_valid_json():
    for records in (0, 1, 499, 500, 501, 1700):
        log = [
            {"kind": "eval", "step": n, "epoch": 0, "metrics": {"ü": n / 7, "none": None}}
            | {"monitor": "ü", "best": False, "seconds": 0.5}
            for n in range(records)
        ]
        events = [event(each) for each in log]
        given = snapshot(1)
        files = encode(replace(given, log=events, documents={"state.json": {"a": [1, 2]}}))
        pieces = list(files["log.json"])
        assert max(map(len, pieces)) < 600 * len(json.dumps(log[-1:]))
        assert b"".join(pieces) == json.dumps(log).encode()
        assert files["state.json"] == b'{"a": [1, 2]}'


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
    image = io.BytesIO()
    draw_curves(read_log(run), image, "a run")
    assert image.getvalue().startswith(b"\x89PNG")


def test_tensorboard_is_imported_only_when_there_is_a_new_record(
    tmp_path: Path, reported: list[Record], monkeypatch: pytest.MonkeyPatch
):
    """The import takes 0.4 s of each start, including a resume."""
    run = open_storage(str(tmp_path))
    book = MetricsLog(
        run, {"TensorBoard": partial(TensorBoard, tmp_path / "tensorboard")}, to(reported)
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        book.restore([event({"kind": "train", "step": 1, "loss": 0.5})])
    book.add(event({"kind": "train", "step": 2, "loss": 0.25}))
    book.add(event({"kind": "train", "step": 3, "loss": 0.125}))
    book.close()
    assert events_of(tmp_path) == [(1, 0.5), (2, 0.25), (3, 0.125)]


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
    assert ["the next checkpoint rewrites it" in note for note in notes(reported)] == [True]
    (tmp_path / "metrics.jsonl").rmdir()
    book.publish()
    book.add(event({"kind": "train", "step": 3, "loss": 0.125}))
    book.close()
    assert [record["step"] for record in read_history(run)] == [1, 2, 3]
    assert events_of(tmp_path) == [(1, 0.5), (2, 0.25), (3, 0.125)]


# ------------------------------------------------------------------ the recorder


def recorder(config: TrainConfig, reported: list[Record]) -> Recorder:
    return Recorder(config, ALONE, Best("loss", "min"), to(reported))


def test_each_start_records_its_number_of_workers_even_if_the_recorder_is_reused(tmp_path: Path):
    made = recorder(tiny_config(tmp_path, "run"), [])
    made.begin()
    made.resume(replace(ALONE, size=3), lambda _: None)
    made.begin()
    made.close()
    claims = claims_in(open_storage(str(tmp_path)).join("run"))
    assert [(attempt, claim["workers"]) for attempt, claim in claims] == [(1, 1), (2, 3)]


class FaultyStore(Faults):
    """An object store that is slow, or fails for a number of writes or reads."""

    def __init__(self) -> None:
        super().__init__()
        self.slow_s, self.failures, self.unread = 0.0, 0, 0

    def __call__(
        self,
        what: str,
        act: Callable[[], Any],
        act_half: Callable[[], Any] = lambda: None,
    ) -> Any:
        if what == "put":
            time.sleep(self.slow_s)
            if self.failures:
                self.failures -= 1
                raise OSError(THROTTLED)
        if what == "open_input" and self.unread:
            self.unread -= 1
            raise OSError(THROTTLED)
        return act()


def use_faulty_store(made: Recorder) -> FaultyStore:
    """Puts the checkpoints of a recorder on a faulty store and returns that."""
    faulty_store, place = FaultyStore(), made.store.storage
    fs = pafs.PyFileSystem(FaultyHandler(faulty_store, False))
    made.store = CheckpointStore(Storage(fs, place.path, is_local=False))
    return faulty_store


def test_fault_07_a_replaced_start_cannot_commit_and_ends_with_an_error(
    tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "zombie")
    first = recorder(config, reported)
    assert first.begin() is None
    first.committer.submit(snapshot(10))
    first.drain()
    second = recorder(config, reported)
    found = second.begin()
    assert found is not None
    assert str(found.name) == "step-00000010-a0001"
    first.committer.submit(snapshot(20))  # it was paused and does not know of the second
    with pytest.raises(RunLockedError, match="attempt 2"):
        first.finish()
    second.committer.submit(snapshot(15))
    second.finish()
    for each in (first, second):
        each.close()
    assert str(newest(config).name) == "step-00000015-a0002"


def test_fault_15_storage_errors_at_the_start_are_retried(
    tmp_path: Path, reported: list[Record], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(async_checkpoint, "retry_pauses", lambda: iter([0.01] * 4))
    made = recorder(tiny_config(tmp_path, "start"), reported)
    use_faulty_store(made).failures = 2
    assert made.begin() is None
    assert ["etrying in" in note for note in notes(reported)] == [True, True]
    made.close()


def test_fault_12_a_start_detects_that_the_checkpoints_in_the_event_log_were_deleted(
    tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "vanished")
    first = recorder(config, reported)
    first.begin()
    first.committer.submit(snapshot(20))
    first.finish()
    first.close()
    place = Path(first.store.storage.path)
    journal = "".join(json.dumps(event) + "\n" for event in reported)  # the driver writes it
    run_storage(config).write("events.jsonl", journal.encode())
    shutil.rmtree(place)
    for _ in range(2):
        again = recorder(config, reported)
        with pytest.raises(CheckpointError, match=r"checkpoint of step 20 .* there is none now"):
            again.begin()
        again.close()
    assert not place.exists()  # it made no claim


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"attempt": 1}', b'{"attempt": null}'])
def test_a_run_starts_even_if_its_life_json_cannot_be_read(
    content: bytes, tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "ageless", checkpoint=CheckpointConfig(every_s="auto"))
    store = checkpoint_store(run_storage(config))
    attempt = store.claim(None, {})
    store.commit(replace(snapshot(10).manifest, attempt=attempt), {"life.json": content})
    made = recorder(config, reported)
    found = made.begin()
    assert found is not None
    assert not made.time_to_save()
    made.close()
    assert ["life.json cannot be read" in note for note in notes(reported)] == [True]


@pytest.fixture
def faulty_store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The store of all checkpoints of this test; pauses between retries are short."""
    monkeypatch.setattr(async_checkpoint, "retry_pauses", lambda: iter([0.01] * 4))
    made = FaultyStore()
    fs = pafs.PyFileSystem(FaultyHandler(made, False))

    def store(run: Storage) -> CheckpointStore:
        return CheckpointStore(Storage(fs, run.join("checkpoints").path, is_local=False))

    monkeypatch.setattr(recorder_module, "checkpoint_store", store)
    monkeypatch.setattr(recording_session, "checkpoint_store", store)
    return made


def commit_step_10(config: TrainConfig) -> None:
    made = recorder(config, [])
    made.begin()
    made.committer.submit(snapshot(10))
    made.finish()
    made.close()


def test_fault_15_failed_reads_of_the_checkpoint_at_the_start_are_retried(
    faulty_store: FaultyStore, tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "reads")
    commit_step_10(config)
    with LocalSession(config, ALONE, Best("loss", "min"), to(reported)) as session:
        assert session.recorder is not None
        begin = session.recorder.begin

        def begin_and_break(*given: Any) -> Any:
            newest = begin(*given)
            faulty_store.unread = 2
            return newest

        session.recorder.begin = begin_and_break  # type: ignore[method-assign]
        found = session.latest()
        assert found is not None
        assert faulty_store.unread == 2  # the name of the checkpoint needs no read
        assert json.loads(found.read("state.json")) == {"step": 10}
        assert faulty_store.unread == 2  # it was read for verification
        assert json.loads(found.read("state.json")) == {"step": 10}
        assert ["etrying in" in note for note in notes(reported)] == [True, True]
        faulty_store.unread = 99
        with pytest.raises(CheckpointError, match="SLOW_DOWN") as caught:
            found.read("state.json")
    assert caught.value.exit_status == 5
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "reads") in str(caught.value)


@pytest.mark.parametrize("what", ["failures", "unread"])
def test_fault_15_permanent_storage_errors_end_the_start_with_5_and_one_line(
    what: str, faulty_store: FaultyStore, tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "broken")
    commit_step_10(config)
    setattr(faulty_store, what, 99)
    with (
        LocalSession(config, ALONE, Best("loss", "min"), to(reported)) as session,
        pytest.raises(CheckpointError, match="SLOW_DOWN") as caught,
    ):
        session.latest()
    assert caught.value.exit_status == 5
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "broken") in str(caught.value)
    assert len(notes(reported)) == TRIES - 1


def test_a_commit_with_a_lost_response_is_not_written_twice(
    tmp_path: Path, reported: list[Record], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(tmp_path, "late")
    made = recorder(config, reported)
    made.begin()
    commit = made.store.commit
    commits = []

    def late(*given: Any) -> Any:
        commits.append(commit(*given))
        raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(made.store, "commit", late)
    made.committer.sleep = lambda _: True
    made.committer.submit(snapshot(4))
    made.finish()
    made.close()
    assert len(commits) == 1
    assert [e["tries"] for e in reported if e["kind"] == "checkpoint"] == [2]
    assert newest(config).manifest == commits[0].manifest


def test_a_failure_to_remove_old_checkpoints_does_not_fail_the_commit(
    tmp_path: Path, reported: list[Record], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(tmp_path, "prune")
    made = recorder(config, reported)
    made.begin()
    made.log.restore([])
    prune = made.store.prune
    monkeypatch.setattr(made.store, "prune", lambda *_: (_ for _ in ()).throw(OSError(THROTTLED)))
    for step in (1, 2, 3):
        made.committer.submit(snapshot(step))
    made.drain()
    assert kept_steps(config) == [1, 2, 3]
    assert sum("could not be updated" in note for note in notes(reported)) == 3
    monkeypatch.setattr(made.store, "prune", prune)
    made.committer.submit(snapshot(4))
    made.finish()
    made.close()
    assert kept_steps(config) == [3, 4]


def test_keep_writes_a_json_file_to_the_run_folder_and_reports_it(
    tmp_path: Path, reported: list[Record]
):
    made = recorder(tiny_config(tmp_path, "kept"), reported)
    made.begin()
    made.keep("diverged-step-00000007.json", {"step": 7, "rows": [1, 2]})
    path = tmp_path / "kept" / "diverged-step-00000007.json"
    assert json.loads(path.read_text()) == {"step": 7, "rows": [1, 2]}
    path.unlink()
    path.mkdir()
    made.keep("diverged-step-00000007.json", {"step": 8})
    made.close()
    kept, failed = notes(reported)
    assert "diverged-step-00000007.json is in" in kept
    assert "cannot be written" in failed


def test_each_checkpoint_starts_a_new_interval(tmp_path: Path, reported: list[Record]):
    config = tiny_config(tmp_path, "timed", checkpoint=CheckpointConfig(every_s=0.05))
    made = recorder(config, reported)
    faulty_store = use_faulty_store(made)
    made.begin()
    assert not made.time_to_save()
    time.sleep(0.06)
    assert made.time_to_save()
    faulty_store.slow_s = 0.1
    made.committer.submit(snapshot(1))
    made.timer.saved(0.01)
    assert not made.time_to_save()
    time.sleep(0.06)
    assert not made.time_to_save()  # the previous one is still being written
    made.drain()
    assert made.time_to_save()
    made.close()


def test_the_interval_follows_recent_stalls_not_the_long_first_one(reported: list[Record]):
    timer = SaveTimer("auto", Life(), to(reported))
    timer.saved(100.0)
    timer.committed(0.1)
    assert timer.interval_s() == LONGEST_S
    for _ in range(1000):
        timer.saved(0.02)
    assert timer.interval_s() == pytest.approx(math.sqrt(2 * 0.02 * 3600), rel=1e-3)


# ------------------------------------------------------------------ training on bad storage


@pytest.fixture(scope="module")
def reference(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("reference"), "whole")
    workers(3, run_tiny, plain(config))
    return config


def assert_same_run(config: TrainConfig, whole: TrainConfig) -> None:
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)
    assert newest(config).name.step == TOTAL_STEPS


def before_each_step_on_rank_0(
    session: ScriptedSession, act: Callable[[ScriptedSession, int], None]
) -> None:
    if session.recorder is not None:
        session.before_step = partial(act, session)


def fill_disk_from_11_to(session: ScriptedSession, last: int) -> None:
    """This process can write no file beyond 1,000 bytes, as on a full disk."""

    def limit(session: ScriptedSession, step: int) -> None:
        if step in (11, last):
            session.drain()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            most = 1000 if step == 11 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    before_each_step_on_rank_0(session, limit)


def run_until_full(rank: int, size: int, config: Mapping[str, Any]) -> WorkerResult:
    """A process that raises would exit, and its peers would notice. This one stays alive, so it
    leaves its process group explicitly."""
    try:
        return run_tiny(rank, size, config, prepare_session=partial(fill_disk_from_11_to, last=99))
    except Exception as error:
        # First: closing a FileStore writes to its file, and torch aborts if that fails.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="the size of files is limited here",
)
def test_fault_08_training_survives_a_full_disk_and_the_run_is_complete_once_space_is_free(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    every_3 = CheckpointConfig(every_epochs=0, every_steps=3, every_s=0.0)
    config = tiny_config(tmp_path, "full", checkpoint=every_3)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, partial(fill_disk_from_11_to, last=17))
    failed = [e for e in ran[0].events if e["kind"] == "checkpoint_failed"]
    assert [(e["step"], e["in_a_row"]) for e in failed] == [(12, 1), (15, 2)]
    assert all("too large" in str(event["message"]) for event in failed)
    good = [e["step"] for e in ran[0].events if e["kind"] == "checkpoint"]
    assert good == [3, 6, 9, 10, 18, 20, 21, 24, 27, 30]  # 10 and 20 are the best so far
    assert any("metrics.jsonl cannot be written" in note for note in notes(ran[0].events))
    assert_same_run(config, reference)
    assert [str(p) for p in tmp_path.rglob("*tmp*")] == []


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="the size of files is limited here",
)
@pytest.mark.parametrize("every_steps", [3, 0])
def test_fault_08_too_many_failed_commits_exit_with_5_and_the_run_can_be_resumed(
    every_steps: int, reference: TrainConfig, workers: Group, tmp_path: Path
):
    checkpoint = CheckpointConfig(every_epochs=1, every_steps=every_steps, every_s=0.0)
    config = tiny_config(tmp_path, "full", checkpoint=checkpoint)
    results = workers.outcomes(3, run_until_full, plain(config), wait_s=10)
    assert isinstance(results[0], Raised)
    assert (results[0].name, results[0].exit_status) == ("CheckpointError", 5)
    assert "Free space" in results[0].text
    assert kept_steps(config)[-1] == 10
    workers(3, run_tiny, plain(config))
    assert_same_run(config, reference)


def throttle_writes(session: ScriptedSession) -> None:
    """Every six steps, the next three writes fail."""
    if session.recorder is not None:
        faulty_store = use_faulty_store(session.recorder)
        session.recorder.committer.sleep = lambda _: True

        def fail(session: ScriptedSession, step: int) -> None:
            if step % 6 == 1:
                session.drain()
                faulty_store.failures = 3

        before_each_step_on_rank_0(session, fail)


def test_fault_15_a_throttling_store_does_not_change_the_results(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    every_6 = CheckpointConfig(every_epochs=0, every_steps=6, every_s=0.0)
    config = tiny_config(tmp_path, "throttled", checkpoint=every_6)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, throttle_writes)
    events = [e for e in ran[0].events if e["kind"] in ("checkpoint", "checkpoint_failed")]
    tries = {e["step"]: e["tries"] for e in events}
    assert sorted(tries) == [6, 10, 12, 18, 20, 24, 30]
    assert max(tries.values()) > 1
    assert_same_run(config, reference)


def slow_down_writes(session: ScriptedSession) -> None:
    """Each write takes 50 ms, the time of several steps; submissions are recorded."""
    if session.recorder is None:
        return
    use_faulty_store(session.recorder).slow_s = 0.05
    submit = session.recorder.committer.submit

    def watched(given: Snapshot) -> Any:
        assert session.recorder is not None
        places = [t.data_ptr() for tensors in given.tensors.values() for t in tensors.values()]
        busy = session.recorder.committer.is_busy()
        session.events.append({"kind": "submitted", "places": places, "busy": busy})
        return submit(given)

    session.recorder.committer.submit = watched  # type: ignore[method-assign]


def test_fault_16_a_slow_store_neither_delays_the_training_nor_takes_more_memory(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    """Steps are logged during a commit, there is one commit at a time, and all snapshots use the
    same memory."""
    timed = CheckpointConfig(every_epochs=0, every_steps=0, every_s=0.001)
    config = tiny_config(tmp_path, "slow", checkpoint=timed, epochs=12)
    ran: list[WorkerResult] = workers(3, run_tiny, plain(config), None, 0, 0, slow_down_writes)
    events = ran[0].events
    submitted = [e for e in events if e["kind"] == "submitted"]
    assert len(submitted) >= 3
    assert not any(event["busy"] for event in submitted)
    assert len({str(event["places"]) for event in submitted[1:]}) == 1
    kinds = [e["kind"] for e in events if e["kind"] in ("submitted", "checkpoint", "train")]
    between = " ".join(str(kind) for kind in kinds).split("submitted")[1:]
    assert all(part.count("checkpoint") == 1 for part in between)
    meanwhile = [part.split("checkpoint")[0].count("train") for part in between[:-1]]
    assert sorted(meanwhile)[len(meanwhile) // 2] >= 2, meanwhile
    assert sum("is still being written" in note for note in notes(events)) == 1
    steps = [e["step"] for e in log_of(config) if e["kind"] == "train"]
    assert steps == list(range(1, 12 * 10 + 1))
