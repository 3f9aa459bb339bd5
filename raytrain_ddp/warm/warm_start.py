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

_started: set[str] = set()  # servers of this process


def py_executable(owner: int, threads: int) -> str:
    """The `py_executable` of a runtime environment; see fork_client.py for the arguments."""
    command = _COMMAND.format(
        python=shlex.quote(sys.executable),
        client=shlex.quote(str(Path(fork_client.__file__).resolve())),
        arguments=f"{owner} {threads}",
    )
    return f"sh -c {shlex.quote(command)} sh"


def why_cold() -> str:
    """Why the processes of a Ray that is started here are not forks; "" if they are."""
    with suppress(OSError):
        if fork_client.free_memory() < fork_client.LEAST_FREE:
            return "less than a tenth of the memory is free"
    return fork_client.unsuited()


def start_early(threads: int, owner: int = 0) -> None:
    """Starts the server of a process, so that it loads its modules while Ray starts.

    Without it, the first worker starts it. A second call does nothing.

    Args:
        owner: the process that it ends with; 0: this one.
    """
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None or why_cold():
        return
    script = str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py")
    owner = owner or os.getpid()
    with suppress(OSError):  # the workers start as usual
        address = fork_client.address_of(owner, threads, script)
        if address not in _started:
            _started.add(address)
            fork_client.start_server(address, owner, threads)
