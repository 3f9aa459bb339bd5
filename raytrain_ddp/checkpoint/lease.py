"""The lease of a run: one process at a time holds ``<run>/lease.json`` and renews it.

The last writer wins: a process that finds another's token in the file has lost the run. The
clocks of two machines are never compared: the age of a lease is measured by the store's own
clock, which dates both the lease and a probe file. Before an old lease is taken over, it is
watched for longer than its owner needs to renew it.

Writes of a process that does not know yet that it lost the lease are fenced off by listing.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import PreflightError, RunLockedError
from raytrain_ddp.uri import answer_within

LEASE_FILE = "lease.json"
HEARTBEAT_S = 10.0
TIMEOUT_S = 60.0
SEEN_WITHIN_S = 15.0

_FIRST_CHECK_S = 1.0  # two simultaneous starters may both have read their own token
_SETTLE_S = 0.2
_SLACK_S = 1.0  # tolerated delay of an owner's heartbeat
_RELEASE_S = 5.0
_STALE_S = 20.0  # what was read longer ago may have changed since
_TEXT = re.compile(r"[\w .:\[\]-]{1,255}", re.ASCII)  # safe to show

_say: Callable[[str], None] = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. `born` is in clock ticks since its machine's boot.

    `machine` is the boot id of the machine and the process namespace that `pid` belongs to; it is
    empty where the system does not provide them (only Linux does). `run` is the folder whose lease
    it took. A copy of that folder has the same lease. `job` is its Slurm job; "": none.
    """

    token: str
    host: str
    pid: int
    since: str
    machine: str
    born: int
    run: str = ""
    job: str = ""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.since}"

    @staticmethod
    def here(run: str = "") -> Owner:
        """Returns an owner for this process, with a new token, for the run in this folder."""
        pid = os.getpid()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")  # only for reading
        state = _state(pid)
        born = state[1] if state else 0
        host = socket.gethostname()
        return Owner(uuid.uuid4().hex, host, pid, now, _machine(), born, run, _slurm_job())

    @staticmethod
    def parse(data: bytes) -> Owner | None:
        """The owner that wrote these bytes, or None if they cannot be parsed."""
        try:
            owner = Owner(**json.loads(data))
            texts = (owner.token, owner.host, owner.since, owner.machine or "-", owner.job or "-")
            numbers = (owner.pid, owner.born)
            shown = all(_TEXT.fullmatch(text) for text in texts)
            counted = all(type(number) is int and number >= 0 for number in numbers)
            is_right = shown and counted and owner.pid > 0 and isinstance(owner.run, str)
            return owner if is_right else None
        except (ValueError, TypeError, RecursionError):
            return None

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine; False if that is unknown."""
        return bool(self.machine) and (self.machine, self.host) == (
            _machine(),
            socket.gethostname(),
        )

    def state(self) -> str:
        """Linux's letter for its state: T stopped, D in the kernel, X dead; "" if unknown."""
        if not self.is_here():
            return ""
        state = _state(self.pid)
        if state is not None:
            is_dead = state[0] in "ZX" or state[1] != self.born  # the pid was reused
            return "X" if is_dead else state[0]
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "X"
        except OSError:
            pass  # it belongs to another user and is hidden
        return ""

    def kill(self) -> None:
        """Ends the process, if it is one of this machine."""
        if self.is_here() and not self.is_dead():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def is_dead(self) -> bool:
        """Whether it was a process of this machine that has died; False if that is unknown."""
        return self.state() == "X"


def owner_of(run: Storage) -> Owner | None:
    """Returns the process that drives the run, or None. A process on another machine counts as
    alive while its lease is recent."""
    with suppress(FileNotFoundError):
        owner, changed_s = Owner.parse(run.read(LEASE_FILE)), run.changed_s(LEASE_FILE)
        # Nothing is written to ask for the store's own clock: ours may be some seconds off.
        fresh = changed_s is not None and time.time() - changed_s < 2 * TIMEOUT_S
        if owner is not None and fresh and not owner.is_dead():
            return owner
    return None


class Lease:
    """A run that this process drives; a thread renews the lease until `release`.

    A temporary failure of the storage does not end the lease: the next renewal tries again.
    """

    def __init__(self, run: Storage, owner: Owner, heartbeat_s: float, timeout_s: float) -> None:
        self._run, self._owner, self._lost = run, owner, ""
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @staticmethod
    def take(
        run: Storage,
        tell: Callable[[str], None] = _say,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> Lease:
        """Takes the lease of the run in folder `run`; if another process holds it, refuses within 2
        s.

        A lease is taken over if its owner is a dead process of this machine, if it was not renewed
        for `timeout_s`, or if it was copied with the folder of another run; checking either of the
        last two takes a little more than `heartbeat_s`.

        Args:
            tell: is called with one line if the lease of another process is taken over, and why.

        Raises:
            RunLockedError: another process holds it; names its host, pid and start, and the expiry.
            PreflightError: the storage cannot be written to.
        """
        owner = Owner.here(str(run))

        def put() -> bytes | None:
            run.mkdir()
            _require_free(run, tell, heartbeat_s, timeout_s)
            started = time.monotonic()
            run.write_atomic(LEASE_FILE, _encode(owner))
            time.sleep(max(_SETTLE_S, 2 * (time.monotonic() - started)))
            return _read(run)

        try:
            try:
                data = put()
            except FileNotFoundError:  # a faster starter has swept our temporary file
                data = put()
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise PreflightError(
                f"Storage {run}: {LEASE_FILE} cannot be written: {reason}"
            ) from None
        if data != _encode(owner):
            raise RunLockedError(
                f"Run {run} was started twice at the same time; the other start continues "
                f"({_describe(data)}). Wait for it, or give this one another --name."
            )
        return Lease(run, owner, heartbeat_s, timeout_s)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def require(self) -> None:
        """Raises RunLockedError once another process has taken the run over. Costs nothing."""
        if self._lost:
            raise RunLockedError(self._lost)

    def release(self) -> None:
        """Releases the run; returns within seconds even if the storage does not respond."""
        self._ended.set()
        if not self._lost:
            answer_within(_RELEASE_S, self._remove)

    def _renew(self) -> None:
        pause_s, misses = min(_FIRST_CHECK_S, self._heartbeat_s), 0
        mine, seen_at = _encode(self._owner), time.monotonic()
        while not self._ended.wait(pause_s):
            pause_s, asked_at = self._heartbeat_s, time.time()
            try:
                data = _read(self._run)
                misses = misses + 1 if data is None else 0
                seen_at = time.monotonic() if data is not None else seen_at
                if misses == 1:  # some file systems hide a file briefly while it is replaced
                    pause_s = min(_FIRST_CHECK_S, self._heartbeat_s)
                elif data is None and self._is_outage(time.monotonic() - seen_at):
                    pass
                elif data is None or Owner.parse(data) not in (None, self._owner):
                    self._lost = (
                        f"Run {self._run} was taken over from this process "
                        f"({_describe(data)}): it ends without another checkpoint."
                    )
                    return
                elif abs(time.time() - asked_at) > _STALE_S:  # stopped since, or a slow storage
                    pause_s = _SETTLE_S
                elif not self._ended.is_set():
                    self._run.write_atomic(LEASE_FILE, mine)
            except Exception:  # also what pyarrow raises besides OSError
                pause_s = self._heartbeat_s / 4

    def _is_outage(self, gone_s: float) -> bool:
        """Whether the lease disappeared together with the run, as when a file system is temporarily
        unmounted; it may be back by now."""
        is_gone = gone_s < self._timeout_s and not self._run.exists("config.toml")
        return is_gone or _read(self._run) is not None

    def _remove(self) -> None:
        self._thread.join()  # otherwise it would write the file again
        if _read(self._run) == _encode(self._owner):
            self._run.delete_file(LEASE_FILE)


def holder(run: Storage) -> str:
    """The token of the process that holds a run; "" if there is none or it cannot be read."""
    data = _read(run)
    owner = Owner.parse(data) if data is not None else None
    return owner.token if owner is not None else ""


def is_seen(run: Storage, token: str, within_s: float = SEEN_WITHIN_S) -> bool:
    """Whether this machine sees the run's folder that the process with that token holds, and not
    an older one at the same path."""
    until_s = time.monotonic() + within_s
    while (found := holder(run)) != token and time.monotonic() < until_s:
        time.sleep(min(1.0, within_s / 4))  # NFS may show old content for seconds
    return found == token


def _require_free(
    run: Storage, tell: Callable[[str], None], heartbeat_s: float, timeout_s: float
) -> None:
    data = _read(run)
    if data is None:
        return
    owner = Owner.parse(data)
    if owner is not None and owner.is_dead():
        tell(f"Run {run} is taken over from a dead process ({owner}).")
        return
    changed_s = run.changed_s(LEASE_FILE)
    age_s = run.clock_s() - (changed_s or 0.0)
    # A lease of another folder was copied with the run, unless its owner uses that path to it.
    is_other = owner is not None and owner.run not in ("", str(run))
    if changed_s is not None and (is_other or abs(age_s) > timeout_s):
        # The clock may have jumped: an owner that renews the lease while we watch is alive.
        until_s = time.monotonic() + 1.2 * heartbeat_s + _SLACK_S
        while time.monotonic() < until_s and run.changed_s(LEASE_FILE) == changed_s:
            time.sleep(min(1.0, heartbeat_s / 4))
        if run.changed_s(LEASE_FILE) == changed_s:
            why = f"its lease was not renewed for {age_s:.0f} s"
            why = "its lease was copied with it from another folder" if is_other else why
            tell(f"Run {run} is taken over: {why} ({_describe(data)}).")
            return
        age_s = 0.0
    if run.exists(LEASE_FILE):
        raise RunLockedError(
            f"Run {run} is driven by another process ({_describe(data)}). Wait until it ends, stop "
            "it there, or give this run another --name. If it is dead, its lease runs out in "
            f"{max(0.0, timeout_s - max(age_s, 0.0)):.0f} s."
        )


def _encode(owner: Owner) -> bytes:
    return json.dumps(asdict(owner), indent=1).encode()


def _read(run: Storage) -> bytes | None:
    with suppress(FileNotFoundError):
        return run.read(LEASE_FILE)
    return None


def _describe(data: bytes | None) -> str:
    if data is None:
        return f"{LEASE_FILE} is gone"
    owner = Owner.parse(data)
    return str(owner) if owner else f"{LEASE_FILE} is damaged and does not name its owner"


def _slurm_job() -> str:
    """As Slurm's commands take it: the plain number of an array's last task means all of them."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, int] | None:
    """The state of a process (Z: dead, not reaped by its parent) and its start time in ticks."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()  # the process name before may contain anything
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
