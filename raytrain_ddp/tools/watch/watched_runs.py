"""All runs of a storage: a thread reads what is new, each request finds it done; stops a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pyarrow import fs as pafs

from raytrain_ddp.checkpoint.lease import Owner, owner_of
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SWEEP_FILE,
    other_runs,
    read_followed,
)
from raytrain_ddp.checkpoint.storage import Storage, is_plain_name, open_storage
from raytrain_ddp.errors import ConfigError, PreflightError, first_line
from raytrain_ddp.tools.report.history import RunHistory, history_of
from raytrain_ddp.tools.report.run_files import RunFiles, claims_in, config_of, kept_in
from raytrain_ddp.tools.watch.live_log import LiveLog
from raytrain_ddp.uri import without_secrets

_LOCAL_S, _REMOTE_S = 1.0, 10.0  # between two looks at a storage; requests to a bucket cost money
_REST = 6  # looks at a bucket between two at a run that has ended
_IN_LIST, _ON_PAGE = 150, 1000  # records of a log in memory
_MOST_PAGES = 12  # runs that are kept as their pages need them
_READERS = 8


class WatchedRun:
    """A run as far as it was read; thread-safe.

    Args:
        whole: with checkpoints and config, as its own page shows them.
    """

    def __init__(self, name: str, folder: Storage, whole: bool = False) -> None:
        self.name, self.folder = name, folder
        self.version = 0
        self.history: RunHistory | None = None
        self._whole = whole
        self._log = LiveLog(folder, _ON_PAGE if whole else _IN_LIST)
        self._owner: Owner | None = None
        self._lock = threading.Lock()
        self._read_at = -1e9

    def read(self, at_most_every_s: float = 0.0) -> None:
        """Reads what is new. Raises OSError."""
        with self._lock:
            if time.monotonic() - self._read_at < at_most_every_s:
                return
            is_new, owner = self._log.read(), owner_of(self.folder)
            if is_new or owner != self._owner or self.history is None:
                self._owner = owner
                self.history = history_of(self._files(owner))
                self.version += 1
            self._read_at = time.monotonic()

    def _files(self, owner: Owner | None) -> RunFiles:
        log, whole = self._log, self._whole
        # Whether a run that ended without an event is complete stands in its checkpoint.
        ended = owner is None and (not log.events or log.events[-1].event.kind != "end")
        return RunFiles(
            name=self.name,
            train=log.train[:],
            evals=log.evals[:],
            place=self.folder,
            config=config_of(self.folder) if whole else {},
            events=log.events[:],
            followed=read_followed(self.folder) if whole else (),
            kept=kept_in(self.folder) if whole or ended else (),
            owner=owner,
            claims=claims_in(self.folder) if whole else (),
            read_at=time.time(),
        )


class WatchedRuns:
    """The runs directly in a storage or in its sweeps, or the only one, if it is a run's folder.

    Raises:
        ConfigError: there is no such storage. PreflightError: it does not answer.
    """

    def __init__(self, place: str) -> None:
        self.storage = open_storage(place)
        info = self.storage.fs.get_file_info(self.storage.path)
        if info.type != pafs.FileType.Directory:
            raise ConfigError(
                f"{without_secrets(place)}: there is no such storage: give the folder or URI that "
                f"holds runs (--storage of fit).{other_runs(place)}"
            )
        self.runs: dict[str, WatchedRun] = {}
        self.trouble = ""  # what cannot be read, and why; "" if all can
        self.is_complete = False  # whether each run was read once
        self.every_s = _LOCAL_S if self.storage.is_local else _REMOTE_S
        self._pages: OrderedDict[str, WatchedRun] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def version(self) -> str:
        """Changes whenever the list shows something else."""
        runs = [*self.runs.values()]
        return f"{len(runs)}.{sum(run.version for run in runs)}.{hash(self.trouble)}"

    def watch(self) -> None:
        """Starts the thread that reads until `close`, which comes later."""
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5.0)  # pools of threads cannot be used while Python ends

    def page(self, name: str) -> WatchedRun | None:
        """A run as its page shows it, with what is new; None if there is no such run.

        Raises:
            OSError: the storage does not answer.
        """
        listed = self.runs.get(name)
        if listed is None:
            return None
        with self._lock:
            run = self._pages.setdefault(name, WatchedRun(name, listed.folder, True))
            self._pages.move_to_end(name)
            while len(self._pages) > _MOST_PAGES:
                self._pages.popitem(last=False)
        run.read(self.every_s / 2)
        return run

    def look(self, number: int = 0) -> None:
        """Reads what is new of all runs; of a bucket's runs that have ended only now and then."""
        try:
            found = self._folders()
            for name in [name for name in self.runs if name not in found]:
                del self.runs[name]
            due = [
                self.runs.get(name) or WatchedRun(name, folder)
                for name, folder in found.items()
                if self._is_due(self.runs.get(name), number)
            ]
            if self.storage.is_local:  # a thread each would only wait for the same lock
                troubles = [self._read(run) for run in due]
            else:
                with ThreadPoolExecutor(_READERS) as pool:
                    troubles = list(pool.map(self._read, due))
            troubles = [trouble for trouble in troubles if trouble]
            more = f" (and {len(troubles) - 1} more)" if troubles[1:] else ""
            self.trouble, self.is_complete = "".join(troubles[:1]) + more, True
        except Exception as error:  # also what pyarrow raises besides OSError
            self.trouble = f"The storage: {_reason(error)}"

    def _work(self) -> None:
        number = 0
        while not self._ended.is_set():
            self.look(number)
            number += 1
            self._ended.wait(self.every_s)

    def _read(self, run: WatchedRun) -> str:
        """Reads a run; returns what prevents that. It may be another user's, or damaged."""
        if self._ended.is_set():
            return ""
        try:
            run.read()
        except Exception as error:
            return f"{run.name}: {_reason(error)}"
        self.runs[run.name] = run
        return ""

    def _is_due(self, run: WatchedRun | None, number: int) -> bool:
        running = run is None or run.history is None or run.history.state == "running"
        return self.storage.is_local or running or number % _REST == 0

    def _folders(self) -> dict[str, Storage]:
        if _is_run(self.storage):
            name = self.storage.path.rstrip("/").rpartition("/")[2]
            return {name: self.storage}
        names = [name for name in self.storage.names() if is_plain_name(name)]
        if self.storage.is_local:
            names = [name for name in names if Path(self.storage.path, name).is_dir()]
        folders = {name: self.storage.join(name) for name in names}
        for name, sweep in [(n, f) for n, f in folders.items() if f.stamp(SWEEP_FILE)]:
            trials = filter(is_plain_name, sweep.names())
            folders |= {f"{name}/{each}": sweep.join(each) for each in trials}
        return {n: f for n, f in folders.items() if n in self.runs or _is_run(f)}


def _reason(error: Exception) -> str:
    return first_line(error) or type(error).__name__


def _is_run(folder: Storage) -> bool:
    return any(folder.stamp(name) for name in (EVENTS_FILE, METRICS_FILE, CONFIG_FILE))


def can_stop(owner: Owner | None) -> bool:
    """Whether it is a live process of this machine and this user."""
    if owner is None or not owner.is_here() or owner.is_dead() or not hasattr(os, "pidfd_open"):
        return False
    try:
        return Path(f"/proc/{owner.pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def stop_run(history: RunHistory) -> str:
    """Asks the process that drives a run to end after the current step, with a checkpoint.

    Returns:
        What happens now.

    Raises:
        PreflightError: it is not, or no longer, a process of this machine and user.
    """
    owner = history.files.owner
    if owner is not None and can_stop(owner):
        with suppress(OSError):
            process = os.pidfd_open(owner.pid)
            try:
                if not owner.is_dead():  # from here on, its number cannot become another's
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    return "It ends after the current step, with a checkpoint."
            finally:
                os.close(process)
    raise PreflightError("no process of this machine and user drives this run now.")
