"""Memory to read a file of tensors into: that of existing tensors, or new memory."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.snapshot import DTYPES, RESERVED_NAME
from raytrain_ddp.checkpoint.streams import new_memory
from raytrain_ddp.errors import CheckpointError

_LEAST_BYTES = 2**20  # of a tensor that is read by itself
Existing = Mapping[str, Mapping[str, Tensor]]  # file name -> tensor's name -> tensor
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)


class _Place(NamedTuple):
    """Of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    end: int


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
            places = _places(head, size_bytes)
        except _WRONG:
            places = []
        for place in places:
            own = existing.get(place.name)
            if own is None or not _takes(own, place) or own.data_ptr() in used:
                continue
            self._add(done, new_memory(place.start - done))
            self._add(place.start, own.detach().reshape(-1).view(torch.uint8).numpy().data)
            self._tensors[place.name], done = own.detach(), place.end
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
        for place in _places(self._head, sum(map(len, self.views))):
            number = bisect_right(self._offsets, place.start) - 1
            at = place.start - self._offsets[number]
            own = self._tensors.get(place.name)
            found[place.name] = own if own is not None else _viewed(self.views[number], place, at)
        return found

    def _add(self, offset: int, view: memoryview) -> None:
        if view or not self.views:
            self._offsets.append(offset)
            self.views.append(view)


def view_tensors(data: memoryview) -> dict[str, Tensor]:
    """The inverse of `encode_tensors`, for a verified file; the tensors share its memory.

    Raises:
        CheckpointError: this is not a file in the safetensors format. No code in it is run.
    """
    try:
        first = 8 + int.from_bytes(data[:8], "little")
        places = _places(bytes(data[:first]), len(data))
        return {place.name: _viewed(data, place, place.start) for place in places}
    except _WRONG as error:
        raise CheckpointError(f"Not a complete safetensors file: {error}") from None


def _places(head: bytes, size_bytes: int) -> list[_Place]:
    """Those of all tensors, in the file's order. As safetensors does, refuses a header whose
    tensors do not fill the file without gaps.

    Raises:
        one of _WRONG: this is not the head of such a file of this size.
    """
    places = []
    for name, kind in json.loads(head[8:]).items():
        if name == RESERVED_NAME:
            continue
        dtype, shape, (start, end) = DTYPES[kind["dtype"]], kind["shape"], kind["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError(f"{name}: {shape} at {start} to {end}")
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {start} to {end} is the wrong size for {shape}")
        places.append(_Place(name, dtype, shape, len(head) + start, len(head) + end))
    places.sort(key=lambda place: (place.start, place.end))
    done = len(head)
    for place in places:
        if place.start != done:
            raise ValueError(f"{place.name} begins at {place.start} instead of {done}")
        done = place.end
    if done != size_bytes:
        raise ValueError(f"its tensors end at {done} instead of {size_bytes}")
    return places


def _viewed(data: memoryview, place: _Place, at: int) -> Tensor:
    """The tensor whose bytes begin at `at`."""
    count, size_bytes = math.prod(place.shape), place.end - place.start
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    if at % place.dtype.itemsize:  # of another writer
        piece = bytearray(data[at : at + size_bytes])
        return torch.frombuffer(piece, dtype=place.dtype).reshape(place.shape)
    whole = torch.frombuffer(data, dtype=place.dtype, count=count, offset=at)
    return whole.reshape(place.shape)


def _takes(own: Tensor, place: _Place) -> bool:
    return (
        type(own) in (Tensor, nn.Parameter)
        and own.device.type == "cpu"
        and own.layout is torch.strided
        and own.is_contiguous()
        and own.dtype == place.dtype
        and list(own.shape) == place.shape
        and own.untyped_storage().nbytes() == own.nbytes >= _LEAST_BYTES
    )
