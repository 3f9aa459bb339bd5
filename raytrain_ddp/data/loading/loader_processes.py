"""Loader processes: torch's DataLoader, below our order of samples and our seeds.

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
from collections.abc import Generator, Iterator
from itertools import count
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from raytrain_ddp import user_code
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.data.loading.nested import bytes_of
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
_DEATH_S = 5.0  # until the fork server, on a busy machine, has told of one
_hidden = threading.Lock()
_place = 0  # of this loader process


class LoaderProcesses:
    """Processes that make batches of copies of `data`, which is copied now by pickle (by value if
    defined in a script or notebook). They start with the first iteration.

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
        self.in_use = False
        """Set by who iterates: there is one iteration at a time."""
        self.batch_bytes = 0
        """Of the largest batch measured: it limits how many are made in advance."""
        self._context = _Context()
        self._draws: Iterator[Draws] = iter(())
        self._sent: dict[int, Draws] = {}
        self._loader: DataLoader[Any] | None = None
        _all.add(self)

    def batches(
        self, draws: Iterator[Draws], threads: LoaderThreads
    ) -> Generator[Batch, None, None]:
        """The batch of each of `draws`, in order; {} if it has no rows. `draws` is read in advance.

        Raises:
            LoaderDied: a process has died.
            Exception: the exception raised there, with a `RemoteTraceback` as its cause.
        """
        self._draws = draws
        results = iter(self._started(threads) if self._loader is None else self._loader)
        for number in count():
            if (result := self._next(results)) is None:
                return
            self._sent.pop(number)
            good, value, text = result
            if not good:
                raise value from (RemoteTraceback(text) if text else None)
            yield value

    def measure(self, batch: Batch) -> None:
        """Takes note of the size of a batch that was made in this process."""
        self.batch_bytes = max(self.batch_bytes, bytes_of(batch))

    def close(self) -> None:
        """Ends the processes; a busy one may finish its batch. They can be started again."""
        self._loader = None  # the last reference, unless an iteration was left
        for process in self._context.made:
            if process.is_alive():
                process.kill()

    def _started(self, threads: LoaderThreads) -> DataLoader[Any]:
        self._context, self._maker = _Context(), _Maker(self._copy, threads.most)
        fitting = threads.ahead_bytes // max(1, threads.most * self.batch_bytes)
        self._loader = DataLoader(
            self._maker,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self,
            num_workers=threads.most,
            collate_fn=_unchanged,
            worker_init_fn=_begin,
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # the global one is that of dropout
            prefetch_factor=max(1, min(threads.ahead, fitting)),
            persistent_workers=True,
        )
        return self._loader

    def __iter__(self) -> Iterator[tuple[int, Draws]]:
        """The sampler of the DataLoader."""
        self._sent.clear()
        for number, draws in enumerate(self._draws):
            self._sent[number] = draws
            yield number, draws

    def _next(self, results: Iterator[Any]) -> Any:
        try:
            return next(results, None)
        except Exception as error:
            connection.wait([each.sentinel for each in self._context.made], _DEATH_S)
            for place, process in enumerate(self._context.made):
                if process.exitcode is not None:
                    raise self._death(place, process.exitcode) from error
            raise

    def _death(self, place: int, code: int) -> LoaderDied:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
        draws = self._sent.get(int(self._maker.at_work[place]))
        rows = [] if draws is None else [*dict.fromkeys(map(str, draws.rows.tolist()))]
        what = f"loaded rows {first_names(rows, _MOST_NAMED)}" if rows else "started"
        self.close()
        return LoaderDied(
            f"a loader process {how} while it {what}. If the system ran out of memory (see its "
            "log), use fewer loader processes with --data.workers, or lower --data.prefetch-mib."
        )


_all: weakref.WeakSet[LoaderProcesses] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before multiprocessing waits for its processes, which do not end by its SIGTERM."""
    for each in [*_all]:
        each.close()


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


class _Process(ForkServerProcess):
    def start(self) -> None:
        """Hides `__main__`, which would be imported again: a script may have no guard, and that of
        a Ray worker loads Ray."""
        with _hidden:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main

    def terminate(self) -> None:
        self.kill()  # it ignores SIGTERM


class _Context(ForkServerContext):
    """Keeps the processes that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        self.made.append(_Process(*args, **options))
        return self.made[-1]


# ------------------------------------------------------------------ in a loader process


def _begin(place: int) -> None:
    global _place  # noqa: PLW0603
    _place = place
    # Otherwise, default_collate makes shared tensors in /dev/shm, which takes more CPU time.
    torch.utils.data._utils.worker._worker_info = None
    for number in STOP_SIGNALS:  # meant for the training process; SIG_IGN would be inherited
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The DataLoader's watchdog would wait for the fork server, which waits for this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Maker:
    """The data set of the DataLoader: the results of draws, and exceptions."""

    def __init__(self, copy: bytes, workers: int) -> None:
        self._copy = copy
        self._data: Data | None = None
        self.at_work = torch.full((workers,), -1).share_memory_()
        """The number of the draws that each process works on."""

    def __getitem__(self, item: tuple[int, Draws]) -> _Packed:
        number, draws = item
        self.at_work[_place] = number
        try:
            batch = self._opened().batch(draws) if len(draws.rows) else {}
            return _Packed((True, batch, ""))
        except Exception as error:
            return _Packed(_raised(error))

    def _opened(self) -> Data:
        if self._data is None:
            try:
                _, self._data = pickle.loads(self._copy)  # the first part registers its modules
            except Exception as error:
                raise TaskError(
                    "the data set and collate cannot be unpickled in a loader process: "
                    f"{type(error).__name__}: {first_line(error)}. Define them in a module that "
                    "can be imported there, or load in the training process with --data.workers 0."
                ) from error
            self._copy = b""
        return self._data


def _unchanged(value: Any) -> Any:
    return value


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


class _Packed:
    """A value in a memory file: pickled, by value for what is defined in a script, with tensors and
    arrays apart. Where it is received, it is the value; changes to that are visible only there.

    The file has no name, and needs no /dev/shm, which has 64 MB in many containers. Writing to it
    takes less CPU time than the page faults of shared tensors.
    """

    def __init__(self, value: Any) -> None:
        stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        try:
            _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        except Exception as error:
            message = f"a batch cannot be sent to the training process: {first_line(error)}."
            raise TaskError(message) from None
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        self._spans = list[tuple[int, int]]()
        self._file = open(os.memfd_create("raytrain_ddp"), "wb")  # noqa: SIM115
        for part in parts:
            start = self._file.seek(-(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT)
            self._spans.append((start, start + self._file.write(part)))
        self._file.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        with self._file as file:
            return _unpacked, (DupFd(file.fileno()), self._spans)


def _unpacked(file: Any, spans: list[tuple[int, int]]) -> Any:
    number = file.detach()
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
