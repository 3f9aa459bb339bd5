"""Memory of image batches, used again as soon as no tensor refers to it.

Fresh memory costs a page fault per 4 KiB, 37 for an image of 224 x 224: costly in virtual machines.
"""

from __future__ import annotations

import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Bytes = npt.NDArray[np.uint8]


class BatchMemory:
    """Makes batches; several threads may use it. A copy of it, in another process, begins empty."""

    def __init__(self) -> None:
        self._free: deque[_Bytes] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMemory, ()

    def empty(self, images: int, height: int, width: int) -> Tensor:
        """Uninitialized uint8 (images, 3, height, width), channels last."""
        shape = images, height, width, 3
        size = prod(shape)
        memory = self._taken(size)
        part = memory[:size]  # alive as long as any tensor refers to it
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(shape).permute(0, 3, 1, 2)

    def _taken(self, size: int) -> _Bytes:
        """Free memory of this size or larger; drops what is too small by now."""
        try:
            while len(memory := self._free.pop()) < size:
                pass
        except IndexError:
            return np.empty(size, np.uint8)
        return memory
