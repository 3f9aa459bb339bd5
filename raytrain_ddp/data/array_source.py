"""Arrays in memory as training data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np

from raytrain_ddp.data.loading.sources import require_count
from raytrain_ddp.data.order.epoch_order import runs_of
from raytrain_ddp.data.order.sample_rng import Rows
from raytrain_ddp.errors import DataError, first_line


class ArraySource:
    """Arrays in memory with a common first dimension; a record is a dict of their rows.

    Args:
        arrays: name -> array, list, tensor or column of a table, shape (rows, ...).
    """

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], rows_per_block: int = 1024):
        length = require_count("rows_per_block", rows_per_block)
        if not hasattr(arrays, "items"):
            kind = type(arrays).__name__
            raise DataError(
                f"ArraySource({kind}): give arrays by name, such as {{'x': x, 'y': y}}."
            )
        self._arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"arrays of unequal or no length: {lengths}.")
        self.blocks = runs_of(next(iter(lengths.values())), length)

    def read(self, rows: Rows) -> dict[str, np.ndarray[Any, Any]]:
        return {name: array[rows] for name, array in self._arrays.items()}

    def fingerprint(self) -> str:
        digest = sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            _digest_content(digest.update, name, array)
        return digest.hexdigest()


def _as_array(name: str, array: Any) -> Any:
    try:
        found = array.detach().numpy() if hasattr(array, "detach") else np.asanyarray(array)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be converted to a NumPy array: {error}") from error
    if not found.ndim:
        kind = type(array).__name__
        raise DataError(f"{name} ({kind}) has no rows: give an array of shape (rows, ...).")
    return found


class _Content(pickle.Pickler):
    """Pickles what is the same in every process."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, set | frozenset) or hasattr(value, "detach"):
            raise TypeError("neither sets nor tensors can be compared between processes")


def _digest_content(
    update: Callable[[bytes], None], name: str, array: np.ndarray[Any, Any]
) -> None:
    """Arrays of objects hold addresses, so these are pickled by value.

    Raises:
        DataError: an object has no content that is the same in every process.
    """
    if not array.dtype.hasobject:
        update(np.ascontiguousarray(array).tobytes())
        return
    pickler = _Content(SimpleNamespace(write=update), 5)
    pickler.fast = True  # regardless of which objects are one and the same
    try:
        for value in array.reshape(-1).tolist():
            pickler.dump(value)
    except Exception as error:
        raise DataError(
            f"ArraySource: {name!r} is an array of objects that cannot be fingerprinted: "
            f"{first_line(error)}. Give numbers, strings or lists, or use MapSource."
        ) from error
