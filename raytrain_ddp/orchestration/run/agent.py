"""The actor of one worker: starts the script under its guard, and hands on what it says.

The driver sends this module with the actor, so that a node needs Ray and what the script needs,
and not this package. So it knows the standard library and Ray alone, and is spoken to in plain
values: an object of a class of ours could not be read there.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.orchestration.run.ship import code_hash

_MOST_LINES = 500  # in one answer
_MOST_WAITING = 5_000  # lines that the driver has not taken; a script that prints more has to wait
_REDRAW_S = 1.0  # how often a progress bar (carriage returns, no line ends) is passed on
_DRAIN_S = 5.0
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
        self._news: queue.Queue[dict[str, Any]] = queue.Queue(_MOST_WAITING)
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

    def has(self, folder: str, code: str | None) -> bool:
        """Whether there is a folder of this path with this code in it; not if it is unknown."""
        return code is not None and code_hash(Path(folder)) == code

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
        place.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            files.extractall(place, **safe)  # type: ignore[arg-type]
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
        args = (command, environment, folder, error_file)
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def signal(self, word: str) -> None:
        """The number of a signal for the script and its children, or ``kill``."""
        guard = self._guard
        if guard is not None and guard.stdin is not None:
            try:
                guard.stdin.write(f"{word}\n".encode())
                guard.stdin.flush()
            except OSError:
                pass  # it has ended

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """What there is to tell; waits until there is something. In order of time:

        {"stream", "line", "at"}, {"pid"}, and at last {"status", "at", "error"}.
        """
        news = []
        try:
            news.append(self._news.get(timeout=wait_s))
            while len(news) < _MOST_LINES:
                news.append(self._news.get_nowait())
        except queue.Empty:
            pass
        return news

    def clean(self) -> None:
        """Removes this agent's own folder."""
        shutil.rmtree(self._own, ignore_errors=True)

    def _run(
        self, command: Sequence[str], environment: dict[str, str], folder: str, error_file: Path
    ) -> None:
        told, tells = os.pipe()
        guard = [sys.executable, "-I", "-S", str(self._own / "guard.py")]
        guard += [str(tells), str(self._own)]
        try:
            self._guard = process = subprocess.Popen(
                [*guard, *command],
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[tells],
                start_new_session=True,  # a signal to Ray's processes is none to the guard
            )
        except OSError as error:
            line = f"cannot start in {folder}: {error}"
            self._news.put({"stream": "stderr", "line": line, "at": time.time()})
            self._news.put({"status": 127, "at": time.time(), "error": None})
            return
        finally:
            os.close(tells)
        readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        process.wait()  # it has gone to the background
        last: dict[str, Any] = {}
        with os.fdopen(told) as reports:
            for report in map(json.loads, reports):
                last = report
                if "pid" in report:
                    self._news.put(report)
        for reader in readers:
            reader.join(_DRAIN_S)
        if "status" not in last:  # the guard itself was killed
            last = {"status": -9, "at": time.time()}
        self._news.put({**last, "error": _recorded(error_file)})

    def _read(self, name: str, stream: IO[bytes]) -> None:
        """Passes lines on. A progress bar draws over its line; it is passed on now and then."""
        kept, drawn_at = b"", time.monotonic()
        while chunk := os.read(stream.fileno(), 1 << 16):
            *lines, kept = (kept + chunk).split(b"\n")
            if time.monotonic() - drawn_at > _REDRAW_S and b"\r" in kept.rstrip(b"\r"):
                shown, _, kept = kept.rstrip(b"\r").rpartition(b"\r")
                lines.append(shown)
            for line in lines:
                self._tell(name, line)
                drawn_at = time.monotonic()
        if kept:
            self._tell(name, kept)

    def _tell(self, stream: str, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        self._news.put({"stream": stream, "line": text, "at": time.time()})

    def _scontrol(self) -> Path:
        place = self._own / "bin"
        place.mkdir(exist_ok=True)
        (place / "scontrol").write_text(_SCONTROL)
        (place / "scontrol").chmod(0o755)
        return place


def _recorded(error_file: Path) -> dict[str, Any] | None:
    """What torch's @record wrote about the exception that ended the script."""
    try:
        told = json.loads(error_file.read_text())["message"]
        return told if isinstance(told, dict) else {"message": str(told)}
    except (OSError, ValueError, KeyError):
        return None
