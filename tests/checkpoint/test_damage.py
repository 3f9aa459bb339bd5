"""Damaged checkpoints and manifests: what is detected, and what remains usable."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import (
    FILES,
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
    sealed,
    tree,
)

from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.errors import CheckpointError, ConfigError

NEWEST = "step-00000020-a0001"


def two_checkpoints(root: Path) -> Path:
    """Commits steps 10 and 20; returns the folder of the latter."""
    store = fresh(root)
    for step in (10, 20):
        commit(store, step)
    return root / NEWEST


def test_fault_10_a_flipped_bit_is_detected_and_the_previous_checkpoint_used(
    tmp_path: Path,
) -> None:
    draw = random.Random(0)
    for number in range(45):
        root = tmp_path / str(number)
        victim = two_checkpoints(root) / FILES[number % 3]
        flip_bit(victim, draw.randrange(8 * victim.stat().st_size))
        damaged = victim.read_bytes()
        found, reported = latest(root)
        assert content(found) == payload(10)
        assert len(reported) == 1
        assert NEWEST in reported[0]
        assert "\n" not in reported[0]
        assert victim.name.partition(".")[0] in reported[0]
        kept = root / f"damaged-{NEWEST}" / victim.name
        assert kept.read_bytes() == damaged
        assert str(kept.parent) in reported[0]
        assert latest(root) == (found, [])  # reported once


def test_fault_10_every_byte_of_the_manifest_counts() -> None:
    good = manifest(1, files={"a.bin": FileEntry(3, "0" * 64)}).to_json()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        for data in (bytes(bad), good[:place], good[:place] + good[place + 1 :]):
            with pytest.raises(DamagedError):
                Manifest.from_json(data)


def overwrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def move_out(path: Path) -> None:
    """Fault 44: content from outside the folder is never read."""
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: Mapping[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "one byte": lambda path: overwrite(path, lambda data: data[:1]),
    "half": lambda path: overwrite(path, lambda data: data[: len(data) // 2]),
    "shorter": lambda path: overwrite(path, lambda data: data[:-1]),
    "longer": lambda path: overwrite(path, lambda data: data + b"\n"),
    "missing": Path.unlink,
    "folder": make_folder,
    "link": move_out,
}


@pytest.mark.parametrize("change", CHANGES)
def test_faults_09_11_a_file_of_another_size_or_kind_is_detected_and_the_previous_checkpoint_used(
    tmp_path: Path, change: str
) -> None:
    for filename in FILES:
        root = tmp_path / filename
        CHANGES[change](two_checkpoints(root) / filename)
        found, reported = latest(root)
        assert content(found) == payload(10)
        # Without a manifest, it is what a killed commit leaves.
        is_leftover = filename == "manifest.json" and change in ("missing", "folder", "link")
        assert len(reported) == (not is_leftover)
        assert all(filename.partition(".")[0] in line and NEWEST in line for line in reported)


def test_fault_11_a_missing_newest_folder_gives_the_previous_checkpoint(root: Path) -> None:
    shutil.rmtree(two_checkpoints(root))
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert reported == []


def test_fault_10_a_read_verifies_the_hash_again(root: Path) -> None:
    checkpoint = commit(fresh(root), 10)
    checkpoint.verify()
    flip_bit(root / "step-00000010-a0001" / "model.safetensors", 77)
    assert checkpoint.read("state.json") == payload(10)["state.json"]
    with pytest.raises(CheckpointError, match="model"):
        checkpoint.read("model.safetensors")


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_12_a_run_whose_checkpoints_are_all_damaged_stays_an_error(
    root: Path, is_local: bool
) -> None:
    store = both(root, is_local)
    for step in (10, 20):
        commit(store, step)
        flip_bit(root / f"step-{step:08d}-a0001" / "state.json", 3)
    reported: list[str] = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            both(root, is_local).latest(reported.append)
        assert not isinstance(caught.value, DamagedError)
        for part in ("step-00000010-a0001", "step-00000020-a0001", "--name"):
            assert part in str(caught.value)
    assert len(reported) == 2  # once per checkpoint
    store.sweep()
    assert next_attempt(store) == 2
    with pytest.raises(CheckpointError):
        store.latest()
    commit(store, 5, 2)
    assert content(store.latest()) == payload(5, 2)


def test_a_damaged_checkpoint_that_cannot_be_marked_is_still_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_checkpoints(root)
    flip_bit(root / NEWEST / "state.json", 3)
    count = Faults()
    faulty_store(root, count, False, monkeypatch).latest(lambda line: None)
    assert "put" in count.done  # writing the mark, which fails below
    (root / NEWEST / "damaged.txt").unlink()
    for n, what in enumerate(count.done):
        if what == "put":
            store = faulty_store(root, Faults("eio", n), False, monkeypatch)
            reported: list[str] = []
            assert content(store.latest(reported.append)) == payload(10)
            assert len(reported) == 1
            assert NEWEST in reported[0]


def test_a_manifest_of_another_checkpoint_is_damage(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    shutil.copytree(root / "step-00000010-a0001", root / "step-00000099-a0001")
    (root / "damaged-step-00000099-a0001" / "of another time").mkdir(parents=True)
    found, reported = latest(root)
    assert content(found) == payload(10)
    assert len(reported) == 1
    assert "belongs to step 10, attempt 1" in reported[0]
    assert (root / "damaged-step-00000099-a0001-2" / "manifest.json").exists()


def test_fault_14_an_outage_is_not_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails during a read must not cost the newest checkpoint."""
    two_checkpoints(root)
    before = tree(root)
    count = Faults()
    faulty_store(root, count, False, monkeypatch).latest()
    for n in range(len(count.done)):
        store = faulty_store(root, Faults("eio", n), False, monkeypatch)
        with pytest.raises(OSError, match="injected"):
            store.latest()
    assert tree(root) == before


def test_all_checkpoints_pruned_while_being_verified_are_not_damage(root: Path) -> None:
    """The reader is so slow that the trainer has replaced every checkpoint it listed."""
    two_checkpoints(root)
    store = fresh(root)

    def overtake(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step == 20:
            for step in (30, 40):
                commit(store, step)
                store.prune(2)
        checkpoint.verify()

    reported: list[str] = []
    assert content(store.latest(reported.append, overtake)) == payload(40)
    assert reported == []


def fields_of(whole: Manifest) -> dict[str, Any]:
    fields = json.loads(whole.to_json())
    del fields["sha256"]
    return dict(fields)


WHOLE = manifest(7, files={"a.bin": FileEntry(3, "0" * 64)})
# Sealed, so that only the content is wrong.
REFUSED: list[tuple[str, Any]] = [
    *(("step", -1), ("step", True), ("step", 1.0), ("world_size", 0), ("attempt", None)),
    *(("epoch", "1"), ("finished", 1), ("config", []), ("metrics", {"loss": "nan"})),
    *(("data_fingerprint", None), ("written_by", 3), ("format", 0), ("surplus", 1)),
    *(("files", {"a": entry}) for entry in (1, {}, {"size_bytes": 1})),
    *(
        ("files", {"a": {"size_bytes": 1, "sha256": "0" * 64, **wrong}})
        for wrong in ({"size_bytes": -1}, {"sha256": "0" * 63}, {"sha256": "A" * 64}, {"more": 1})
    ),
]


def test_a_sealed_manifest_with_wrong_content_is_damaged() -> None:
    fields = fields_of(WHOLE)
    assert Manifest.from_json(sealed(fields)) == WHOLE
    for field, value in REFUSED:
        with pytest.raises(DamagedError):
            Manifest.from_json(sealed({**fields, field: value}))
    for field in fields:
        with pytest.raises(DamagedError):
            Manifest.from_json(sealed({name: fields[name] for name in fields if name != field}))
    good = WHOLE.to_json()
    head = good[: good.rindex(b'"sha256"')]
    for inside in (b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b'"\\ud800"', b"{}", b"nul"):
        bad = head.replace(b'"step": 7', b'"step": ' + inside)
        with pytest.raises(DamagedError):
            Manifest.from_json(
                bad + f'"sha256": "{hashlib.sha256(bad).hexdigest()}"\n}}\n'.encode()
            )


@pytest.mark.parametrize(
    "name", ["../x", "/abs", "a/b", "..", "", "x\0", "a\\b", "x\n", "C:x", "~"]
)
def test_fault_44_no_name_leads_out_of_its_folder(root: Path, name: str) -> None:
    entry = {"size_bytes": 1, "sha256": "0" * 64}
    with pytest.raises(DamagedError):
        Manifest.from_json(sealed({**fields_of(WHOLE), "files": {name: entry}}))
    storage = open_storage(str(root))
    for use in (storage.join, storage.read, storage.exists, storage.delete_dir):
        with pytest.raises(ConfigError):
            use(name)
    assert not root.exists()
    assert not (root.parent / "x").exists()
