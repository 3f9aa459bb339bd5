"""Starts or joins Ray, even if Ray is read from a slow disk.

Ray gives its node 30 s to start and its agents about 15 s, which cannot be configured, and then
raises a bare Exception. A second try finds most files in memory.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from raytrain_ddp.errors import PreflightError, is_passing, with_backoff
from raytrain_ddp.ray_backend.foreign_texts import is_slow_start_of_ray
from raytrain_ddp.signals import handling

RAY_START_S = 300.0
"""The time limit for starting Ray, over all tries, unless `wait_s` is longer."""


def start_with_retries(
    init: Callable[[], object],
    shutdown: Callable[[], object],
    where: str,
    within_s: float,
    tell: Callable[[str], None],
) -> None:
    """Calls `init`, which starts or joins Ray, until it succeeds, or fails permanently.

    Processes left behind by a failed try are ended before the next one. Ctrl-C takes effect after
    a try: a handler that raises while a process is forked would be ignored, or leave a lock held.

    Args:
        where: the location of Ray, for messages.
        within_s: no new try starts after this time.

    Raises:
        PreflightError: the time limit has passed, or retrying cannot help.
        KeyboardInterrupt: with the number of the signal.
    """
    import psutil  # type: ignore[import-untyped]  # Ray brings it along

    began, tries = time.monotonic(), 0

    def start(number: int) -> None:
        nonlocal tries
        tries, asked = number + 1, list[int]()
        before = psutil.Process().children()
        is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # Processes started meanwhile never receive SIGHUP, and this one receives it afterwards. A
        # closed terminal sends it to each process of its group: Ray would end at once, and the
        # checkpoint that the driver then requests would never be made.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            with handling([signal.SIGINT] * is_usual, lambda number, _: asked.append(number)):
                init()
        except Exception as error:
            message = " ".join((str(error).splitlines() or [""])[0].split()) or type(error).__name__
            with suppress(Exception):
                shutdown()
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    if child not in before:
                        _end_if_of_ray(child)
            of_system = getattr(error, "errno", None) and is_passing(error)
            if of_system or is_slow_start_of_ray(error):
                raise ConnectionError(message) from error
            raise PreflightError(f"no Ray at {where}: {message}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if asked:
                raise KeyboardInterrupt(asked[-1])

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


def _end_if_of_ray(child: Any) -> None:
    """Ends a process of Ray, whose session's name is an argument, and all its descendants."""
    if any("session_" in word for word in child.cmdline()):
        for process in (*child.children(recursive=True), child):
            process.kill()
        child.wait()


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
