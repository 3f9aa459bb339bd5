"""The commit protocol on a file system that fails, and damage to what it wrote."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
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
from raytrain_ddp.checkpoint.manifest import DamagedError, FileEntry, Manifest
from raytrain_ddp.checkpoint.storage import (
    Storage,
    is_plain_name,
    open_storage,
)
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointName, CheckpointStore
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError
from raytrain_ddp.uri import without_secrets

# ------------------------------------------------------------------ a file system that fails


class Killed(BaseException):
    """Stands for SIGKILL: from then on the file system refuses everything."""


class Faults:
    """Lets operation number ``at`` (from 0) go wrong in one way; without ``at`` it only counts.

    eio, enospc: raises before the operation. late: raises EIO after it, as a lost reply would.
    torn: writes half, then EIO. kill: never returns. torn_kill: writes half and never returns.
    """

    MODES = ("eio", "enospc", "late", "torn", "kill", "torn_kill")

    def __init__(self, mode: str = "eio", at: int | None = None) -> None:
        self.mode, self.at = mode, at
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


class FaultyHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    def __init__(self, faults: Faults, fs: Any = None) -> None:
        self.faults, self.fs = faults, fs or pafs.LocalFileSystem()

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
        raw = self.faults("open_output", lambda: self.fs.open_output_stream(path, compression=None))
        return pa.PythonFile(FaultyStream(self.faults, raw), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


def faulty_store(
    root: Path, faults: Faults, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    monkeypatch.setattr(os, "fsync", lambda fd: faults("fsync", lambda: None))
    fs = pafs.PyFileSystem(FaultyHandler(faults))
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
    assert len(counter.done) >= 5
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
    assert "open_output" in count.done  # the mark, which the next lines make impossible
    (root / "step-00000020-a0001" / "damaged.txt").unlink()
    for n, what in enumerate(count.done):
        if what == "open_output":
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


# ------------------------------------------- invariants 8, 9: the store as a state machine


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of commits, kills, prunings and damage: latest() is the newest good commit."""

    @initialize(is_local=st.booleans())
    def start(self, is_local: bool) -> None:
        self.folder = tempfile.mkdtemp(prefix="raytrain-store-")
        self.root = Path(self.folder) / "run"
        self.is_local = is_local
        self.good: set[CheckpointName] = set()
        self.bad: set[CheckpointName] = set()  # damaged, and perhaps not noticed yet
        self.noticed: set[CheckpointName] = set()
        self.step = 0
        self.attempt = 1

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self) -> CheckpointStore:
        return CheckpointStore(replace(open_storage(str(self.root)), is_local=self.is_local))

    def under_fault(self, act: Callable[[CheckpointStore], Any], mode: str, at: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            try:
                act(faulty_store(self.root, Faults(mode, at), self.is_local, patch))
            except (OSError, Killed):
                return False
        return True

    @rule(steps=st.integers(1, 3))
    def commit(self, steps: int) -> None:
        self.step += steps
        self.good.add(commit(self.store(), self.step, self.attempt).name)

    # A torn manifest under its final name cannot be: no torn modes here.
    @rule(mode=st.sampled_from(["eio", "enospc", "late", "kill"]), at=st.integers(0, 25))
    def commit_under_fault(self, mode: str, at: int) -> None:
        self.step += 1
        name = CheckpointName(self.step, self.attempt)
        returned = self.under_fault(lambda s: commit(s, *(name.step, name.attempt)), mode, at)
        there = {path: data for path, data in tree(self.root).items() if str(name) in path}
        is_whole = f"{name}/manifest.json" in there
        assert is_whole or not returned
        if is_whole:
            files = payload(name.step, name.attempt)
            if all(there.get(f"{name}/{file}") == data for file, data in files.items()):
                self.good.add(name)
            else:
                assert mode == "late"  # a deletion that was answered too late
                self.bad.add(name)

    @rule(keep_last=st.integers(0, 4), data=st.data())
    def prune(self, keep_last: int, data: st.DataObject) -> None:
        listed = sorted(self.good | self.bad - self.noticed, reverse=True)
        best = data.draw(st.sampled_from([None, *listed]))
        self.store().prune(keep_last, best)
        for name in listed[max(2, keep_last) :]:
            if name != best:
                self.good.discard(name)
                self.bad.discard(name)

    @rule(mode=st.sampled_from(Faults.MODES), at=st.integers(0, 25))
    def prune_under_fault(self, mode: str, at: int) -> None:
        listed = sorted(self.good | self.bad - self.noticed, reverse=True)
        self.under_fault(lambda s: s.prune(2), mode, at)
        left = set(self.store().names())
        assert set(listed[:2]) <= left <= set(listed)
        self.good &= left
        self.bad &= left | self.noticed

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        if self.good:
            name = data.draw(st.sampled_from(sorted(self.good)))
            victim = self.root / str(name) / data.draw(st.sampled_from(FILES))
            flip_bit(victim, data.draw(st.integers(0, 8 * victim.stat().st_size - 1)))
            self.good.remove(name)
            self.bad.add(name)

    @rule()
    def restart(self) -> None:
        store = self.store()
        attempt = store.next_attempt()
        listed = self.good | self.bad
        assert attempt > max((name.attempt for name in listed), default=0)
        self.attempt = max(self.attempt + 1, attempt)
        store.sweep()
        known = {str(name) for name in listed}
        for path in self.root.iterdir() if self.root.exists() else []:
            assert path.name in known or path.name.startswith("damaged-")

    @rule()
    def resume(self) -> None:
        told: list[str] = []
        newest = max(self.good, default=None)
        passed = {n for n in self.bad - self.noticed if newest is None or n > newest}
        if newest is None and self.bad:
            with pytest.raises(CheckpointError, match="all are damaged"):
                self.store().latest(told.append)
        else:
            found = self.store().latest(told.append)
            assert (found.name if found else None) == newest
            if found:
                assert content(found) == payload(found.name.step, found.name.attempt)
                self.step = found.name.step
                self.attempt = max(self.attempt, self.store().next_attempt())
        assert len(told) == len(passed)
        self.noticed |= passed

    @invariant()
    def names_are_known(self) -> None:
        if hasattr(self, "root"):
            assert set(self.store().names()) == (self.good | self.bad) - self.noticed


@settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
class _Machine(StoreMachine):
    pass


test_invariants_08_09_store_as_state_machine = _Machine.TestCase
