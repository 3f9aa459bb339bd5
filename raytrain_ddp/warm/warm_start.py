"""Which Python Ray runs for a run's processes: one that forks them from a warm process."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from raytrain_ddp.warm import fork_client

# Other nodes may have Python elsewhere: then it is the one that belongs to Ray's own files.
_COMMAND = """p={python} c={client}
[ -x "$p" ] && [ -f "$c" ] && exec "$p" -I -S "$c" {arguments} "$@"
p="${{1%/lib/python*}}/bin/python3"; [ -x "$p" ] || p=python3; exec "$p" "$@\""""

_AUTO = 2  # workers on CPUs, see scaling.num_workers
_MOST = 8  # workers that are prepared: further ones may be placed elsewhere
_started: set[str] = set()  # servers of this process


def py_executable(mode: str, owner: int, threads: int, spares: int) -> str:
    """The `py_executable` of a runtime environment; see fork_client.py for the arguments."""
    command = _COMMAND.format(
        python=shlex.quote(sys.executable),
        client=shlex.quote(str(Path(fork_client.__file__).resolve())),
        arguments=f"{mode} {owner} {threads} {spares}",
    )
    return f"sh -c {shlex.quote(command)} sh"


def announce_job(workers: object, job: str = "") -> None:
    """Makes servers on this machine prepare processes for a job: the mailbox, Ray Train's
    controller, and workers.

    Args:
        workers: how many, if it is an integer.
        job: its id, if it has connected to Ray.
    """
    count = workers if isinstance(workers, int) else _AUTO
    with suppress(OSError):
        fork_client.expect_job(2 + min(count, len(os.sched_getaffinity(0)), _MOST), job)


def start_early(mode: str, threads: int) -> None:
    """Starts the server of this process, so that it loads its modules while Ray starts.

    Without it, the first worker starts it. A second call does nothing.
    """
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None or not fork_client.suits(mode):
        return
    script = str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py")
    try:
        if fork_client.free_memory() < fork_client.LEAST_FREE:
            return
        owner = os.getpid()
        address = fork_client.address_of(owner, threads, script)
        if address not in _started:
            _started.add(address)
            fork_client.start_server(address, owner, threads)
    except OSError:
        pass  # the workers start as usual
