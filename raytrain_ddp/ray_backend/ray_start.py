"""Starts or joins Ray: its settings, its authentication token, and its start from a slow disk.

Ray gives its node 30 s to start and its agents about 15 s, which cannot be configured, and then
raises a bare Exception. A second try finds most files in memory.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, is_passing, with_backoff
from raytrain_ddp.ray_backend.failure_causes import is_slow_start_of_ray
from raytrain_ddp.signals import handling

_MAX_FOLDER_BYTES = 36  # the path of a socket has at most 107 bytes, and Ray adds up to 70
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# How long each part of Ray may take to start, where this is configurable: see above.
_SLOW_START = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
# Read by Ray in the driver, and by the processes of an embedded Ray; the user's own values win.
SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a report waits for this poll (default 2 s)
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise each print of a worker appears twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the driver's folder
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use the existing environment
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",  # notices may be short (default 5 s)
    "RAY_DASHBOARD_ENABLE_PROFILING": "1",  # stack traces and flame graphs of workers
    **_SLOW_START,
    # Ray aborts a process 60 s after its head is lost; our processes report it earlier and exit.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_worker_niceness": "0",  # training is this Ray's purpose (default 15: lowest priority)
}
RAY_START_S = 300.0
"""The time limit for starting Ray, over all tries, unless `wait_s` is longer."""
_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def ray_settings(config: TrainConfig, embedded: bool) -> dict[str, str]:
    """Ray's settings for this run."""
    timeout_s = config.scaling.start_timeout_s
    least, most = config.scaling.worker_range()
    if timeout_s == "auto":
        timeout_s = 5 if least < most else 120
    settings = {**SETTINGS, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{timeout_s:g}"}
    if embedded:  # a few workers: Ray Train sees sooner that one has died
        settings["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
        settings[PREEMPTION_WATCHER] = "0"  # no preemption on this machine: saves a process
        settings["RAY_prestart_worker_first_driver"] = "0"  # without the runtime environment
    return settings


def short_folder() -> dict[str, str]:
    """Returns the setting that keeps the socket paths of a Ray started here short enough, if TMPDIR
    does not."""
    is_short = len(os.fsencode(os.environ.get("TMPDIR", ""))) <= _MAX_FOLDER_BYTES
    return {} if is_short else {"RAY_TMPDIR": "/tmp"}


@contextmanager
def applied_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets these environment variables, except those that the user has set; removes them
    afterward."""
    unset = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


# ------------- the authentication token: anyone who can read it can run code as its owner


def use_token(embedded: bool, tell: Callable[[str], None] = lambda _: None) -> None:
    """Enables Ray's token authentication: always for our own Ray, for a cluster if a token exists.

    `ray start` uses an existing token by default, but a connecting driver does not, and is
    refused. Ray reads the mode once, when it is imported. So the mode stays set, and nothing is
    changed if Ray was imported without it.

    Raises:
        PreflightError: others can read the token; see `_secure`.
    """
    own = Path.home() / ".ray" / "auth_token"
    given = bool(os.environ.get(_TOKEN) or os.environ.get(_PATH))
    if "ray._raylet" not in sys.modules and (embedded or given or own.is_file()):
        os.environ.setdefault(_MODE, "token")
    if os.environ.get(_MODE, "token").lower() != "token" or os.environ.get(_TOKEN):
        return  # not set: `ray.init` creates a token itself, with a mode by the umask
    file = Path(os.environ.get(_PATH) or own)
    if embedded and not given:
        _make(file)
    if file.exists():
        _secure(file, file == own, embedded, tell)


def _make(file: Path) -> None:
    """Creates a token readable only by this user if there is none; Ray's own would have a
    umask-dependent mode."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32))
    except FileExistsError:
        return
    except OSError as error:
        raise PreflightError(f"Ray's token {file} cannot be written: {error.strerror}.") from None


def _secure(file: Path, in_own_folder: bool, embedded: bool, tell: Callable[[str], None]) -> None:
    """Removes other users' access to the file, and their write access to its folder, if that is
    Ray's.

    Raises:
        PreflightError: its mode cannot be changed, and a Ray is to be started with it. (A file
            mounted by a cluster keeps its mode.)
    """
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        folder = stat.S_IMODE(file.parent.stat().st_mode)
        if in_own_folder and folder & 0o022:
            file.parent.chmod(folder & ~0o022)
        if mode & 0o077:
            file.chmod(0o600)
            tell(
                f"other users could read Ray's token {file} (mode {mode:03o}); its mode is now "
                "600. If this machine has other users, remove it: a new one is created."
            )
    except OSError as error:
        if embedded:
            raise PreflightError(
                f"other users can read Ray's token {file} (mode {mode:03o}), and its mode cannot "
                f"be changed: {error.strerror}. Set RAY_AUTH_TOKEN_PATH to another file."
            ) from None


# ------------------------------------------------------------------ the start


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
