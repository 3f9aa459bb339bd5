"""Times the first step in forks of a warm server, and in fresh processes: ``gpu_forks.py OPTIONS``.

gpu.py starts it. It imports only the server from this package, as the server must load the modules.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FRESH, LIMIT_S = 3, 60.0


def main() -> None:
    options = {**json.loads(sys.argv[1]), "steps": 1, "warm_up": 0, "every": 1}
    sys.path.insert(0, str(HERE.parent / "raytrain_ddp" / "warm"))
    import fork_server

    fork_server.load()
    if not fork_server.is_fit_to_fork():
        tasks = Path("/proc/self/task").iterdir()
        threads = [(task / "comm").read_text().strip() for task in tasks]
        files = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
        raise RuntimeError(f"not fit to fork: threads {threads}, files {sorted(files)}")
    took: dict[str, list[float]] = {"fork": [], "fresh process": []}
    losses = set()
    for number in range(options["forks"] + FRESH):
        kind = "fork" if number < options["forks"] else "fresh process"
        given = {**options, "name": f"first-{number}"}
        began = time.monotonic()
        at, loss = json.loads(in_fork(given) if kind == "fork" else in_fresh(given))
        took[kind].append(at - began)
        losses.add(loss)
        parts = [
            f"{len(each)} x {name}: {min(each):.1f} .. {max(each):.1f} s to the first step"
            for name, each in took.items()
            if each
        ]
        same = "the same loss" if len(losses) == 1 else f"DIFFERENT LOSSES: {losses}"
        print(f"= {'; '.join(parts)}; {same}", flush=True)
    if len(losses) > 1:
        raise RuntimeError("forks and fresh processes have different losses")


def in_fork(options: dict[str, Any]) -> bytes:
    """Runs `first` of gpu_jobs.py in a fork; returns what it prints."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writing, 1)
            sys.path.insert(0, str(HERE))
            import gpu_jobs

            gpu_jobs.first(options)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    is_done = bool(select.select([reading], [], [], LIMIT_S)[0])
    answer = os.read(reading, 1 << 10) if is_done else b""
    os.close(reading)
    if not is_done:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not answer:
        raise RuntimeError("a fork failed on the GPU" if is_done else "a fork hangs on the GPU")
    return answer


def in_fresh(options: dict[str, Any]) -> bytes:
    command = [sys.executable, str(HERE / "gpu_jobs.py"), "first", json.dumps(options)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


if __name__ == "__main__":
    main()
