"""Times the first step in forks of a warm server, and in fresh processes: ``gpu_forks.py OPTIONS``.

Started by gpu.py; "argv" of the options is a command line of `raytrain fit`, for one step. Imports
nothing of this package but the server, which must load the modules.
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

HERE = Path(__file__).resolve().parent
FRESH, LIMIT_S = 2, 60.0


def main() -> None:
    options = json.loads(sys.argv[1])
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
        name = f"first-{number}"
        argv = [*options["argv"], "--name", name]
        began = time.monotonic()
        if kind == "fork":
            in_fork(argv)
        else:
            subprocess.run([sys.executable, "-m", "raytrain_ddp.fit", *argv], check=True)
        took[kind].append(time.monotonic() - began)
        log = Path(options["storage"]) / name / "metrics.jsonl"
        losses.add(json.loads(log.read_text().splitlines()[0])["loss"])
        parts = [
            f"{len(each)} x {name}: {min(each):.1f} .. {max(each):.1f} s for a run of one step"
            for name, each in took.items()
            if each
        ]
        same = "the same loss" if len(losses) == 1 else f"DIFFERENT LOSSES: {losses}"
        print(f"= {'; '.join(parts)}; {same}", flush=True)
    if len(losses) > 1:
        raise RuntimeError("forks and fresh processes have different losses")


def in_fork(argv: list[str]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            from raytrain_ddp.fit import main as fit

            status = fit(argv)
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    end = os.pidfd_open(pid)
    is_done = bool(select.select([end], [], [], LIMIT_S)[0])
    os.close(end)
    if not is_done:
        os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("a fork failed on the GPU" if is_done else "a fork hangs on the GPU")


if __name__ == "__main__":
    main()
