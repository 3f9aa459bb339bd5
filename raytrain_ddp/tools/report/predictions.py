"""What a run's best checkpoint predicts, as HTML: here, or in a process of its own.

``raytrain report.predictions RUN`` prints it. A server starts that process, as the
run's task is somebody's code, and torch would stay in the server's memory.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from html import escape

from raytrain_ddp.errors import PreflightError, RaytrainError, first_line
from raytrain_ddp.tools.report.history import RunHistory, history_of
from raytrain_ddp.tools.report.run_files import read_run

_MOST_S = 300.0  # a minute of it evaluates; the rest imports torch and opens the data
_NICE = 10


def predictions(history: RunHistory, device: str) -> str:
    """HTML, or why there is none, which is not an error."""
    if not history.files.kept:
        return ""
    from raytrain_ddp.tools.report.class_tables import classes
    from raytrain_ddp.tools.report.mistakes import predict

    try:
        return classes(predict(history.files, device, history.state == "running"))
    except (RaytrainError, OSError) as error:
        return _none(str(error))


class Predictor:
    """Makes the predictions of one run at a time, in a child process.

    Attributes:
        found: name of the run -> (number of the result, HTML; "" while it is made).
    """

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, str]] = {}
        self._numbers = itertools.count(1)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self, history: RunHistory) -> str:
        """Begins, and returns what happens now.

        Raises:
            PreflightError: it predicts already.
        """
        name = history.files.name
        with self._lock:
            if self._child is not None:
                raise PreflightError("a checkpoint is being evaluated: try again when it is done.")
            command = [sys.executable, "-m", __name__, history.files.place.address]
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            self.found[name] = next(self._numbers), ""
            threading.Thread(target=self._finish, args=(name, self._child), daemon=True).start()
        return "The best checkpoint is being evaluated."

    def close(self) -> None:
        """Ends the child process."""
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def _finish(self, name: str, child: subprocess.Popen[bytes]) -> None:
        try:
            html = _result(child, *child.communicate(timeout=_MOST_S))
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            html = _none(f"it took over {_MOST_S:.0f} s.")
        with self._lock:
            self.found[name] = next(self._numbers), html
            self._child = None


def _result(child: subprocess.Popen[bytes], out: bytes, errors: bytes) -> str:
    """HTML: the last line of the child's output, as a task may print something, too."""
    lines = out.decode("utf-8", "replace").splitlines()
    if child.returncode == 0 and lines:
        return lines[-1]
    said = errors.decode("utf-8", "replace").strip().splitlines() or ["its process was killed."]
    return _none(said[-1])


def _none(why: str) -> str:
    return f"<p class=note>None: {escape(why)}</p>"


def _main(place: str) -> int:
    os.nice(_NICE)  # the run that is examined may be training here
    try:
        found = predictions(history_of(read_run(place)), "auto")
    except (RaytrainError, OSError) as error:
        found = _none(first_line(error))
    sys.stdout.write("\n" + " ".join(found.splitlines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
