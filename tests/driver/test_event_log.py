"""events.jsonl: what happened to a run, kept separate from the training log."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from event_records import event, record
from faulty_storage import commit
from pyarrow import fs as pafs
from tiny import tiny_config

from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    checkpoint_store,
    read_history,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.driver import event_log as journal_module
from raytrain_ddp.driver import preflight
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import CheckpointError, PreflightError, UnreachableError


class EventLog(journal_module.EventLog):
    """Takes and shows records instead of events."""

    def __init__(self, run: Storage, show: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(run, lambda event: show(record(event)))

    def __call__(self, record: dict[str, Any]) -> None:  # type: ignore[override]
        super().__call__(event(record))


def kinds_and_steps(run: Storage) -> list[tuple[str, int]]:
    return [
        (e["kind"], e.get("start_step", e.get("step", -1))) for e in read_history(run, EVENTS_FILE)
    ]


def begun(folder: Path, is_local: bool = True) -> Storage:
    """A run that has begun; if not local, one whose files are written as a whole, as in a
    bucket."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).touch()
    return Storage(pafs.LocalFileSystem(), str(folder), is_local)


@pytest.mark.parametrize("is_local", [True, False])
def test_events_are_kept_over_several_starts_and_all_are_shown(tmp_path: Path, is_local: bool):
    run = begun(tmp_path, is_local)
    shown = []
    with EventLog(run, shown.append) as journal:
        journal({"kind": "plan", "start_step": 0})
        journal({"kind": "train", "step": 1})
        journal({"kind": "checkpoint", "step": 2})
    with EventLog(run, shown.append) as journal:
        journal({"kind": "end", "step": 3})
    assert kinds_and_steps(run) == [("plan", 0), ("checkpoint", 2), ("end", 3)]
    assert [e["kind"] for e in shown] == ["plan", "train", "checkpoint", "end"]
    assert all(e["time"].endswith("Z") for e in read_history(run, EVENTS_FILE))


def test_a_line_truncated_by_a_kill_loses_no_other_line(tmp_path: Path):
    run = begun(tmp_path)
    (tmp_path / EVENTS_FILE).write_text('{"kind": "plan", "start_step": 7}\n{"kind": "check')
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "checkpoint", "step": 8})
    assert kinds_and_steps(run) == [("plan", 7), ("checkpoint", 8)]


@pytest.mark.parametrize("is_local", [True, False])
def test_events_are_held_back_until_the_run_has_begun(tmp_path: Path, is_local: bool):
    run = Storage(pafs.LocalFileSystem(), str(tmp_path), is_local)
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "note", "text": "a disk is slow"})
        journal({"kind": "end", "status": 3})
    assert list(tmp_path.iterdir()) == []
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "note", "text": "taken over"})
        begun(tmp_path)
        journal({"kind": "plan", "start_step": 0})
    assert kinds_and_steps(run) == [("note", -1), ("plan", 0)]


def test_fault_12_checkpoint_events_are_written_at_once_even_to_a_bucket(tmp_path: Path):
    run = begun(tmp_path, is_local=False)
    journal = EventLog(run, lambda _: None)  # is never closed
    journal({"kind": "plan", "start_step": 0})
    for step in (20, 40):
        journal({"kind": "checkpoint", "step": step})
        assert kinds_and_steps(run)[-1][1] == step


def test_a_temporarily_failing_store_loses_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = begun(tmp_path, is_local=False)
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "plan", "start_step": 0})
        with monkeypatch.context() as failing:
            failing.setattr(Storage, "write_atomic", out_of_order)
            journal({"kind": "checkpoint", "step": 1})
        journal({"kind": "checkpoint", "step": 2})
    assert kinds_and_steps(run) == [("plan", 0), ("checkpoint", 1), ("checkpoint", 2)]


def out_of_order(*_: Any) -> Any:
    raise TimeoutError("no answer to key:hidden")


def test_fault_08_an_event_truncated_by_a_full_disk_is_written_once(tmp_path: Path):
    run, soft = begun(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "checkpoint", "step": 1})
        size = (tmp_path / EVENTS_FILE).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, soft[1]))
        try:
            journal({"kind": "checkpoint", "step": 2})
            journal({"kind": "checkpoint", "step": 3})
            assert (tmp_path / EVENTS_FILE).stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert kinds_and_steps(run) == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)]


def test_fault_12_a_run_whose_checkpoints_were_all_deleted_does_not_restart_at_0(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run = run_storage(config)
    store = checkpoint_store(run)
    assert find_run(config).manifest is None  # a new run
    commit(store, 20)
    begun(Path(run.path))
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "checkpoint", "step": 20})
    shutil.rmtree(store.storage.path)
    with pytest.raises(CheckpointError, match="step 20"):
        find_run(config)
    (Path(store.storage.path) / "step-00000030-a0001").mkdir(parents=True)  # never committed
    with pytest.raises(CheckpointError, match="step 20"):
        find_run(config)


def test_fault_12_a_run_killed_before_its_first_checkpoint_restarts(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run_storage(config).mkdir()
    begun(Path(run_storage(config).path))
    with EventLog(run_storage(config), lambda _: None) as journal:
        journal({"kind": "plan", "start_step": 0})
    assert find_run(config).manifest is None


# ------------------------------------------------------------------ an unresponsive storage


def test_fault_15_a_start_retries_an_unresponsive_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    monkeypatch.setattr(preflight, "time", clock)
    config, left = tiny_config(tmp_path, "run"), [2]

    def walk(storage: Storage) -> list[str]:
        left[0] -= 1
        return out_of_order() if left[0] >= 0 else []

    monkeypatch.setattr(Storage, "walk", walk)
    assert find_run(config).manifest is None
    left[0] = 100
    with pytest.raises(PreflightError) as caught:
        find_run(config)
    assert str(tmp_path) in str(caught.value)

    asked = []

    def unreachable() -> None:
        asked.append(1)
        raise UnreachableError("Storage s3://b did not respond within 25 s: check the address")

    with pytest.raises(UnreachableError):
        preflight.answered(config, unreachable)
    assert asked == [1], "it has taken long already"


def test_events_are_shown_without_waiting_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = begun(tmp_path, is_local=False)
    answers, order, put = threading.Event(), [], Storage.write_atomic

    def slow(self: Storage, *given: Any) -> None:
        assert answers.wait(60)
        put(self, *given)

    monkeypatch.setattr(Storage, "write_atomic", slow)
    with EventLog(run, lambda event: order.append(event["kind"])) as journal:
        for step in range(3):
            journal({"kind": "note", "text": f"the storage does not answer {step}"})
        assert order == ["note"] * 3
        answers.set()
    notes = read_history(run, EVENTS_FILE)
    assert [note["text"].split()[-1] for note in notes] == ["0", "1", "2"]
