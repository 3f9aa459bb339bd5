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


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same nest with function(leaf) in place of each leaf."""
    return _mapped(lambda _, leaf: function(leaf), batch, "")


def leaves_of(batch: Any) -> list[tuple[str, Any]]:
    """(path, leaf) for each non-container in a batch, in a fixed order."""
    found: list[tuple[str, Any]] = []

    def note(at: str, leaf: Any) -> Any:
        found.append((at, leaf))
        return leaf

    _mapped(note, batch, "")
    return found


def _mapped(function: Callable[[str, Any], Any], batch: Any, at: str) -> Any:
    if isinstance(batch, Mapping):
        mapped = {key: _mapped(function, each, f"{at}[{key!r}]") for key, each in batch.items()}
        if type(batch) is dict:
            return mapped
        if isinstance(batch, MutableMapping):  # its constructor may need other arguments
            batch = copy.copy(batch)
            batch.update(mapped)
            return batch
        return type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
        names = getattr(batch, "_fields", None)
        places = [f".{name}" for name in names] if names else [f"[{n}]" for n in range(len(batch))]
        items = [_mapped(function, each, at + n) for n, each in zip(places, batch, strict=True)]
        return getattr(batch, "_make", type(batch))(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        clone = copy.copy(batch)
        for name in (field.name for field in fields(batch)):  # also of frozen dataclasses
            value = _mapped(function, getattr(batch, name), f"{at}.{name}")
            object.__setattr__(clone, name, value)
        return clone
    return function(at, batch)


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
    leaves = leaves_of(batch)
    shapes: dict[tuple[int, ...], str] = {}  # by first dimension
    for at, leaf in leaves:
        if isinstance(leaf, Tensor):
            shape = (leaf.size(0),) if leaf.is_nested else tuple(leaf.shape)
            shapes.setdefault(shape[:1], f"batch{at} {[*shape]}")
        elif isinstance(leaf, PackedSequence):
            shapes.setdefault((int(leaf.batch_sizes[0]),), f"batch{at}")
    if len(shapes) == 1 and () not in shapes:
        return next(iter(shapes))[0]
    if not leaves:
        return 0
    if not shapes:
        kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves}))
        raise TaskError(
            f"collate returned a batch without tensors (it contains {kinds}): return tensors, or "
            f"{COUNTED}"
        )
    shown = ", ".join([*shapes.values()][:_MOST_NAMED])
    raise TaskError(
        f"collate returned tensors whose first dimensions differ: {shown}. The first dimension of "
        "each tensor must be the number of samples: pass a value that belongs to the whole batch "
        f"as a Python number, or {COUNTED}"
    )


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
