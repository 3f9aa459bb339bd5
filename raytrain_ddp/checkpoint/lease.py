"""Who drives a run: one process at a time holds ``<run>/lease.json`` and renews it.

The last writer wins: whoever finds another's token in the file has lost the run. The clocks of two
machines are never compared: how old a lease is, the store's own clock says, by which it dates both
the lease and a file that is written to ask it; and before a lease is taken over for its age, it is
watched for longer than its owner would need to renew it.

What a process does that does not know yet that it has lost, the claims fence off: see claims.py.
"""

from __future__ import annotations

import json
import logging
import os
import re
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

_FIRST_CHECK_S = 1.0  # of two starters at the same instant, both may have found the file theirs
_SETTLE_S = 0.2
_SLACK_S = 1.0  # an owner's heartbeat may be so late
_RELEASE_S = 5.0
_TEXT = re.compile(r"[\w .:\[\]-]{1,255}", re.ASCII)  # what is shown of a file that others write

_say: Callable[[str], None] = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. `born` is in clock ticks after its machine's start.

    `machine` is the boot of the machine and the process namespace that `pid` belongs to; empty
    where the system does not tell (it is Linux that does).
    """

    token: str
    host: str
    pid: int
    since: str
    machine: str
    born: int

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.since}"

    @staticmethod
    def here() -> Owner:
        """This process, with a new token."""
        pid = os.getpid()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")  # only for reading
        state = _state(pid)
        born = state[1] if state else 0
        return Owner(uuid.uuid4().hex, socket.gethostname(), pid, now, _machine(), born)

    @staticmethod
    def parse(data: bytes) -> Owner | None:
        """The owner that wrote these bytes, or None where nobody can tell."""
        try:
            owner = Owner(**json.loads(data))
            texts = (owner.token, owner.host, owner.since, owner.machine or "-")
            numbers = (owner.pid, owner.born)
            shown = all(_TEXT.fullmatch(text) for text in texts)
            counted = all(type(number) is int and number >= 0 for number in numbers)
            return owner if shown and counted and owner.pid > 0 else None
        except (ValueError, TypeError, RecursionError):
            return None

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine; False where that is unseen."""
        return bool(self.machine) and (self.machine, self.host) == (
            _machine(),
            socket.gethostname(),
        )

    def state(self) -> str:
        """Linux's letter for its state: T stopped, D in the kernel, Z or X dead; "" if unseen."""
        if self.is_dead():
            return "X"
        state = _state(self.pid) if self.is_here() else None
        return state[0] if state is not None else ""

    def is_dead(self) -> bool:
        """Whether it was a process of this machine, and is no more; False where that is unseen."""
        if not self.is_here():
            return False
        state = _state(self.pid)
        if state is not None:
            return state[0] in "ZX" or state[1] != self.born  # the pid is another process's now
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it is another user's, and hidden
        return False


class Lease:
    """A run that this process drives; a thread renews it until `release`.

    A storage that fails for a while ends nothing: it is asked again.
    """

    def __init__(self, run: Storage, owner: Owner, heartbeat_s: float) -> None:
        self._run, self._owner, self._heartbeat_s = run, owner, heartbeat_s
        self._lost = ""
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
        """Hold the run in folder `run`; where another holds it, refused within some 2 s.

        Taken over from a process of this machine that is dead; or else from one that has not
        renewed its lease for `timeout_s`, which takes little more than a `heartbeat_s` to be sure.

        Args:
            tell: is given one line when the lease of another is taken over, and why.

        Raises:
            RunLockedError: another process holds it: host, pid, since when, when it runs out.
            PreflightError: the storage cannot be written to.
        """
        owner = Owner.here()

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
            except FileNotFoundError:  # one that got ahead of us has swept our temporary file away
                data = put()
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise PreflightError(
                f"Storage {run}: {LEASE_FILE} cannot be written: {reason}"
            ) from None
        if data != _encode(owner):
            raise RunLockedError(
                f"Run {run} was started twice at the same time; the other start goes on "
                f"({_describe(data)}). Wait for it, or give this one another --name."
            )
        return Lease(run, owner, heartbeat_s)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def require(self) -> None:
        """Costs nothing; raises RunLockedError once another process has taken the run over."""
        if self._lost:
            raise RunLockedError(self._lost)

    def release(self) -> None:
        """Let the run go; returns within some seconds also where the storage does not answer."""
        self._ended.set()
        if not self._lost:
            answer_within(_RELEASE_S, self._remove)

    def _renew(self) -> None:
        pause_s, misses = min(_FIRST_CHECK_S, self._heartbeat_s), 0
        mine = _encode(self._owner)
        while not self._ended.wait(pause_s):
            pause_s = self._heartbeat_s
            try:
                data = _read(self._run)
                misses = misses + 1 if data is None else 0
                if misses == 1:  # some file systems lose sight of a file while it is replaced
                    pause_s = min(_FIRST_CHECK_S, self._heartbeat_s)
                elif data is None or Owner.parse(data) not in (None, self._owner):
                    self._lost = (
                        f"Run {self._run} was taken over from this process "
                        f"({_describe(data)}): it ends without another checkpoint."
                    )
                    return
                elif not self._ended.is_set():
                    self._run.write_atomic(LEASE_FILE, mine)
            except Exception:  # also what pyarrow raises besides OSError
                pause_s = self._heartbeat_s / 4

    def _remove(self) -> None:
        self._thread.join()  # or it would write the file again
        if _read(self._run) == _encode(self._owner):
            self._run.delete_file(LEASE_FILE)


def holder(run: Storage) -> str:
    """The token of the process that holds a run; "" if there is none, or nobody can tell."""
    data = _read(run)
    owner = Owner.parse(data) if data is not None else None
    return owner.token if owner is not None else ""


def is_seen(run: Storage, token: str, within_s: float = SEEN_WITHIN_S) -> bool:
    """Whether the run's folder, as this machine sees it, is the one that the process with that
    token holds, and not an older one at the same path."""
    until_s = time.monotonic() + within_s
    while (found := holder(run)) != token and time.monotonic() < until_s:
        time.sleep(min(1.0, within_s / 4))  # NFS may show for seconds what was there before
    return found == token


def _require_free(
    run: Storage, tell: Callable[[str], None], heartbeat_s: float, timeout_s: float
) -> None:
    data = _read(run)
    if data is None:
        return
    owner = Owner.parse(data)
    if owner is not None and owner.is_dead():
        tell(f"Run {run} is taken over from a process that died ({owner}).")
        return
    changed_s = run.changed_s(LEASE_FILE)
    age_s = run.clock_s() - (changed_s or 0.0)
    if changed_s is not None and abs(age_s) > timeout_s:
        # It may be the clock that jumped: whoever renews it before our eyes lives.
        until_s = time.monotonic() + 1.2 * heartbeat_s + _SLACK_S
        while time.monotonic() < until_s and run.changed_s(LEASE_FILE) == changed_s:
            time.sleep(min(1.0, heartbeat_s / 4))
        if run.changed_s(LEASE_FILE) == changed_s:
            tell(
                f"Run {run} is taken over: its lease was not renewed for {age_s:.0f} s "
                f"({_describe(data)})."
            )
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
    return str(owner) if owner else f"{LEASE_FILE} does not tell which: it is damaged"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, int] | None:
    """The state of a process (Z: dead, its parent has not noticed) and when it was born."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()  # the name before may hold anything
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
