"""The commit protocol on a failing file system: commits, pruning, and what remains of them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_storage import (
    BOTH,
    Faults,
    both,
    commit,
    content,
    faulty_store,
    flip_bit,
    fresh,
    latest,
    manifest,
    next_attempt,
    payload,
    sweep_faults,
    tree,
)

from raytrain_ddp.checkpoint.manifest import FileEntry
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError


def test_commit_then_read(root: Path) -> None:
    store = fresh(root)
    assert store.latest() is None
    assert store.names() == []
    assert next_attempt(store) == 1
    (root / "step-00000120-a0001" / "left by a killed commit").mkdir(parents=True)
    committed = commit(store, 120)
    assert committed.name == CheckpointName(120, 1)
    assert str(committed) == str(root / "step-00000120-a0001")
    found, reported = latest(root)
    assert found is not None
    assert reported == []
    assert content(found) == payload(120)
    assert found.manifest == replace(manifest(120), files=committed.manifest.files)
    assert found.manifest.files["model.safetensors"] == FileEntry(
        700, hashlib.sha256(payload(120)["model.safetensors"]).hexdigest()
    )
    assert {*os.listdir(root / "step-00000120-a0001")} == {*payload(120), "manifest.json"}
    with pytest.raises(CheckpointError):
        store.commit(manifest(120), {"other": b"x"})
    assert content(latest(root)[0]) == payload(120)


@BOTH
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_a_failure_of_any_operation_of_a_commit(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    outcomes = set()

    def prepare(store: CheckpointStore) -> None:
        commit(store, 10)

    def act(store: CheckpointStore) -> None:
        commit(store, 20)

    for root, returned, where in sweep_faults(tmp_path, prepare, act, mode, is_local):
        found, reported = latest(root)
        outcomes.add(content(found) == payload(20))
        if returned:
            assert content(found) == payload(20), where
        else:
            assert content(found) in (payload(10), payload(20)), where
        if is_local:
            assert reported == [], where  # a kill leaves no damage: the manifest appears by rename

        store = fresh(root)
        store.sweep()
        kept = {p.name for p in root.iterdir() if not p.name.startswith("damaged-")}
        assert kept == {str(name) for name in store.names()}, where
        assert not any(".tmp-" in path for path in tree(root)), where
        assert content(store.latest()) == content(found), where
        again = commit(store, 20, next_attempt(store))
        assert content(store.latest()) == content(again), where
    # The old one is found until the commit point; only a kill after it leaves the new one.
    assert False in outcomes


@BOTH
@pytest.mark.parametrize("mode", ["eio", "enospc", "torn"])
def test_fault_08_failed_commit_cleans_up_itself(tmp_path: Path, mode: str, is_local: bool) -> None:
    for root, returned, where in sweep_faults(
        tmp_path, lambda s: commit(s, 10), lambda s: commit(s, 20), mode, is_local
    ):
        assert returned or set(os.listdir(root)) == {"step-00000010-a0001"}, where


def test_a_manifest_that_appears_after_its_timeout_still_has_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store may apply a request after its client has timed out."""
    store, late = both(tmp_path, False), []
    write = Storage.write_atomic

    def slowly(folder: Storage, name: str, data: bytes) -> None:
        if name != MANIFEST_FILE:
            return write(folder, name, data)
        late.append((folder, data))
        raise OSError(5, "AWS Error NETWORK_CONNECTION: curlCode: 28, Timeout was reached")

    monkeypatch.setattr(Storage, "write_atomic", slowly)
    with pytest.raises(OSError, match="Timeout"):
        commit(store, 10)
    ((folder, data),) = late
    write(folder, MANIFEST_FILE, data)
    (name,) = store.names()
    store.open(name).verify()


def test_commit_syncs_payload_before_the_manifest_appears(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    commit(faulty_store(root, faults, True, monkeypatch), 1)
    writes = [what for what in faults.done if what in ("open_output", "fsync", "move")]
    file = ["open_output", "fsync"]
    made_folders = ["fsync"] * 3
    assert writes == [*made_folders, *file, *file, *file, "move", "fsync"]


@BOTH
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_03_a_failure_of_any_operation_of_a_prune(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    def prepare(store: CheckpointStore) -> None:
        for step in (10, 20, 30, 40):
            commit(store, step)

    for root, _, where in sweep_faults(tmp_path, prepare, lambda s: s.prune(2), mode, is_local):
        found, reported = latest(root)
        assert content(found) == payload(40), where
        assert reported == [], where
        store = fresh(root)
        for name in store.names():  # every checkpoint that is still listed is complete
            store.open(name).verify()
        assert store.names()[:2] == [CheckpointName(40, 1), CheckpointName(30, 1)], where
        store.sweep()
        store.prune(2)
        assert sorted(os.listdir(root)) == ["step-00000030-a0001", "step-00000040-a0001"], where


@pytest.mark.parametrize(
    ("keep_last", "best", "kept"),
    [
        (0, None, [50, 40]),
        (1, None, [50, 40]),
        (3, None, [50, 40, 30]),
        (9, None, [50, 40, 30, 20, 10]),
        (2, CheckpointName(10, 1), [50, 40, 10]),
        (2, CheckpointName(50, 1), [50, 40]),
        (2, CheckpointName(11, 1), [50, 40]),
    ],
)
def test_prune_keeps_the_newest_and_the_best(
    root: Path, keep_last: int, best: CheckpointName | None, kept: list[int]
) -> None:
    store = fresh(root)
    for step in (10, 20, 30, 40, 50):
        commit(store, step)
    store.prune(keep_last, best)
    assert [name.step for name in store.names()] == kept
    assert len(os.listdir(root)) == len(kept)


@BOTH
def test_prune_does_not_count_damaged_checkpoints(root: Path, is_local: bool) -> None:
    store = both(root, is_local)
    for step in (10, 20, 30):
        commit(store, step)
    for step in (20, 30):
        flip_bit(root / f"step-{step:08d}-a0001" / "state.json", 0)
    assert store.latest(lambda line: None) == store.open(CheckpointName(10, 1))
    commit(store, 11, next_attempt(store))
    store.prune(2)
    assert store.names() == [CheckpointName(11, 2), CheckpointName(10, 1)]
    assert sum("state.json" in path for path in tree(root)) == 4  # the damaged ones still exist


def test_sweep_touches_only_its_own_leftovers(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    for folder in ("step-00000020-a0001", "damaged-step-00000005-a0001", "notes"):
        (root / folder).mkdir()
        (root / folder / "x").write_bytes(b"x")
    (root / "step-00000030-a0001").mkdir()
    (root / ".tmp-abc").write_bytes(b"x")
    (root / "readme").write_bytes(b"x")
    store.sweep()
    left = {"damaged-step-00000005-a0001", "notes", "readme", "step-00000010-a0001"}
    assert {*os.listdir(root)} == left
