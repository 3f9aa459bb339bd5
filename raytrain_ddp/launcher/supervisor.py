"""The parent process of a script: starts it, forwards signals, and leaves nothing behind.

``python -I -S guard.py REPORT_FD STDIN_FD FOLDER COMMAND...``, uses only the standard library:

- the script is a real main process in its own session, without anything from Ray;
- the guard moves to the background: Ray kills the children of a worker that ends, but nobody would
  kill their children;
- FOLDER is created and removed here, so it never outlives the starting process;
- when standard input ends because the starting process is gone, all descendants are killed
  immediately;
- a line on standard input is the number of a signal for the script's process group, or ``kill``;
- processes left behind by the script, including daemons, are ended.

The script's standard input is STDIN_FD; with -1 it is empty.

Reports JSON lines on REPORT_FD: {"pid", "guard"}, and as soon as the script has ended {"status",
"at", "asked", "asked_at", "error"}: its status as in subprocess, negative for a signal; the time,
by this machine's monotonic clock; the signal it had been sent before, or 0, and when the first one
was sent; and what torch's @record wrote about the exception that ended it, or null. REPORT_FD is
closed when all descendants have ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LEFTOVERS_GRACE_S = 2.0
SCONTROL = """#!/bin/sh
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


def main(report: int, stdin: int, folder: str, command: list[str]) -> None:
    """Returns at once in the calling process; in the guard, when no descendants are left."""
    if os.fork():
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below become children of this process
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if file.read().strip() == "1000":  # of Ray's workers: the kernel kills them first,
            file.seek(0)  # whichever process ran out of memory
            file.write("0")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # instructions come through the pipe
    for fd in (report, stdin) if stdin >= 0 else (report,):
        os.set_inheritable(fd, False)
    try:
        _furnish(folder)
        _watch(report, stdin, folder, command)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        _tell(report, {"status": 127, "at": time.monotonic(), "asked": 0})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(report: int, stdin: int, folder: str, command: list[str]) -> None:
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    script = _start(command, stdin)
    _tell(report, {"pid": script, "guard": os.getpid()})
    watched, asked, asked_at = [woken, 0], 0, 0.0
    while (status := _ended(script)) is None:
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            os.read(woken, 4096)  # processes that ended before a signal ended by themselves
        elif 0 in ready:
            instructions = os.read(0, 4096).split()
            if not instructions:
                watched.remove(0)
            for instruction in instructions or [b"kill"]:
                asked = signal.SIGKILL if instruction == b"kill" else int(instruction)
                asked_at = asked_at or time.monotonic()
                _obey(script, asked)
    ended = {"status": status, "at": time.monotonic(), "asked": asked, "asked_at": asked_at}
    _tell(report, ended | {"error": _recorded(f"{folder}/error.json")})
    _end_leftovers(_LEFTOVERS_GRACE_S if 0 in watched else 0)


def _furnish(folder: str) -> None:
    """Creates the folder, with a `scontrol` in it if the script's PATH refers to it."""
    os.mkdir(folder, 0o700)
    if f"{folder}/bin" in os.environ.get("PATH", "").split(":"):
        os.mkdir(f"{folder}/bin")
        with open(f"{folder}/bin/scontrol", "w") as file:
            file.write(SCONTROL)
        os.chmod(file.name, 0o755)


def _recorded(path: str) -> dict[str, object] | None:
    """The content of torch's @record file, plus the time `at`, by this machine's monotonic
    clock."""
    try:
        with open(path) as file:
            content = json.load(file)["message"]
        content = content if isinstance(content, dict) else {"message": str(content)}
        return {**content, "at": time.monotonic() - time.time() + os.stat(path).st_mtime}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _start(command: list[str], stdin: int) -> int:
    guard = os.getpid()
    ready, starting = os.pipe()  # closed by exec
    pid = os.fork()
    if pid:
        os.close(starting)
        if stdin >= 0:
            os.close(stdin)  # so the writer notices when the script ends
        os.read(ready, 1)  # a signal sent before it has its process group would be lost
        os.close(ready)
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it ended before that
            os._exit(1)
        os.dup2(stdin if stdin >= 0 else os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's workers block SIGINT
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _obey(script: int, number: int) -> None:
    with suppress(OSError):  # it has just ended
        os.killpg(script, number)
    if number == signal.SIGKILL:
        for pid in [script, *_descendants()]:
            _signal(pid, number)


def _ended(script: int) -> int | None:
    """The script's exit status, once it has one; takes note of all other ends as well."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == script:
            return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _end_leftovers(grace_s: float) -> None:
    """SIGTERM, then after a while or on ``kill`` SIGKILL, until there are no children."""
    deadline = time.monotonic() + grace_s
    for pid in _descendants():
        _signal(pid, signal.SIGTERM)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            for pid in _descendants():
                _signal(pid, signal.SIGKILL)
        elif select.select([0], [], [], 0)[0]:  # the starting process does not want to wait
            deadline = 0.0
        time.sleep(0.02)


def _descendants() -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    if not os.path.isdir("/proc"):
        return []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, ahead = [], [os.getpid()]
    while ahead:
        for pid in children.get(ahead.pop(), []):
            found.append(pid)
            ahead.append(pid)
    return found


def _signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tell(report: int, content: dict[str, object]) -> None:
    with suppress(OSError):
        os.write(report, json.dumps(content).encode() + b"\n")


if __name__ == "__main__":
    if sys.argv[0].startswith("/dev/fd/"):
        os.close(int(sys.argv[0].rpartition("/")[2]))  # this code was read from it
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
