"""events.jsonl: what happened to a run, kept separate from the training log."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
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
from raytrain_ddp.driver import run_ownership as journal_module
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import CheckpointError


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
def test_events_of_several_starts_are_kept_once_the_run_has_begun(tmp_path: Path, is_local: bool):
    run = Storage(pafs.LocalFileSystem(), str(tmp_path), is_local)
    shown: list[dict[str, Any]] = []
    with EventLog(run, shown.append) as journal:
        journal({"kind": "note", "text": "a disk is slow"})
        journal({"kind": "end", "status": 3})
    assert list(tmp_path.iterdir()) == []
    with EventLog(run, shown.append) as journal:
        journal({"kind": "note", "text": "taken over"})
        begun(tmp_path)
        journal({"kind": "plan", "start_step": 0})
        journal({"kind": "train", "step": 1})
        journal({"kind": "checkpoint", "step": 2})
    if is_local:
        with (tmp_path / EVENTS_FILE).open("a") as file:
            file.write('{"kind": "check')  # cut off by a kill
    with EventLog(run, shown.append) as journal:
        journal({"kind": "end", "step": 3})
    assert kinds_and_steps(run) == [("note", -1), ("plan", 0), ("checkpoint", 2), ("end", 3)]
    kinds = [event["kind"] for event in shown]
    assert kinds == ["note", "end", "note", "plan", "train", "checkpoint", "end"]


def test_faults_12_15_checkpoint_events_reach_a_bucket_at_once_or_once_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = begun(tmp_path, is_local=False)
    journal = EventLog(run, lambda _: None)  # is never closed
    journal({"kind": "plan", "start_step": 0})
    for step in (20, 40):
        journal({"kind": "checkpoint", "step": step})
        assert kinds_and_steps(run)[-1][1] == step

    def out_of_order(*_: Any) -> None:
        raise TimeoutError

    with monkeypatch.context() as failing:
        failing.setattr(Storage, "write_atomic", out_of_order)
        journal({"kind": "checkpoint", "step": 60})
    journal({"kind": "checkpoint", "step": 80})
    assert [step for _, step in kinds_and_steps(run)] == [0, 20, 40, 60, 80]


def test_fault_12_a_run_whose_checkpoints_were_all_deleted_does_not_restart_at_0(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run = run_storage(config)
    store = checkpoint_store(run)
    assert find_run(config).manifest is None  # a new run
    run.mkdir()
    begun(Path(run.path))
    with EventLog(run, lambda _: None) as journal:
        journal({"kind": "plan", "start_step": 0})
        assert find_run(config).manifest is None  # killed before its first checkpoint
        commit(store, 20)
        journal({"kind": "checkpoint", "step": 20})
    shutil.rmtree(store.storage.path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step 20"):
            find_run(config)
        never_committed = Path(store.storage.path) / "step-00000030-a0001"
        never_committed.mkdir(parents=True, exist_ok=True)
