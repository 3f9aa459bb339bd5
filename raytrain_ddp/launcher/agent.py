"""The actor of one worker: starts the script under its guard, and forwards its output.

The driver sends this module with the actor, so a node needs only Ray and the script's own
dependencies, not this package. Therefore, it imports only the standard library and Ray, and its
interface uses plain values: objects of this package could not be unpickled there.
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
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# Functions, not the module: only they go along with the class.
from raytrain_ddp.launcher.code_shipping import contents, unpack_folder

_CHUNK_BYTES = 1 << 16
_MOST_CHUNKS = 100  # per reply
_MOST_WAITING = 1_000  # chunks not yet taken by the driver; a script that prints more blocks
_LOOK_S = 0.5  # how often to check whether a silent stream has a writer left


class Agent:
    """The actor on one worker's seat. `take` may wait while other calls run."""

    def __init__(self, guard: str) -> None:
        self._source = guard.encode()
        self._changed = threading.Condition()
        self._chunks: deque[dict[str, Any]] = deque()
        self._urgent: deque[dict[str, Any]] = deque()  # does not wait for a slow console
        self._asked = 0
        self._asked_at = 0.0
        self._guard: subprocess.Popen[bytes] | None = None
        self._feeds = -1  # the write end of the pipe to the script's standard input

    def seat(self) -> dict[str, Any]:
        """The facts about this seat."""
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
        }

    def free_port(self, wanted: Sequence[int]) -> int:
        """The first free port of these, or any free port; a single port is returned if free, else
        0."""
        for port in wanted if len(wanted) == 1 else (*wanted, 0):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like torch's store
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
                return int(probe.getsockname()[1])
        return 0

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder here."""
        return os.path.exists(path)

    def contents(self, folder: str) -> dict[str, str] | None:
        """The files in the folder at this path; None if it cannot be listed."""
        return contents(Path(folder))

    def unpack(self, archive: bytes, folder: str) -> str:
        """Writes the code to a folder of this name among the temporary ones; returns its path.

        Raises:
            PermissionError: another user has created that folder.
        """
        own = Path(tempfile.gettempdir()) / f"raytrain_ddp-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{own} is another user's, who may change what is in it")
        own.chmod(0o700)
        place = own / folder
        unpack_folder(archive, place)
        return str(place)

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: str,
        slurm: bool,
        feeds: bool,
    ) -> None:
        """Starts a command in a folder; call `take` for its output and status.

        Args:
            environment: complete except for the path in TORCHELASTIC_ERROR_FILE.
            slurm: whether to put a `scontrol` on the PATH.
            feeds: whether `feed` provides its standard input; otherwise it is empty.
        """
        own = Path(tempfile.gettempdir()) / f"raytrain-run-{uuid.uuid4().hex}"  # the guard makes it
        if "TORCHELASTIC_ERROR_FILE" in environment:
            environment["TORCHELASTIC_ERROR_FILE"] = str(own / "error.json")
        if slurm:
            environment["PATH"] = f"{own}/bin:{environment.get('PATH', os.defpath)}"
        report_end, write_end = os.pipe()
        code, writes = os.pipe()  # nothing is left on disk if this process is killed
        os.write(writes, self._source)
        os.close(writes)
        if self._feeds >= 0:  # of a start before, whose script did not read all
            os.close(self._feeds)
        stdin, self._feeds = os.pipe() if feeds else (-1, -1)
        guard = [sys.executable, "-I", "-S", f"/dev/fd/{code}", *map(str, (write_end, stdin, own))]
        given = [fd for fd in (write_end, code, stdin) if fd >= 0]
        self._guard, self._asked, self._asked_at = None, 0, 0.0
        try:
            self._guard = subprocess.Popen(
                [*guard, *command],
                bufsize=0,
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given,
                start_new_session=True,  # signals to Ray's process group must not reach the guard
            )
        except OSError as error:
            os.close(report_end)
            self._tell("stderr", f"cannot start in {folder}: {error}\n".encode())
            self._put(self._urgent, _end(127))
            self._put(self._chunks, {"closed": True})
            return
        finally:
            for fd in given:
                os.close(fd)
        args = (self._guard, report_end, own)
        threading.Thread(target=self._attend, args=args, daemon=True).start()

    def feed(self, data: bytes) -> bool:
        """Writes data to the script's standard input; empty data closes it. Returns whether more
        data is wanted. Blocks until the script has read enough."""
        wanted = bool(data) and self._feeds >= 0
        try:
            while data and self._feeds >= 0:
                data = data[os.write(self._feeds, data) :]
        except OSError:  # the script has ended or closed its input
            wanted = False
        if not wanted and self._feeds >= 0:
            os.close(self._feeds)
            self._feeds = -1
        return wanted

    def signal(self, instruction: str) -> None:
        """The number of a signal for the script and its children, or ``kill``."""
        guard = self._guard
        if guard is not None and guard.stdin is not None:
            self._asked = int(signal.SIGKILL) if instruction == "kill" else int(instruction)
            self._asked_at = self._asked_at or time.monotonic()
            with suppress(OSError, ValueError):  # it has ended
                guard.stdin.write(f"{instruction}\n".encode())

    def take(self, wait_s: float, most: int = _MOST_CHUNKS) -> list[dict[str, Any]]:
        """The news, with at most `most` chunks; waits up to `wait_s` for any:

        - {"stream", "data", "at"}: bytes as the script wrote them, and finally {"closed"};
        - {"status", "at", "asked", "asked_at", "error"}: as soon as the script has ended, before
          any chunks.

        Times are those of `clock`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or (self._chunks and most), wait_s)
            chunks = [self._chunks.popleft() for _ in range(min(most, len(self._chunks)))]
            news = [*self._urgent, *chunks]
            self._urgent.clear()
            self._changed.notify_all()
        return news

    def clock(self) -> float:
        """Seconds, by this machine's monotonic clock."""
        return time.monotonic()

    def clean(self) -> None:
        """Ends the script; the guard removes its own files."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def _attend(self, guard: subprocess.Popen[bytes], report_end: int, own: Path) -> None:
        """Reports the script's end immediately, and finally that all output has been forwarded."""
        over = threading.Event()
        readers = [
            threading.Thread(target=self._read, args=(name, stream, over), daemon=True)
            for name, stream in (("stdout", guard.stdout), ("stderr", guard.stderr))
        ]
        for reader in readers:
            reader.start()
        guard.wait()  # it has moved to the background
        ended = False
        with os.fdopen(report_end) as reports:
            for report in map(json.loads, reports):
                if "status" in report:
                    self._put(self._urgent, {"asked_at": 0.0, "error": None, **report})
                    ended = True
        if not ended:  # the guard itself was killed
            self._put(self._urgent, _end(-9, self._asked, self._asked_at))
            shutil.rmtree(own, ignore_errors=True)
        over.set()
        for reader in readers:
            reader.join()  # it may have to wait for the console
        self._put(self._chunks, {"closed": True})

    def _read(self, name: str, stream: IO[bytes], over: threading.Event) -> None:
        """Forwards bytes until the stream ends, or until no writer can be left."""
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while True:
            last = over.is_set()
            if not poll.poll(_LOOK_S * 1000):
                if last:
                    break
                continue
            if not (chunk := os.read(stream.fileno(), _CHUNK_BYTES)):
                break
            self._tell(name, chunk)
        stream.close()

    def _tell(self, stream: str, data: bytes) -> None:
        self._put(self._chunks, {"stream": stream, "data": data, "at": time.monotonic()})

    def _put(self, news: deque[dict[str, Any]], each: dict[str, Any]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(news) < _MOST_WAITING)
            news.append(each)
            self._changed.notify_all()


def _end(status: int, asked: int = 0, asked_at: float = 0.0) -> dict[str, Any]:
    at = time.monotonic()
    return {"status": status, "at": at, "asked": asked, "asked_at": asked_at, "error": None}
