"""Sends objects between processes: pickled, with tensors and arrays in anonymous shared memory.

A message is a memory file (memfd_create) whose descriptor is sent over a Unix socket. It has no
name, so nothing can be left in /dev/shm, and the size of that mount (64 MB in many containers) does
not matter. It is freed with its last user, however that process ends. The receiver maps it without
copying.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from raytrain_ddp.errors import PreflightError

_ALIGNMENT = 64
_COUNT = struct.Struct("<Q")


class _EnoughFiles:
    """Raises PreflightError where this process has no free file descriptor."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ETOOMANYREFS):
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise PreflightError(
                f"no free file descriptor for a batch from a loader process: this process may have "
                f"at most {limit} open files. Raise the limit (ulimit -n), keep fewer files or "
                "batches open, or load in the training process with --data.workers 0."
            ) from None


enough_files = _EnoughFiles()


def pack(value: Any) -> int:
    """A memory file with `value`; returns its descriptor, which the caller closes.

    Raises:
        PreflightError: this process has too many open files.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    head = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
    with enough_files:
        file = os.memfd_create("raytrain_ddp", os.MFD_CLOEXEC)
    try:
        place = 0
        for part in (memoryview(head), *parts):
            place, done = _aligned(place), 0
            os.ftruncate(file, place)
            while done < part.nbytes:  # a call writes 2 GiB at most
                done += os.pwrite(file, part[done:], place + done)
            place += done
    except BaseException:
        os.close(file)
        raise
    return file


def unpack(file: int) -> Any:
    """The value in a memory file. Changes to it are visible only in this process."""
    memory = memoryview(mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    (count,) = _COUNT.unpack_from(memory)
    sizes = struct.unpack_from(f"<{count}Q", memory, _COUNT.size)
    parts, place = [], _COUNT.size * (count + 1)
    for size in sizes:
        place = _aligned(place)
        parts.append(memory[place : place + size])
        place += size
    return pickle.loads(parts[0], buffers=parts[1:])


def send(channel: socket.socket, value: Any) -> None:
    """Raises ConnectionError if the other end is closed, and the errors of `pack`."""
    file = pack(value)
    try:
        with enough_files:
            socket.send_fds(channel, [b"."], [file])
    finally:
        os.close(file)


def receive(channel: socket.socket) -> Any:
    """Raises EOFError if the other end is closed, and PreflightError if this process has too many
    open files; the message is lost then."""
    head, files = b"", list[int]()
    # If the other end was closed before it had read everything, Linux reports that first, once, and
    # then what the other end had sent.
    for _ in range(2):
        with suppress(ConnectionError):
            head, files, _, _ = socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)
            break
    if not head:
        raise EOFError
    with enough_files:
        if not files:  # Linux has dropped it
            raise OSError(errno.EMFILE, "no descriptor")
        try:
            return unpack(files[0])
        finally:
            os.close(files[0])


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.layout is torch.strided and value.numel():
            if value.device.type != "cpu":
                raise TypeError(f"a tensor on {value.device}; loader processes have only the CPU")
            if not (value.requires_grad or value.is_quantized):
                return _reduced(value)
        return super().reducer_override(value)


def _reduced(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The tensor's bytes in memory order, without the rest of its storage."""
    tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    laid = tensor.permute(order).contiguous()
    inverse = sorted(range(len(order)), key=order.__getitem__)
    array: Any = laid.view(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(array), tensor.dtype, tuple(laid.shape), inverse)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape).permute(order)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
