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

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3 import S3, s3_server

from raytrain_ddp.checkpoint import lease as lease_module
from raytrain_ddp.checkpoint.lease import LEASE_FILE, Lease, Owner, holder, is_seen
from raytrain_ddp.checkpoint.storage import TEMP_PREFIX, Storage, open_storage
from raytrain_ddp.errors import PreflightError, RunLockedError

FAST = {"heartbeat_s": 0.2, "timeout_s": 0.8}

OWNER = """
import sys, time
from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.errors import RunLockedError
try:
    lease = Lease.take(open_storage(sys.argv[1]), print, float(sys.argv[2]), float(sys.argv[3]))
    print("held", flush=True)
    while True:
        lease.require()
        time.sleep(0.02)
except RunLockedError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
"""


@contextmanager
def owner_process(uri: str, heartbeat_s: float = 0.2) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease until it is killed, or exits with 8 once it has lost it."""
    command = [sys.executable, "-c", OWNER, uri, str(heartbeat_s), str(4 * heartbeat_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_SETTLE_S", 0.05)
    monkeypatch.setattr(lease_module, "_SLACK_S", 0.3)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


@pytest.fixture(params=["local", "mounted", "s3", "fsspec"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A run's folder on a disk, on a disk without rename (as with FUSE), in a bucket, and in
    fsspec."""
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3").uri(f"runs/{tmp_path.name}"))
    if request.param == "fsspec":
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


def refusal(act: Callable[[], object]) -> str:
    """The one-line error, which must come at once."""
    started = time.monotonic()
    with pytest.raises(RunLockedError) as caught:
        act()
    assert time.monotonic() - started < 10
    assert caught.value.exit_status == 8
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wait_until(happens: Callable[[], bool], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not happens():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_lost(lease: Lease) -> bool:
    try:
        lease.require()
    except RunLockedError:
        return True
    return False


# ------------------------------------------------------------------------- two at once


def test_fault_31_a_second_start_is_refused_and_the_owner_is_named_in_the_error(
    any_storage: Storage,
) -> None:
    notes: list[str] = []
    with Lease.take(any_storage, notes.append) as lease:
        line = refusal(lambda: Lease.take(any_storage, notes.append))
        for part in (
            str(any_storage),
            socket.gethostname(),
            f"pid {os.getpid()}",
            "since 20",
            "UTC",
        ):
            assert part in line
        assert "runs out in 60 s" in line or "runs out in 59 s" in line or "out in 58 s" in line
        lease.require()
    assert not any_storage.exists(LEASE_FILE)
    assert [path for path in any_storage.walk() if not path.endswith("/")] == []
    Lease.take(any_storage, notes.append).release()
    assert notes == []


def test_fault_31_another_process_is_refused_in_ten_seconds(run: Storage) -> None:
    with Lease.take(run):
        command = [sys.executable, "-c", OWNER, run.path, "10", "60"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 8
    assert f"pid {os.getpid()}" in done.stdout
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_fault_31_of_many_simultaneous_starts_one_gets_the_lease(any_storage: Storage) -> None:
    begin = threading.Barrier(4)
    taken: list[Lease] = []
    refused: list[str] = []

    def start() -> None:
        begin.wait()
        try:
            taken.append(Lease.take(any_storage, heartbeat_s=0.3))
        except RunLockedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) + len(refused) == 4
    assert taken
    # A delayed process may have taken the lease from the one that already held it.
    wait_until(lambda: sum(not is_lost(lease) for lease in taken) == 1)
    time.sleep(0.7)
    assert sum(not is_lost(lease) for lease in taken) == 1
    for lease in taken:
        lease.release()
    assert not any_storage.exists(LEASE_FILE)


def test_an_old_copy_of_a_runs_folder_is_not_mistaken_for_the_active_one(
    run: Storage, tmp_path: Path
) -> None:
    """As on a host without the shared storage that once ran a run of the same name."""
    other = open_storage(str(tmp_path / "other host"))
    other.mkdir()
    other.write_atomic("config.toml", b"")
    with Lease.take(run):
        token = holder(run)
        assert token
        assert is_seen(run, token, 0.1)
        assert not is_seen(other, token, 0.1)  # no lease
        other.write_atomic(LEASE_FILE, json.dumps(asdict(Owner.here())).encode())
        assert not is_seen(other, token, 0.1)  # the lease of an older start
        late = threading.Timer(0.3, other.write_atomic, (LEASE_FILE, run.read(LEASE_FILE)))
        late.start()
        assert is_seen(other, token, 20.0)  # NFS shows it after a delay
        late.join()


def test_the_loser_of_a_race_names_the_winner(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwritten(_: float) -> None:
        put(run, written(foreign_owner()))

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", overwritten)
        line = refusal(lambda: Lease.take(run))
    assert "host node-7, pid 4321, since 2026-01-02 03:04:05 UTC" in line
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()


@pytest.mark.parametrize("asks", [True, False], ids=["probe", "lease"])
def test_fault_31_a_start_whose_temporary_file_is_swept_is_refused_normally(
    any_storage: Storage, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process takes the run and sweeps while this one reads the clock or writes its
    lease."""
    write, swept = Storage._write, []

    def swept_at_once(storage: Storage, path: str, data: bytes) -> object:
        result = write(storage, path, data)
        if TEMP_PREFIX in path and not swept:
            swept.append(path)
            put(any_storage, written(foreign_owner()))
            any_storage.sweep()
        return result

    if asks:
        put(any_storage, written(foreign_owner(token="1" * 32)))
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "_write", swept_at_once)
        if asks or any_storage.is_local:  # other stores do not use a temporary file
            assert "host node-7, pid 4321" in refusal(lambda: Lease.take(any_storage))
            assert swept
            assert Owner.parse(any_storage.read(LEASE_FILE)) == foreign_owner()
        else:
            Lease.take(any_storage).release()
            assert not swept


def test_fault_31_a_concurrent_sweep_does_not_remove_an_owners_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, swept = Storage._write, []

    def sweep_now_and_then(storage: Storage, path: str, data: bytes) -> object:
        result = write(storage, path, data)
        if TEMP_PREFIX in path and len(swept) % 2 == 0:
            storage.sweep()
        swept.append(path)
        return result

    with Lease.take(run, heartbeat_s=0.1) as lease, monkeypatch.context() as patch:
        before = run.changed_s(LEASE_FILE)
        patch.setattr(Storage, "_write", sweep_now_and_then)
        wait_until(lambda: run.changed_s(LEASE_FILE) != before and len(swept) > 5)
        lease.require()


# ------------------------------------------------------------------------- dead owners


def test_fault_31_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    run, notes = open_storage(str(tmp_path)), []
    with owner_process(str(tmp_path), heartbeat_s=10) as process:
        process.kill()  # and not waited for: it remains as a zombie process
        wait_until(lambda: lease_module._state(process.pid) in (None, ("Z", process_born(run))))
        started = time.monotonic()
        with Lease.take(run, notes.append):
            assert time.monotonic() - started < 5
    assert len(notes) == 1
    assert f"a dead process (host {socket.gethostname()}, pid {process.pid}, since " in notes[0]


def process_born(run: Storage) -> int:
    owner = Owner.parse(run.read(LEASE_FILE))
    assert owner is not None
    return owner.born


def test_fault_31_an_owner_whose_pid_was_reused_counts_as_dead(run: Storage) -> None:
    here = Owner.here()
    put(run, written(replace(here, born=here.born - 1)))
    notes: list[str] = []
    Lease.take(run, notes.append).release()
    assert "dead process" in notes[0]


@pytest.mark.parametrize(
    "elsewhere", [{"host": "other"}, {"machine": "other boot"}, {"machine": ""}]
)
def test_a_pid_of_another_machine_is_ignored(run: Storage, elsewhere: dict[str, str]) -> None:
    """So is one in another container on this machine, which has its own PID namespace."""
    put(run, written(replace(Owner.here(), pid=2**22 + 1, **elsewhere)))  # no such pid here
    assert "another process" in refusal(lambda: Lease.take(run))


def test_an_owner_hidden_in_proc_does_not_count_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be mounted so that other users' processes are invisible."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    owner = Owner.here()
    assert not owner.is_dead()
    monkeypatch.setattr(lease_module, "_state", lambda pid: None)
    assert not owner.is_dead()
    monkeypatch.setattr(os, "kill", refuse)
    assert not owner.is_dead()


def test_fault_31_a_stopped_owner_is_replaced_and_notices_the_loss(tmp_path: Path) -> None:
    run, notes = open_storage(str(tmp_path)), []
    with owner_process(str(tmp_path)) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        with Lease.take(run, notes.append, **FAST) as lease:
            assert f"pid {process.pid}" in notes[0]
            assert "not renewed for" in notes[0]
            process.send_signal(signal.SIGCONT)
            assert process.wait(10) == 8
            assert process.stdout is not None
            lost = process.stdout.read()
            assert "was taken over from this process" in lost
            assert f"pid {os.getpid()}" in lost
            time.sleep(0.5)
            lease.require()
    assert not run.exists(LEASE_FILE)


def test_a_replaced_owner_does_not_release_its_successors_lease(run: Storage) -> None:
    lease = Lease.take(run, **FAST)
    put(run, written(foreign_owner()))
    wait_until(lambda: is_lost(lease))
    assert "node-7" in refusal(lease.require)
    lease.release()
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()


def test_an_owner_unaware_of_its_replacement_does_not_release_its_successors_lease(
    run: Storage,
) -> None:
    lease = Lease.take(run)
    put(run, written(foreign_owner()))
    lease.release()
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()


def test_a_renewal_in_progress_does_not_undo_the_release(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.take(run, **FAST)
    write, writing, go_on = Storage.write_atomic, threading.Event(), threading.Event()

    def slow(*arguments: object) -> None:
        writing.set()
        go_on.wait(5)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Storage, "write_atomic", slow)
    assert writing.wait(5)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    lease.release()
    timer.join()
    lease._thread.join(5)
    assert not run.exists(LEASE_FILE)


def test_an_owner_whose_lease_is_removed_has_lost_it(run: Storage) -> None:
    """A successor may have started and finished in the meantime."""
    lease = Lease.take(run, **FAST)
    run.delete_file(LEASE_FILE)
    wait_until(lambda: is_lost(lease))
    assert "lease.json is gone" in refusal(lease.require)
    lease.release()
    assert not run.exists(LEASE_FILE)


def test_a_temporarily_unmounted_file_system_does_not_lose_the_lease(run: Storage) -> None:
    lease = Lease.take(run, heartbeat_s=0.1, timeout_s=1.5)
    run.write("config.toml", b"")
    folder, elsewhere = Path(run.path), Path(f"{run.path}-elsewhere")
    folder.rename(elsewhere)
    (folder / "checkpoints").mkdir(parents=True)  # the mount point; a commit may run now
    time.sleep(0.8)
    assert not is_lost(lease)
    shutil.rmtree(folder)
    elsewhere.rename(folder)
    time.sleep(0.3)
    assert not is_lost(lease)
    assert Owner.parse(run.read(LEASE_FILE)) is not None
    shutil.rmtree(folder)  # permanently
    wait_until(lambda: is_lost(lease))
    lease.release()


def test_an_owner_stopped_between_read_and_write_rereads_the_lease(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, stopped = lease_module._read, threading.Event()

    def slow(place: Storage) -> bytes | None:
        data = read(place)
        if threading.current_thread().name == "lease" and not stopped.is_set():
            stopped.set()
            put(run, written(foreign_owner()))  # another process takes over in the meantime
            time.sleep(0.3)
        return data

    lease = Lease.take(run, **FAST)
    monkeypatch.setattr(lease_module, "_STALE_S", 0.2)
    monkeypatch.setattr(lease_module, "_read", slow)
    wait_until(lambda: is_lost(lease))
    lease.release()
    assert Owner.parse(run.read(LEASE_FILE)) == foreign_owner()


# ------------------------------------------------------------------------------- clocks


def test_a_lease_of_another_machine_expires(run: Storage) -> None:
    put(run, written(foreign_owner()), age_s=20)
    assert "runs out in 40 s" in refusal(lambda: Lease.take(run)).replace("39 s", "40 s")
    put(run, written(foreign_owner()), age_s=61)
    notes: list[str] = []
    Lease.take(run, notes.append, heartbeat_s=0.2).release()
    assert len(notes) == 1
    assert "not renewed for 61 s (host node-7, pid 4321" in notes[0].replace("62 s", "61 s")


@pytest.mark.parametrize("jump_s", [86400.0, -3600.0])
def test_fault_36_the_local_clock_is_ignored(
    any_storage: Storage, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    any_storage.mkdir()
    any_storage.write(LEASE_FILE, written(foreign_owner()))
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    line = refusal(lambda: Lease.take(any_storage))
    assert 55 <= float(line.rpartition(" in ")[2].removesuffix(" s.")) <= 60


@pytest.mark.parametrize("age_s", [86400.0, -86400.0])
def test_fault_36_a_clock_jump_of_the_store_does_not_take_the_lease_of_a_live_owner(
    run: Storage, age_s: float
) -> None:
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
    notes: list[str] = []
    Lease.take(run, notes.append, heartbeat_s=0.2).release()  # it is no longer renewed
    assert len(notes) == 1


def test_a_lease_released_while_watched_is_free(run: Storage) -> None:
    put(run, written(foreign_owner()), age_s=100)
    timer = threading.Timer(0.3, lambda: run.delete_file(LEASE_FILE))
    timer.start()
    notes: list[str] = []
    Lease.take(run, notes.append, heartbeat_s=0.5).release()
    timer.join()
    assert notes == []


# ------------------------------------------------------------------- files nobody wrote

NONSENSE = {
    "empty": b"",
    "torn": written(foreign_owner())[:60],
    "list": b"[1]",
    "null": b"null",
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "foreign": b'{"holder": "someone"}',
    "more": json.dumps({**asdict(foreign_owner()), "more": 1}).encode(),
    "types": json.dumps({**asdict(foreign_owner()), "pid": "1"}).encode(),
    "bool": json.dumps({**asdict(foreign_owner()), "pid": True}).encode(),
    "lines": json.dumps({**asdict(foreign_owner()), "host": "a\nb"}).encode(),
    "escape": json.dumps({**asdict(foreign_owner()), "host": "\x1b[2J"}).encode(),
    "long": json.dumps({**asdict(foreign_owner()), "host": "a" * 999}).encode(),
    "huge pid": json.dumps({**asdict(foreign_owner()), "pid": 10**30, "machine": ""}).encode(),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_an_unreadable_lease_blocks_a_start_until_it_expires(run: Storage, kind: str) -> None:
    put(run, NONSENSE[kind])
    line = refusal(lambda: Lease.take(run))
    assert "\x1b" not in line
    if kind != "huge pid":
        assert "lease.json is damaged and does not name its owner" in line
    assert "runs out in" in line


def test_an_expired_damaged_lease_is_taken_over(run: Storage) -> None:
    put(run, b"{", age_s=100)
    notes: list[str] = []
    Lease.take(run, notes.append, heartbeat_s=0.2).release()
    assert "is damaged" in notes[0]


@given(st.binary(max_size=200) | st.sampled_from(sorted(asdict(foreign_owner()))).flatmap(
    lambda key: st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        st.lists,
        max_leaves=3,
    ).map(lambda value: json.dumps({**asdict(foreign_owner()), key: value}).encode())
))  # fmt: skip
def test_invariant_15_parsing_any_bytes_gives_an_owner_or_none(data: bytes) -> None:
    owner = Owner.parse(data)
    if owner is not None:
        assert Owner.parse(written(owner)) == owner
        assert str(owner).isprintable()
        assert owner.is_dead() in (True, False)


def test_a_damaged_lease_is_repaired_by_its_owner(run: Storage) -> None:
    with Lease.take(run, **FAST) as lease:
        put(run, b"{")
        wait_until(lambda: Owner.parse(run.read(LEASE_FILE)) is not None)
        lease.require()
    assert not run.exists(LEASE_FILE)


# ------------------------------------------------------------------------------ storage


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
                for _ in range(4):
                    assert tried.acquire(timeout=5)
            lease.require()
        before = any_storage.changed_s(LEASE_FILE)
        wait_until(lambda: any_storage.changed_s(LEASE_FILE) != before)  # it is renewed again
        lease.require()
    assert not any_storage.exists(LEASE_FILE)


def test_release_does_not_wait_for_a_hung_storage(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.take(run, heartbeat_s=0.1)
    hung, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> bytes:
        hung.set()
        go_on.wait()
        return b""

    monkeypatch.setattr(lease_module, "_RELEASE_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read", hang)
        assert hung.wait(5)
        started = time.monotonic()
        lease.release()
        assert time.monotonic() - started < 3
    go_on.set()
    lease._thread.join(5)
    assert not lease._thread.is_alive()


def test_fault_14_a_storage_that_is_not_writable_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    run = replace(open_storage(str(tmp_path)), path=str(tmp_path / "file" / "run"))
    with pytest.raises(PreflightError, match=r"file/run: lease\.json cannot be written") as caught:
        Lease.take(run)
    assert "\n" not in str(caught.value)


def test_fault_45_a_lease_holds_nothing_secret(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2")
    uri = s3.uri(f"runs/{tmp_path.name}").replace("s3://", "s3://KEY:hunter2@")
    run = open_storage(uri)
    with Lease.take(run):
        content = run.read(LEASE_FILE)
        fields = {"token", "host", "pid", "since", "machine", "born", "run"}
        assert set(json.loads(content)) == fields
        line = refusal(lambda: Lease.take(run))
    assert b"hunter2" not in content
    assert "hunter2" not in line
    assert "KEY" not in line


def test_invariant_11_no_thread_outlives_its_lease(run: Storage) -> None:
    before = threading.active_count()
    for _ in range(3):
        Lease.take(run, heartbeat_s=0.05).release()
    assert threading.active_count() == before
    assert run.walk() == []


def test_the_copy_of_a_run_in_progress_is_free_and_the_same_folder_by_another_path_is_not(
    tmp_path: Path,
):
    """Whoever copies a run copies the lease of its owner, who lives."""
    run = open_storage(str(tmp_path / "run"))
    with Lease.take(run, heartbeat_s=0.1):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "link").symlink_to(tmp_path / "run")
        with pytest.raises(RunLockedError, match="driven by another process"):
            Lease.take(open_storage(str(tmp_path / "link")), heartbeat_s=0.1)
        with Lease.take(open_storage(str(tmp_path / "copy")), heartbeat_s=0.1) as taken:
            taken.require()
            with pytest.raises(RunLockedError, match="driven by another process"):
                Lease.take(run, heartbeat_s=0.1)
