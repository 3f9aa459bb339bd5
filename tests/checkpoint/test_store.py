"""The commit protocol on a failing file system: commits, pruning, and what remains of them."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from faulty_storage import (
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

from raytrain_ddp.checkpoint import streams
from raytrain_ddp.checkpoint.manifest import FileEntry
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError

BOTH = pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])


def test_commit_then_read(root: Path) -> None:
    store = fresh(root)
    assert store.latest() is None
    assert store.names() == []
    assert next_attempt(store) == 1
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
    assert sorted(os.listdir(root / "step-00000120-a0001")) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]


def test_commit_takes_any_buffer(root: Path) -> None:
    for step, kind in enumerate((bytes, bytearray, memoryview, pa.py_buffer)):
        files = {"x": kind(b"abc"), "empty": kind(b"")}
        checkpoint = fresh(root).commit(manifest(step), files)
        assert content(checkpoint) == {"x": b"abc", "empty": b""}


def test_write_of_several_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", 7)
    checkpoint = commit(fresh(root), 3)
    checkpoint.verify()
    assert content(checkpoint) == payload(3)


def test_file_names_do_not_trigger_compression(root: Path) -> None:
    checkpoint = fresh(root).commit(manifest(1), {"x.gz": b"not gzip"})
    assert checkpoint.read("x.gz") == b"not gzip"
    assert (root / "step-00000001-a0001" / "x.gz").read_bytes() == b"not gzip"


def test_commit_refuses_a_name_twice_and_leaves_the_first(root: Path) -> None:
    store = fresh(root)
    commit(store, 5)
    before = tree(root)
    with pytest.raises(CheckpointError, match="step-00000005-a0001"):
        store.commit(manifest(5), {"other": b"x"})
    assert tree(root) == before


def test_commit_replaces_a_leftover(root: Path) -> None:
    leftover = root / "step-00000005-a0001"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_bytes(b"x")
    checkpoint = commit(fresh(root), 5)
    assert not (leftover / "junk").exists()
    assert content(checkpoint) == payload(5)


def test_a_file_that_the_checkpoint_does_not_have_is_named_in_the_error(root: Path) -> None:
    with pytest.raises(CheckpointError, match="'ema'"):
        commit(fresh(root), 5).read("ema")


@pytest.mark.parametrize("name", ["manifest.json", "damaged.txt", "../x", "a/b", "..", "", "x\n"])
def test_reserved_names_and_paths_are_not_names_of_files(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        fresh(root).commit(manifest(1), {name: b"x"})
    assert tree(root.parent) == {}


def test_commit_of_config_that_is_not_json_leaves_nothing(root: Path) -> None:
    with pytest.raises(TypeError):
        fresh(root).commit(manifest(1, config={"x": object()}), payload(1))
    assert tree(root) == {}
    assert latest(root) == (None, [])


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


def test_fault_02_a_failure_of_the_first_commit_of_a_run(tmp_path: Path) -> None:
    for mode in Faults.MODES:
        for root, returned, where in sweep_faults(
            tmp_path / mode, lambda s: None, lambda s: commit(s, 20), mode, True
        ):
            found, reported = latest(root)
            assert content(found) in ((payload(20),) if returned else (None, payload(20))), where
            assert reported == []


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
    assert sorted(os.listdir(root)) == [
        "damaged-step-00000005-a0001",
        "notes",
        "readme",
        "step-00000010-a0001",
    ]


def test_next_attempt_counts_leftover_and_damaged_checkpoints(root: Path) -> None:
    root.mkdir(parents=True)
    store = fresh(root)
    for folder, expected in [
        ("step-00000020-a0003", 4),
        ("damaged-step-00000020-a0007", 8),
        ("damaged-step-00000020-a0008-2", 9),
        ("stepping-a0099", 9),
    ]:
        (root / folder).mkdir()
        assert next_attempt(store) == expected
