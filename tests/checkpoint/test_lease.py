"""Who drives a run: one process at a time, on any storage, despite dead processes and wrong
clocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from faulty_storage import Faults, FaultyHandler
from processes import wait_until
from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.lease import LEASE_FILE, Lease, Owner
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.errors import RunLockedError

FAST = {"heartbeat_s": 0.2, "timeout_s": 0.8}
OWNER = """
import sys, time
from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.errors import RunLockedError
try:
    lease = Lease.take(open_storage(sys.argv[1]), print, 0.2, 0.8)
    print("held", flush=True)
    while True:
        lease.require()
        time.sleep(0.02)
except RunLockedError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
"""


@contextmanager
def owner_process(uri: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease until it is killed, or exits with 8 once it has lost it."""
    command = [sys.executable, "-c", OWNER, uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda pause_s: real(pause_s / 4))


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture(params=["local", "mounted", "s3", "fsspec"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A run's folder on a disk, on a disk without rename (as with FUSE), in a bucket, and in
    fsspec."""
    if request.param == "s3":
        uri = request.getfixturevalue("s3").uri(f"runs/{tmp_path.name}")
        return open_storage(uri.replace("s3://", "s3://KEY:hunter2@"))
    if request.param == "fsspec":
        pytest.importorskip("fsspec")
        return open_storage(f"memory://runs/{tmp_path.name}")
    return replace(open_storage(str(tmp_path / "run")), is_local=request.param == "local")


def foreign_owner(**changes: object) -> Owner:
    """A process on another machine."""
    owner = Owner("0" * 32, "node-7", 4321, "2026-01-02 03:04:05 UTC", "boot pid:[1]", 99)
    return replace(owner, **changes)  # type: ignore[arg-type]


def put(run: Storage, content: bytes, age_s: float = 0.0) -> None:
    run.mkdir()
    run.write(LEASE_FILE, content)
    if age_s:
        os.utime(f"{run.path}/{LEASE_FILE}", (time.time() - age_s,) * 2)


def written(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode()


FIELDS = asdict(foreign_owner())


def refusal(act: Callable[[], object]) -> str:
    """The one-line error."""
    with pytest.raises(RunLockedError) as caught:
        act()
    assert caught.value.exit_status == 8
    assert "\n" not in str(caught.value)
    return str(caught.value)


def seconds_left(line: str) -> float:
    """When the lease of the owner runs out, as the error says."""
    return float(line.rpartition(" in ")[2].removesuffix(" s."))


def wait_for_renewal(run: Storage) -> None:
    before = run.changed_s(LEASE_FILE)
    wait_until(lambda: run.changed_s(LEASE_FILE) != before)


def is_lost(lease: Lease) -> bool:
    try:
        lease.require()
    except RunLockedError:
        return True
    return False


def test_faults_31_45_a_second_start_is_refused_and_names_the_owner_but_no_secret(
    any_storage: Storage,
) -> None:
    notes: list[str] = []
    with Lease.take(any_storage, notes.append) as lease:
        line = refusal(lambda: Lease.take(any_storage, notes.append))
        for part in (str(any_storage), socket.gethostname(), f"pid {os.getpid()}"):
            assert part in line
        assert 50 < seconds_left(line) <= 60
        content = any_storage.read(LEASE_FILE).decode()
        assert set(json.loads(content)) == set(FIELDS)
        assert "hunter2" not in line + content
        lease.require()
    assert not any_storage.exists(LEASE_FILE)
    assert [path for path in any_storage.walk() if not path.endswith("/")] == []
    Lease.take(any_storage, notes.append).release()
    assert notes == []


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "object_store"])
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "free"])
def test_fault_31_another_start_before_any_operation_of_a_start_is_never_overlooked(
    tmp_path: Path, is_held: bool, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the run and sweeps away temporary files; the last one that writes has the run."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    outcomes, operations, number = set[str](), 1, 0
    while number < operations:
        plain = open_storage(str(tmp_path / str(number)))
        if is_held:
            put(plain, written(foreign_owner(token="1" * 32)))

        def other(plain: Storage = plain) -> None:
            put(plain, written(foreign_owner()))
            plain.sweep()

        faults = Faults("meanwhile", number, other)
        storage = Storage(pafs.PyFileSystem(FaultyHandler(faults, is_local)), plain.path, is_local)
        try:
            with Lease.take(storage, heartbeat_s=60):
                outcomes.add("taken")
                assert plain.read(LEASE_FILE) != written(foreign_owner())
        except RunLockedError:
            outcomes.add("refused")
            assert plain.read(LEASE_FILE) == written(foreign_owner())
        operations, number = len(faults.done), number + 1
    assert outcomes == ({"refused"} if is_held else {"refused", "taken"})


def test_fault_31_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    run, notes = open_storage(str(tmp_path)), []
    with owner_process(str(tmp_path)) as process:
        owner = Owner.parse(run.read(LEASE_FILE))
        assert owner is not None
        assert not owner.is_dead()
        process.kill()  # and not waited for: it remains as a zombie process
        wait_until(owner.is_dead)
        with Lease.take(run, notes.append):  # its lease has not run out
            pass
    assert len(notes) == 1
    assert f"{socket.gethostname()}, pid {process.pid}" in notes[0]


def test_fault_31_an_owner_counts_as_dead_only_if_its_process_on_this_machine_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Owner.here()

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    assert not here.is_dead()
    assert replace(here, born=here.born - 1).is_dead()  # its pid was reused
    ended = replace(here, pid=2**22 + 1)  # there is no such pid here
    assert ended.is_dead()
    # In another container on this machine, which has its own PID namespace, there may be.
    for elsewhere in ({"host": "other"}, {"machine": "other boot"}, {"machine": ""}):
        assert not replace(ended, **elsewhere).is_dead()
    monkeypatch.setattr(os, "kill", refuse)
    assert not here.is_dead()


def test_fault_31_a_stopped_owner_is_replaced_and_notices_the_loss(tmp_path: Path) -> None:
    run, notes = open_storage(str(tmp_path)), []
    with owner_process(str(tmp_path)) as process:
        process.send_signal(signal.SIGSTOP)
        owner = Owner.parse(run.read(LEASE_FILE))
        assert owner is not None
        wait_until(lambda: owner.state() == "T")
        put(run, run.read(LEASE_FILE), age_s=5)
        with Lease.take(run, notes.append, **FAST) as lease:
            assert f"pid {process.pid}" in notes[0]
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 8
            assert process.stdout is not None
            assert f"pid {os.getpid()}" in process.stdout.read()
            wait_for_renewal(run)
            lease.require()
    assert not run.exists(LEASE_FILE)


@pytest.mark.parametrize("knows", [True, False])
def test_a_replaced_owner_does_not_release_its_successors_lease(run: Storage, knows: bool) -> None:
    lease = Lease.take(run, heartbeat_s=0.2 if knows else 60)
    put(run, written(foreign_owner()))
    if knows:
        wait_until(lambda: is_lost(lease))
        assert "node-7" in refusal(lease.require)
    lease.release()
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()
    if knows:
        run.delete_file(LEASE_FILE)  # the successor has ended, too
        wait_until(lambda: is_lost(lease))


def test_a_renewal_in_progress_does_not_undo_the_release(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, go_on = Storage.write_atomic, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        writing.set()
        go_on.wait(5)
        write(*arguments)

    lease = Lease.take(run, **FAST)
    monkeypatch.setattr(Storage, "write_atomic", slow)
    assert writing.wait(5)
    threading.Timer(0.2, go_on.set).start()
    lease.release()
    wait_until(lambda: not any(thread.name == "lease" for thread in threading.enumerate()))
    assert not run.exists(LEASE_FILE)


def test_a_temporarily_unmounted_file_system_does_not_lose_the_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, asked = Storage.read, threading.Semaphore(0)

    def counted(*arguments: Any) -> bytes:
        asked.release()
        return read(*arguments)

    lease = Lease.take(run, heartbeat_s=0.1, timeout_s=3)
    run.write("config.toml", b"")
    folder, elsewhere = Path(run.path), Path(f"{run.path}-elsewhere")
    folder.rename(elsewhere)
    (folder / "checkpoints").mkdir(parents=True)  # the mount point; a commit may run now
    monkeypatch.setattr(Storage, "read", counted)
    assert all(asked.acquire(timeout=5) for _ in range(4))
    assert not is_lost(lease)
    shutil.rmtree(folder)
    elsewhere.rename(folder)
    wait_for_renewal(run)
    assert not is_lost(lease)
    shutil.rmtree(folder)  # permanently
    wait_until(lambda: is_lost(lease))
    lease.release()


def test_an_owner_stopped_between_read_and_write_rereads_the_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real, late_s = Storage.read, time.time, [0.0]

    def slow(place: Storage, name: str) -> bytes:
        data = read(place, name)
        if threading.current_thread().name == "lease" and not late_s[0]:
            put(run, written(foreign_owner()))  # another process takes over in the meantime
            late_s[0] = 60.0
        return data

    lease = Lease.take(run, **FAST)
    monkeypatch.setattr(time, "time", lambda: real() + late_s[0])
    monkeypatch.setattr(Storage, "read", slow)
    wait_until(lambda: is_lost(lease))
    lease.release()
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()


@pytest.mark.parametrize("content", [written(foreign_owner()), b"{"], ids=["whole", "damaged"])
def test_a_lease_of_another_machine_expires(run: Storage, content: bytes) -> None:
    put(run, content, age_s=20)
    assert 30 < seconds_left(refusal(lambda: Lease.take(run))) <= 40
    for age_s in (61, -86400):  # the store's clock may have been set back
        put(run, content, age_s)
        notes: list[str] = []
        Lease.take(run, notes.append, heartbeat_s=0.1).release()
        assert len(notes) == 1
        assert ("node-7" in notes[0]) == (content != b"{")


def test_fault_36_the_local_clock_is_ignored(
    any_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    any_storage.mkdir()
    for jump_s in (86400.0, -3600.0):
        any_storage.write(LEASE_FILE, written(foreign_owner()))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + jump_s)  # noqa: B023
            line = refusal(lambda: Lease.take(any_storage))
        assert 50 <= seconds_left(line) <= 60


def test_fault_36_a_clock_jump_of_the_store_does_not_take_the_lease_of_a_live_owner(
    run: Storage,
) -> None:
    age_s = -86400.0
    put(run, written(foreign_owner()), age_s)
    ended = threading.Event()

    def renew() -> None:
        beat = time.time() - age_s
        while not ended.wait(0.1):
            beat += 0.1
            os.utime(f"{run.path}/{LEASE_FILE}", (beat, beat))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert "node-7" in refusal(lambda: Lease.take(run, heartbeat_s=1.0))
    finally:
        ended.set()
        thread.join()


NONSENSE = [b"", written(foreign_owner())[:60], b"[1]", b"null", bytes(range(256)), b"[" * 100_000]
NONSENSE += [
    json.dumps({**FIELDS, **changes}).encode()
    for changes in (
        *({"more": 1}, {"pid": "1"}, {"pid": True}, {"pid": 0}, {"born": -1}, {"run": 3}),
        *({"host": "a\nb"}, {"host": "\x1b[2J"}, {"host": "a" * 999}, {"token": None}),
    )
]


def test_an_unreadable_lease_blocks_a_start_until_it_expires(run: Storage) -> None:
    for content in NONSENSE:
        assert Owner.parse(content) is None
        put(run, content)
        line = refusal(lambda: Lease.take(run))
        assert line.isprintable()
        assert 50 < seconds_left(line) <= 60
    huge = foreign_owner(pid=10**30, machine="")
    assert Owner.parse(written(huge)) == huge
    assert not huge.is_dead()


def test_a_damaged_lease_is_repaired_by_its_owner(run: Storage) -> None:
    with Lease.take(run, **FAST) as lease:
        put(run, b"{")
        wait_until(lambda: Owner.parse(run.read(LEASE_FILE)) is not None or is_lost(lease))
        lease.require()


def test_fault_15_a_temporary_storage_failure_does_not_end_the_run(
    any_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease.take(any_storage, heartbeat_s=0.1) as lease:
        tried = threading.Semaphore(0)

        def fail(*_: object) -> None:
            tried.release()
            raise OSError("AWS Error SLOW_DOWN")

        for operation in ("read", "write_atomic"):
            with monkeypatch.context() as patch:
                patch.setattr(Storage, operation, fail)
                assert all(tried.acquire(timeout=5) for _ in range(4))
            lease.require()
        wait_for_renewal(any_storage)
        lease.require()
    assert not any_storage.exists(LEASE_FILE)


def test_the_copy_of_a_run_in_progress_is_free_and_the_same_folder_by_another_path_is_not(
    tmp_path: Path,
):
    """Whoever copies a run copies the lease of its owner, who lives."""
    run = open_storage(str(tmp_path / "run"))
    with Lease.take(run, heartbeat_s=0.1):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "link").symlink_to(tmp_path / "run")
        refusal(lambda: Lease.take(open_storage(str(tmp_path / "link")), heartbeat_s=0.1))
        with Lease.take(open_storage(str(tmp_path / "copy")), heartbeat_s=0.1) as taken:
            taken.require()
            refusal(lambda: Lease.take(run, heartbeat_s=0.1))
