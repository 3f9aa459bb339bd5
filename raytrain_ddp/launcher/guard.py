"""The parent process of a script: starts it, forwards signals, and leaves nothing behind.

``python -I -S OWN/guard.py REPORT_FD STDIN FOLDER COMMAND...``, uses only the standard library:

- the script is a real main process in its own session, without anything from Ray. It runs in
  FOLDER, and reads the file STDIN;
- the guard moves to the background: Ray kills the children of a worker that ends, but nobody would
  kill their children;
- the folder OWN is removed at the end, so it never outlives the starting process;
- a line on standard input is the number of a signal for the script's process group, and the
  seconds after which all descendants are killed, as they are when standard input ends because the
  starting process is gone;
- processes left behind by the script, including daemons, are ended.

As soon as the script has ended, a line of JSON on REPORT_FD says how: `status` as in subprocess,
negative for a signal; `at`, by this machine's monotonic clock; `asked`, the signal that it was sent
before, or 0, and `asked_at`, when the first one was sent; `raised` and `raised_at`, what torch's
@record wrote about the exception that ended it, and when. REPORT_FD is closed when all descendants
have ended.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LEFTOVERS_GRACE_S = 2.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # instructions come through the pipe

Sent = list[tuple[int, float]]  # signals, and when


def main(own: str, report: int, stdin: str, folder: str, command: list[str]) -> None:
    """Returns at once in the calling process; in the guard, when no descendants are left."""
    if os.fork():
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below become children of this process
    with suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if file.read().strip() == "1000":  # of Ray's workers: the kernel kills them first,
            file.seek(0)  # whichever process ran out of memory
            file.write("0")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    sent: Sent = []
    try:
        status = _run(command, stdin, folder, sent)
        end = {"status": status, "at": time.monotonic(), "asked": 0, "asked_at": 0.0}
        if sent:
            end |= {"asked": sent[-1][0], "asked_at": sent[0][1]}
        with suppress(OSError):  # the starting process is gone
            os.write(report, json.dumps(end | _recorded(f"{own}/error.json")).encode() + b"\n")
        _end_leftovers(sent)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _run(command: list[str], stdin: str, folder: str, sent: Sent) -> int:
    """The script's exit status; reaps all others that end meanwhile."""
    try:
        with open(stdin, "rb") as file:
            script = subprocess.Popen(
                command,
                stdin=file,
                cwd=folder,
                start_new_session=True,
                preexec_fn=_as_if_started_by_a_shell,  # noqa: PLW1509 (there is one thread)
            )
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
        return 127
    threading.Thread(target=_obey, args=(script.pid, sent), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == script.pid:
            return os.waitstatus_to_exitcode(status)


def _as_if_started_by_a_shell() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's workers block SIGINT


def _obey(script: int, sent: Sent) -> None:
    """Carries out the instructions on standard input."""
    with open(0, "rb", buffering=0) as lines:
        for line in lines:
            number, grace_s = line.split()
            sent.append((int(number), time.monotonic()))
            with suppress(OSError):  # it has just ended
                os.killpg(script, int(number))
            killer = threading.Timer(float(grace_s), _kill, [sent])
            killer.daemon = True
            killer.start()
    _kill(sent)


def _kill(sent: Sent) -> None:
    sent.append((signal.SIGKILL, time.monotonic()))
    _signal_descendants(signal.SIGKILL)


def _recorded(path: str) -> dict[str, object]:
    try:
        with open(path) as file:
            message = json.load(file)["message"]
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack") or message["message"]
        age_s = time.time() - os.stat(path).st_mtime
        return {"raised": str(message), "raised_at": time.monotonic() - age_s}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {"raised": "", "raised_at": 0.0}


def _end_leftovers(sent: Sent) -> None:
    """SIGTERM, then after a while or when all are killed SIGKILL, until there are no children."""
    deadline = time.monotonic() + _LEFTOVERS_GRACE_S
    _signal_descendants(signal.SIGTERM)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline or signal.SIGKILL in dict(sent):
            _signal_descendants(signal.SIGKILL)
        time.sleep(0.02)


def _signal_descendants(number: int, of: int | str = "self") -> None:
    for path in glob.glob(f"/proc/{of}/task/*/children"):
        with suppress(OSError), open(path) as file:
            for pid in map(int, file.read().split()):
                _signal_descendants(number, pid)
                os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    program, report_fd, stdin_path, *rest = sys.argv
    main(os.path.dirname(program), int(report_fd), stdin_path, rest[0], rest[1:])
