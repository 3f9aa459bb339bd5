"""Loader processes: each makes the batches that a loader thread asks it for.

Python's fork server loads torch once and forks the processes, each with a copy of the data set. So
nothing is forked from the training process (a Ray worker has threads, and forking it can deadlock),
and each further process starts quickly. The user's `__main__` is not imported again.
"""

from __future__ import annotations

import atexit
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from raytrain_ddp import user_code
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order import Draws
from raytrain_ddp.errors import (
    LoaderDied,
    RaytrainError,
    RemoteTraceback,
    TaskError,
    first_line,
    first_names,
    signal_name,
)
from raytrain_ddp.signals import STOP_SIGNALS

_PRELOADED = ("torchvision", "torchvision.transforms.v2", "PIL.Image")  # if installed
_ALIGNMENT = 64
_MOST_NAMED = 64  # rows
_DEATH_S = 1.0  # until the fork server has told of one
_hidden = threading.Lock()

_Process = tuple[ForkServerProcess, "Connection[Any, Any]"]


class LoaderProcesses:
    """Processes that make batches of copies of `data`, which is copied now by pickle (by value if
    defined in a script or notebook).

    Raises:
        TaskError: the data cannot be copied.
    """

    def __init__(self, data: Data) -> None:
        _start_fork_server()
        try:
            self._copy = cloudpickle.dumps((user_code.received(), data))
        except Exception as error:
            raise TaskError(
                "the data set and collate cannot be copied to loader processes: "
                f"{type(error).__name__}: {first_line(error)}. Open files when __getitem__ first "
                "needs them, and store no generators or locks; or load in the training process "
                "with --data.workers 0; or, if it draws no random numbers, let threads share it: "
                "MapSource(dataset, shared=True)."
            ) from error
        self._made: list[ForkServerProcess] = []
        self._free: SimpleQueue[_Process | LoaderDied] = SimpleQueue()
        _all.add(self)

    def start(self, most: int) -> None:
        """Starts processes, unless there are this many."""
        if not self._made:
            self._free = SimpleQueue()  # those who wait for the former ones have the former queue
        while len(self._made) < most:
            process, link = _started(self._copy)
            self._made.append(process)
            self._free.put((process, link))

    def batch(self, draws: Draws) -> Batch:
        """The batch of `draws`, from the next process that is free; several threads may ask.

        Raises:
            LoaderDied: a process has died; also for all who wait for it.
            Exception: the exception raised there, with a `RemoteTraceback` as its cause.
        """
        free = self._free
        got = free.get()
        try:
            if isinstance(got, LoaderDied):
                raise got
            sent = _asked(*got, draws)
        except LoaderDied as died:
            free.put(died)
            raise
        free.put(got)
        good, value, text = _unpacked(*sent)
        if not good:
            raise value from (RemoteTraceback(text) if text else None)
        return value

    def close(self) -> None:
        """Ends the processes; they can be started again."""
        for process in self._made:
            process.kill()  # they ignore SIGTERM
        self._made = []


_all: weakref.WeakSet[LoaderProcesses] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before multiprocessing waits for its processes, which do not end by its SIGTERM."""
    for each in [*_all]:
        each.close()


def _asked(process: ForkServerProcess, link: Connection[Any, Any], draws: Draws) -> Any:
    """The memory file with the result, and its parts; raises LoaderDied."""
    try:
        link.send(draws)
        if link in connection.wait([link, process.sentinel]):
            return link.recv(), recv_handle(link)
    except (EOFError, OSError):
        pass
    process.join(_DEATH_S)
    code = process.exitcode or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
    rows = [*dict.fromkeys(map(str, draws.rows.tolist()))]
    raise LoaderDied(
        f"a loader process {how} while it loaded rows {first_names(rows, _MOST_NAMED)}. If the "
        "system ran out of memory (see its log), use fewer loader processes with --data.workers, "
        "or lower --data.prefetch-mib."
    )


# ------------------------------------------------------------------ how they start


def _start_fork_server() -> None:
    """Starts it unless it runs; it loads torch meanwhile. No signal ends it: those to the process
    group are meant for the training process."""
    loaded = [name for name in _PRELOADED if name in sys.modules]
    forkserver.set_forkserver_preload([__name__, *loaded])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited
    try:
        resource_tracker.ensure_running()  # unblocks some
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(copy: bytes) -> _Process:
    """Hides `__main__`, which would be imported again: a script may have no guard, and that of a
    Ray worker loads Ray."""
    ours, theirs = multiprocessing.Pipe()
    process = ForkServerProcess(target=_serve, args=(theirs, [copy]), daemon=True)
    with theirs, _hidden:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process, ours


# ------------------------------------------------------------------ in a loader process


def _serve(link: Connection[Any, Any], copy: list[bytes]) -> None:
    """Makes the batch of all draws that arrive."""
    torch.set_num_threads(1)
    for number in STOP_SIGNALS:  # meant for the training process; SIG_IGN would be inherited
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    data: Data | None = None
    while True:
        draws = link.recv()
        try:
            data = _opened(copy) if data is None else data
            parts = _pickled((True, data.batch(draws), ""))
        except Exception as error:
            parts = _pickled(_raised(error))
        _send(link, parts)


def _end_with_parent() -> None:
    """It may die while this process is busy."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _opened(copy: list[bytes]) -> Data:
    try:
        _, data = pickle.loads(copy[0])  # the first part registers its modules
    except Exception as error:
        raise TaskError(
            "the data set and collate cannot be unpickled in a loader process: "
            f"{type(error).__name__}: {first_line(error)}. Define them in a module that "
            "can be imported there, or load in the training process with --data.workers 0."
        ) from error
    copy.clear()
    return data  # type: ignore[no-any-return]


def _raised(error: Exception) -> tuple[bool, Exception, str]:
    """The exception, or a picklable one with the same message; and its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[2])
    mine = [n for n, frame in enumerate(frames) if frame.filename.startswith(package)]
    users = frames[mine[-1] + 1 :] or frames
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(users)]
    text = "".join(lines + traceback.format_exception_only(type(error), error))
    try:
        error = cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return False, error, "" if isinstance(error, RaytrainError) else text


# ------------------------------------------------------------------ transfer of batches


def _pickled(value: Any) -> list[memoryview]:
    """By value for what is defined in a script, with the memory of tensors and arrays apart."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    except Exception as error:
        message = f"a batch cannot be sent to the training process: {first_line(error)}."
        raise TaskError(message) from None
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _send(link: Connection[Any, Any], parts: list[memoryview]) -> None:
    """In a memory file: it has no name, and needs no /dev/shm, which has 64 MB in many containers.
    Writing to it takes less CPU time than the page faults of shared tensors."""
    spans = list[tuple[int, int]]()
    with open(os.memfd_create("raytrain_ddp"), "wb") as file:
        for part in parts:
            start = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            spans.append((start, start + file.write(part)))
        file.flush()
        link.send(spans)
        send_handle(link, file.fileno(), None)


def _unpacked(spans: list[tuple[int, int]], number: int) -> Any:
    """The value; changes to it are visible only here."""
    try:
        memory = memoryview(mmap.mmap(number, 0, mmap.MAP_PRIVATE))
    finally:
        os.close(number)
    first, *others = (memory[start:stop] for start, stop in spans)
    return pickle.loads(first, buffers=others)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        """A tensor's bytes in the order of memory, without the rest of its storage."""
        if type(value) is not Tensor or value.layout is not torch.strided or not value.numel():
            return super().reducer_override(value)
        if value.requires_grad or value.is_quantized or value.is_nested:
            return super().reducer_override(value)
        value = value.resolve_conj().resolve_neg()
        if not (value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last)):
            value = value.clone()  # keeps the order
        content: Any = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy()
        buffer = pickle.PickleBuffer(content)
        return _tensor, (buffer, value.dtype, tuple(value.shape), value.stride())


def _tensor(buffer: Any, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)
