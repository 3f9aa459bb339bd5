"""A storage whose operations fail, and checkpoints to commit to it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.listing import CheckpointListing, Claim
from raytrain_ddp.checkpoint.manifest import DamagedError, Manifest
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.checkpoint.store import Checkpoint, CheckpointStore
from raytrain_ddp.errors import RunLockedError

BOTH = pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])


class Killed(BaseException):
    """Stands in for SIGKILL: from then on, the file system refuses every operation."""


class Faults:
    """Makes operation number ``at`` (from 0) fail in one way; without ``at``, it only counts.

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
        self, what: str, act: Callable[[], Any], act_half: Callable[[], Any] = lambda: None
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
            self.raw.close()  # writes nothing, as it has no buffer
            if not self.faults.dead:
                self.faults("close", lambda: None)

    def flush(self) -> None: ...


class FaultyPut:
    """The stream of an object store: closing it creates one object, without a folder. Only the torn
    modes leave half of the content, which object stores never do."""

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


def sealed(content: Mapping[str, Any]) -> bytes:
    """The content of a manifest, valid or not, with the checksum that to_json would add."""
    head = json.dumps(content, indent=1).removesuffix("\n}") + ",\n "
    seal = hashlib.sha256(head.encode()).hexdigest()
    return f'{head}"sha256": "{seal}"\n}}\n'.encode()


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
    reported: list[str] = []
    return fresh(root).latest(reported.append), reported


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def sweep_faults(
    tmp_path: Path,
    prepare: Callable[[CheckpointStore], Any],
    act: Callable[[CheckpointStore], Any],
    mode: str,
    is_local: bool,
) -> Iterator[tuple[Path, bool, str]]:
    """Run ``act`` once for each of its operations, and let that operation fail.

    A run without a fault counts the operations. Yields the folder, whether ``act`` returned, and
    the operation.
    """
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


FILES = ["model.safetensors", "state.json", "manifest.json"]


def claims_in(root: Path) -> list[Claim]:
    found = filter(None, map(Claim.parse, os.listdir(root))) if root.exists() else []
    return sorted(found, key=lambda claim: claim.rank)


def start(
    store: CheckpointStore, reported: list[str] | None = None
) -> tuple[Checkpoint | None, int]:
    """Starts or resumes a run like rank 0; returns the checkpoint and the attempt."""
    found = store.latest((reported if reported is not None else []).append)
    attempt = store.claim(found.name if found else None, {"world_size": 3})
    store.sweep()
    return found, attempt


def both(tmp_path: Path, is_local: bool) -> CheckpointStore:
    return CheckpointStore(replace(open_storage(str(tmp_path)), is_local=is_local))


@dataclass(frozen=True)
class Unaware(Storage):
    """As a process sees it that listed the claims before those of its successors were there."""

    attempt: int = 0

    def walk(self) -> list[str]:
        claims = {path: Claim.parse(path) for path in super().walk()}
        return [
            path for path, claim in claims.items() if not claim or claim.attempt <= self.attempt
        ]


class Unmarkable(Storage):
    """Damaged checkpoints cannot be set aside."""

    def rename(self, old: str, new: str) -> None:
        raise OSError(errno.EROFS, old)

    def write_atomic(self, name: str, data: Any) -> None:
        raise OSError(errno.EROFS, name)


@contextmanager
def moved(store: CheckpointStore, storage: Storage) -> Iterator[CheckpointStore]:
    """The same writer, which reaches its checkpoints through `storage` meanwhile."""
    before, store.storage = store.storage, storage
    try:
        yield store
    finally:
        store.storage = before


def unaware(store: CheckpointStore, attempt: int) -> AbstractContextManager[CheckpointStore]:
    """As if the writer had checked for a successor just before there was one."""
    storage = store.storage
    return moved(store, Unaware(storage.fs, storage.path, storage.is_local, attempt=attempt))


def look_no_later_than(store: CheckpointStore, step: int) -> None:
    """`latest` as if the checkpoints after `step` were damaged and could not be marked."""

    def verify(checkpoint: Checkpoint) -> None:
        if checkpoint.name.step > step:
            raise DamagedError("as if")

    storage = store.storage
    with moved(store, Unmarkable(storage.fs, storage.path, storage.is_local)):
        found = store.latest(lambda line: None, verify)
    assert found is not None
    assert found.name.step == step


def next_attempt(store: CheckpointStore) -> int:
    return CheckpointListing.of(store.storage.walk()).next_attempt()


class Turns(Faults):
    """A process whose operations each wait for their turn."""

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


def interleaved(
    tmp_path: Path,
    is_local: bool,
    prepare: Callable[[CheckpointStore], Any],
    act: Callable[[CheckpointStore], Any],
    other: Callable[[Path], Any],
) -> Iterator[tuple[Path, Any, Any, str]]:
    """Run ``act`` once for each of its operations, and run ``other`` before that operation.

    Yields the folder, the results or errors of ``act`` and ``other``, and the operation.
    """

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
