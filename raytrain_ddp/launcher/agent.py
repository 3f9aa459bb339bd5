"""The actor of one worker: starts the script under its guard, and forwards its output.

The driver sends this module with the actor, so a node needs only Ray and the script's own
dependencies, not this package. Therefore, it imports only the standard library and Ray, and its
interface uses plain values: objects of this package could not be unpickled there.
"""

from __future__ import annotations

import json
import os
import queue
import random
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# The function, not the module: only it goes along with the class.
from raytrain_ddp.launcher.code_shipping import unpack_folder

# Below the range of ports for outgoing connections, and above that of well-known services: a port
# that is free now is still free when the script listens on it seconds later.
# Also above the ports of slurm.sbatch.
_PORTS = range(32_000, 32_768)
_CHUNK_BYTES = 1 << 16
_MAX_WAITING = 1_000  # chunks not yet taken by the driver; a script that prints more blocks
_MAX_NEWS = 100  # per reply
_LOOK_S = 0.5  # how often to check whether a silent stream has a writer left
_SCONTROL = """#!/bin/sh
# Answers scontrol show hostnames [LIST], which an unconfigured Slurm cannot. The next scontrol on
# the PATH answers everything else, and lists with brackets.
list=${3:-$SLURM_JOB_NODELIST}
case "$1 $2 $list" in
  *\\[*) ;;
  "show hostname "*|"show hostnames "*) echo "$list" | tr , '\\n'; exit ;;
esac
case $PATH in *:*) PATH=${PATH#*:}; command -v scontrol > /dev/null && exec scontrol "$@" ;; esac
echo "scontrol: on Ray, only 'show hostnames' is supported" >&2
exit 1
"""


class Agent:
    """The actor on one worker's seat. `take` may wait while other calls run.

    Args:
        guard: the source of guard.py.
    """

    def __init__(self, guard: str) -> None:
        self._source = guard
        self._news: queue.Queue[tuple[str, Any]] = queue.Queue(_MAX_WAITING)
        self._guard: subprocess.Popen[bytes] | None = None

    def seat(self) -> dict[str, Any]:
        """The facts about this seat."""
        import ray

        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
            "node_has_gpus": any(Path("/dev").glob("nvidia[0-9]*")),
            "python": sys.executable,
            "environment": dict(os.environ),
        }

    def free_port(self, wanted: int | None) -> int:
        """This port if it is free, or any free port for None; else 0."""
        for port in [*random.sample(_PORTS, 20), 0] if wanted is None else [wanted]:
            with socket.socket() as probe, suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like torch's store
                probe.bind(("", port))
                return int(probe.getsockname()[1])
        return 0

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder here."""
        return os.path.exists(path)

    def unpack(self, archive: bytes, folder: str) -> str:
        """Writes the code to a folder of this name among the temporary ones; returns its path.

        Raises:
            PermissionError: another user has created that folder.
        """
        own = Path(tempfile.gettempdir()) / f"raytrain_ddp-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            place = f"{own} on {socket.gethostname()}"
            raise PermissionError(f"{place} is another user's, who may change what is in it")
        own.chmod(0o700)
        unpack_folder(archive, own / folder)
        return str(own / folder)

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: str,
        slurm: bool,
        stdin: str,
    ) -> None:
        """Starts a command in a folder; call `take` for its output and its end.

        Args:
            environment: complete except for the path in TORCHELASTIC_ERROR_FILE.
            slurm: whether to put a `scontrol` on the PATH.
            stdin: the file that is its standard input.
        """
        own = Path(tempfile.mkdtemp(prefix="raytrain-run-"))  # the guard removes it
        (own / "guard.py").write_text(self._source, encoding="utf-8")
        if "TORCHELASTIC_ERROR_FILE" in environment:
            environment["TORCHELASTIC_ERROR_FILE"] = str(own / "error.json")
        if slurm:
            (own / "scontrol").write_text(_SCONTROL, encoding="utf-8")
            (own / "scontrol").chmod(0o755)
            environment["PATH"] = f"{own}:{environment.get('PATH', os.defpath)}"
        reports, report = os.pipe()
        guard = [sys.executable, "-I", "-S", str(own / "guard.py"), str(report), stdin, folder]
        self._guard = subprocess.Popen(
            [*guard, *command],
            bufsize=0,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[report],
            start_new_session=True,  # signals to Ray's process group must not reach the guard
        )
        os.close(report)
        args = (self._guard, reports, own)
        threading.Thread(target=self._attend, args=args, daemon=True).start()

    def signal(self, number: int, grace_s: float) -> None:
        """Sends a signal to the script and its children, and kills them after a while."""
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self._guard.stdin.write(f"{number} {grace_s}\n".encode())

    def take(self, wait_s: float) -> tuple[float, list[tuple[str, Any]]]:
        """The time by this machine's monotonic clock, and what is new, waiting up to `wait_s`:

        - `stdout` or `stderr`, and bytes as the script wrote them;
        - `end`, and what the guard reports, as soon as the script has ended;
        - `closed`: nothing more will come.
        """
        news = []
        with suppress(queue.Empty):
            news.append(self._news.get(timeout=wait_s))
            while len(news) < _MAX_NEWS:
                news.append(self._news.get_nowait())
        return time.monotonic(), news

    def clean(self) -> None:
        """Ends the script; the guard removes its own files."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()

    def _attend(self, guard: subprocess.Popen[bytes], reports: int, own: Path) -> None:
        """Forwards output and report until they end, or until no writer can be left."""
        assert guard.stdout is not None
        assert guard.stderr is not None
        names = {guard.stdout.fileno(): "stdout", guard.stderr.fileno(): "stderr", reports: "end"}
        poll, report = select.poll(), b""
        for fd in names:
            poll.register(fd, select.POLLIN)
        with guard, os.fdopen(reports):
            while ready := poll.poll(None if reports in names else _LOOK_S * 1000):
                for fd, _ in ready:
                    data = os.read(fd, _CHUNK_BYTES)
                    if not data:
                        poll.unregister(fd)
                        del names[fd]
                    elif fd != reports:
                        self._news.put((names[fd], data))
                    elif (report := report + data).endswith(b"\n"):
                        self._news.put(("end", json.loads(report)))
                    if not data and fd == reports and not report:  # the guard itself was killed
                        self._news.put(("end", {"status": -9, "at": time.monotonic()}))
                        shutil.rmtree(own, ignore_errors=True)
                if not names:
                    break
        self._news.put(("closed", None))
