"""Memory for a file of tensors that is read: that of tensors that exist, or new memory."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.snapshot import DTYPES, RESERVED_NAME
from raytrain_ddp.checkpoint.streams import new_memory
from raytrain_ddp.errors import CheckpointError

_LEAST_BYTES = 2**20  # of a tensor that is read by itself
Existing = Mapping[str, Mapping[str, Tensor]]  # file name -> tensor's name -> tensor
_WRONG = (ValueError, TypeError, KeyError, AttributeError, RuntimeError)


class TensorPlaces:
    """Where the bytes of a safetensors file go.

    Args:
        head: the file's first bytes, up to its tensors; if they are damaged, all memory is new.
        existing: of these, those that are large, on the CPU, contiguous, and alone in their
            memory are read into.

    Attributes:
        views: one after another, as large as the file.
    """

    def __init__(self, head: bytes, size_bytes: int, existing: Mapping[str, Tensor]) -> None:
        self._head, self._tensors = head, dict[str, Tensor]()
        self.views: list[memoryview] = []
        self._offsets: list[int] = []  # in the file, of each view
        done, used = 0, set[int]()
        try:
            ranges = sorted(_ranges(head), key=lambda each: each[2:])
        except _WRONG:
            ranges = []
        for name, kind, start, end in ranges:
            own = existing.get(name)
            fits = own is not None and done <= start <= end <= size_bytes
            if own is None or not fits or not _takes(own, kind) or own.data_ptr() in used:
                continue
            self._add(done, new_memory(start - done))
            self._add(start, _as_view(own))
            self._tensors[name], done = own.detach(), end
            used.add(own.data_ptr())
        self._add(done, new_memory(size_bytes - done))

    def tensors(self) -> dict[str, Tensor]:
        """Those of the file, after it was read and verified; nothing is copied.

        Raises:
            CheckpointError: this is not a file in the safetensors format.
        """
        if not self._tensors:
            return view_tensors(self.views[0])
        if self.views[0][: len(self._head)] != self._head:
            raise CheckpointError("A file of tensors has changed while it was read.")
        found = {}
        for name, kind, start, _ in _ranges(self._head):
            number = bisect_right(self._offsets, start) - 1
            at = start - self._offsets[number]
            own = self._tensors.get(name)
            found[name] = own if own is not None else _viewed(self.views[number], kind, at)
        return found

    def _add(self, offset: int, view: memoryview) -> None:
        if view or not self.views:
            self._offsets.append(offset)
            self.views.append(view)


def view_tensors(data: memoryview) -> dict[str, Tensor]:
    """As `decode_tensors`, but of a file that was verified, and in its memory: nothing is copied.

    Raises:
        CheckpointError: this is not a file in the safetensors format.
    """
    try:
        first = 8 + int.from_bytes(data[:8], "little")
        ranges = _ranges(bytes(data[:first]))
        return {name: _viewed(data, kind, start) for name, kind, start, _ in ranges}
    except _WRONG as error:
        raise CheckpointError(f"Not a complete safetensors file: {error}") from None


def _ranges(head: bytes) -> list[tuple[str, dict[str, Any], int, int]]:
    """Name, kind, and place in the file, of each tensor, in the header's order."""
    return [
        (name, kind, len(head) + kind["data_offsets"][0], len(head) + kind["data_offsets"][1])
        for name, kind in json.loads(head[8:]).items()
        if name != RESERVED_NAME
    ]


def _viewed(data: memoryview, kind: Mapping[str, Any], at: int) -> Tensor:
    """The tensor whose bytes begin at `at`."""
    dtype, shape, (start, end) = DTYPES[kind["dtype"]], kind["shape"], kind["data_offsets"]
    count = math.prod(shape)
    if end - start != count * dtype.itemsize or start < 0:
        raise ValueError(f"{start} to {end} is no place of {shape}")
    if not count:
        return torch.empty(shape, dtype=dtype)
    if at + end - start > len(data):
        raise ValueError(f"{start} to {end} is beyond the end")
    if at % dtype.itemsize:  # of another writer
        piece = bytearray(data[at : at + end - start])
        return torch.frombuffer(piece, dtype=dtype).reshape(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=at).reshape(shape)


def _takes(own: Tensor, kind: Mapping[str, Any]) -> bool:
    start, end = kind["data_offsets"]
    return (
        type(own) in (Tensor, nn.Parameter)
        and own.device.type == "cpu"
        and own.layout is torch.strided
        and own.is_contiguous()
        and own.dtype == DTYPES.get(kind["dtype"])
        and list(own.shape) == kind["shape"]
        and own.untyped_storage().nbytes() == own.nbytes == end - start >= _LEAST_BYTES
    )


def _as_view(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
