"""A Python process that has the heavy modules loaded, and forks itself on request.

fork_client.py runs it as ``python fork_server.py ADDRESS OWNER [MODULE ...]``. It has no extra
threads and no CUDA context, and never imports Ray, whose random numbers would then be equal in all
workers. After each worker, one fork loads Ray and waits to be the next one. The server ends when
its owner ends, and then also ends its forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_ddp.warm import fork_child
    from raytrain_ddp.warm import fork_client as client
else:  # of this folder: the package itself is each worker's own
    import fork_child
    import fork_client as client

# What Ray, Ray Train and training import, without Ray itself. Those that fail are left out.
_MODULES = """
aiohttp click colorful filelock fsspec fsspec.implementations.local google.protobuf.descriptor_pb2
google.protobuf.json_format google.protobuf.struct_pb2 google.protobuf.timestamp_pb2 jsonschema
logging.config msgpack packaging.version psutil pydantic.dataclasses pydantic.json_schema
pydantic.main pydantic.v1 referencing requests rich.console sqlite3 typing_extensions yaml
numpy pandas pyarrow pyarrow.compute pyarrow.dataset pyarrow.fs pyarrow.parquet
PIL.Image safetensors.torch simplejpeg
torch torch._dynamo torch._inductor.config torch.distributed torch.nn.parallel torch.optim
torch.utils.data torch.utils.flop_counter torch.utils.tensorboard
torchvision torchvision.transforms.v2 torchmetrics torchmetrics.classification
"""
_OF_CLUSTER = "AutoscalingCoordinator"  # an actor of Ray Train; any other counts
IDLE_S = 3600.0
_LOOK_S = 10.0
_GRACE_S = 5.0
_REQUEST_WITHIN_S = 5.0
_LEAST_FREE = 0.05
_QUIET_S = 3.0  # after the last request: then the spare's start takes no CPU time from a worker's


def main(address: str, owner: int, modules: Sequence[str]) -> None:
    """Serves until the owner ends, memory is short, or an hour has passed without a request while
    no job has a process."""
    fork_child.close_all_but({0, 1, 2})
    os.chdir("/")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody could wait for a process
    owner_end = os.pidfd_open(owner)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        return  # there is one already
    listener.listen(128)
    sys.path.pop(0)  # this folder
    variables = load(modules)
    children = Server(listener, owner_end, variables if is_fit_to_fork() else None).serve()
    listener.close()
    if select.select([owner_end], [], [], 0)[0]:
        end(children)
    os._exit(0)  # nothing is left to clean up


def load(modules: Sequence[str] = ()) -> dict[str, str]:
    """Imports the modules; returns the environment variables that they have set.

    Args:
        modules: besides the usual ones. Of this package: those of the tree that this file is in.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for GPUs without a CUDA context
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of PyArrow's jemalloc
    before = {*os.environ}
    gc.disable()  # a fifth of the CPU of what follows
    for name in _MODULES.split():
        with suppress(Exception):
            importlib.import_module(name)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    for name in modules:
        importlib.import_module(name)
    sys.path.pop(0)
    gc.freeze()  # a worker's garbage collector would copy the pages
    gc.enable()
    if (child := os.fork()) == 0:  # ends the threads that NumPy's OpenBLAS starts when loaded
        os._exit(0)
    os.waitpid(child, 0)
    return {name: value for name, value in os.environ.items() if name not in before}


def is_fit_to_fork() -> bool:
    """Whether this process has one thread and no GPU, and has not imported Ray."""
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    opened = {os.readlink(file) for file in files if os.path.islink(file)}
    threads = len(os.listdir("/proc/self/task"))
    on_gpu = any(name.startswith(("/dev/nvidia", "/dev/dxg")) for name in opened)  # or WSL's
    return threads == 1 and not on_gpu and "ray" not in sys.modules


@dataclass
class Server:
    """Forks on request.

    Args:
        variables: added to the environments of the processes; None: refuses all requests.
        children: the processes that live: pidfd -> (pid, where its status goes, if it is wanted).
        spare: pid, model request and connection of a process that has loaded Ray and waits.
        last: the request of the last worker; `due`: the monotonic time to fork a spare like it.
    """

    listener: socket.socket
    owner_end: int
    variables: Mapping[str, str] | None
    children: dict[int, tuple[int, socket.socket | None]] = field(default_factory=dict)
    spare: tuple[int, Mapping[str, Any], socket.socket] | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    due: float = float("inf")

    def serve(self) -> dict[int, int]:
        """Serves requests; returns the pidfds and pids of the processes still alive at its end."""
        asked = time.monotonic()
        while True:
            watched = [self.listener.fileno(), self.owner_end, *self.children]
            left_s = max(0.0, self.due - time.monotonic())
            ready, _, _ = select.select(watched, [], [], min(_LOOK_S, left_s))
            if left_s == 0:
                self._prepare()
            living = {pidfd: pid for pidfd, (pid, _) in self.children.items()}
            if self.owner_end in ready:
                return living
            for pidfd in living.keys() & set(ready):
                self._reap(pidfd)
            if self.listener.fileno() in ready:
                asked = time.monotonic()
                refused = suppress(OSError, ValueError, EOFError)
                with refused, self.listener.accept()[0] as connection:
                    self._answer(connection)
            idle = time.monotonic() - asked > IDLE_S and all(map(outlasts_jobs, living.values()))
            is_awaited = any(awaited for _, awaited in self.children.values())
            if idle or (client.free_memory() < _LEAST_FREE and not is_awaited):
                return living

    def _reap(self, pidfd: int) -> None:
        pid, awaited = self.children.pop(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        if awaited:
            with suppress(OSError), awaited:
                awaited.sendall(client.NUMBER.pack(status))

    def _answer(self, connection: socket.socket) -> None:
        if self.variables is None or not client.is_own(connection):
            return
        connection.settimeout(_REQUEST_WITHIN_S)
        connection.sendall(client.READY)
        given, files = fork_child.received(connection)
        try:
            if hides_modules(given["environment"].get(b"PYTHONPATH", b"")):
                return
            if (pid := self._taken(given, files) or os.fork()) == 0:
                fork_child.become(given, files, self.variables)
            if not given["waits"]:  # a worker of Ray's
                self.last, self.due = given, time.monotonic() + _QUIET_S
            self.children[os.pidfd_open(pid)] = pid, connection.dup() if given["waits"] else None
            with suppress(OSError):  # the client has ended: the process is still one of ours
                connection.sendall(client.NUMBER.pack(pid))
        finally:
            fork_child.close(files)

    def _prepare(self) -> None:
        """Forks a spare that is like the last worker, unless there is one."""
        self.due = float("inf")
        if self.spare is None:
            own, its = socket.socketpair()
            with its:
                if (pid := os.fork()) == 0:
                    fork_child.wait(its, self.last, self.variables or {})
            self.spare = pid, self.last, own

    def _taken(self, given: Mapping[str, Any], files: Sequence[int]) -> int:
        """Makes the spare the process that is asked for, and returns its pid; if it does not suit,
        ends it, and returns 0."""
        if self.spare is None:
            return 0
        (pid, like, connection), self.spare = self.spare, None
        connection.settimeout(_REQUEST_WITHIN_S)
        with connection, suppress(OSError):
            is_ready = select.select([connection], [], [], 0)[0] and connection.recv(1)
            if is_ready and all(like[name] == given[name] for name in ("environment", "folder")):
                client.send_request(connection, given, files)
                if connection.recv(1):
                    return pid
        os.kill(pid, signal.SIGKILL)  # still our child, even if it has ended
        os.waitpid(pid, 0)
        return 0


def hides_modules(path: bytes) -> bool:
    """Whether a folder of PYTHONPATH has modules with names of those that are loaded, or of those
    that Python runs when it starts."""
    loaded = {name.partition(".")[0] for name in _MODULES.split()}
    loaded |= {"sitecustomize", "usercustomize"}
    for folder in os.fsdecode(path).split(os.pathsep):
        with suppress(OSError):
            if folder and loaded & {name.partition(".")[0] for name in os.listdir(folder)}:
                return True
    return False


def outlasts_jobs(pid: int) -> bool:
    """Whether a process is one of Ray's own, which stay as long as the cluster."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8") as title:
        return _OF_CLUSTER in title.read()
    return False


def end(children: dict[int, int]) -> None:
    """Gives the processes some seconds, as they end with Ray by themselves; then kills them."""
    deadline = time.monotonic() + _GRACE_S
    while children and (left := deadline - time.monotonic()) > 0:
        for ended in select.select([*children], [], [], left)[0]:
            children.pop(ended)
    for child in children.values():
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
