"""What rank 0 writes: checkpoints off the training path, on slow, full and failing storage."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commits import BEST, THROTTLED, Record, checkpoints_of, notes, snapshot
from faulty_storage import Faults, FaultyHandler
from processes import Group
from pyarrow import fs as pafs
from tiny import (
    TOTAL_STEPS,
    ScriptedMembership,
    WorkerResult,
    bits,
    log_of,
    newest,
    plain,
    run_tiny,
    tiny_config,
)

from raytrain_ddp import errors
from raytrain_ddp.checkpoint import checkpoints as checkpoints_module
from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config.sections import CheckpointConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import TRIES, CheckpointError, RunLockedError
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.state.live_state import newest_state

ALONE = World(0, 1, 0, torch.device("cpu"), threads=1)


@pytest.fixture
def reported() -> list[Record]:
    return []


class FaultyStore(Faults):
    """An object store that is slow, or fails for a number of writes or reads."""

    def __init__(self) -> None:
        super().__init__()
        self.slow_s, self.failures, self.unread = 0.0, 0, 0

    def __call__(
        self, what: str, act: Callable[[], Any], act_half: Callable[[], Any] = lambda: None
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

    def opened(self, run: Storage) -> CheckpointStore:
        """In the place of `checkpoint_store`."""
        fs = pafs.PyFileSystem(FaultyHandler(self, False))
        return CheckpointStore(Storage(fs, run.join("checkpoints").path, is_local=False))


def test_fault_07_a_replaced_start_cannot_commit_and_ends_with_an_error(
    tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "zombie")
    first = checkpoints_of(config, reported)
    assert first.begin(BEST, 1) is None
    first.save(snapshot(10))
    first.drain()
    second = checkpoints_of(config, reported)
    found = second.begin(BEST, 1)
    assert found is not None
    assert str(found.name) == "step-00000010-a0001"
    first.save(snapshot(20))  # it was paused and does not know of the second
    with pytest.raises(RunLockedError):
        first.finish()
    second.save(snapshot(15))
    second.finish()
    for each in (first, second):
        each.close()
    assert str(newest(config).name) == "step-00000015-a0002"


def test_fault_12_a_start_detects_that_the_checkpoints_in_the_event_log_were_deleted(
    tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "vanished")
    first = checkpoints_of(config, reported)
    first.begin(BEST, 1)
    first.save(snapshot(20))
    first.finish()
    first.close()
    place = Path(first.store.storage.path)
    journal = "".join(json.dumps(event) + "\n" for event in reported)  # the driver writes it
    run_storage(config).write("events.jsonl", journal.encode())
    shutil.rmtree(place)
    for _ in range(2):
        again = checkpoints_of(config, reported)
        with pytest.raises(CheckpointError, match="step 20"):
            again.begin(BEST, 1)
        again.close()
    assert not place.exists()  # it made no claim


@pytest.fixture
def faulty_store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The store of all checkpoints of this test; pauses between retries are short."""
    monkeypatch.setattr(errors, "retry_pauses", lambda: iter([0.01] * 4))
    made = FaultyStore()
    monkeypatch.setattr(checkpoints_module, "checkpoint_store", made.opened)
    return made


@pytest.mark.parametrize("what", ["failures", "unread"])
def test_fault_15_permanent_storage_errors_end_the_start_with_5_and_one_line(
    what: str, faulty_store: FaultyStore, tmp_path: Path, reported: list[Record]
):
    config = tiny_config(tmp_path, "broken")
    made = checkpoints_of(config, [])
    made.begin(BEST, 1)
    made.save(snapshot(10))
    made.finish()
    made.close()
    setattr(faulty_store, what, 99)
    with pytest.raises(CheckpointError, match="SLOW_DOWN") as caught:
        newest_state(checkpoints_of(config, reported), BEST, None, ALONE)
    assert caught.value.exit_status == 5
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "broken") in str(caught.value)
    assert len(notes(reported)) == TRIES - 1


def test_a_commit_with_a_lost_response_is_not_written_twice(
    tmp_path: Path, reported: list[Record], monkeypatch: pytest.MonkeyPatch
):
    config = tiny_config(tmp_path, "late")
    made = checkpoints_of(config, reported)
    made.begin(BEST, 1)
    commit = made.store.commit
    commits = []

    def late(*given: Any) -> Any:
        commits.append(commit(*given))
        raise OSError(errno.ETIMEDOUT, "no answer")

    monkeypatch.setattr(made.store, "commit", late)
    monkeypatch.setattr(errors, "retry_pauses", lambda: iter([0.01] * 4))
    made.save(snapshot(4))
    made.finish()
    made.close()
    assert len(commits) == 1
    assert [e["tries"] for e in reported if e["kind"] == "checkpoint"] == [2]
    assert newest(config).manifest == commits[0].manifest


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


def fill_disk_from_11_to(membership: ScriptedMembership, last: int) -> None:
    """This process can write no file beyond 1,000 bytes, as on a full disk."""

    def limit(step: int) -> None:
        if step in (11, last) and membership.world.is_main:
            for thread in threading.enumerate():
                if thread.name == "committer":
                    thread.join()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            most = 1000 if step == 11 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    membership.before_step = limit


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
    good = [e["step"] for e in ran[0].events if e["kind"] == "checkpoint"]
    assert good == [3, 6, 9, 10, 18, 20, 21, 24, 27, 30]  # 10 and 20 are the best so far
    assert any("metrics.jsonl cannot be written" in note for note in notes(ran[0].events))
    assert_same_run(config, reference)
    assert [str(p) for p in tmp_path.rglob("*tmp*")] == []


def run_slow(rank: int, size: int, config: dict[str, Any]) -> WorkerResult:
    """Each write takes 50 ms, the time of several steps; what is saved is recorded."""
    trained: list[ScriptedMembership] = []
    faulty, save = FaultyStore(), Checkpoints.save
    faulty.slow_s = 0.05

    def watched(own: Checkpoints, given: Snapshot, stall_s: float) -> None:
        places = [t.data_ptr() for tensors in given.tensors.values() for t in tensors.values()]
        submitted = {"kind": "submitted", "places": places, "busy": own.is_saving()}
        trained[0].events.append(submitted)
        save(own, given, stall_s)

    with (
        mock.patch.object(checkpoints_module, "checkpoint_store", faulty.opened),
        mock.patch.object(Checkpoints, "save", watched),
    ):
        return run_tiny(rank, size, config, prepare=trained.append)


def test_fault_16_a_slow_store_neither_delays_the_training_nor_takes_more_memory(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    """Steps are logged during a commit, there is one commit at a time, and all snapshots use the
    same memory."""
    timed = CheckpointConfig(every_epochs=0, every_steps=0, every_s=0.001)
    config = tiny_config(tmp_path, "slow", checkpoint=timed, epochs=6)
    ran: list[WorkerResult] = workers(3, run_slow, plain(config))
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
    assert steps == list(range(1, 6 * 10 + 1))
