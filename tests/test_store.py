"""The commit protocol on a file system that fails, and damage to what it wrote."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint import storage as storage_module
from raytrain_ddp.checkpoint.claims import Claim, ContendedError
from raytrain_ddp.checkpoint.listing import CheckpointListing
from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import (
    Storage,
    is_plain_name,
    open_storage,
)
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError, RunLockedError
from raytrain_ddp.failpoints import arm
from raytrain_ddp.uri import without_secrets

# ------------------------------------------------------------------ a file system that fails


class Killed(BaseException):
    """Stands for SIGKILL: from then on the file system refuses everything."""


class Faults:
    """Lets operation number ``at`` (from 0) go wrong in one way; without ``at`` it only counts.

    eio, enospc: raises before the operation. late: raises EIO after it, as a lost reply would.
    torn: writes half, then EIO. kill: never returns. torn_kill: writes half and never returns.
    meanwhile: another process does something before it, and nothing fails.
    """

    MODES = ("eio", "enospc", "late", "torn", "kill", "torn_kill")

    def __init__(
        self, mode: str = "eio", at: int | None = None, meanwhile: Callable[[], Any] | None = None
    ) -> None:
        self.mode, self.at, self.meanwhile = mode, at, meanwhile
        self.done: list[str] = []
        self.dead = False

    def __call__(
        self,
        what: str,
        act: Callable[[], Any],
        act_half: Callable[[], Any] = lambda: None,
    ) -> Any:
        if self.dead:
            raise Killed(what)
        self.done.append(what)
        if len(self.done) - 1 != self.at:
            return act()
        if self.meanwhile is not None:
            self.meanwhile()
            return act()
        if self.mode.startswith("torn"):
            act_half()
        elif self.mode == "late":
            act()
        if self.mode.endswith("kill"):
            self.dead = True
            raise Killed(what)
        number = errno.ENOSPC if self.mode == "enospc" else errno.EIO
        raise OSError(number, f"{os.strerror(number)} (injected in {what})")


class FaultyStream:
    def __init__(self, faults: Faults, raw: Any) -> None:
        self.faults, self.raw, self.closed = faults, raw, False

    def write(self, data: Any) -> None:
        data = bytes(data)
        half = data[: len(data) // 2]
        self.faults("write", lambda: self.raw.write(data), lambda: self.raw.write(half))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.raw.close()  # it has no buffer, so that this writes nothing
            if not self.faults.dead:
                self.faults("close", lambda: None)

    def flush(self) -> None: ...


class FaultyPut:
    """The stream of an object store: its content appears when it is closed, as one object, and
    needs no folder. Half of it is there only in the torn modes: of a store that is none."""

    def __init__(self, faults: Faults, path: str) -> None:
        self.faults, self.path, self.closed, self.data = faults, Path(path), False, b""

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def close(self) -> None:
        def put(data: bytes) -> None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(data)

        if not self.closed:
            self.closed = True
            half = self.data[: len(self.data) // 2]
            self.faults("put", lambda: put(self.data), lambda: put(half))

    def flush(self) -> None: ...


class FaultyHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    def __init__(self, faults: Faults, is_local: bool) -> None:
        self.faults, self.is_local, self.fs = faults, is_local, pafs.LocalFileSystem()

    def get_type_name(self) -> str:
        return "faulty"

    def normalize_path(self, path: str) -> str:
        return str(self.fs.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> Any:
        return self.faults("get_file_info", lambda: self.fs.get_file_info(paths))

    def get_file_info_selector(self, selector: Any) -> Any:
        return self.faults("list", lambda: self.fs.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        self.faults("create_dir", lambda: self.fs.create_dir(path, recursive=recursive))

    def delete_dir(self, path: str) -> None:
        def act_half() -> None:
            names = sorted(os.listdir(path))
            for name in names[: (len(names) + 1) // 2]:
                os.unlink(f"{path}/{name}")

        self.faults("delete_dir", lambda: self.fs.delete_dir(path), act_half)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self.faults("delete_file", lambda: self.fs.delete_file(path))

    def move(self, src: str, dest: str) -> None:
        self.faults("move", lambda: self.fs.move(src, dest))

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        return self.faults("open_input", lambda: self.fs.open_input_stream(path, compression=None))

    def open_input_file(self, path: str) -> Any:
        return self.faults("open_input", lambda: self.fs.open_input_file(path))

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if not self.is_local:
            return pa.PythonFile(FaultyPut(self.faults, path), mode="w")
        raw = self.faults("open_output", lambda: self.fs.open_output_stream(path, compression=None))
        return pa.PythonFile(FaultyStream(self.faults, raw), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


def faulty_store(
    root: Path, faults: Faults, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    monkeypatch.setattr(os, "fsync", lambda fd: faults("fsync", lambda: None))
    fs = pafs.PyFileSystem(FaultyHandler(faults, is_local))
    return CheckpointStore(Storage(fs, str(root), is_local))


# ------------------------------------------------------------------------------- helpers


def manifest(step: int, attempt: int = 1, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": step // 10,
        "attempt": attempt,
        "world_size": 3,
        "config": {"seed": 1, "optim": {"lr": 0.1, "betas": [0.9, 0.999], "warmup": None}},
        "data_fingerprint": "rows=64 sha=ab",
        "metrics": {"loss": 1.5 / (step + 1)},
        "written_by": "1.2.3",
    }
    return Manifest(**{**fields, **changes})


def payload(step: int, attempt: int = 1) -> dict[str, bytes]:
    draw = random.Random(f"{step}/{attempt}")
    return {
        "model.safetensors": draw.randbytes(700),
        "state.json": json.dumps({"step": step}).encode(),
    }


def commit(store: CheckpointStore, step: int, attempt: int = 1) -> Checkpoint:
    return store.commit(manifest(step, attempt), payload(step, attempt))


def content(checkpoint: Checkpoint | None) -> dict[str, bytes] | None:
    if checkpoint is None:
        return None
    return {name: checkpoint.read(name) for name in checkpoint.manifest.files}


def fresh(root: Path) -> CheckpointStore:
    return CheckpointStore(open_storage(str(root)))


def latest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    told: list[str] = []
    return fresh(root).latest(told.append), told


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power; that the calls are made is tested by counting them."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


# ------------------------------------------------------------------- commit, open, read


def test_commit_then_read(root: Path) -> None:
    store = fresh(root)
    assert store.latest() is None
    assert store.names() == []
    assert store.next_attempt() == 1
    committed = commit(store, 120)
    assert committed.name == CheckpointName(120, 1)
    assert str(committed) == str(root / "step-00000120-a0001")
    found, told = latest(root)
    assert found is not None
    assert told == []
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


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_commit_takes_any_buffer(root: Path, kind: Callable[[bytes], Any]) -> None:
    checkpoint = fresh(root).commit(manifest(1), {"x": kind(b"abc"), "empty": kind(b"")})
    assert content(checkpoint) == {"x": b"abc", "empty": b""}


def test_write_of_several_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "CHUNK_BYTES", 7)
    checkpoint = commit(fresh(root), 3)
    checkpoint.verify()
    assert content(checkpoint) == payload(3)


def test_names_never_choose_compression(root: Path) -> None:
    checkpoint = fresh(root).commit(manifest(1), {"x.gz": b"not gzip"})
    assert checkpoint.read("x.gz") == b"not gzip"
    assert (root / "step-00000001-a0001" / "x.gz").read_bytes() == b"not gzip"


def test_order_is_step_then_attempt(root: Path) -> None:
    store = fresh(root)
    for step, attempt in [(9, 2), (10, 1), (10, 12), (10, 2), (100_000_000, 1)]:
        commit(store, step, attempt)
    assert [str(name) for name in store.names()] == [
        "step-100000000-a0001",
        "step-00000010-a0012",
        "step-00000010-a0002",
        "step-00000010-a0001",
        "step-00000009-a0002",
    ]
    assert store.next_attempt() == 13


@given(st.integers(0, 10**14), st.integers(0, 10**14))
def test_checkpoint_name_round_trip(step: int, attempt: int) -> None:
    name = CheckpointName(step, attempt)
    assert CheckpointName.parse(str(name)) == name
    assert is_plain_name(str(name))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step-1-a1",
        "step-00000001-a0001 ",
        "step-00000001-a0001\n",
        "step-000000001-a0001",
        "step-0000000\u0661-a0001",
        "damaged-step-00000001-a0001",
        "x/step-00000001-a0001",
    ],
)
def test_other_folders_are_no_checkpoints(text: str) -> None:
    assert CheckpointName.parse(text) is None


def test_commit_refuses_a_name_twice_and_leaves_the_first(root: Path) -> None:
    store = fresh(root)
    commit(store, 5)
    before = tree(root)
    with pytest.raises(CheckpointError, match="step-00000005-a0001 exists already"):
        store.commit(manifest(5), {"other": b"x"})
    assert tree(root) == before


def test_commit_replaces_a_leftover(root: Path) -> None:
    leftover = root / "step-00000005-a0001"
    leftover.mkdir(parents=True)
    (leftover / "junk").write_bytes(b"x")
    checkpoint = commit(fresh(root), 5)
    assert not (leftover / "junk").exists()
    assert content(checkpoint) == payload(5)


def test_read_of_an_unknown_file(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no file 'ema'; it has: model\.safetensors, s"):
        commit(fresh(root), 5).read("ema")


def test_commit_of_config_that_is_not_json_leaves_nothing(root: Path) -> None:
    with pytest.raises(TypeError):
        fresh(root).commit(manifest(1, config={"x": object()}), payload(1))
    assert tree(root) == {}
    assert latest(root) == (None, [])


# -------------------------------------------------- faults 2 and 8: the writer dies or fails


def sweep_faults(
    tmp_path: Path,
    prepare: Callable[[CheckpointStore], Any],
    act: Callable[[CheckpointStore], Any],
    mode: str,
    is_local: bool,
) -> Iterator[tuple[Path, bool, str]]:
    """Run ``act`` once for each of its operations, which then fails. A run without fault counts
    them. Yields the folder, whether ``act`` returned, and which operation it was."""
    tmp_path.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        prepare(fresh(tmp_path / "count"))
        counter = Faults()
        act(faulty_store(tmp_path / "count", counter, is_local, patch))
    assert len(counter.done) >= 4
    for n, what in enumerate(counter.done):
        root = tmp_path / str(n)
        prepare(fresh(root))
        faults = Faults(mode, n)
        with pytest.MonkeyPatch.context() as patch:
            store = faulty_store(root, faults, is_local, patch)
            try:
                act(store)
                returned = True
            except (OSError, Killed):
                returned = False
        assert len(faults.done) > n, "the fault was never reached"
        yield root, returned, f"{mode} in operation {n}, {what}"


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_any_operation_of_a_commit_fails(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    outcomes = set()

    def prepare(store: CheckpointStore) -> None:
        commit(store, 10)

    def act(store: CheckpointStore) -> None:
        commit(store, 20)

    for root, returned, where in sweep_faults(tmp_path, prepare, act, mode, is_local):
        found, told = latest(root)
        outcomes.add(content(found) == payload(20))
        if returned:
            assert content(found) == payload(20), where
        else:
            assert content(found) in (payload(10), payload(20)), where
        if is_local:
            assert told == [], where  # a kill leaves no damage: the manifest appears by rename

        store = fresh(root)
        store.sweep()
        kept = {p.name for p in root.iterdir() if not p.name.startswith("damaged-")}
        assert kept == {str(name) for name in store.names()}, where
        assert not any(".tmp-" in path for path in tree(root)), where
        assert content(store.latest()) == content(found), where
        again = commit(store, 20, store.next_attempt())
        assert content(store.latest()) == content(again), where
    # Until the commit point the old one is found; only a kill after it leaves the new one.
    assert False in outcomes


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", ["eio", "enospc", "torn"])
def test_fault_08_failed_commit_cleans_up_itself(tmp_path: Path, mode: str, is_local: bool) -> None:
    for root, returned, where in sweep_faults(
        tmp_path, lambda s: commit(s, 10), lambda s: commit(s, 20), mode, is_local
    ):
        assert returned or set(os.listdir(root)) == {"step-00000010-a0001"}, where


def test_fault_02_first_commit_of_a_run_fails(tmp_path: Path) -> None:
    for mode in Faults.MODES:
        for root, returned, where in sweep_faults(
            tmp_path / mode, lambda s: None, lambda s: commit(s, 20), mode, True
        ):
            found, told = latest(root)
            assert content(found) in ((payload(20),) if returned else (None, payload(20))), where
            assert told == []


def test_commit_syncs_payload_before_the_manifest_appears(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    commit(faulty_store(root, faults, True, monkeypatch), 1)
    writes = [what for what in faults.done if what in ("open_output", "fsync", "move")]
    file = ["open_output", "fsync"]
    made_folders = ["fsync"] * 3
    assert writes == [*made_folders, *file, *file, *file, "move", "fsync"]


# ------------------------------------------------------------------------ fault 3: pruning


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_03_any_operation_of_prune_fails(tmp_path: Path, mode: str, is_local: bool) -> None:
    def prepare(store: CheckpointStore) -> None:
        for step in (10, 20, 30, 40):
            commit(store, step)

    for root, _, where in sweep_faults(tmp_path, prepare, lambda s: s.prune(2), mode, is_local):
        found, told = latest(root)
        assert content(found) == payload(40), where
        assert told == [], where
        store = fresh(root)
        for name in store.names():  # whatever is still listed is whole
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


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_prune_does_not_count_damaged_ones(root: Path, is_local: bool) -> None:
    store = CheckpointStore(replace(open_storage(str(root)), is_local=is_local))
    for step in (10, 20, 30):
        commit(store, step)
    for step in (20, 30):
        flip_bit(root / f"step-{step:08d}-a0001" / "state.json", 0)
    assert store.latest(lambda line: None) == store.open(CheckpointName(10, 1))
    commit(store, 11, store.next_attempt())
    store.prune(2)
    assert store.names() == [CheckpointName(11, 2), CheckpointName(10, 1)]
    assert sum("state.json" in path for path in tree(root)) == 4  # the damaged are still there


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


def test_next_attempt_counts_leftovers_and_damaged(root: Path) -> None:
    root.mkdir(parents=True)
    store = fresh(root)
    for folder, expected in [
        ("step-00000020-a0003", 4),
        ("damaged-step-00000020-a0007", 8),
        ("damaged-step-00000020-a0008-2", 9),
        ("stepping-a0099", 9),
    ]:
        (root / folder).mkdir()
        assert store.next_attempt() == expected


# --------------------------------------------------------------- faults 9, 10, 11, 12: damage

FILES = ["model.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("seed", range(200))
def test_fault_10_bit_flip(root: Path, seed: int) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    draw = random.Random(seed)
    victim = root / "step-00000020-a0001" / FILES[seed % 3]
    flip_bit(victim, draw.randrange(8 * victim.stat().st_size))
    damaged = victim.read_bytes()

    found, told = latest(root)
    assert content(found) == payload(10)
    assert len(told) == 1
    assert "step-00000020-a0001" in told[0]
    assert "\n" not in told[0]
    assert victim.name.partition(".")[0] in told[0]
    kept = root / "damaged-step-00000020-a0001" / victim.name
    assert kept.read_bytes() == damaged
    assert str(kept.parent) in told[0]
    assert latest(root) == (found, [])  # told once


def test_fault_10_every_bit_of_the_manifest_counts() -> None:
    good = manifest(1, files={"a.bin": FileEntry(3, "0" * 64)}).to_json()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            Manifest.from_json(bytes(bad))


@pytest.mark.parametrize("filename", FILES)
@pytest.mark.parametrize("part", ["0", "1", "half", "n-1", "longer"])
def test_fault_09_truncated(root: Path, filename: str, part: str) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    victim = root / "step-00000020-a0001" / filename
    data = victim.read_bytes()
    sizes = {"0": 0, "1": 1, "half": len(data) // 2, "n-1": len(data) - 1, "longer": len(data)}
    victim.write_bytes(data[: sizes[part]] + (b"\n" if part == "longer" else b""))
    found, told = latest(root)
    assert content(found) == payload(10)
    assert len(told) == 1
    assert "manifest" in told[0] if filename == "manifest.json" else "bytes instead of" in told[0]


def test_fault_10_read_checks_again(root: Path) -> None:
    checkpoint = commit(fresh(root), 10)
    checkpoint.verify()
    flip_bit(root / "step-00000010-a0001" / "model.safetensors", 77)
    assert checkpoint.read("state.json") == payload(10)["state.json"]
    with pytest.raises(CheckpointError, match=r"step-00000010-a0001: model\.safetensors is dam"):
        checkpoint.read("model.safetensors")


def test_fault_11_latest_folder_missing(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    shutil.rmtree(root / "step-00000020-a0001")
    found, told = latest(root)
    assert content(found) == payload(10)
    assert told == []


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
    found, told = latest(root)
    assert content(found) == payload(10)
    assert len(told) == 1
    assert "model.safetensors is missing or no plain file" in told[0]


def test_fault_11_manifest_missing_is_a_leftover(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    (root / "step-00000020-a0001" / "manifest.json").unlink()
    found, told = latest(root)
    assert content(found) == payload(10)
    assert told == []


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_12_all_damaged_is_an_error_for_ever(root: Path, is_local: bool) -> None:
    storage = replace(open_storage(str(root)), is_local=is_local)
    store = CheckpointStore(storage)
    for step in (10, 20):
        commit(store, step)
        flip_bit(root / f"step-{step:08d}-a0001" / "state.json", 3)
    told: list[str] = []
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all are damaged") as caught:
            CheckpointStore(storage).latest(told.append)
        assert not isinstance(caught.value, DamagedError)
        for part in ("step-00000010-a0001", "step-00000020-a0001", "--name"):
            assert part in str(caught.value)
    assert len(told) == 2  # once for each
    store.sweep()
    assert store.next_attempt() == 2
    with pytest.raises(CheckpointError, match="all are damaged"):
        store.latest()
    commit(store, 5, 2)
    assert content(store.latest()) == payload(5, 2)


def test_damaged_ones_of_one_name_are_all_kept(root: Path) -> None:
    store = fresh(root)
    for _ in range(3):
        commit(store, 10)
        flip_bit(root / "step-00000010-a0001" / "state.json", 3)
        with pytest.raises(CheckpointError, match="all are damaged"):
            store.latest(lambda line: None)
    assert sorted(os.listdir(root)) == [
        f"damaged-step-00000010-a0001{suffix}" for suffix in ("", "-2", "-3")
    ]


def test_damage_in_a_store_that_cannot_be_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(fresh(root), 10)
    commit(fresh(root), 20)
    flip_bit(root / "step-00000020-a0001" / "state.json", 3)
    count = Faults()
    faulty_store(root, count, False, monkeypatch).latest(lambda line: None)
    assert "put" in count.done  # the mark, which the next lines make impossible
    (root / "step-00000020-a0001" / "damaged.txt").unlink()
    for n, what in enumerate(count.done):
        if what == "put":
            store = faulty_store(root, Faults("eio", n), False, monkeypatch)
            told: list[str] = []
            assert content(store.latest(told.append)) == payload(10)
            assert len(told) == 1
            assert "step-00000020-a0001" in told[0]


def test_a_manifest_of_another_checkpoint(root: Path) -> None:
    store = fresh(root)
    commit(store, 10)
    shutil.copytree(root / "step-00000010-a0001", root / "step-00000099-a0001")
    found, told = latest(root)
    assert content(found) == payload(10)
    assert len(told) == 1
    assert "belongs to step 10, attempt 1" in told[0]


def test_fault_14_an_outage_is_not_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails while it is read must not cost the newest checkpoint."""
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


def test_pruned_while_being_verified_is_not_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside the trainer (evaluate, say) may find its checkpoint half deleted."""
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    verify = Checkpoint.verify

    def prune_first(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step == 20:
            (root / "step-00000020-a0001" / "manifest.json").unlink()
            (root / "step-00000020-a0001" / "state.json").unlink()
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", prune_first)
    told: list[str] = []
    assert content(store.latest(told.append)) == payload(10)
    assert told == []
    assert (root / "step-00000020-a0001").exists()


def test_all_pruned_while_being_verified(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader so slow that the trainer meanwhile replaced all that it had listed."""
    store = fresh(root)
    commit(store, 10)
    commit(store, 20)
    verify = Checkpoint.verify

    def overtake(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step == 20:
            for step in (30, 40):
                commit(store, step)
                store.prune(2)
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", overtake)
    told: list[str] = []
    assert content(store.latest(told.append)) == payload(40)
    assert told == []


def test_listing_beside_a_writer_raises_nothing(root: Path) -> None:
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
    """Any content, sealed as to_json seals it."""
    head = json.dumps(content, indent=1).removesuffix("\n}") + ",\n "
    seal = hashlib.sha256(head.encode()).hexdigest()
    return f'{head}"sha256": "{seal}"\n}}\n'.encode()


def fields_of(whole: Manifest) -> dict[str, Any]:
    fields = json.loads(whole.to_json())
    del fields["sha256"]
    return dict(fields)


WHOLE = manifest(7, files={"a.bin": FileEntry(3, "0" * 64)})


def test_sealing_in_the_tests_is_the_real_one() -> None:
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
    """Even with a right seal, what comes out is a manifest that can be written again."""
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
    with pytest.raises(DamagedError, match="makes no sense"):
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
    with pytest.raises(DamagedError, match="makes no sense"):
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
        with pytest.raises(ConfigError, match="no file name"):
            use(name)
    assert not root.exists()
    assert not (root.parent / "x").exists()


@pytest.mark.parametrize("name", ["manifest.json", "damaged.txt"])
def test_commit_refuses_its_own_names(root: Path, name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint file"):
        fresh(root).commit(manifest(1), {name: b"x"})


def test_fault_44_traversal_in_a_stored_manifest(root: Path) -> None:
    commit(fresh(root), 1)
    (root / "secret").write_bytes(b"s")
    entry = {"size_bytes": 1, "sha256": hashlib.sha256(b"s").hexdigest()}
    fields = {**fields_of(manifest(1)), "files": {"../secret": entry}}
    (root / "step-00000001-a0001" / "manifest.json").write_bytes(sealed(fields))
    with pytest.raises(DamagedError, match="makes no sense"):
        fresh(root).open(CheckpointName(1, 1))


def test_newer_format_stops_and_is_not_damage(root: Path) -> None:
    """Going on from an older one would silently lose work after a downgrade."""
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


def test_write_atomic_replaces_whole_or_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(parents=True)
    for mode in Faults.MODES:
        for n in range(5):  # open, write, close, fsync, move
            open_storage(str(root)).write_atomic("x", b"old")
            store = faulty_store(root, Faults(mode, n), True, monkeypatch)
            with pytest.raises((OSError, Killed)):
                store.storage.write_atomic("x", b"new!")
            monkeypatch.undo()
            # Only a lost reply to the rename itself can leave the new content.
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


def test_fault_14_bad_storage(tmp_path: Path) -> None:
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
    with pytest.raises(PreflightError, match=r"s3://bucket/x.*(did not answer|NETWORK)") as caught:
        open_storage(uri)
    assert "SECRET" not in str(caught.value)


# ------------------------------------------------- fault 7: zombies, claims and what they fence


def claims_in(root: Path) -> list[Claim]:
    found = filter(None, map(Claim.parse, os.listdir(root))) if root.exists() else []
    return sorted(found, key=lambda claim: claim.rank)


def start(store: CheckpointStore, told: list[str] | None = None) -> tuple[Checkpoint | None, int]:
    """What rank 0 does when its run starts or goes on: the checkpoint and its attempt."""
    found = store.latest((told if told is not None else []).append)
    attempt = store.claim(found.name if found else None, {"world_size": 3})
    store.sweep()
    return found, attempt


def both(tmp_path: Path, is_local: bool) -> CheckpointStore:
    return CheckpointStore(replace(open_storage(str(tmp_path)), is_local=is_local))


def unaware(patch: pytest.MonkeyPatch) -> None:
    """As if each process had looked for its successor just before there was one."""
    patch.setattr(CheckpointStore, "_owned", lambda store, *_: store._list())


def persistent_start(store: CheckpointStore) -> tuple[Checkpoint | None, int]:
    """What the recorder makes of it: again, as after any OSError."""
    while True:
        try:
            return start(store)
        except ContendedError:
            time.sleep(random.uniform(0, 0.01))


def test_a_claim_says_all_in_its_name(root: Path) -> None:
    store = fresh(root)
    assert start(store) == (None, 1)
    commit(store, 200, 1)
    assert start(fresh(root))[1] == 2
    first, second = claims_in(root)
    assert str(first) == f"claim-a0001-{first.token}.json"
    assert str(second) == f"claim-a0002-from-step-00000200-a0001-{second.token}.json"
    assert json.loads((root / str(second)).read_bytes()) == {"world_size": 3}


@given(
    st.integers(0, 10**14),
    st.none() | st.builds(CheckpointName, st.integers(0, 10**14), st.integers(0, 10**14)),
    st.integers(0, 2**32 - 1),
)
def test_claim_round_trip(attempt: int, base: CheckpointName | None, token: int) -> None:
    claim = Claim(attempt, base, f"{token:08x}")
    assert Claim.parse(str(claim)) == claim
    assert is_plain_name(str(claim))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "claim-a0001.json",
        "claim-a1-00000000.json",
        "claim-a0001-00000000.json ",
        "claim-a00001-00000000.json",
        "claim-a0001-0000000G.json",
        "claim-a0001-from-step-00000001-00000000.json",
        "claim-a0001-from-step-000000001-a0001-00000000.json",
        ".tmp-claim-a0001-00000000.json",
    ],
)
def test_other_files_are_no_claims(root: Path, text: str) -> None:
    assert Claim.parse(text) is None


GARBAGE = [
    "claim-a999999999999999-0a1b2c3d.json",
    "claim-a100000000000001-from-step-00000020-a0001-0a1b2c3d.json",
    "claim-a0003-from-step-00000020-a999999999999999-0a1b2c3d.json",
    "claim-a99999999999999999999-0a1b2c3d.json",
    "claim-a0001-0a1b2c3d.json.bak",
    "step-00000020-a999999999999999/model.safetensors",
    "step-00000020-a999999999999999/manifest.json",
    "step-999999999999999-a999999999999999/x",
    "damaged-step-00000020-a99999999999999999999/manifest.json",
    "step-00000030-a0001-copy/manifest.json",
    "notes.txt",
    "a folder/with a file",
    "Ω",
]


@pytest.mark.parametrize("name", [*GARBAGE, b"step-\xff\xfe", "link", "loop"])
def test_names_that_are_none_of_ours_are_passed_over(root: Path, name: str | bytes) -> None:
    store = fresh(root)
    start(store)
    commit(store, 20, 1)
    if name == "link":
        (root / "link").symlink_to("/usr")
    elif name == "loop":
        (root / "loop").symlink_to(".")
    elif isinstance(name, bytes):
        os.mkdir(os.path.join(os.fsencode(root), name))
    else:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    for attempt in (2, 3, 4):
        store = fresh(root)
        base, number = start(store)
        assert base is not None
        assert (base.name, number) == (
            CheckpointName(20 + 10 * (attempt - 2), attempt - 1),
            attempt,
        )
        store.sweep()
        commit(store, 10 * (attempt + 1), attempt)
        store.prune(9)
        store.storage.sweep()


def test_a_checkpoint_whose_folder_is_a_link_counts(root: Path, tmp_path: Path) -> None:
    store = fresh(root)
    commit(store, 20, 1)
    (root / "step-00000020-a0001").rename(tmp_path / "elsewhere")
    (root / "step-00000020-a0001").symlink_to(tmp_path / "elsewhere")
    assert fresh(root).names() == [CheckpointName(20, 1)]


def test_a_number_after_which_there_is_none_is_named(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "claim-a100000000000000-0a1b2c3d.json").touch()
    with pytest.raises(CheckpointError, match="100000000000000"):
        start(fresh(root))


def test_of_two_claims_of_one_number_the_one_that_saw_less_fences_nothing() -> None:
    """Its process died before it could withdraw it."""
    paths = ["claim-a0003-from-step-00000100-a0002-ffffffff.json"]
    paths += ["claim-a0003-from-step-00000150-a0002-00000000.json"]
    paths += [f"step-00000{step}-a0002/manifest.json" for step in (100, 150)]
    assert CheckpointListing.of(paths).names() == [CheckpointName(150, 2), CheckpointName(100, 2)]
    assert CheckpointListing.of([paths[0], *paths[2:]]).fenced() == [CheckpointName(150, 2)]


def test_attempts_count_up_whatever_is_swept(root: Path) -> None:
    for attempt in range(1, 15):
        assert start(fresh(root))[1] == attempt
    assert [claim.attempt for claim in claims_in(root)] == list(range(5, 15))  # the newest ten
    assert os.listdir(root) != []
    assert fresh(root).latest() is None


def test_fault_07_a_replaced_writer_commits_nothing(root: Path) -> None:
    zombie, store = fresh(root), fresh(root)
    start(zombie)
    commit(zombie, 10, 1)
    start(store)
    before = tree(root)
    with pytest.raises(RunLockedError, match=r"attempt 2 .* has taken .* over: attempt 1 commits"):
        commit(zombie, 20, 1)
    assert tree(root) == before
    commit(store, 15, 2)
    assert latest(root)[0] == store.open(CheckpointName(15, 2))


def test_fault_07_a_replaced_writer_notices_it_after_a_long_upload(root: Path) -> None:
    zombie = fresh(root)
    start(zombie)
    commit(zombie, 10, 1)

    class Slow(dict[str, bytes]):
        def items(self) -> Any:  # the successor comes while the files are written
            yield from super().items()
            start(fresh(root))

    with pytest.raises(RunLockedError, match="attempt 2"):
        zombie.commit(manifest(20), Slow(payload(20)))
    assert not (root / "step-00000020-a0001").exists()


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_late_commit_does_not_count(
    tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(zombie)
    for step in (10, 20):
        commit(zombie, step, 1)
    start(store)
    with monkeypatch.context() as patch:  # it had looked before
        unaware(patch)
        late = commit(zombie, 30, 1)
    late.verify()
    assert [name.step for name in both(tmp_path, is_local).names()] == [20, 10]
    assert content(both(tmp_path, is_local).latest()) == payload(20)
    store.prune(2)
    with pytest.raises(RunLockedError):
        zombie.prune(2)
    assert [name.step for name in store.names()] == [20, 10]  # it was not counted
    successor = both(tmp_path, is_local)
    found, attempt = start(successor)
    assert (content(found), attempt) == (payload(20), 3)
    assert (tmp_path / "step-00000030-a0001").exists()  # as long as it may be all that is left
    commit(successor, 25, 3)
    successor.prune(9)
    assert not (tmp_path / "step-00000030-a0001").exists()
    assert [name.step for name in successor.names()] == [25, 20, 10]


def test_fault_07_a_late_commit_counts_until_the_successor_has_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost by it: another start may as well go on from there."""
    zombie, store = fresh(root), fresh(root)
    start(zombie)
    start(store)
    with monkeypatch.context() as patch:
        unaware(patch)
        commit(zombie, 10, 1)
    assert fresh(root).names() == [CheckpointName(10, 1)]
    commit(store, 5, 2)
    assert fresh(root).names() == [CheckpointName(5, 2)]
    assert start(fresh(root)) == (store.open(CheckpointName(5, 2)), 3)


def test_a_claim_whose_base_was_pruned_meanwhile_is_withdrawn(root: Path) -> None:
    writer, store = fresh(root), fresh(root)
    start(writer)
    commit(writer, 10, 1)
    found = store.latest()
    for step in (20, 30):
        commit(writer, step, 1)
        writer.prune(2)
    assert found is not None
    with pytest.raises(ContendedError, match="is at work on this run"):
        store.claim(found.name, {})
    assert [claim.attempt for claim in claims_in(root)] == [1]
    commit(writer, 40, 1)
    assert content(latest(root)[0]) == payload(40)
    assert persistent_start(store) == (store.open(CheckpointName(40, 1)), 2)


def test_a_start_that_found_nothing_gives_way_to_what_was_committed_meanwhile(root: Path) -> None:
    """Else it would begin at step 0, and in the end remove what the other has done."""
    writer, store = fresh(root), fresh(root)
    start(writer)
    assert store.latest() is None
    commit(writer, 10, 1)
    with pytest.raises(ContendedError, match="is at work on this run"):
        store.claim(None, {})
    assert persistent_start(store) == (store.open(CheckpointName(10, 1)), 2)


def test_a_writer_whose_claim_is_gone_commits_nothing(root: Path) -> None:
    """As where all was replaced by an older backup, and somebody goes on from that."""
    writer = fresh(root)
    start(writer)
    commit(writer, 10, 1)
    backup = root.parent / "backup"
    shutil.copytree(root, backup)
    writer = fresh(root)
    start(writer)
    commit(writer, 20, 2)
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    with pytest.raises(RunLockedError, match="attempt 2 commits nothing"):
        commit(writer, 30, 2)
    assert [name.step for name in writer.names()] == [10]


def test_what_a_start_went_on_from_counts_though_a_later_claim_stands_above_it(root: Path) -> None:
    """10 of attempt 1; attempt 2 goes on from it; a zombie of attempt 1 commits 30 and removes 10;
    attempt 3 goes on from 30, and all that attempt 3 and 4 go back to is kept."""
    zombie, second = fresh(root), fresh(root)
    start(zombie)
    commit(zombie, 10, 1)
    start(second)
    with pytest.MonkeyPatch.context() as patch:
        unaware(patch)
        commit(zombie, 30, 1)
        zombie._delete(CheckpointName(10, 1))
    third = fresh(root)
    assert start(third) == (third.open(CheckpointName(30, 1)), 3)
    commit(third, 40, 3)
    fourth = fresh(root)
    start(fourth)
    commit(fourth, 50, 4)
    assert [name.step for name in fourth.names()] == [50, 40, 30]


def test_of_starts_at_the_same_instant_one_can_commit(root: Path) -> None:
    for round_ in range(10):
        begin = threading.Barrier(6)
        stores: list[tuple[CheckpointStore, int]] = []
        refused: list[RunLockedError] = []

        def run(begin: threading.Barrier, stores: Any, refused: Any) -> None:
            store = fresh(root)
            found = store.latest()
            begin.wait()
            try:
                stores.append((store, store.claim(found.name if found else None, {})))
            except ContendedError as error:
                refused.append(error)
                stores.append((store, persistent_start(store)[1]))

        threads = [threading.Thread(target=run, args=(begin, stores, refused)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        attempts = {attempt for _, attempt in stores}
        assert len(attempts) == 6  # no two have one number
        assert claims_in(root)[-1].attempt == max(attempts)
        committed = 0
        for store, attempt in stores:
            with suppress(RunLockedError):
                commit(store, round_, attempt)
                committed += 1
        assert committed == 1
        found = fresh(root).latest()
        assert found is not None
        assert found.name.step == round_


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_any_operation_of_a_claim_fails(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    def prepare(store: CheckpointStore) -> None:
        attempt = start(store)[1]
        for step in (10, 20):
            commit(store, step, attempt)

    def act(store: CheckpointStore) -> None:
        store.claim(CheckpointName(20, 1), {"world_size": 3})

    claimed = set()
    for root, returned, where in sweep_faults(tmp_path, prepare, act, mode, is_local):
        numbers = [claim.attempt for claim in claims_in(root)]
        assert numbers == [1, 2] if returned else numbers in ([1], [1, 2]), where
        claimed.add(len(numbers))
        found, told = latest(root)
        assert (content(found), told) == (payload(20), []), where
        again, attempt = start(fresh(root))
        assert (again, attempt) == (found, 1 + max(numbers)), where
        assert not any(".tmp-" in path for path in tree(root)), where
        with pytest.raises(RunLockedError):
            commit(fresh(root), 30, attempt - 1)
        assert content(commit(fresh(root), 30, attempt)) == payload(30, attempt)
    assert 1 in claimed


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("mode", Faults.MODES)
def test_fault_02_08_any_operation_of_a_start_fails(
    tmp_path: Path, mode: str, is_local: bool
) -> None:
    """With all there is to do: a late commit, a leftover, a temporary file, old claims."""

    def prepare(store: CheckpointStore) -> None:
        for _ in range(11):
            attempt = start(store)[1]
        commit(store, 10, attempt)
        zombie = fresh(Path(store.storage.path))
        start(zombie)
        commit(zombie, 20, attempt + 1)
        start(store)
        with pytest.MonkeyPatch.context() as patch:
            unaware(patch)
            commit(zombie, 30, attempt + 1)
        root = Path(store.storage.path)
        (root / "step-00000025-a0013").mkdir()
        (root / "step-00000025-a0013" / "x").write_bytes(b"x")
        (root / ".tmp-1").write_bytes(b"x")

    for root, _, where in sweep_faults(tmp_path, prepare, start, mode, is_local):
        told: list[str] = []
        store = fresh(root)
        found, attempt = start(store, told)
        assert (content(found), told) == (payload(20, 12), []), where
        assert attempt in (14, 15), where
        assert not any(".tmp-" in path or "step-00000025" in path for path in tree(root)), where
        commit(store, 21, attempt)
        store.prune(2)
        folders = [path.name for path in root.iterdir() if path.is_dir()]
        kept = ["step-00000020-a0012", f"step-00000021-a{attempt:04d}"]
        assert sorted(folders) == kept, where  # the late one is gone, too
        assert [claim.attempt for claim in claims_in(root)][-1] == attempt, where


def interleaved(
    tmp_path: Path,
    is_local: bool,
    prepare: Callable[[CheckpointStore], Any],
    act: Callable[[CheckpointStore], Any],
    other: Callable[[Path], Any],
) -> Iterator[tuple[Path, Any, Any, str]]:
    """Run ``act`` once for each of its operations, before which another process does ``other``.
    Yields the folder, what ``act`` and ``other`` gave or raised, and which operation it was."""

    def outcome(do: Callable[[], Any]) -> Any:
        try:
            return do()
        except (OSError, RunLockedError) as error:
            return error

    with pytest.MonkeyPatch.context() as patch:
        counter = Faults()
        store = faulty_store(tmp_path / "count", counter, is_local, patch)
        prepare(store)
        before = len(counter.done)
        act(store)
    for n in range(before, len(counter.done)):
        root = tmp_path / str(n)
        others: list[Any] = []
        faults = Faults("meanwhile", n, lambda: others.append(outcome(lambda: other(root))))  # noqa: B023
        with pytest.MonkeyPatch.context() as patch:
            store = faulty_store(root, faults, is_local, patch)
            prepare(store)
            result = outcome(lambda: act(store))  # noqa: B023
        assert len(others) == 1
        yield root, result, others[0], f"before operation {n}, {counter.done[n]}"


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_successor_starts_before_any_operation_of_a_commit(
    tmp_path: Path, is_local: bool
) -> None:
    zombies: dict[Path, CheckpointStore] = {}

    def prepare(store: CheckpointStore) -> None:
        zombies[Path(store.storage.path)] = store
        start(store)
        for step in (10, 20):
            commit(store, step, 1)

    def act(store: CheckpointStore) -> None:
        commit(store, 30, 1)
        store.prune(2)

    def other(root: Path) -> Checkpoint:
        store = both(root, is_local)
        found, attempt = start(store)
        assert found is not None
        made = commit(store, found.name.step + 5, attempt)
        store.prune(9)
        return made

    bases = set()
    for root, result, made, where in interleaved(tmp_path, is_local, prepare, act, other):
        bases.add(made.name.step - 5)
        assert made.name.step > 30 or isinstance(result, (OSError, RunLockedError, type(None)))
        zombie = zombies[root]
        with pytest.raises(RunLockedError):
            commit(zombie, 40, 1)
        with pytest.raises(RunLockedError):
            zombie.prune(2)
        told: list[str] = []
        found = both(root, is_local).latest(told.append)
        assert found is not None, where
        assert (found.name, told) == (made.name, []), where
        assert content(found) == payload(found.name.step, 2), where
        successor = both(root, is_local)
        assert start(successor)[0] == found, where
        commit(successor, found.name.step + 1, 3)
        successor.prune(9)
        left = {path.name for path in root.iterdir() if path.is_dir()}
        assert left == {str(name) for name in both(root, is_local).names()}, where
    assert bases == {20, 30}


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_zombie_commits_before_any_operation_of_a_start(
    tmp_path: Path, is_local: bool
) -> None:
    zombies: dict[Path, CheckpointStore] = {}

    def prepare(store: CheckpointStore) -> None:
        root = Path(store.storage.path)
        zombies[root] = zombie = both(root, is_local)
        start(zombie)
        for step in (10, 20):
            commit(zombie, step, 1)

    def other(root: Path) -> None:
        zombie = zombies[root]
        for step in (30, 40):
            commit(zombie, step, 1)
            zombie.prune(2)

    results = set()
    for root, result, _, where in interleaved(tmp_path, is_local, prepare, start, other):
        if isinstance(result, RunLockedError):
            results.add("refused")
            found, attempt = start(both(root, is_local))
        else:
            assert not isinstance(result, Exception), where
            found, attempt = result
        assert found is not None
        results.add(found.name.step)
        assert both(root, is_local).latest() == both(root, is_local).open(found.name), where
        assert content(found) == payload(found.name.step), where
        made = commit(both(root, is_local), found.name.step + 5, attempt)
        assert content(both(root, is_local).latest()) == content(made), where
    assert results == {20, 40, "refused"}


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_31_a_whole_start_before_any_operation_of_a_start_is_never_lost(
    tmp_path: Path, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(2**32 - 1, 0, -1))  # the slower one has the higher token
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(f"{next(numbers):08x}" + "0" * 24))

    def prepare(store: CheckpointStore) -> None:
        commit(store, 10, 1)

    def other(root: Path) -> Checkpoint:
        store = both(root, is_local)
        found, attempt = start(store)
        assert found is not None
        return commit(store, 20, attempt)

    outcomes = set()
    for root, result, made, where in interleaved(tmp_path, is_local, prepare, start, other):
        outcomes.add(type(result))
        found = both(root, is_local).latest()
        assert found is not None
        if isinstance(made, RunLockedError):
            assert found.name.step == 10
        else:
            assert found == both(root, is_local).open(made.name), where
            if isinstance(result, tuple):
                assert result[1] != made.name.attempt, where
    assert outcomes == {tuple, ContendedError}


@pytest.mark.parametrize("site", ["begin", "payload", "manifest", "committed"])
def test_failpoints_of_a_commit_are_where_they_say(
    root: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointStore, "_delete", lambda *_: None)  # as a kill would leave it
    store = fresh(root)
    arm(f"checkpoint.{site}:eio@step=7", str(tmp_path / "fired"))
    try:
        commit(store, 6)
        with pytest.raises(OSError, match=f"failpoint checkpoint.{site}"):
            commit(store, 7)
    finally:
        arm("", "")
    left = {path.name for path in (root / "step-00000007-a0001").iterdir()}
    expected = {
        "begin": set(),
        "payload": {"model.safetensors"},
        "manifest": {"model.safetensors", "state.json"},
        "committed": {"model.safetensors", "state.json", "manifest.json"},
    }
    assert left == expected[site]
    assert [name.step for name in store.names()] == ([7, 6] if site == "committed" else [6])


@pytest.mark.parametrize(("site", "left"), [("manifest", 4), ("done", 2)])
def test_failpoints_of_pruning_are_where_they_say(
    root: Path, tmp_path: Path, site: str, left: int
) -> None:
    store = fresh(root)
    for step in (10, 20, 30, 40):
        commit(store, step)
    arm(f"prune.{site}:eio", str(tmp_path / "fired"))
    try:
        with pytest.raises(OSError, match=f"failpoint prune.{site}"):
            store.prune(2)
    finally:
        arm("", "")
    assert len(os.listdir(root)) == left
    assert len(store.names()) == min(left, 3)


def test_fault_12_a_base_that_is_gone_is_an_error(root: Path) -> None:
    """The claim of an earlier start tells that there was a checkpoint: never step 0 again."""
    start(fresh(root))
    commit(fresh(root), 10, 1)
    start(fresh(root))
    shutil.rmtree(root / "step-00000010-a0001")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"attempt 2 went on from step-00000010-a0001, w"):
            start(fresh(root))


def test_fault_31_who_meets_another_at_the_same_instant_may_try_again(root: Path) -> None:
    """In whatever process it is told, and by whoever tries again after an OSError."""
    store = fresh(root)
    assert store.latest() is None
    start(fresh(root))
    with pytest.raises(ContendedError, match="is at work on this run, too") as caught:
        store.claim(None, {})
    told = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(told, OSError)
    assert isinstance(told, RunLockedError)
    assert (told.exit_status, str(told)) == (8, str(caught.value))
    assert [claim.attempt for claim in claims_in(root)] == [1]
    assert start(store) == (None, 2)


def test_fault_07_a_replaced_writer_prunes_nothing_more(root: Path) -> None:
    zombie = fresh(root)
    start(zombie)
    for step in (10, 20, 30, 40, 50):
        commit(zombie, step, 1)
    delete_file, deleted = Storage.delete_file, []

    def replaced_at_the_second(storage: Storage, name: str) -> None:
        delete_file(storage, name)
        if name == "manifest.json":
            deleted.append(name)
            if len(deleted) == 2:
                start(fresh(root))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "delete_file", replaced_at_the_second)
        with pytest.raises(RunLockedError, match=r"attempt 2 .* has taken this run over"):
            zombie.prune(2)
    assert [name.step for name in fresh(root).names()] == [50, 40, 30]


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_a_start_whose_base_is_gone_gives_the_run_back(tmp_path: Path, is_local: bool) -> None:
    """A replaced writer had looked before there was a claim, and prunes after that."""
    writer, store = both(tmp_path, is_local), both(tmp_path, is_local)
    start(writer)
    commit(writer, 10, 1)
    found = store.latest()
    assert found is not None
    for step in (20, 30):
        commit(writer, step, 1)
    store._look()  # as if these were damaged, and could not be set aside
    assert store.claim(found.name, {}) == 2
    assert both(tmp_path, is_local).names() == [found.name]
    with pytest.MonkeyPatch.context() as patch:
        unaware(patch)
        writer._delete(found.name)
    assert [name.step for name in both(tmp_path, is_local).names()] == [30, 20]
    with pytest.raises(ContendedError, match="just removed step-00000010-a0001"):
        store.sweep()
    assert [claim.attempt for claim in claims_in(tmp_path)] == [1]
    commit(writer, 40, 1)
    assert start(store)[0] == store.open(CheckpointName(40, 1))


def test_fault_12_a_backup_counts_whatever_was_claimed_since(root: Path) -> None:
    """Older than all that the claims tell of, or newer: nobody need know of fences to restore."""
    for attempt, step in [(1, 100), (2, 200), (3, 300)]:
        store = fresh(root)
        start(store)
        commit(store, step, attempt)
    shutil.copytree(root, root.parent / "backup")
    for step in (100, 200, 300):
        for name in list(fresh(root).names()):
            shutil.rmtree(root / str(name))
        with pytest.raises(CheckpointError, match=r"which is gone\. Restore one from a backup"):
            fresh(root).latest()
        name = CheckpointName(step, step // 100)
        shutil.copytree(root.parent / "backup" / str(name), root / str(name))
        found, told = latest(root)
        assert (found, told) == (fresh(root).open(name), [])
    (root / str(name)).rename(root / "step-00000300-a0001")  # fenced off by attempts 2 and 3 ...
    assert fresh(root).names() == [CheckpointName(300, 1)]  # ... but they have nothing
    shutil.copytree(root.parent / "backup" / "step-00000200-a0002", root / "step-00000200-a0002")
    assert fresh(root).names() == [CheckpointName(200, 2)]


# ----------------------------------------------- two processes that take turns at any operation


class Turns(Faults):
    """A process of which each operation waits until it is its turn."""

    def __init__(self, act: Callable[[Faults], Any]) -> None:
        super().__init__()
        self.turn, self.waits = threading.Semaphore(0), threading.Semaphore(0)
        self.result: Any = None
        self.ended = False
        self.act = act
        threading.Thread(target=self.run, daemon=True).start()
        self.waits.acquire()

    def run(self) -> None:
        try:
            self.result = self.act(self)
        except Exception as error:
            self.result = error
        self.ended = True
        self.waits.release()

    def __call__(self, what: str, act: Callable[[], Any], _: Any = None) -> Any:
        self.done.append(what)
        self.waits.release()
        self.turn.acquire()
        return act()

    def go_on(self, operations: int = 2**30) -> None:
        while operations and not self.ended:
            self.turn.release()
            self.waits.acquire()
            operations -= 1


def in_turns(root: Path, is_local: bool, act: Callable[[CheckpointStore], Any]) -> Turns:
    def run(faults: Faults) -> Any:
        fs = pafs.PyFileSystem(FaultyHandler(faults, is_local))
        return act(CheckpointStore(Storage(fs, str(root), is_local)))

    return Turns(run)


def operations_of(tmp_path: Path, prepare: Any, act: Any, is_local: bool) -> int:
    prepare(tmp_path / "count")
    process = in_turns(tmp_path / "count", is_local, act)
    process.go_on()
    assert not isinstance(process.result, Exception), process.result
    return len(process.done)


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_07_a_prune_and_a_start_in_any_order_leave_a_whole_checkpoint(
    tmp_path: Path, is_local: bool
) -> None:
    """The start had taken the oldest for the newest, and the prune is about to remove it."""
    stores: dict[Path, tuple[CheckpointStore, Any]] = {}

    def prepare(root: Path) -> None:
        writer, starter = both(root, is_local), both(root, is_local)
        start(writer)
        commit(writer, 10, 1)
        starter.latest()
        for step in (20, 30):
            commit(writer, step, 1)
        starter._look()  # as if these were damaged, and could not be set aside
        stores[root] = writer, starter._seen

    def prune(store: CheckpointStore) -> None:
        store._claim = stores[Path(store.storage.path)][0]._claim
        store.prune(2)

    def go_on(store: CheckpointStore) -> None:
        store._seen = stores[Path(store.storage.path)][1]
        store.claim(CheckpointName(10, 1), {})
        store.sweep()

    outcomes = set()
    first = operations_of(tmp_path / "prune", prepare, prune, is_local)
    second = operations_of(tmp_path / "start", prepare, go_on, is_local)
    for i in range(first + 1):
        for j in range(1, second + 1):
            root, where = tmp_path / f"{i}-{j}", f"{i} of {first}, then {j} of {second}"
            prepare(root)
            old, new = in_turns(root, is_local, prune), in_turns(root, is_local, go_on)
            for process, operations in ((old, i), (new, j), (old, 2**30), (new, 2**30)):
                process.go_on(operations)
                assert both(root, is_local).names(), where
            results = (type(old.result), type(new.result))
            assert results[0] in (type(None), RunLockedError), (where, old.result)
            assert results[1] in (type(None), ContendedError), (where, new.result)
            outcomes.add(results)
            told: list[str] = []
            successor = both(root, is_local)
            found, attempt = start(successor, told)
            assert found is not None, where
            assert content(found) == payload(found.name.step), where
            assert told == [], where
            commit(successor, 40, attempt)
            successor.prune(2)
            assert successor.names()[0] == CheckpointName(40, attempt), where
    # Where neither is told, the start owns the run, but what it goes on from is gone.
    none = type(None)
    assert outcomes == {(RunLockedError, none), (none, ContendedError), (none, none)}


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
def test_fault_31_two_starts_in_any_order_never_own_one_number(
    tmp_path: Path, is_local: bool
) -> None:
    def prepare(root: Path) -> None:
        start(both(root, is_local))

    outcomes = set()
    count = operations_of(tmp_path, prepare, start, is_local)
    for i in range(count + 1):
        for j in range(1, count + 1):
            root, where = tmp_path / f"{i}-{j}", f"{i}, then {j} of {count}"
            prepare(root)
            one, two = in_turns(root, is_local, start), in_turns(root, is_local, start)
            for process, operations in ((one, i), (two, j), (one, 2**30), (two, 2**30)):
                process.go_on(operations)
            results = [one.result, two.result]
            numbers = [result[1] for result in results if isinstance(result, tuple)]
            assert len(set(numbers)) == len(numbers), where
            contended = [error for error in results if isinstance(error, ContendedError)]
            assert len(contended) + len(numbers) == 2, (where, results)
            outcomes.add(len(numbers))
            assert [claim.attempt for claim in claims_in(root)] == [1, *sorted(numbers)], where
            assert start(both(root, is_local))[1] == 1 + max(numbers, default=1), where
    assert outcomes == {1, 2}


@settings(
    max_examples=int(os.environ.get("STORE_TURNS_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    is_local=st.booleans(),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25)), min_size=5, max_size=40),
)
def test_invariants_08_09_writers_that_take_turns_always_leave_a_whole_checkpoint(
    is_local: bool, turns: list[tuple[int, int]]
) -> None:
    def live(store: CheckpointStore) -> None:
        for _ in range(5):
            with suppress(ContendedError):
                found, attempt = start(store)
                break
        else:
            return
        with suppress(RunLockedError, FileNotFoundError):
            for further in (1, 2, 3):
                commit(store, (found.name.step if found else 0) + further, attempt)
                store.prune(2)

    with tempfile.TemporaryDirectory(prefix="raytrain-turns-") as folder:
        root = Path(folder)
        first = both(root, is_local)
        commit(first, 1, start(first)[1])
        processes = [in_turns(root, is_local, live) for _ in range(3)]
        for number, operations in [*turns, *((number, 2**30) for number in range(3))]:
            processes[number].go_on(operations)
            assert both(root, is_local).names()
        for process in processes:
            assert process.result is None, process.result
        found, attempt = start(both(root, is_local))
        assert found is not None
        assert content(found) == payload(found.name.step, found.name.attempt)
        assert attempt > max(claim.attempt for claim in claims_in(root)[:-1])


# ------------------------------------------- invariants 8, 9: the store as a state machine


class Writer:
    """A process that started the run; all but the newest are zombies."""

    def __init__(self, store: CheckpointStore, attempt: int, step: int) -> None:
        self.store, self.attempt, self.step = store, attempt, step


class StoreMachine(RuleBasedStateMachine):
    """Starts, commits, kills, prunings, damage and zombies in any order.

    A start finds the newest good commit that is not fenced off, and never an older one than the
    start before, but for damage; and some good one, as long as there is any.
    """

    @initialize(is_local=st.booleans())
    def begin(self, is_local: bool) -> None:
        self.folder = tempfile.mkdtemp(prefix="raytrain-store-")
        self.root = Path(self.folder) / "run"
        self.is_local = is_local
        self.good: set[CheckpointName] = set()
        self.bad: set[CheckpointName] = set()  # damaged, and perhaps not noticed yet
        self.writers: list[Writer] = []
        self.attempts: list[int] = []
        self.resumed: CheckpointName | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self) -> CheckpointStore:
        return both(self.root, self.is_local)

    def under_fault(self, act: Callable[[CheckpointStore], Any], mode: str, at: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            try:
                act(faulty_store(self.root, Faults(mode, at), self.is_local, patch))
            except (OSError, Killed):
                return False
        return True

    # ------------------------------------------------------------------- the model

    def noticed(self) -> set[CheckpointName]:
        """The damaged ones that are kept aside, as the folder shows."""
        plain = {str(name): name for name in self.bad}
        kept = set()
        for path in self.root.iterdir() if self.root.exists() else []:
            name = path.name.removeprefix("damaged-")[: len("step-00000000-a0000")]
            if path.name.startswith("damaged-") or (path / "damaged.txt").exists():
                kept.add(plain[name])
        return kept

    def counted(self, aside: Set[CheckpointName] = frozenset()) -> set[CheckpointName]:
        there = self.good | (self.bad - self.noticed() - aside)
        standing = [
            claim
            for claim in claims_in(self.root)
            if claim.base in there or any(name.attempt >= claim.attempt for name in there)
        ]
        fenced = {
            name
            for claim in standing
            for name in there
            if claim.attempt > name.attempt and (claim.base is None or claim.base < name)
        }
        numbered = {claim.attempt: claim for claim in standing}
        line, last = set(), standing[-1:]
        while last and last[0].base:  # the newest start's, that of the start it goes back to, ...
            line.add(last[0].base)
            last = [numbered[last[0].base.attempt]] if last[0].base.attempt in numbered else []
        return there - (fenced - line)

    def newest(self) -> CheckpointName | None:
        return max(self.good & self.counted(), default=None)

    def live(self) -> Writer | None:
        claims = claims_in(self.root)
        newest = self.writers[-1] if self.writers else None
        return newest if newest and newest.attempt == claims[-1].attempt else None

    def dropped(self, names: set[CheckpointName]) -> None:
        self.good -= names
        self.bad -= names - self.noticed()

    # ------------------------------------------------------------------ looking and starting

    def look(self, store: CheckpointStore) -> tuple[Checkpoint | None, bool]:
        """latest() as the model says; False: it is an error, as all are damaged."""
        told: list[str] = []
        noticed, passed = self.noticed(), set[CheckpointName]()
        while (newest := max(self.counted(passed), default=None)) in self.bad:
            passed.add(newest)
        based = any(claim.base for claim in claims_in(self.root))
        if newest is None and (passed or noticed or based):
            with pytest.raises(CheckpointError, match="No usable checkpoint"):
                store.latest(told.append)
            found = None
        else:
            found = store.latest(told.append)
            assert (found.name if found else None) == newest
            if found is not None:
                assert content(found) == payload(found.name.step, found.name.attempt)
        assert len(told) == len(passed)
        assert self.noticed() == noticed | passed
        return found, found is not None or not (passed or noticed or based)

    @rule()
    def a_reader_looks(self) -> None:
        self.look(self.store())

    @rule()
    def start(self) -> None:
        store = self.store()
        found, usable = self.look(store)
        if not usable:
            return
        if self.resumed is not None:
            assert found is not None
            assert found.name >= self.resumed
        self.resumed = found.name if found else None
        attempt = store.claim(self.resumed, {})
        assert attempt > max(self.attempts, default=0)
        assert attempt > max((n.attempt for n in self.good | self.bad), default=0)
        self.attempts.append(attempt)
        self.writers.append(Writer(store, attempt, found.name.step if found else 0))
        store.sweep()
        known = {str(name) for name in self.good | self.bad}
        for path in self.root.iterdir():
            assert path.name in known or path.name.startswith(("damaged-", "claim-"))

    @rule(mode=st.sampled_from(["eio", "enospc", "late", "kill"]), at=st.integers(0, 40))
    def start_under_fault(self, mode: str, at: int) -> None:
        with suppress(CheckpointError):
            self.under_fault(start, mode, at)
        claims = claims_in(self.root)
        self.attempts += [claims[-1].attempt] if claims else []

    @rule(mode=st.sampled_from(["late", "kill"]), data=st.data())
    def claim_and_die(self, mode: str, data: st.DataObject) -> None:
        """Often enough: a start that dies about when it writes its claim."""
        newest = self.newest()
        if newest is not None or not claims_in(self.root):
            at = data.draw(st.integers(1, 12))
            self.under_fault(lambda store: store.claim(newest, {}), mode, at)
            claims = claims_in(self.root)
            self.attempts += [claims[-1].attempt] if claims else []

    # ----------------------------------------------------------------------- writing

    @rule(steps=st.integers(1, 3))
    def commit(self, steps: int) -> None:
        if writer := self.live():
            writer.step += steps
            self.good.add(commit(writer.store, writer.step, writer.attempt).name)

    @rule(mode=st.sampled_from(["eio", "enospc", "late", "kill"]), at=st.integers(0, 25))
    def commit_under_fault(self, mode: str, at: int) -> None:
        writer = self.live()
        if writer is None:
            return
        writer.step += 1
        name = CheckpointName(writer.step, writer.attempt)
        returned = self.under_fault(lambda s: commit(s, name.step, name.attempt), mode, at)
        there = {path: data for path, data in tree(self.root).items() if str(name) in path}
        is_whole = f"{name}/manifest.json" in there
        assert is_whole or not returned
        if is_whole:
            files = payload(name.step, name.attempt)
            assert all(there.get(f"{name}/{file}") == data for file, data in files.items())
            self.good.add(name)

    @rule(data=st.data())
    def a_zombie_commits(self, data: st.DataObject) -> None:
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            writer = data.draw(st.sampled_from(zombies))
            before = tree(self.root)
            with pytest.raises(RunLockedError):
                commit(writer.store, writer.step + 1, writer.attempt)
            assert tree(self.root) == before

    @rule(data=st.data())
    def a_zombie_commits_late(self, data: st.DataObject) -> None:
        """It looked for a newer claim before there was one."""
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            writer = data.draw(st.sampled_from(zombies))
            writer.step += 1
            with pytest.MonkeyPatch.context() as patch:
                unaware(patch)
                self.good.add(commit(writer.store, writer.step, writer.attempt).name)

    @rule(keep_last=st.integers(0, 4), data=st.data())
    def prune(self, keep_last: int, data: st.DataObject) -> None:
        if writer := self.live():
            listed = sorted(self.counted(), reverse=True)
            best = data.draw(st.sampled_from([None, *listed]))
            writer.store.prune(keep_last, best)
            kept = {*listed[: max(2, keep_last)], *({best} - {None})}
            if listed and listed[0].attempt < writer.attempt:  # it has not committed itself yet
                kept |= (self.good | self.bad) - set(listed)
            self.dropped((self.good | self.bad) - kept)

    @rule(mode=st.sampled_from(Faults.MODES), at=st.integers(0, 25))
    def prune_under_fault(self, mode: str, at: int) -> None:
        def prune(store: CheckpointStore) -> None:
            store._claim = writer.store._claim
            store.prune(2)

        if writer := self.live():
            listed = sorted(self.counted(), reverse=True)
            self.under_fault(prune, mode, at)
            left = set(self.store().names())
            assert set(listed[:2]) <= left <= set(listed)
            there = {n for n in self.good | self.bad if (self.root / str(n) / FILES[2]).exists()}
            self.dropped((self.good | self.bad) - there)

    @rule(data=st.data())
    def a_zombie_prunes(self, data: st.DataObject) -> None:
        zombies = [writer for writer in self.writers if writer is not self.live()]
        if zombies:
            before = tree(self.root)
            with pytest.raises(RunLockedError):
                data.draw(st.sampled_from(zombies)).store.prune(2)
            assert tree(self.root) == before

    # ------------------------------------------------------------------------ damage

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        if self.good:
            name = data.draw(st.sampled_from(sorted(self.good)))
            victim = self.root / str(name) / data.draw(st.sampled_from(FILES))
            flip_bit(victim, data.draw(st.integers(0, 8 * victim.stat().st_size - 1)))
            self.good.remove(name)
            self.bad.add(name)
            self.resumed = None  # the one thing that sets a run back

    @rule(data=st.data(), left=st.binary(max_size=5))
    def damage_a_claim(self, data: st.DataObject, left: bytes) -> None:
        if claims := claims_in(self.root):
            (self.root / str(data.draw(st.sampled_from(claims)))).write_bytes(left)

    @invariant()
    def what_counts_is_listed(self) -> None:
        if hasattr(self, "root"):
            assert set(self.store().names()) == self.counted()
            assert self.counted() or not self.good


@settings(
    max_examples=int(os.environ.get("STORE_MACHINE_EXAMPLES", "60")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
class _Machine(StoreMachine):
    pass


test_invariants_08_09_store_as_state_machine = _Machine.TestCase
