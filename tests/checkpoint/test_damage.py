"""Damaged checkpoints, manifests, and storage: what is detected, and what remains usable."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import (
    FILES,
    Faults,
    Killed,
    commit,
    content,
    faulty_store,
    flip_bit,
    fresh,
    latest,
    manifest,
    payload,
    tree,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint import storage as storage_module
from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import (
    Storage,
    open_storage,
)
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError
from raytrain_ddp.uri import without_secrets


@pytest.mark.parametrize("seed", range(200))
def test_fault_10_a_flipped_bit_is_detected_and_the_previous_checkpoint_used(
    root: Path, seed: int
) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    draw = random.Random(seed)
    victim = root / "step-00000020-a0001" / FILES[seed % 3]
    flip_bit(victim, draw.randrange(8 * victim.stat().st_size))
    damaged = victim.read_bytes()

    found, reported = latest(root)
    assert content(found) == payload(10)
    assert len(reported) == 1
    assert "step-00000020-a0001" in reported[0]
    assert "\n" not in reported[0]
    assert victim.name.partition(".")[0] in reported[0]
    kept = root / "damaged-step-00000020-a0001" / victim.name
    assert kept.read_bytes() == damaged
    assert str(kept.parent) in reported[0]
    assert latest(root) == (found, [])  # reported once


def test_fault_10_every_bit_of_the_manifest_counts() -> None:
    good = manifest(1, files={"a.bin": FileEntry(3, "0" * 64)}).to_json()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            Manifest.from_json(bytes(bad))


@pytest.mark.parametrize("filename", FILES)
@pytest.mark.parametrize("part", ["0", "1", "half", "n-1", "longer"])
def test_fault_09_a_file_of_the_wrong_size_is_detected_and_the_previous_checkpoint_used(
    root: Path, filename: str, part: str
) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    victim = root / "step-00000020-a0001" / filename
    data = victim.read_bytes()
    sizes = {"0": 0, "1": 1, "half": len(data) // 2, "n-1": len(data) - 1, "longer": len(data)}
    victim.write_bytes(data[: sizes[part]] + (b"\n" if part == "longer" else b""))
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert len(reported) == 1
    assert (
        "manifest" in reported[0]
        if filename == "manifest.json"
        else "bytes instead of" in reported[0]
    )


def test_fault_10_a_read_verifies_the_hash_again(root: Path) -> None:
    checkpoint = commit(fresh(root), 10)
    checkpoint.verify()
    flip_bit(root / "step-00000010-a0001" / "model.safetensors", 77)
    assert checkpoint.read("state.json") == payload(10)["state.json"]
    with pytest.raises(CheckpointError, match=r"step-00000010-a0001: model\.safetensors is dam"):
        checkpoint.read("model.safetensors")


def test_fault_11_a_missing_newest_folder_gives_the_previous_checkpoint(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    shutil.rmtree(root / "step-00000020-a0001")
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert reported == []


@pytest.mark.parametrize("left", ["only_manifest", "folder_as_file", "symlink"])
def test_fault_11_payload_missing(root: Path, left: str) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    victim = root / "step-00000020-a0001" / "model.safetensors"
    data = victim.read_bytes()
    victim.unlink()
    if left == "folder_as_file":
        victim.mkdir()
    elif left == "symlink":  # fault 44: content from outside the folder is never read
        (root.parent / "outside").write_bytes(data)
        victim.symlink_to(root.parent / "outside")
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert len(reported) == 1
    assert "model.safetensors is missing or not a regular file" in reported[0]


def test_fault_11_manifest_missing_is_a_leftover(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    (root / "step-00000020-a0001" / "manifest.json").unlink()
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert reported == []


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_12_a_run_whose_checkpoints_are_all_damaged_stays_an_error(
    root: Path, is_local: bool
) -> None:
    storage = replace(open_storage(str(root)), is_local=is_local)
    store = CheckpointStore(storage)
    for step in (10, 20):
        commit(store, step)
        flip_bit(root / f"step-{step:08d}-a0001" / "state.json", 3)
    reported: list[str] = []
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all are damaged") as caught:
            CheckpointStore(storage).latest(reported.append)
        assert not isinstance(caught.value, DamagedError)
        for part in ("step-00000010-a0001", "step-00000020-a0001", "--name"):
            assert part in str(caught.value)
    assert len(reported) == 2  # once per checkpoint
    store.sweep()
    assert store._list().next_attempt() == 2
    with pytest.raises(CheckpointError, match="all are damaged"):
        store.latest()
    commit(store, 5, 2)
    assert content(store.latest()) == payload(5, 2)


def test_damaged_checkpoints_with_the_same_name_are_all_kept(root: Path) -> None:
    store = fresh(root)
    for _ in range(3):
        commit(store, 10)
        flip_bit(root / "step-00000010-a0001" / "state.json", 3)
        with pytest.raises(CheckpointError, match="all are damaged"):
            store.latest(lambda line: None)
    assert sorted(os.listdir(root)) == [
        f"damaged-step-00000010-a0001{suffix}" for suffix in ("", "-2", "-3")
    ]


def test_a_damaged_checkpoint_that_cannot_be_marked_is_still_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(fresh(root), 10)
    commit(fresh(root), 20)
    flip_bit(root / "step-00000020-a0001" / "state.json", 3)
    count = Faults()
    faulty_store(root, count, False, monkeypatch).latest(lambda line: None)
    assert "put" in count.done  # writing the mark, which fails below
    (root / "step-00000020-a0001" / "damaged.txt").unlink()
    for n, what in enumerate(count.done):
        if what == "put":
            store = faulty_store(root, Faults("eio", n), False, monkeypatch)
            reported: list[str] = []
            assert content(store.latest(reported.append)) == payload(10)
            assert len(reported) == 1
            assert "step-00000020-a0001" in reported[0]


def test_a_manifest_of_another_checkpoint_is_damage(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    shutil.copytree(root / "step-00000010-a0001", root / "step-00000099-a0001")
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert len(reported) == 1
    assert "belongs to step 10, attempt 1" in reported[0]


def test_fault_14_an_outage_is_not_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails during a read must not cost the newest checkpoint."""
    commit(fresh(root), 10)
    commit(fresh(root), 20)
    before = tree(root)
    count = Faults()
    faulty_store(root, count, False, monkeypatch).latest()
    for n in range(len(count.done)):
        store = faulty_store(root, Faults("eio", n), False, monkeypatch)
        with pytest.raises(OSError, match="injected"):
            store.latest()
    assert tree(root) == before


def test_pruned_while_being_verified_is_not_damage(root: Path) -> None:
    """A reader beside the trainer, such as evaluate, may find its checkpoint half deleted."""
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)

    def prune_first(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step == 20:
            (root / "step-00000020-a0001" / "manifest.json").unlink()
            (root / "step-00000020-a0001" / "state.json").unlink()
        checkpoint.verify()

    reported: list[str] = []
    assert content(store.latest(reported.append, prune_first)) == payload(10)
    assert reported == []
    assert (root / "step-00000020-a0001").exists()


def test_all_checkpoints_pruned_while_being_verified_are_not_damage(root: Path) -> None:
    """The reader is so slow that the trainer has replaced every checkpoint it listed."""
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)

    def overtake(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step == 20:
            for step in (30, 40):
                commit(store, step)
                store.prune(2)
        checkpoint.verify()

    reported: list[str] = []
    assert content(store.latest(reported.append, overtake)) == payload(40)
    assert reported == []


def test_listing_during_a_write_does_not_raise(root: Path) -> None:
    writer, reader = fresh(root), fresh(root)
    commit(writer, 0)
    done = threading.Event()
    seen: list[CheckpointName] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                seen.extend(reader.names())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 40):
        commit(writer, step)
        writer.prune(2)
    done.set()
    thread.join()
    assert errors == []
    assert seen


def test_fault_36_times_of_files_do_not_matter(root: Path) -> None:
    store = fresh(root)
    for step in range(10):
        commit(store, step)
    draw = random.Random(0)
    for path in [*root.rglob("*"), root]:
        os.utime(path, (draw.randrange(2**31), draw.randrange(2**31)))
    assert [name.step for name in fresh(root).names()] == list(range(9, -1, -1))
    assert content(latest(root)[0]) == payload(9)
    store.prune(2)
    assert [name.step for name in fresh(root).names()] == [9, 8]


# ------------------------------------------------------------------------------- manifest


def test_manifest_round_trip() -> None:
    whole = manifest(
        7,
        files={"a.bin": FileEntry(3, "0" * 64)},
        metrics={"loss": float("inf"), "top1": 0.1 + 0.2},
        config={"deep": [{"é\ud800": [None, True, 1, 1e300, -0.0, "x"]}]},
        finished=True,
    )
    data = whole.to_json()
    assert Manifest.from_json(data) == whole
    assert Manifest.from_json(data).to_json() == data
    seal = json.loads(data)["sha256"]
    assert hashlib.sha256(data[: data.rindex(b'"sha256"')]).hexdigest() == seal


def sealed(content: Mapping[str, Any]) -> bytes:
    """Any content with the checksum that to_json would add."""
    head = json.dumps(content, indent=1).removesuffix("\n}") + ",\n "
    seal = hashlib.sha256(head.encode()).hexdigest()
    return f'{head}"sha256": "{seal}"\n}}\n'.encode()


def fields_of(whole: Manifest) -> dict[str, Any]:
    fields = json.loads(whole.to_json())
    del fields["sha256"]
    return dict(fields)


WHOLE = manifest(7, files={"a.bin": FileEntry(3, "0" * 64)})


def test_the_tests_checksum_function_equals_the_real_one() -> None:
    assert Manifest.from_json(sealed(fields_of(WHOLE))) == WHOLE


@settings(max_examples=600, deadline=None)
@given(st.binary(max_size=400))
def test_manifest_fuzz_any_bytes(data: bytes) -> None:
    with pytest.raises(DamagedError):
        Manifest.from_json(data)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_manifest_fuzz_mutated(data: st.DataObject) -> None:
    good = WHOLE.to_json()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    bad = good[:start] + data.draw(st.binary(max_size=20)) + good[end:]
    if bad != good:
        with pytest.raises(DamagedError):
            Manifest.from_json(bad)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(fields_of(WHOLE))), JSON, st.booleans())
def test_manifest_fuzz_sealed_nonsense(key: str, value: Any, drop: bool) -> None:
    """Even with a valid checksum, the result is a manifest that can be written again."""
    fields = fields_of(WHOLE)
    if drop:
        del fields[key]
    else:
        fields[key] = value
    try:
        parsed = Manifest.from_json(sealed(fields))
    except CheckpointError:
        return
    assert not drop
    assert Manifest.from_json(parsed.to_json()).to_json() == parsed.to_json()


@pytest.mark.parametrize(
    "inside",
    ["[" * 100_000 + "]" * 100_000, "9" * 5000, '"\\ud800"', "{}", '{"a.bin": {"size_bytes": 1}}'],
    ids=["deep", "long_number", "surrogate", "empty", "half_entry"],
)
def test_manifest_sealed_extremes(inside: str) -> None:
    good = WHOLE.to_json()
    head = good[: good.rindex(b'"sha256"')].replace(b'"step": 7', b'"step": ' + inside.encode())
    bad = head + f'"sha256": "{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()
    with pytest.raises(DamagedError, match="has invalid content"):
        Manifest.from_json(bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", True),
        ("step", 1.0),
        ("world_size", 0),
        ("attempt", None),
        ("epoch", "1"),
        ("finished", 1),
        ("config", []),
        ("metrics", {"loss": "nan"}),
        ("data_fingerprint", None),
        ("written_by", 3),
        ("format", 0),
        ("files", {"a": {"size_bytes": -1, "sha256": "0" * 64}}),
        ("files", {"a": {"size_bytes": 1, "sha256": "0" * 63}}),
        ("files", {"a": {"size_bytes": 1, "sha256": "A" * 64}}),
        ("files", {"a": {"size_bytes": 1, "sha256": "0" * 64, "more": 1}}),
        ("files", {"a": 1}),
        ("surplus", 1),
    ],
)
def test_manifest_refuses(field: str, value: Any) -> None:
    with pytest.raises(DamagedError, match="has invalid content"):
        Manifest.from_json(sealed({**fields_of(WHOLE), field: value}))


BAD_NAMES = ["../x", "/abs", "a/../../b", "a/b", "..", ".", "", "x\0", "a\\b", "a b", "é", "x\n"]


BAD_NAMES += ["a" * 129, "C:x", "~"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_fault_44_name_traversal(root: Path, name: str) -> None:
    entry = {"size_bytes": 1, "sha256": "0" * 64}
    with pytest.raises(DamagedError, match="files cannot be"):
        Manifest.from_json(sealed({**fields_of(WHOLE), "files": {name: entry}}))
    with pytest.raises(ValueError, match="checkpoint file"):
        fresh(root).commit(manifest(1), {name: b"x"})
    storage = open_storage(str(root))
    for use in (storage.join, storage.read, storage.exists, storage.delete_dir):
        with pytest.raises(ConfigError, match="is not a valid name"):
            use(name)
    assert not root.exists()
    assert not (root.parent / "x").exists()


@pytest.mark.parametrize("name", ["manifest.json", "damaged.txt"])
def test_commit_refuses_reserved_names(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint file"):
        fresh(root).commit(manifest(1), {name: b"x"})


def test_fault_44_traversal_in_a_stored_manifest(root: Path) -> None:
    commit(fresh(root), 1)
    (root / "secret").write_bytes(b"s")
    entry = {"size_bytes": 1, "sha256": hashlib.sha256(b"s").hexdigest()}
    fields = {**fields_of(manifest(1)), "files": {"../secret": entry}}
    (root / "step-00000001-a0001" / "manifest.json").write_bytes(sealed(fields))
    with pytest.raises(DamagedError, match="has invalid content"):
        fresh(root).open(CheckpointName(1, 1))


def test_newer_format_stops_and_is_not_damage(root: Path) -> None:
    """Resuming from an older checkpoint would silently lose work after a downgrade."""
    commit(fresh(root), 10)
    commit(fresh(root), 20)
    newer = {"format": 2, "written_by": "9.8.7", "other": "fields"}
    (root / "step-00000020-a0001" / "manifest.json").write_bytes(sealed(newer))
    before = tree(root)
    with pytest.raises(CheckpointError, match=r"format 2, written by raytrain_ddp 9\.8\.7; this"):
        fresh(root).latest()
    assert tree(root) == before


# -------------------------------------------------------------------------------- storage


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


def test_other_file_systems_are_not_local(root: Path) -> None:
    fs = pafs.SubTreeFileSystem(str(root.parent.parent), pafs.LocalFileSystem())
    store = CheckpointStore(Storage(fs, "run/checkpoints", False))
    commit(store, 10)
    commit(store, 20)
    assert str(store.open(CheckpointName(20, 1))) == "subtree://run/checkpoints/step-00000020-a0001"
    flip_bit(root / "step-00000020-a0001" / "state.json", 0)
    assert content(store.latest(lambda line: None)) == payload(10)
    assert (root / "step-00000020-a0001" / "damaged.txt").exists()


def test_an_fsspec_store_can_hold_checkpoints(tmp_path: Path) -> None:
    """As with hf:// and abfs://; the in-memory file system stands in for them."""
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


SECRET = "hunter2/SECRET"


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://KEY:{SECRET}@bucket/x",
        f"foo://KEY:{SECRET}@bucket/x",
        f"foo://bucket/x?token={SECRET}",
        f"foo://bucket/x?a=b@c&token={SECRET}",
        f"foo://u:a?b#{SECRET}@bucket/x",
        f"foo://bucket/x#{SECRET}",
    ],
)
def test_fault_45_no_secret_in_messages(uri: str) -> None:
    assert "SECRET" not in without_secrets(uri)
    with pytest.raises(PreflightError) as caught:
        open_storage(uri)
    chained = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert not any("SECRET" in str(error) or "hunter2" in str(error) for error in chained)
    assert uri.partition("://")[0] + "://" in str(caught.value)


def test_without_secrets_leaves_the_rest() -> None:
    assert without_secrets("s3://k:s@bucket:90/a/b?region=x") == "s3://bucket:90/a/b"
    assert without_secrets("/a/b@c?d") == "/a/b@c?d"
    assert without_secrets("gs://bucket/a") == "gs://bucket/a"


def test_fault_14_unreachable_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "REACH_TIMEOUT_S", 0.5)
    uri = "s3://KEY:SECRET@bucket/x?endpoint_override=127.0.0.1:1&scheme=http&region=nowhere"
    with pytest.raises(PreflightError, match=r"s3://bucket/x.*(did not respond|NETWORK)") as caught:
        open_storage(uri)
    assert "SECRET" not in str(caught.value)
