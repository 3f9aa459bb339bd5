"""events.jsonl: what happened to a run, kept apart from what was trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyarrow import fs as pafs
from test_store import commit
from tiny import tiny_config

from raytrain_ddp.checkpoint.layout import (
    EVENTS_FILE,
    checkpoint_store,
    read_history,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.orchestration.journal import Journal
from raytrain_ddp.orchestration.preflight import open_run


def kinds_and_steps(run: Storage) -> list[tuple[str, int]]:
    return [(e["kind"], e.get("step", -1)) for e in read_history(run, EVENTS_FILE)]


@pytest.mark.parametrize("is_local", [True, False])
def test_events_are_kept_over_several_starts_and_all_are_shown(tmp_path: Path, is_local: bool):
    run = Storage(pafs.LocalFileSystem(), str(tmp_path), is_local)
    shown = []
    with Journal(run, shown.append) as journal:
        journal({"kind": "plan", "step": 0})
        journal({"kind": "train", "step": 1})
        journal({"kind": "checkpoint", "step": 2})
    with Journal(run, shown.append) as journal:
        journal({"kind": "end", "step": 3})
    assert kinds_and_steps(run) == [("plan", 0), ("checkpoint", 2), ("end", 3)]
    assert [e["kind"] for e in shown] == ["plan", "train", "checkpoint", "end"]
    assert all(e["time"].endswith("Z") for e in read_history(run, EVENTS_FILE))


def test_a_line_torn_by_a_kill_costs_no_other_line(tmp_path: Path):
    run = open_storage(str(tmp_path))
    (tmp_path / EVENTS_FILE).write_text('{"kind": "plan", "step": 7}\n{"kind": "check')
    with Journal(run, lambda _: None) as journal:
        journal({"kind": "checkpoint", "step": 8})
    assert kinds_and_steps(run) == [("plan", 7), ("checkpoint", 8)]


def test_a_journal_that_cannot_be_written_ends_nothing(tmp_path: Path):
    run = open_storage(str(tmp_path / "file" / "run"))
    (tmp_path / "file").write_text("")
    shown = []
    with Journal(run, shown.append) as journal:
        journal({"kind": "plan", "step": 0})
    assert shown == [{"kind": "plan", "step": 0}]


def test_fault_12_a_run_whose_checkpoints_are_all_gone_does_not_begin_at_0(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run = run_storage(config)
    store = checkpoint_store(run)
    assert open_run(config)[1] is None  # a new run
    commit(store, 20)
    with Journal(run, lambda _: None) as journal:
        journal({"kind": "checkpoint", "step": 20})
    shutil.rmtree(store.storage.path)
    with pytest.raises(CheckpointError, match=r"had a checkpoint of step 20 .* none any more") as e:
        open_run(config)
    assert e.value.exit_status == 5
    (Path(store.storage.path) / "step-00000030-a0001").mkdir(parents=True)  # never committed
    with pytest.raises(CheckpointError, match="none any more"):
        open_run(config)


def test_fault_12_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run_storage(config).mkdir()
    with Journal(run_storage(config), lambda _: None) as journal:
        journal({"kind": "plan", "step": 0})
    assert open_run(config)[1] is None
