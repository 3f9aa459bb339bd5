"""What tells two objects of one task class apart, such as the folds of a cross-validation.

A run is recognized by its config. If Python code passes an object, what it holds is part of that.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import os
import sys
import uuid
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_BY_REPR = (bytearray, range, slice, decimal.Decimal, fractions.Fraction, uuid.UUID, *_DATES)
_MOST_VALUES = 1_000_000  # of an array: others are skipped evenly
_OF_TORCH = "torch.utils.data"  # such as a Subset
_OURS = "raytrain_ddp."

_known: dict[int, tuple[weakref.ref[Any], str]] = {}  # as it was when it was first seen


def state_digest(target: Any) -> str:
    """Eight hex digits of what an object, a function, a partial or a class made in a function
    holds; "" if that is nothing.

    It is the same in another process. Values count as such, arrays by a million of their values,
    modules of torch by their type and plain attributes, and other objects of installed packages by
    their type. An object that training has changed keeps its digest.
    """
    known = _known.get(id(target))
    if known is not None and known[0]() is target:
        return known[1]
    parts = _Parts()
    inside = parts.inside(target)
    digest = hashlib.sha256(repr(inside).encode()).hexdigest()[:8] if inside else ""
    with suppress(TypeError):  # a class with __slots__
        _known[id(target)] = weakref.ref(target), digest
    return digest


class _Parts:
    """Texts that are equal if two values are alike; each object is visited once."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._visited: list[Any] = []  # they stay alive, so that their ids stay theirs

    def text(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        own = _own_text(value)
        if own is not None:
            return f"{kind} {own}"
        if id(value) not in self._texts:
            self._visited.append(value)
            self._texts[id(value)] = kind  # for what refers back to it
            content = repr(self.inside(value)).encode()
            self._texts[id(value)] = f"{kind} {hashlib.sha256(content).hexdigest()}"
        return self._texts[id(value)]

    def inside(self, value: Any) -> list[Any]:
        """The texts of the parts of a value, in a fixed order."""
        if isinstance(value, (list, tuple, collections.deque)):
            return [*map(self.text, value)]
        if isinstance(value, (set, frozenset)):
            return sorted(map(self.text, value))
        if isinstance(value, Mapping):
            return sorted((self.text(key), self.text(each)) for key, each in value.items())
        if _is_array(value):
            return [*map(self.text, _values(value).tolist())]
        return [(name, self.text(each)) for name, each in _parts(value)]


def _own_text(value: Any) -> str | None:
    """What a value is, if it has no parts."""
    text: str | None = None
    if isinstance(value, enum.Enum):
        text = value.name
    elif isinstance(value, (*_PLAIN, *_BY_REPR)):
        text = repr(value)
    elif isinstance(value, os.PathLike):
        text = repr(os.fspath(value))
    elif isinstance(value, type) and not _is_local(value):
        text = f"{value.__module__}.{value.__qualname__}"
    elif _is_array(value):
        values = _values(value)
        if not values.dtype.hasobject:
            content = hashlib.sha256(values.tobytes()).hexdigest()
            text = f"{value.dtype} {tuple(value.shape)} {content}"
    elif isinstance(getattr(value, "__dict__", {}).get("_fingerprint"), str):
        text = value._fingerprint  # a data set of Hugging Face
    return text


def _is_array(value: Any) -> bool:
    """Of NumPy, pandas, or torch."""
    kinds = {f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(value).__mro__}
    return not kinds.isdisjoint({"numpy.ndarray", "numpy.generic", "torch.Tensor", "pandas.Series"})


def _values(value: Any) -> Any:
    """Of an array: one-dimensional, evenly chosen."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.to_dense() if value.is_sparse else value
        is_known = str(value.dtype).removeprefix("torch.") in np.sctypeDict
        value = value.numpy() if is_known else value.double().numpy()  # bfloat16
    flat = np.asarray(value).reshape(-1)
    return np.ascontiguousarray(flat[:: 1 + flat.size // _MOST_VALUES])


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The parts of an object, a function or a class, by name."""
    match value:
        case functools.partial():
            return [("", value.func), ("", value.args), ("", value.keywords)]
        case MethodType():
            return [("", value.__func__), ("", value.__self__)]
        case FunctionType():
            held = [*(value.__defaults__ or ()), value.__kwdefaults__, *_closure(value)]
            if "<" in value.__qualname__:  # it has no name of its own
                held += [each for each in value.__code__.co_consts if isinstance(each, _PLAIN)]
            return [("", each) for each in held if each is not None]
        case type() if _is_local(value):
            return _parts_of_class(value)
    if type(value).__name__ == "DataFrame":
        return [(str(name), value[name]) for name in value.columns]
    return sorted(_attributes(value).items())


def _is_local(kind: type) -> bool:
    return "<locals>" in kind.__qualname__


def _parts_of_class(kind: type) -> list[tuple[str, Any]]:
    """Of a class made in a function: what its functions hold, and plain attributes."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(vars(kind).items()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        found += [(name, each) for each in _closure(inner) if each is not kind]  # as of super()
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            found.append((name, value))
    return found


def _closure(function: Any) -> list[Any]:
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is not set yet
            held.append(cell.cell_contents)
    return held


def _attributes(value: Any) -> dict[str, Any]:
    """Of an object of the user's, or of a data set or source."""
    kind = type(value)
    names = [*getattr(value, "__dict__", ())]
    if dataclasses.is_dataclass(value):  # it may have __slots__
        names = [field.name for field in dataclasses.fields(value)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if any(each.__module__ == "torch.nn.modules.module" for each in kind.__mro__):
        return {n: v for n, v in found.items() if n[0] != "_" and isinstance(v, _PLAIN)}
    return found if _is_own(kind) else {}


def _is_own(kind: type) -> bool:
    if kind.__module__.startswith(_OURS):  # a config is compared field by field
        return kind.__module__.startswith(f"{_OURS}data.")
    if kind.__name__.endswith("Namespace"):  # of argparse, or a SimpleNamespace
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    is_python = kind.__module__.partition(".")[0] in {*sys.stdlib_module_names} - {"__main__"}
    return kind.__module__.startswith(_OF_TORCH) or not (installed or is_python)
