"""Starts or joins Ray, even if Ray is read from a slow disk.

Ray gives its node 30 s to start and its agents about 15 s, which cannot be configured, and then
raises a bare Exception. A second try finds most files in memory.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from raytrain_ddp.errors import PreflightError, is_passing
from raytrain_ddp.ray_backend.foreign_texts import is_slow_start_of_ray
from raytrain_ddp.ray_backend.ray_private import newest_address
from raytrain_ddp.retries import with_backoff

RAY_START_S = 300.0
"""The time limit for starting Ray, over all tries, unless `wait_s` is longer."""

_AFTER_FORK_S = 0.05


def start_with_retries(
    init: Callable[[], object],
    shutdown: Callable[[], object],
    where: str,
    within_s: float,
    tell: Callable[[str], None],
) -> None:
    """Calls `init`, which starts or joins Ray, until it succeeds, or fails permanently.

    Processes left behind by a failed try are ended before the next one.

    Args:
        where: the location of Ray, for messages.
        within_s: no new try starts after this time.

    Raises:
        PreflightError: the time limit has passed, or retrying cannot help.
    """
    began, tries = time.monotonic(), 0

    def start(number: int) -> None:
        nonlocal tries
        before, tries = _children(), number + 1
        try:
            with interruptible(), _no_hangups():
                init()
        except Exception as error:
            message = " ".join((str(error).splitlines() or [""])[0].split()) or type(error).__name__
            with suppress(Exception):
                shutdown()
            _end_processes(_children() - before)
            of_system = getattr(error, "errno", None) and is_passing(error)
            if of_system or is_slow_start_of_ray(error):
                raise ConnectionError(message) from error
            raise PreflightError(f"no Ray at {where}: {message}") from error

    def pause(wait_s: float, error: OSError) -> bool:
        spent_s = time.monotonic() - began
        if spent_s + wait_s > within_s:
            return False
        tell(f"Ray did not start in {spent_s:.0f} s ({error}); trying again")
        time.sleep(wait_s)
        return True

    try:
        with_backoff(start, pause, within_s)
    except ConnectionError as error:
        raise PreflightError(
            f"Ray did not start at {where} within {within_s:g} s ({tries} tries): {error} Its logs "
            "are in /tmp/ray/session_latest/logs. On a slow disk or a busy machine, allow more "
            "time with --scaling.wait-s (fit) or --wait-s (run)."
        ) from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes Ctrl-C reliable while processes are being started.

    Python swallows an exception that a signal handler raises within a callback of
    os.register_at_fork. Moreover, such a callback then never releases logging's lock, so the next
    import in another thread deadlocks. Therefore, a signal that arrives at that time is sent again
    later.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        above = frame
        while above is not None:
            if above.f_code is subprocess.Popen._execute_child.__code__:  # type: ignore[attr-defined]
                again = threading.Timer(_AFTER_FORK_S, os.kill, (os.getpid(), number))
                again.daemon = True
                again.start()
                return
            above = above.f_back
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _no_hangups() -> Iterator[None]:
    """Processes started meanwhile never receive SIGHUP, and this one receives it afterwards.

    A closed terminal sends it to each process of its group: Ray would end immediately, and the
    checkpoint that the driver then requests would never be made.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explicit_address(address: str) -> str:
    """HOST:PORT in place of "auto" if a Ray was started here by `ray start`: the newest one."""
    if address == "auto" and (newest := newest_address()):
        host, _, port = newest.rpartition(":")
        with suppress(OSError, ValueError):
            socket.create_connection((host, int(port)), timeout=5).close()
            return newest
    return address


def require_listener(address: str) -> None:
    """Fails fast; Ray itself tries for ten minutes or more to reach an address without a
    listener."""
    if address.startswith("ray://"):
        raise PreflightError(
            f"--address {address}: Ray Client is not supported. Use HOST:6379 on a node of "
            "the cluster, or submit a job: ray job submit -- python -m raytrain_ddp...."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray knows at once
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        given = (
            "unset RAY_ADDRESS" if address == os.environ.get("RAY_ADDRESS") else "remove --address"
        )
        raise PreflightError(
            f"no Ray at {address}: {error.strerror or error}. Start one with `ray start --head` "
            f"(it prints its address), or {given} to use an embedded Ray."
        ) from None


def require_same(address: str, connected_to: str) -> None:
    """Raises PreflightError if a process that is connected to one Ray is asked to use another."""
    if ":" in address and address != connected_to:  # "auto": the one that this process uses
        raise PreflightError(
            f"--address {address}, but this process is connected to the Ray at {connected_to}. "
            "Call ray.shutdown() first, or remove the address."
        )


def _children() -> set[int]:
    """The processes that this one has started; none where the system does not tell."""
    return _children_of(os.getpid())


def _children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(child) for child in path.read_text().split()}
    return found


def _end_processes(children: set[int]) -> None:
    """Ends Ray's processes among these children of this process, and all their descendants."""
    for child in children:
        with suppress(OSError):
            if b"session_" not in Path(f"/proc/{child}/cmdline").read_bytes():
                continue  # each Ray process has its session's name as an argument
            tree, new = {child}, {child}
            while new:
                new = set().union(*map(_children_of, new)) - tree
                tree |= new
            for process in tree:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(child, 0)
