"""events.jsonl: what happened to a run, kept separate from the training log."""

from __future__ import annotations

import math
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_records import event, record
from faulty_storage import commit
from processes import run_cli
from pyarrow import fs as pafs
from tiny import tiny_config

from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    checkpoint_store,
    read_history,
    run_storage,
)
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.driver import event_log as journal_module
from raytrain_ddp.driver import preflight
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import CheckpointError, PreflightError, UnreachableError
from raytrain_ddp.events import Timing
from raytrain_ddp.records import log_records, stored_events


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


def test_a_value_of_another_type_counts_as_missing():
    split = {"rows": 3, "smallest": ["a", 1], "largest": ["b", "2"]}
    lines = [
        {"kind": "train", "step": 5, "loss": 1, "lr": "0.1", "epoch": True, "timing": 3},
        {"kind": "train", "step": 6, "scalars": {"a": 1.5}, "timing": {"step_s": 2, "split_s": 4}},
        {"kind": "train", "step": "7"},
        {"kind": "eval", "step": 8, "metrics": {"top1": "x", "loss": 2.5}, "tables": {"t": [[1]]}},
    ]
    one, two, three = log_records(lines)
    assert (one.step, one.loss, one.epoch, one.timing) == (5, 1, 0, Timing())
    assert math.isnan(one.lr)
    assert (two.scalars, two.timing) == ({"a": 1.5}, Timing(step_s=2))
    assert (three.metrics, three.tables) == ({"loss": 2.5}, {"t": [[1]]})
    data = {"train": split, "eval": None, "classes": 2, "names": ["a", "b"]}
    stored = [
        {"kind": "plan", "run": None, "hosts": 3, "replaced": [0], "data": data},
        {"kind": "failed", "rank": "1", "step": 4},
        {"kind": "note", "text": 5},
    ]
    plan, failed = (timed.event for timed in stored_events(stored))
    assert (plan.hosts, plan.replaced) == ((), [0])
    assert (plan.data.train.smallest, plan.data.train.largest) == (["a", 1], None)
    assert (failed.rank, failed.step) == (None, 4)


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
    journal = EventLog(run, lambda _: None)
    for step in (0, 20, 40):
        journal({"kind": "checkpoint", "step": step} if step else {"kind": "plan", "start_step": 0})
        assert kinds_and_steps(run)[-1][1] == step  # it has not been closed


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


@pytest.mark.parametrize("is_local", [True, False])
def test_concurrent_threads_lose_no_events(tmp_path: Path, is_local: bool):
    run = begun(tmp_path, is_local)
    with EventLog(run, lambda _: None) as journal:

        def tell(first: int) -> None:
            for step in range(first, first + 25):
                journal({"kind": "checkpoint", "step": step})

        threads = [threading.Thread(target=tell, args=(first,)) for first in range(0, 100, 25)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(kinds_and_steps(run)) == [("checkpoint", step) for step in range(100)]


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


def test_an_unwritable_journal_does_not_end_the_run(tmp_path: Path):
    run = open_storage(str(tmp_path / "file" / "run"))
    (tmp_path / "file").write_text("")
    shown = []
    with EventLog(run, shown.append) as journal:
        journal({"kind": "plan", "start_step": 0})
    assert shown == [record(event({"kind": "plan", "start_step": 0}))]


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
    with pytest.raises(
        CheckpointError, match=r"had a checkpoint of step 20 .* there is none now"
    ) as e:
        find_run(config)
    assert e.value.exit_status == 5
    (Path(store.storage.path) / "step-00000030-a0001").mkdir(parents=True)  # never committed
    with pytest.raises(CheckpointError, match="there is none now"):
        find_run(config)


def test_fault_12_a_run_killed_before_its_first_checkpoint_restarts(tmp_path: Path):
    config = tiny_config(tmp_path, "run")
    run_storage(config).mkdir()
    begun(Path(run_storage(config).path))
    with EventLog(run_storage(config), lambda _: None) as journal:
        journal({"kind": "plan", "start_step": 0})
    assert find_run(config).manifest is None


# ------------------------------------------------------------------ an unresponsive storage


def failing(times: int) -> Callable[..., list[str]]:
    """Replaces Storage.walk."""
    left = [times]

    def walk(storage: Storage) -> list[str]:
        left[0] -= 1
        return out_of_order() if left[0] >= 0 else []

    return walk


def test_fault_15_a_start_retries_an_unresponsive_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "_PAUSES_S", (0.0, 0.0))
    config = tiny_config(tmp_path, "run")
    monkeypatch.setattr(Storage, "walk", failing(2))
    assert find_run(config).manifest is None
    monkeypatch.setattr(Storage, "walk", failing(3))
    with pytest.raises(PreflightError, match=r"no answer.*the same command again") as caught:
        find_run(config)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_secrets_in_storage_errors_are_not_repeated(monkeypatch: pytest.MonkeyPatch):
    config = replace(tiny_config(Path("x"), "run"), storage="s3://key:hidden@bucket/runs")
    monkeypatch.setattr(preflight, "_PAUSES_S", ())
    with pytest.raises(PreflightError, match="s3://bucket/runs") as caught:
        preflight.answered(config, out_of_order)
    assert "hidden" not in str(caught.value)


def test_a_run_folder_that_is_a_file_is_refused_at_once_in_one_line(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").write_text("in the way")
    answer = run_cli("fit", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (3, [])
    assert len(answer.err.splitlines()) == 1
    assert str(tmp_path / "runs") in answer.err


def test_per_rank_timings_are_thinned_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])
    run, shown = begun(tmp_path), []
    few, many = [{"compute": 0.1}] * 2, [{"compute": 0.1}] * 1000
    with EventLog(run, shown.append) as journal:
        journal({"kind": "plan", "start_step": 0})
        for second in range(2000):
            now[0] = float(second)
            journal({"kind": "ranks", "step": second, "split_s": few})
        journal({"kind": "ranks", "step": 9999, "split_s": many})
    steps = [step for kind, step in kinds_and_steps(run) if kind == "ranks"]
    assert steps[:3] == [5, 10, 15]
    assert 1900 < steps[-1] < 2000
    assert steps[-1] - steps[-2] >= 35
    assert len(steps) < 160
    assert len(shown) == 2002


def test_events_are_shown_without_waiting_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = begun(tmp_path, is_local=False)
    answers, order, put = threading.Event(), [], Storage.write_atomic

    def slow(self: Storage, *given: Any) -> None:
        order.append("asked")
        assert answers.wait(60)
        put(self, *given)

    monkeypatch.setattr(Storage, "write_atomic", slow)
    monkeypatch.setattr(journal_module, "_WRITE_S", 0.01)
    with EventLog(run, lambda event: order.append(event["kind"])) as journal:
        journal({"kind": "checkpoint", "step": 1})
        for step in range(20):
            journal({"kind": "note", "text": f"the storage does not answer {step}"})
        assert order[0] == "checkpoint"
        assert order.count("note") == 20
        answers.set()
    _, *notes = read_history(run, EVENTS_FILE)
    assert [note["text"].split()[-1] for note in notes] == [str(step) for step in range(20)]


@pytest.mark.parametrize("is_local", [True, False])
def test_an_unresponsive_storage_does_not_keep_the_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
):
    run = begun(tmp_path, is_local)
    never = threading.Event()
    monkeypatch.setattr(Storage, "exists", lambda *_: never.wait(60))
    monkeypatch.setattr(journal_module, "_WRITE_S", 0.01)
    monkeypatch.setattr(journal_module, "_LAST_S", 0.01)
    shown: list[Any] = []
    with EventLog(run, shown.append) as journal:
        journal({"kind": "note", "text": "slow"})
        journal({"kind": "end", "status": 0})
    assert len(shown) == 2
    never.set()


def test_a_long_unresponsive_storage_is_not_retried(tmp_path: Path) -> None:
    asked = []

    def unreachable() -> None:
        asked.append(1)
        raise UnreachableError("Storage s3://b did not respond within 25 s: check the address")

    with pytest.raises(UnreachableError, match=r"^Storage s3://b did not respond"):
        preflight.answered(tiny_config(tmp_path, "run"), unreachable)
    assert asked == [1]
