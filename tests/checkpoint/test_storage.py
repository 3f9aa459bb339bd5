"""The folder of a run, on disks and elsewhere: paths, atomic writes, what cannot be opened."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from faulty_storage import Faults, Killed, commit, content, faulty_store, payload

from raytrain_ddp.checkpoint import run_folder
from raytrain_ddp.checkpoint import storage as storage_module
from raytrain_ddp.checkpoint.run_folder import path_of_run, run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, UnreachableError


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for uri in ("~/a b", "a b", "./x/../a b", f"{tmp_path}/a b/", f"file://{tmp_path}/a%20b"):
        storage = open_storage(uri)
        assert storage.path == str(storage) == f"{tmp_path}/a b"
        assert storage.is_local
    assert not (tmp_path / "a b").exists()
    storage.join("sub").mkdir()
    storage.join("sub").mkdir()
    storage.write_atomic("x", b"1")
    storage.write_atomic("x", b"22")
    assert storage.walk() == ["sub/", "x"]
    assert (storage.read("x"), storage.size_bytes("x"), storage.exists("sub")) == (b"22", 2, False)
    assert storage.sha256("x") == hashlib.sha256(b"22").hexdigest()
    storage.delete_file("x")
    storage.delete_file("x")
    storage.delete_dir("sub")
    storage.delete_dir("sub")
    assert storage.walk() == [] == storage.join("nowhere").walk()
    with pytest.raises(FileNotFoundError):
        storage.read("x")


def test_write_atomic_replaces_the_whole_file_or_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    for mode in Faults.MODES:
        for n in range(5):  # open, write, close, fsync, move
            open_storage(str(root)).write_atomic("x", b"old")
            store = faulty_store(root, Faults(mode, n), True, monkeypatch)
            with pytest.raises((OSError, Killed)):
                store.storage.write_atomic("x", b"new!")
            monkeypatch.undo()
            # Only a lost response to the rename itself can leave the new content.
            expected = b"new!" if (mode, n) == ("late", 4) else b"old"
            assert (root / "x").read_bytes() == expected
            left = sorted(os.listdir(root))
            assert left == ["x"] or (mode.endswith("kill") and len(left) == 2)
            CheckpointStore(open_storage(str(root))).sweep()
            assert os.listdir(root) == ["x"]


def test_an_fsspec_store_can_hold_checkpoints(tmp_path: Path) -> None:
    """As with hf:// and abfs://; the in-memory file system stands in for them."""
    pytest.importorskip("fsspec")
    storage = open_storage(f"memory://{tmp_path.name}/run")
    assert str(storage) == f"memory:///{tmp_path.name}/run"
    assert str(open_storage(str(storage))) == str(storage)
    store = CheckpointStore(storage.join("checkpoints"))
    for step in (5, 10, 20, 30):
        commit(store, step)
    damaged = storage.join("checkpoints").join("step-00000030-a0001")
    damaged.write("state.json", b"{}")
    reported: list[str] = []
    assert content(store.latest(reported.append)) == payload(20)
    assert len(reported) == 1
    assert damaged.exists("damaged.txt")
    store.prune(1, None)
    assert [name.step for name in store.names()] == [20, 10]
    assert storage.join("nowhere").walk() == []


def test_fault_14_an_invalid_storage_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for uri in ("", "foo://bucket/x", "file://host/x", "s3://", f"{tmp_path}/file", "a\0b"):
        with pytest.raises(PreflightError) as caught:
            open_storage(uri)
        assert "torage" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_fault_14_unreachable_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "REACH_TIMEOUT_S", 0.5)
    uri = "s3://KEY:SECRET@bucket/x?endpoint_override=127.0.0.1:1&scheme=http&region=nowhere"
    with pytest.raises(PreflightError, match="s3://bucket/x") as caught:
        open_storage(uri)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "events.jsonl"])
def test_a_run_is_found_by_name_although_its_data_folder_has_the_same_name(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`fit --data.source photos` trains the run `photos`, and the README continues with this
    name."""
    monkeypatch.chdir(tmp_path)
    Path("photos/train/cat").mkdir(parents=True)
    assert path_of_run("photos") == "photos"  # nothing else has the name
    Path("runs/photos").mkdir(parents=True)
    assert path_of_run("photos") == "photos"  # it is not a run yet
    Path("runs/photos", file).touch()
    assert path_of_run("photos") == "runs/photos"
    assert path_of_run("photos/train") == "photos/train"
    assert path_of_run(str(tmp_path / "photos")) == str(tmp_path / "photos")
    for other in (".", "runs", "s3://bucket/photos"):
        assert path_of_run(other) == other
    Path("photos", file).touch()  # a run in the working folder takes precedence
    assert path_of_run("photos") == "photos"


def test_fault_15_an_opened_storage_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(uri: str) -> None:
        raise UnreachableError(uri)

    first = TrainConfig(name="first", storage=str(tmp_path))
    opened = run_storage(first)
    monkeypatch.setattr(run_folder, "open_storage", refuse)
    assert run_storage(first) == opened
    monkeypatch.chdir(tmp_path.parent)
    assert run_storage(TrainConfig(name="first", storage=tmp_path.name)) == opened
    with pytest.raises(UnreachableError):
        run_storage(TrainConfig(name="first", storage=str(tmp_path / "another")))
    monkeypatch.undo()
    (tmp_path / "file").touch()
    for _ in range(2):
        with pytest.raises(PreflightError):
            run_storage(TrainConfig(name="first", storage=str(tmp_path / "file")))
