"""A Python that has the heavy modules loaded, and forks from itself what it is asked for.

Run by fork_client.py as ``python fork_server.py ADDRESS OWNER EXPECTED [MODULE ...]``. It has no
thread and no CUDA context, and never imports Ray, whose random numbers would then be equal in all
workers. It ends when its owner ends, and ends what it has forked with it.
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
_RAY = ("ray", "ray.train", "ray.train.torch")
_JOB = b"RAY_JOB_ID"
# Not read when Ray is loaded. RAY_JOB_ID is: Ray ends a worker that has that of another job.
_READ_LATER = (b"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",)
_OF_CLUSTER = "AutoscalingCoordinator"  # an actor of Ray Train; any other counts
IDLE_S = 3600.0
_LOOK_S = 10.0
_GRACE_S = 5.0
_REQUEST_WITHIN_S = 5.0
_QUIET_S = 3.0  # after the last request: loading takes half a second of CPU
_EXPECTED_WITHIN_S = 30.0
_TAKEN_WITHIN_S = 2.0
_LEAST_FREE = 0.05


def main(address: str, owner: int, expected: int, modules: Sequence[str]) -> None:
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
    children = Server(listener, owner_end, variables if is_fit_to_fork() else None).serve(expected)
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
    on_gpu = any(name.startswith("/dev/nvidia") for name in opened)
    return threads == 1 and not on_gpu and "ray" not in sys.modules


@dataclass
class Server:
    """Forks on request.

    Args:
        variables: added to the environments of the processes; None: refuses all requests.
        children: the processes that live: pidfd -> (pid, where its status goes, if it is wanted).
    """

    listener: socket.socket
    owner_end: int
    variables: Mapping[str, str] | None
    children: dict[int, tuple[int, socket.socket | None]] = field(default_factory=dict)

    def serve(self, expected: int) -> dict[int, int]:
        """Returns the pidfds and pids of the processes that live at its end.

        Args:
            expected: processes that follow the first one soon.
        """
        spares = Spares(self.variables or {}, expected)
        asked = time.monotonic()
        while True:
            watched = [self.listener.fileno(), self.owner_end, *self.children, *spares.waiting]
            ready, _, _ = select.select(watched, [], [], min(_LOOK_S, spares.look_s))
            living = {pidfd: pid for pidfd, (pid, _) in self.children.items()}
            if self.owner_end in ready:
                return living
            for file in spares.waiting.keys() & set(ready):
                spares.hear(file)
            for pidfd in living.keys() & set(ready):
                self._reap(pidfd)
            if self.listener.fileno() in ready:
                asked = time.monotonic()
                refused = suppress(OSError, ValueError, EOFError)
                with refused, self.listener.accept()[0] as connection:
                    self._answer(connection, spares)
            spares.tend()
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

    def _answer(self, connection: socket.socket, spares: Spares) -> None:
        if self.variables is None or not client.is_own(connection):
            return
        connection.settimeout(_REQUEST_WITHIN_S)
        connection.sendall(client.READY)
        given, files = fork_child.received(connection)
        try:
            if "expected" in given:
                spares.expect(given["expected"], given["job"].encode())
                return
            if hides_modules(given["environment"].get(b"PYTHONPATH", b"")):
                return
            pid = spares.take(given, files) or os.fork()
            if pid == 0:
                fork_child.become(given, files, self.variables)
            self.children[os.pidfd_open(pid)] = pid, connection.dup() if given["waits"] else None
            with suppress(OSError):  # the client has ended: the process is still one of ours
                connection.sendall(client.NUMBER.pack(pid))
        finally:
            fork_child.close(files)


@dataclass
class Spare:
    """A process that was forked before it is asked for, has loaded Ray, too, and waits.

    Args:
        loaded_with: what its modules depend on, see _read_by_ray().
        connection: to the process.
        ready: whether it has loaded Ray.
    """

    pid: int
    loaded_with: object
    connection: socket.socket
    ready: bool = False

    def end(self) -> None:
        self.connection.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@dataclass
class Spares:
    """The spares of a server: a worker that is one of them starts sooner.

    Args:
        variables: added to the environments of the processes.
        number: how many there are to be, until `due`; then as many as the last request wants.
        waiting: by the file number of their connections.
        last: the last request, or one like it of an expected job.
    """

    variables: Mapping[str, str]
    number: int = 0
    waiting: dict[int, Spare] = field(default_factory=dict)
    last: Mapping[str, Any] | None = None
    due: float = float("inf")

    @property
    def look_s(self) -> float:
        """Seconds after which tend() has something to do."""
        return max(0.0, self.due - time.monotonic())

    def take(self, given: Mapping[str, Any], files: list[int]) -> int:
        """The pid of a spare that becomes the process that was asked for; 0: there is none."""
        self.last, self.due = given, time.monotonic() + _QUIET_S
        self.number = max(0, self.number - 1)
        wanted = _read_by_ray(given)
        for file, spare in sorted(self.waiting.items(), key=lambda each: not each[1].ready):
            if spare.loaded_with != wanted:
                continue
            del self.waiting[file]
            with suppress(OSError), spare.connection as connection:
                client.send_request(connection, given, files)
                # One that is not ready yet is still ahead of a new process.
                if not spare.ready or connection.recv(1) == client.READY:
                    return spare.pid
            spare.end()  # so that there are not two
        return 0

    def hear(self, file: int) -> None:
        """Handles what a spare has sent: it is ready, or has ended."""
        spare = self.waiting[file]
        with suppress(OSError):
            spare.ready = spare.connection.recv(1) == client.READY
        if not spare.ready:  # nothing takes its place, which might end in the same way
            self.waiting.pop(file).end()
            self.number -= 1

    def expect(self, processes: int, job: bytes) -> None:
        """A new job will soon ask for so many: spares for it load Ray meanwhile.

        Args:
            job: its RAY_JOB_ID; empty: presumably the next one.
        """
        if self.last is not None and self.last["spares"]:
            self.last, self.number = _of_job(self.last, job), processes
            self.due = time.monotonic() + _EXPECTED_WITHIN_S

    def tend(self) -> None:
        """Starts spares, and ends those that do not suit the last request once it is some time
        ago."""
        if self.last is None:
            return
        wanted = _read_by_ray(self.last)
        if time.monotonic() >= self.due:
            self.due, self.number = float("inf"), self.last["spares"]
            for file, spare in [*self.waiting.items()]:
                if spare.loaded_with != wanted or len(self.waiting) > self.number:
                    self.waiting.pop(file).end()
        suited = sum(spare.loaded_with == wanted for spare in self.waiting.values())
        loading = sum(not spare.ready for spare in self.waiting.values())
        # Leaves a core to the new job's driver, which is starting, too.
        at_once = max(1, len(os.sched_getaffinity(0)) - 1)
        for _ in range(min(self.number - suited, at_once - loading)):
            if client.free_memory() > client.LEAST_FREE:
                self._start(self.last, wanted)

    def _start(self, given: Mapping[str, Any], loaded_with: object) -> None:
        own, its = socket.socketpair()
        with its:
            pid = os.fork()
            if pid == 0:
                wait(its, given, self.variables)
        own.settimeout(_TAKEN_WITHIN_S)
        self.waiting[own.fileno()] = Spare(pid, loaded_with, own)


def wait(connection: socket.socket, given: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """In the forked process: loads Ray, and waits for a request; does not return."""
    try:
        fork_child.close_all_but({0, 1, 2, connection.fileno()})
        fork_child.take_environment(given, variables)
        before = [*sys.path]
        sys.path[:0] = fork_child.module_folders(given)
        for name in _RAY:
            importlib.import_module(name)
        sys.path[:] = before
        with suppress(BrokenPipeError):  # it was taken before it was ready
            connection.sendall(client.READY)
        request, files = fork_child.received(connection)
        with suppress(BrokenPipeError):
            connection.sendall(client.READY)
    except BaseException:  # the server has ended, or Ray cannot be loaded
        os._exit(1)
    fork_child.become(request, files, variables)


def _read_by_ray(given: Mapping[str, Any]) -> object:
    """What of a request may change the modules of Ray: the environment, and where they lie."""
    environment = {k: v for k, v in given["environment"].items() if k not in _READ_LATER}
    return environment, fork_child.module_folders(given)


def _of_job(given: Mapping[str, Any], job: bytes) -> dict[str, Any]:
    """A request as this job's would be; see `Spares.expect`. Ray numbers its jobs: four bytes, the
    lowest first."""
    environment = dict(given["environment"])
    with suppress(KeyError, ValueError, OverflowError):
        last = int.from_bytes(bytes.fromhex(environment[_JOB].decode()), "little")
        environment[_JOB] = job or (last + 1).to_bytes(4, "little").hex().encode()
    return {**given, "environment": environment}


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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
