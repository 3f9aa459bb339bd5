"""Loader processes: results in order, the user's own errors, and no leftover processes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from raytrain_ddp.data.loading import loader_processes, shared_memory
from raytrain_ddp.data.loading.loader_processes import LoaderProcesses
from raytrain_ddp.data.loading.loader_threads import Gate, LoaderThreads, prefetched
from raytrain_ddp.errors import DataError, LoaderDied, PreflightError, RemoteTraceback, TaskError
from raytrain_ddp.ray_backend.failure_causes import users_traceback

Point = namedtuple("Point", "x y")


@pytest.fixture(scope="module", autouse=True)
def _keep_interpreter() -> Any:
    return loader_processes._server()


@pytest.fixture
def made() -> Iterator[Callable[..., LoaderProcesses]]:
    """Creates pools that are closed at the end."""
    pools: list[LoaderProcesses] = []

    def make(work: Callable[[Any], Any]) -> LoaderProcesses:
        pools.append(LoaderProcesses(work, lambda item: f"row {item}"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def children() -> set[int]:
    """All processes below this one, except the interpreter they are forked from."""
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if not zombie(p.pid)} - {
        p.pid for p in psutil.Process().children()
    }


def gone(pids: set[int], within_s: float = 20.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(psutil.pid_exists(p) and not zombie(p) for p in pids):
            return True
        time.sleep(0.05)
    return False


def zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def ahead(pool: LoaderProcesses, items: Any, threads: LoaderThreads) -> Iterator[Any]:
    gate = Gate(threads)
    replies = (pool.submit(item, gate.active).result for item in items)
    return prefetched(replies, lambda reply: reply(), threads, lambda _: 1, gate)


@pytest.mark.parametrize("begin", [1, None])
def test_results_arrive_in_order_and_within_the_prefetch_limit(
    made: Callable[..., LoaderProcesses], begin: int | None
):
    begun: list[int] = []

    def work(item: int) -> tuple[int, int]:
        time.sleep(0.002 * (item % 3))
        return item * item, os.getpid()

    def items() -> Iterator[int]:
        for item in range(50):
            begun.append(item)
            yield item

    before = children()
    results = ahead(made(work), items(), LoaderThreads(3, begin, ahead=2))
    first = next(results)
    time.sleep(0.05)
    assert len(begun) <= 2 + 3 * 2
    every = [first, *results]
    assert [value for value, _ in every] == [item * item for item in range(50)]
    pids = {pid for _, pid in every}
    assert os.getpid() not in pids
    assert len(pids) == 3 if begin is None else 1 <= len(pids) <= 3
    assert children() - before == pids


def test_an_error_arrives_in_order_with_the_users_traceback(
    made: Callable[..., LoaderProcesses],
):
    def users_code(item: int) -> int:
        if item == 3:
            raise KeyError("oops")
        return item

    results = ahead(made(users_code), range(100), LoaderThreads(2, ahead=2))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="oops") as caught:
        next(results)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    text = users_traceback(caught.value)
    assert text == str(caught.value.__cause__)
    assert text.splitlines()[1].endswith("in users_code")
    assert text.splitlines()[-1] == "KeyError: 'oops'"


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_of_any_kind_arrive(made: Callable[..., LoaderProcesses]):
    def work(item: int) -> Any:
        if item == 0:
            raise DataError("row 0 is bad.")
        if item == 1:
            raise Odd(1, 2)  # cannot be unpickled
        return (n for n in range(3))  # cannot be pickled

    pool = made(work)
    replies = [pool.submit(item, 1) for item in range(3)]
    with pytest.raises(DataError, match=r"^row 0 is bad\.$") as caught:
        replies[0].result()
    assert caught.value.__cause__ is None
    with pytest.raises(RuntimeError, match=r"^Odd: 1 and 2$"):
        replies[1].result()
    with pytest.raises(TaskError, match=r"cannot be sent .*generator"):
        replies[2].result()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "exited with status 3"),
        (lambda: sys.exit(4), "exited with status 4"),
    ],
)
def test_fault_37_the_death_of_a_process_is_an_error_that_names_its_item(
    end: Callable[[], None], how: str, made: Callable[..., LoaderProcesses]
):
    def work(item: int) -> int:
        if item == 3:
            end()
        return item

    results = ahead(made(work), range(100), LoaderThreads(1, ahead=2))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LoaderDied, match=f"a loader process {how} while it loaded row 3"):
        next(results)


def test_results_sent_before_a_process_died_arrive_although_items_are_unread():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared_memory.send(theirs, "the reply")
    shared_memory.send(ours, "an item that it never reads")
    theirs.close()
    with ours:
        assert shared_memory.receive(ours) == "the reply"
        with pytest.raises(EOFError):
            shared_memory.receive(ours)


@contextmanager
def files_left(number: int) -> Iterator[None]:
    """Leaves this number of file descriptors free."""
    before, opened = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + number + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for _ in range(number):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in opened:
            os.close(file)


@pytest.mark.parametrize("among", [1, 2])  # the second process has not started yet
def test_an_item_that_cannot_be_sent_for_lack_of_file_descriptors_is_refused(
    among: int, made: Callable[..., LoaderProcesses]
):
    pool = made(lambda item: item)
    assert pool.submit(0, 1).result() == 0
    with files_left(0), pytest.raises(PreflightError, match=r"at most \d+ open .*ulimit -n"):
        pool.submit(1, among)
    assert pool.submit(2, among).result() == 2


@pytest.mark.parametrize("free", [0, 1])  # to receive one, and to map it
def test_a_result_that_cannot_be_received_for_lack_of_file_descriptors_is_an_error(
    free: int, made: Callable[..., LoaderProcesses]
):
    pool = made(lambda item: item)
    replies = [pool.submit(item, 1) for item in range(2)]
    with files_left(free), pytest.raises(PreflightError, match=r"ulimit -n"):
        replies[0].result()
    assert replies[1].result() == 1


def test_loader_processes_that_cannot_be_started_for_lack_of_file_descriptors_are_refused():
    with files_left(0), pytest.raises(PreflightError, match=r"ulimit -n"):
        LoaderProcesses(lambda item: item, str)


def test_an_item_that_does_not_fit_into_memory_is_refused(
    made: Callable[..., LoaderProcesses], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pool = made(lambda item: item)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            pool.submit(1, 1)
    assert pool.submit(2, 1).result() == 2


def test_loader_processes_ignore_signals_to_the_training(
    made: Callable[..., LoaderProcesses],
):
    """Ctrl-C and a scheduler's SIGTERM reach all processes: the training ends after its step."""
    pool = made(lambda item: os.getpid())
    pid = pool.submit(0, 1).result()
    assert os.getpgid(pid) != os.getpgid(0)  # torchrun signals the group, possibly during startup
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
        assert pool.submit(0, 1).result() == pid


def test_the_processes_end_when_closed_and_without_an_explicit_close():
    before = children()
    pool = LoaderProcesses(lambda item: os.getpid(), str)
    pids = {pool.submit(0, 2).result() for _ in range(4)}
    assert children() - before >= pids
    pool.close()
    assert gone(pids)
    other = LoaderProcesses(lambda item: os.getpid(), str)
    pids = {other.submit(0, 1).result()}
    del other
    assert gone(pids)


_SCRIPT = """
import os, sys, time
import numpy as np, torch
from raytrain_ddp.data.loading.loader import TrainLoader
from raytrain_ddp.data.order.epoch_order import Plan
from raytrain_ddp.data.loading.sources import Data, MapSource
from raytrain_ddp.data.loading.loader_threads import LoaderThreads

class Rows:
    def __len__(self):
        return 40
    def __getitem__(self, row):
        if row % 20 >= 10 and sys.argv[1] == "stuck":
            time.sleep(1000)
        return {"row": torch.tensor(row), "pid": os.getpid()}

data = Data(MapSource(Rows()))  # a class of __main__, and no guard
loader = TrainLoader(data, Plan(40, 2, 5), "none", 1, 0, 1, 0, LoaderThreads(2))
steps = loader.steps(0, 4)
pids = {pid for slot in next(steps) for pid in slot.batch["pid"].tolist()}
pgrep = f"pgrep -P {os.getpid()} -f raytrain_ddp.data.loading.loader_worker"
print(*pids, os.popen(pgrep).read(), flush=True)
if sys.argv[1] == "raise":
    raise ValueError("done")
if sys.argv[1] != "end":
    time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["end", "raise", "kill", "stuck"])
def test_fault_37_no_process_outlives_a_script(way: str, tmp_path: Path):
    """A script without a __main__ guard that ends, raises, or is killed."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(script), way], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    pids = {int(pid) for pid in process.stdout.readline().split()}
    assert len(pids) >= 2
    if way in ("kill", "stuck"):
        process.kill()
    _, said = process.communicate()
    assert process.returncode == {"end": 0, "raise": 1}.get(way, -signal.SIGKILL), said
    assert said.count("Traceback") == (way == "raise"), said
    assert gone(pids)


# ------------------------------------------------------------------ transfers between them


def tensors() -> list[torch.Tensor]:
    picture = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    return [
        torch.rand(3, 4),
        picture.to(torch.uint8).to(memory_format=torch.channels_last),
        picture.transpose(1, 3)[:, ::2],
        torch.rand(5).bfloat16(),
        torch.tensor([True, False]),
        torch.rand(2, 2, dtype=torch.complex64).conj(),
        torch.ones(1).expand(4),
        torch.empty(0, 3),
        torch.tensor(3),
        torch.rand(2, requires_grad=True),
        torch.arange(100)[10:20],
        torch.eye(3).to_sparse(),
    ]


def test_tensors_and_arrays_arrive_unchanged_and_writable():
    value = {"tensors": tensors(), "point": Point(np.arange(5), "text"), "none": None}
    file = shared_memory.pack(value)
    arrived = shared_memory.unpack(file)
    os.close(file)
    for one, other in zip(arrived["tensors"], value["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert one.layout == other.layout
        assert torch.equal(one.to_dense(), other.to_dense())
        assert one.requires_grad == other.requires_grad
    assert arrived["tensors"][1].is_contiguous(memory_format=torch.channels_last)
    assert arrived["point"].x.tolist() == [0, 1, 2, 3, 4]
    assert type(arrived["point"]) is Point
    arrived["tensors"][0] += 1
    arrived["point"].x[0] = 7


def test_fault_38_batches_need_no_dev_shm(made: Callable[..., LoaderProcesses]):
    """One of 64 KiB is enough for batches of 8 MiB; without mount rights, it is only checked to
    stay empty."""
    script = (
        "import os, torch\n"
        "from raytrain_ddp.data.loading.loader_processes import LoaderProcesses\n"
        "pool = LoaderProcesses(lambda n: torch.full((2**23,), n, dtype=torch.uint8), str)\n"
        "made = [pool.submit(n, 2) for n in range(6)]\n"
        "assert [int(m.result()[-1]) for m in made] == list(range(6))\n"
        "assert os.listdir('/dev/shm') == []\n"
    )
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    unshare = ["unshare", "-rm", "sh", "-c"]
    if shutil.which("unshare") and not subprocess.run([*unshare, mount], check=False).returncode:
        command = f'{mount} && exec "$0" -c "$1"'
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*unshare, command, sys.executable, script], check=True, env=environment)
        return
    pool = made(lambda n: torch.full((2**23,), n, dtype=torch.uint8))
    replies = [pool.submit(n, 2) for n in range(6)]
    assert [int(reply.result()[-1]) for reply in replies] == list(range(6))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
