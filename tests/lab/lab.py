"""Hosts on this machine, each with its own network, processes, disk, and ssh daemon: see lab.sh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "lab.sh"
ROOT = SCRIPT.parents[2]
PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh-keygen", "rsync")


def lacking() -> str:
    """What this machine lacks for a lab; ``""`` if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a lab of hosts needs Linux and root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"a lab of hosts needs {', '.join(absent)}" if absent else ""


class Lab:
    """Hosts by name; `shared` folders are at the same place on all of them, as by NFS.

    The Python that runs this, with its packages, is on each host as well.
    """

    def __init__(self, shared: Sequence[Path], hosts: Sequence[str]) -> None:
        name = f"rtlab{os.getpid()}"
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        where = {"NETLAB_NAME": name, "NETLAB_DIR": f"/var/tmp/{name}", "PATH": path}
        self._environment = {**os.environ, **where}
        self.hosts = tuple(hosts)
        python = {Path(sys.prefix), Path(sys.base_prefix)}
        folders = [word for folder in (*python, *shared) for word in ("-s", str(folder))]
        try:
            self._do("up", *folders, *hosts)
        except BaseException:
            self.down()
            raise

    def _do(self, *words: str) -> str:
        done = subprocess.run(
            [str(SCRIPT), *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"lab.sh {' '.join(words)}: {done.stderr}"
        return done.stdout

    def down(self) -> None:
        self._do("down")

    def home(self, host: str) -> Path:
        """The path of a host's home as seen from this machine."""
        return Path(self._environment["NETLAB_DIR"], "h", host, "home")

    def address(self, host: str) -> str:
        return self._do("ip", host).strip()

    def key(self) -> str:
        return Path(self._do("key").strip()).read_text(encoding="utf-8")

    def crash(self, host: str) -> None:
        """Powers the host off without a shutdown; `boot` powers it on."""
        self._do("crash", host)

    def boot(self, host: str) -> None:
        self._do("boot", host)

    def processes(self, host: str) -> list[str]:
        """Priority and command of each process except the host's own (ssh and this command)."""
        lines = self._do("ps", host).splitlines()[1:]
        found = [line.split(maxsplit=1)[1] for line in lines]
        own = ("sshd:", "/usr/sbin/sshd", "ps -eo")
        return [each for each in found if not each.split(maxsplit=1)[1].startswith(own)]

    def start(self, host: str, script: str) -> Command:
        """Starts a bash script on a host, in its home; does not wait."""
        return Command(host, script, [str(SCRIPT), "exec", host], self._environment)

    def run(self, host: str, script: str, timeout_s: float = 180) -> str:
        """Runs a bash script on a host; returns its output once it has succeeded."""
        command = self.start(host, script)
        status = command.wait(timeout_s)
        assert status == 0, f"exit status {status}: {command}"
        return command.output()


class Command:
    """A command on a host, and its output lines (including standard error) with their times."""

    def __init__(
        self, host: str, script: str, enter: Sequence[str], environment: dict[str, str]
    ) -> None:
        self._script, self._host = script, host
        self.lines: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            [*enter, "bash", "-c", script],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append((time.time(), line.rstrip()))

    def output(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def __str__(self) -> str:
        return f"{self._script!r} on {self._host} said:\n{self.output()[-4000:]}"

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done in {timeout_s:g} s: {self}") from None
        self._listening.join(timeout=1)  # a child process may hold the pipe, as `ssh` does
        return status

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it as Ctrl-C would, if it is still running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def wait_until(what: Callable[[], bool], timeout_s: float, why: object) -> float:
    """Waits until `what` is true; returns the time."""
    deadline = time.time() + timeout_s
    while not what():
        assert time.time() < deadline, f"not in {timeout_s:g} s: {why}"
        time.sleep(0.1)
    return time.time()
