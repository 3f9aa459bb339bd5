"""The actor of one worker: starts the script under its guard, and hands on what it says.

The driver sends this module with the actor, so that a node needs Ray and what the script needs,
and not this package. So it knows the standard library and Ray alone, and is spoken to in plain
values: an object of a class of ours could not be read there.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# Functions, not the module: only they go along with the class.
from raytrain_ddp.orchestration.run.ship import contents, unpack

_MOST_LINES = 500  # in one answer
_MOST_WAITING = 5_000  # lines that the driver has not taken; a script that prints more has to wait
_REDRAW_S = 1.0  # how often a progress bar (carriage returns, no line ends) is passed on
_LOOK_S = 0.5  # whether a stream that says nothing can say more
_SCONTROL = """#!/bin/sh
# There is no Slurm here. Answers: scontrol show hostnames [LIST]
case "$1 $2" in
  "show hostname"|"show hostnames") echo "${3:-$SLURM_JOB_NODELIST}" | tr , '\\n' ;;
  *) echo "scontrol: only 'show hostnames' is there, as this is Ray" >&2; exit 1 ;;
esac
"""


class Agent:
    """One worker's seat. `take` may wait while the other calls go on."""

    def __init__(self, guard: str) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="raytrain-run-"))
        (self._own / "guard.py").write_text(guard, encoding="utf-8")
        self._changed = threading.Condition()
        self._lines: deque[dict[str, Any]] = deque()
        self._urgent: deque[dict[str, Any]] = deque()  # does not wait for a slow console
        self._asked = 0
        self._guard: subprocess.Popen[bytes] | None = None

    def seat(self) -> dict[str, Any]:
        """Where this is."""
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
            "node_has_gpus": any(Path("/dev").glob("nvidia[0-9]*")),
            "python": sys.executable,
            "environment": dict(os.environ),
            "own": str(self._own),
        }

    def free_port(self, wanted: Sequence[int]) -> int:
        """The first of these that is free here."""
        for port in (*wanted, 0):
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
                return int(probe.getsockname()[1])
        raise OSError("no free port")

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder here."""
        return os.path.exists(path)

    def contents(self, folder: str) -> dict[str, str] | None:
        """What there is in the folder of this path; None if that is unknown."""
        return contents(Path(folder))

    def unpack(self, archive: bytes, folder: str) -> str:
        """Writes the code to a folder of this name among the temporary ones; returns its path.

        Raises:
            PermissionError: somebody else has made that folder.
        """
        own = Path(tempfile.gettempdir()) / f"raytrain_ddp-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{own} is another user's, who may change what is in it")
        own.chmod(0o700)
        place = own / folder
        unpack(archive, place)
        return str(place)

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: str,
        attempt: int,
        slurm: bool,
    ) -> None:
        """Starts a command in a folder; `take` then tells the rest.

        Args:
            environment: complete, but for the path of TORCHELASTIC_ERROR_FILE.
            slurm: whether a `scontrol` is put on the PATH where there is none.
        """
        error_file = self._own / f"attempt_{attempt}" / "error.json"
        error_file.parent.mkdir(exist_ok=True)
        if "TORCHELASTIC_ERROR_FILE" in environment:
            environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        if slurm and shutil.which("scontrol", path=environment.get("PATH")) is None:
            environment["PATH"] = f"{self._scontrol()}:{environment.get('PATH', os.defpath)}"
        told, tells = os.pipe()
        guard = [sys.executable, "-I", "-S", str(self._own / "guard.py")]
        guard += [str(tells), str(self._own)]
        self._guard, self._asked = None, 0
        try:
            self._guard = subprocess.Popen(
                [*guard, *command],
                bufsize=0,
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[tells],
                start_new_session=True,  # a signal to Ray's processes is none to the guard
            )
        except OSError as error:
            os.close(told)
            self._tell("stderr", f"cannot start in {folder}: {error}".encode())
            self._put(self._urgent, _end(127))
            self._put(self._lines, {"closed": True})
            return
        finally:
            os.close(tells)
        args = (self._guard, told, error_file)
        threading.Thread(target=self._attend, args=args, daemon=True).start()

    def signal(self, word: str) -> None:
        """The number of a signal for the script and its children, or ``kill``."""
        guard = self._guard
        if guard is not None and guard.stdin is not None:
            self._asked = int(signal.SIGKILL) if word == "kill" else int(word)
            with suppress(OSError, ValueError):  # it has ended
                guard.stdin.write(f"{word}\n".encode())

    def take(self, wait_s: float, most: int = _MOST_LINES) -> list[dict[str, Any]]:
        """What there is to tell, with at most so many lines; waits until there is something:

        - {"stream", "line", "at"}: in the order of each stream, and at last {"closed"};
        - {"status", "at", "asked", "error"}: as soon as the script has ended, before any lines.

        Times are those of `clock`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or (self._lines and most), wait_s)
            lines = [self._lines.popleft() for _ in range(min(most, len(self._lines)))]
            news = [*self._urgent, *lines]
            self._urgent.clear()
            self._changed.notify_all()
        return news

    def clock(self) -> float:
        """Seconds, by this machine's monotonic clock."""
        return time.monotonic()

    def clean(self) -> None:
        """Ends what there is, and removes this agent's own folder."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _attend(self, guard: subprocess.Popen[bytes], told: int, error_file: Path) -> None:
        """Tells of the script's end at once, and at last that all lines have been told."""
        over = threading.Event()
        readers = [
            threading.Thread(target=self._read, args=(name, stream, over), daemon=True)
            for name, stream in (("stdout", guard.stdout), ("stderr", guard.stderr))
        ]
        for reader in readers:
            reader.start()
        guard.wait()  # it has gone to the background
        ended = False
        with os.fdopen(told) as reports:
            for report in map(json.loads, reports):
                if "status" in report:
                    self._put(self._urgent, {**report, "error": _recorded(error_file)})
                    ended = True
        if not ended:  # the guard itself was killed
            self._put(self._urgent, _end(-9, self._asked))
        over.set()
        for reader in readers:
            reader.join()  # it may have to wait for the console
        self._put(self._lines, {"closed": True})

    def _read(self, name: str, stream: IO[bytes], over: threading.Event) -> None:
        """Passes lines on, until the stream ends, or nobody who writes to it can be left.

        A progress bar draws over its line; it is passed on now and then.
        """
        kept, drawn_at = b"", time.monotonic()
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while True:
            last = over.is_set()
            if not poll.poll(_LOOK_S * 1000):
                if last:
                    break
                continue
            if not (chunk := os.read(stream.fileno(), 1 << 16)):
                break
            *lines, kept = (kept + chunk).split(b"\n")
            if time.monotonic() - drawn_at > _REDRAW_S and b"\r" in kept.rstrip(b"\r"):
                shown, _, kept = kept.rstrip(b"\r").rpartition(b"\r")
                lines.append(shown)
            for line in lines:
                self._tell(name, line)
                drawn_at = time.monotonic()
        if kept:
            self._tell(name, kept)
        stream.close()

    def _tell(self, stream: str, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._put(self._lines, {"stream": stream, "line": text, "at": time.monotonic()})

    def _put(self, news: deque[dict[str, Any]], each: dict[str, Any]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(news) < _MOST_WAITING)
            news.append(each)
            self._changed.notify_all()

    def _scontrol(self) -> Path:
        place = self._own / "bin"
        place.mkdir(exist_ok=True)
        (place / "scontrol").write_text(_SCONTROL)
        (place / "scontrol").chmod(0o755)
        return place


def _end(status: int, asked: int = 0) -> dict[str, Any]:
    return {"status": status, "at": time.monotonic(), "asked": asked, "error": None}


def _recorded(error_file: Path) -> dict[str, Any] | None:
    """What torch's @record wrote about the exception that ended the script."""
    try:
        told = json.loads(error_file.read_text())["message"]
        return told if isinstance(told, dict) else {"message": str(told)}
    except (OSError, ValueError, KeyError):
        return None
