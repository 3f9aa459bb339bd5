"""Nested batches: tensors in mappings, lists, tuples, named tuples and dataclasses.

Everything else in them (strings, numbers, arrays) is passed through unchanged. A packed sequence
counts as one leaf, not as a named tuple.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raytrain_ddp.errors import TaskError

PLAIN = (str, bytes, int, float, complex, type(None))
_MOST_NAMED = 6
COUNTED = "specify how to count samples: Data(source, collate, count=...)."


def _is_sequence(batch: Any) -> bool:
    return isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence)


def leaves_of(batch: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) for each non-container in a batch, in a fixed order."""
    if isinstance(batch, Mapping):
        for key, inner in batch.items():
            yield from leaves_of(inner, f"{at}[{key!r}]")
    elif _is_sequence(batch):
        names = getattr(batch, "_fields", None)
        for place, inner in enumerate(batch):
            yield from leaves_of(inner, f"{at}.{names[place]}" if names else f"{at}[{place}]")
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from leaves_of(getattr(batch, field.name), f"{at}.{field.name}")
    else:
        yield at, batch


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same nest with function(leaf) in place of each leaf."""
    if isinstance(batch, Mapping):
        mapped = {key: map_leaves(function, inner) for key, inner in batch.items()}
        if type(batch) is dict:
            return mapped
        if isinstance(batch, MutableMapping):  # its constructor may need other arguments
            batch = copy.copy(batch)
            batch.update(mapped)
            return batch
        return type(batch)(mapped)  # type: ignore[call-arg]
    if _is_sequence(batch):
        items = [map_leaves(function, inner) for inner in batch]
        make = getattr(batch, "_make", type(batch))
        return make(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for field in fields(batch):  # also works for frozen dataclasses
            value = map_leaves(function, getattr(batch, field.name))
            object.__setattr__(clone, field.name, value)
        return clone
    return function(batch)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def pinned(batch: Any) -> Any:
    """The same nest with its dense tensors page-locked."""
    return map_leaves(lambda leaf: leaf.pin_memory() if _is_dense(leaf) else leaf, batch)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    return (leaf for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def samples_of(batch: Any) -> int:
    """The number of samples: the common first dimension of all tensors; 0 of an empty nest.

    Raises:
        TaskError: first dimensions differ, a tensor has none, or there are leaves but no tensor;
            names the entries.
    """
    leaves = list(leaves_of(batch))
    tensors = [(at, leaf) for at, leaf in leaves if isinstance(leaf, Tensor)]
    shapes = [(at, (t.size(0),) if t.is_nested else tuple(t.shape)) for at, t in tensors]
    packed = [(at, leaf) for at, leaf in leaves if isinstance(leaf, PackedSequence)]
    shapes += [(at, (int(leaf.batch_sizes[0]),)) for at, leaf in packed]
    if len({shape[:1] for _, shape in shapes}) == 1 and shapes[0][1]:
        return int(shapes[0][1][0])
    if not leaves:
        return 0
    if not shapes:
        kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves}))
        raise TaskError(
            f"collate returned a batch without tensors (it contains {kinds}): return tensors, or "
            f"{COUNTED}"
        )
    shown = ", ".join(f"batch{at} {list(shape)}" for at, shape in _one_per_size(shapes))
    raise TaskError(
        f"collate returned tensors whose first dimensions differ: {shown}. The first dimension of "
        "each tensor must be the number of samples: pass a value that belongs to the whole batch "
        f"as a Python number, or {COUNTED}"
    )


def _one_per_size(shapes: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Moves the first entry of each distinct first dimension to the front."""
    first = {shape[:1]: (at, shape) for at, shape in reversed(shapes)}
    unlike = [entry for entry in shapes if entry in first.values()]
    return [*unlike, *(entry for entry in shapes if entry not in unlike)][:_MOST_NAMED]


def bytes_of(batch: Any) -> int:
    """Bytes of the tensors and arrays."""
    parts = (part for _, leaf in leaves_of(batch) for part in _parts_of(leaf))
    return sum(int(getattr(part, "nbytes", 0)) for part in parts)


def _parts_of(leaf: Any) -> list[Any]:
    """The dense tensors that make up a sparse, nested or packed leaf; otherwise the leaf itself."""
    if isinstance(leaf, PackedSequence):
        return [each for each in leaf if each is not None]
    if not isinstance(leaf, Tensor) or _is_dense(leaf):
        return [leaf]
    if leaf.is_nested:
        nested: Any = leaf
        if leaf.layout is not torch.jagged:
            return [leaf.contiguous().values(), nested._nested_tensor_size()]
        parts = (leaf.values(), nested.offsets(), nested.lengths())
        return [each for each in parts if each is not None]
    coo = leaf.to_sparse_coo()
    return [coo._indices(), coo._values()]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on `device`; copies from page-locked memory run asynchronously.

    Also moves other objects with a method `to`.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_leaves(moved, batch)


def digest_of(start: bytes, batch: Any) -> str:
    """sha256 of `start` and of all tensors, arrays, strings and numbers, and of where they are."""
    digest = sha256(start)
    for at, leaf in sorted(leaves_of(batch), key=lambda pair: pair[0]):
        if isinstance(leaf, (Tensor, PackedSequence)):
            for part in _parts_of(leaf):
                digest.update(f"{at} {part.dtype} {tuple(part.shape)}".encode())
                dense = part.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
                digest.update(dense.view(torch.uint8).numpy().tobytes() if len(dense) else b"")
        elif isinstance(leaf, PLAIN):
            digest.update(f"{at} {leaf!r}".encode())
        elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.hasobject:
            # Its bytes are addresses.
            digest.update(f"{at} {leaf.shape} {digest_of(b'', leaf.tolist())}".encode())
        else:  # bytes that have a shape, or an object whose text may hold an address
            digest.update(f"{at} {type(leaf).__name__}".encode())
            digest.update(leaf.tobytes() if hasattr(leaf, "tobytes") else b"")
    return digest.hexdigest()
