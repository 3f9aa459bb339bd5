"""What NCCL does when a rank dies, on emulated GPUs: nothing, until it is aborted.

A collective of which a rank has died does not end. Once it is aborted, it seems to be done, and its
result is whatever is in the memory. Nobody is told of an error.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import emulated
import torch
import torch.distributed as dist
from torch import Tensor

GARBAGE = 1000.0
_NAMES = (
    *("allreduce", "broadcast", "allgather", "_allgather_base", "all_gather_single", "gather"),
    *("alltoall_base", "all_to_all_single", "send", "recv", "barrier"),
)


class FakeNccl(dist.ProcessGroup):
    """A process group whose collectives on CPUs are gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._cpus, self._gpus = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("cpus", "gpus")
        )
        self.aborted = threading.Event()
        self.is_made = False

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else self._cpus

    @property
    def _device_types(self) -> list[torch.device]:
        # With any, torch would record its collectives, for which it lacks a name.
        return [torch.device("cpu"), torch.device("cuda")] if self.is_made else []

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "fake_nccl"

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        raise AssertionError("NCCL would wait for its collectives")

    def call(self, name: str, *given: Any) -> Any:
        tensors = [tensor for tensor in emulated._tensors(given) if tensor.is_cuda]
        if not tensors:
            return getattr(self._cpus, name)(*given)
        for tensor in tensors:
            stream = torch._C._cuda_getCurrentRawStream(tensor.device.index)
            emulated.runtime.emulated_launch(stream)
        work = None
        if not self.aborted.is_set():
            try:
                work = getattr(self._gpus, name)(*_on_host(given))
            except RuntimeError:  # a rank is dead
                work = None
        return _Work(self, work, tensors)


for _name in _NAMES:
    setattr(FakeNccl, _name, lambda self, *given, _name=_name: self.call(_name, *given))


class _Work(dist._Work):
    """The host gets no error."""

    def __init__(self, group: FakeNccl, work: Any, tensors: list[Tensor]) -> None:
        super().__init__()
        self._group, self._work, self._tensors = group, work, tensors
        _kept.append(self)  # gloo may still write

    def wait(self, timeout: timedelta | None = None) -> bool:
        """On a GPU, the stream would wait, and the host after it, at the next synchronization."""
        while self._work is not None and not self._work.is_completed():
            if self._group.aborted.is_set():
                self._work = None
                break
            time.sleep(0.001)
        if self._work is None or not self._work.is_success():
            self._group.aborted.wait()
            for tensor in self._tensors:
                emulated.on_host(tensor).fill_(GARBAGE)
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.wait()
        future.set_result(self._tensors)
        return future


_kept: list[_Work] = []


def _on_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_host(each) for each in value]
    return emulated.on_host(value) if isinstance(value, Tensor) and value.is_cuda else value


def install() -> None:
    """From now on, process groups for NCCL are these."""
    dist.Backend.register_backend("fake_nccl", FakeNccl, devices=["cuda"])
    make = dist.init_process_group

    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> None:
        make(backend and backend.replace("nccl", "fake_nccl"), *given, **named)
        if isinstance(dist.group.WORLD, FakeNccl):
            dist.group.WORLD.is_made = True

    dist.init_process_group = init_process_group
