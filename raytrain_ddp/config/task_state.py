"""Distinguishes objects of the same task class, such as the folds of a cross-validation.

A run is identified by its config. If Python code passes an object as the task, its contents are
part of the config.
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
import pathlib
import re
import sys
import uuid
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_NUMBERS = (decimal.Decimal, fractions.Fraction)
_BY_REPR = (bytearray, range, slice, uuid.UUID, re.Pattern, *_NUMBERS, *_DATES)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_MOST_VALUES = 1_000_000  # of an array; larger ones are sampled evenly
_OF_TORCH = "torch.utils.data"  # such as a Subset
_OURS = "raytrain_ddp."
_ARRAYS = {"numpy.ndarray", "numpy.generic", "torch.Tensor"}
_ARRAYS |= {"pandas.Series", "pandas.Index", "pandas.Categorical"}

_known: dict[int, tuple[weakref.ref[Any], str]] = {}  # id -> digest when first seen


def state_digest(target: Any) -> str:
    """An eight-digit hex digest of the contents of an object, a partial, or a function or class
    defined in a function; "" if it has none.

    The digest is the same in every process. Plain values count in full, arrays by at most a million
    values, torch modules by their type and plain attributes, and other objects of installed
    packages by their type. An object keeps its first digest even if training changes it.
    """
    if isinstance(target, _FUNCTIONS) and "<" not in target.__qualname__:
        return ""
    known = _known.get(id(target))
    if known is not None and known[0]() is target:
        return known[1]
    inside: list[Any] = []
    with suppress(Exception):  # an object that cannot be read, or is nested too deeply
        inside = _Parts().inside(target, is_task=True)
    digest = hashlib.sha256(repr(inside).encode()).hexdigest()[:8] if inside else ""
    with suppress(TypeError):  # no weak references, as with __slots__
        _known[id(target)] = weakref.ref(target), digest
    return digest


class _Parts:
    """Texts that are equal for equal values; each object is visited once."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._visited: list[Any] = []  # kept alive so that ids are not reused

    def text(self, value: Any) -> str:
        own = _own_text(value)
        if own is not None:
            return own
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if id(value) not in self._texts:
            self._visited.append(value)
            self._texts[id(value)] = kind  # for what refers back to it
            content = repr(self.inside(value)).encode()
            self._texts[id(value)] = f"{kind} {hashlib.sha256(content).hexdigest()}"
        return self._texts[id(value)]

    def inside(self, value: Any, is_task: bool = False) -> list[Any]:
        """The texts of the parts of a value, in a fixed order."""
        if isinstance(value, (list, tuple, collections.deque)):
            if all(type(each) in _PLAIN for each in value):  # at once, as there may be millions
                return [len(value), *_chosen([*value])]
            return [*map(self.text, value)]
        if isinstance(value, (set, frozenset)):  # they may refer to each other, in any order
            return sorted(_Parts().text(each) for each in value)
        if isinstance(value, Mapping):
            return sorted((self.text(key), self.text(each)) for key, each in value.items())
        if _is_array(value):
            return [*map(self.text, _values(value).tolist())]
        return [(name, self.text(each)) for name, each in _parts(value, is_task)]


def _own_text(value: Any) -> str | None:
    """The text of a value without parts; otherwise None."""
    kind, text = type(value), None
    if _is_array(value):
        values = _values(value)
        if not values.dtype.hasobject:
            content = hashlib.sha256(values.tobytes()).hexdigest()
            text = f"{value.dtype} {tuple(value.shape)} {content}"
    elif isinstance(value, enum.Enum):
        text = f"{kind.__qualname__} {value.value!r}"
    elif isinstance(value, (*_PLAIN, *_BY_REPR)) or kind.__module__ == "torch":
        text = repr(value)  # also a dtype or device of torch
    elif isinstance(value, pathlib.PurePath):
        text = f"path {str(value)!r}"
    elif isinstance(value, _FUNCTIONS) and "<" not in value.__qualname__:
        text = f"{value.__module__}.{value.__qualname__}"
    elif isinstance(getattr(value, "__dict__", {}).get("_fingerprint"), str):
        text = value._fingerprint  # a data set of Hugging Face
    return text


def _is_array(value: Any) -> bool:
    """Whether a value is an array, table or tensor of NumPy, pandas, or torch."""
    kinds = {f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(value).__mro__}
    return not kinds.isdisjoint(_ARRAYS)


def _values(value: Any) -> Any:
    """Evenly spaced values of an array, one-dimensional."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.values() if value.is_nested else value
        value = value.to_dense() if value.is_sparse else value
        try:
            value = value.resolve_conj().numpy()
        except TypeError:  # of bfloat16, and other types that NumPy itself does not have
            value = value.double().numpy()
    return np.ascontiguousarray(_chosen(np.asarray(value).reshape(-1)))


def _chosen(values: Any) -> Any:
    return values[:: 1 + len(values) // _MOST_VALUES]


def _parts(value: Any, is_task: bool) -> Iterable[tuple[str, Any]]:
    """The parts of an object, a function or a class, by name."""
    match value:
        case functools.partial():
            return [("", value.func), ("", value.args), ("", value.keywords)]
        case MethodType():
            return [("", value.__func__), ("", value.__self__)]
        case FunctionType():  # a lambda or a local function
            held = [*(value.__defaults__ or ()), value.__kwdefaults__, *_closure(value)]
            held += [each for each in value.__code__.co_consts if isinstance(each, _PLAIN)]
            named = (value.__qualname__, *value.__code__.co_names)
            return [("", each) for each in (named, *held) if each is not None] if held else []
        case type():  # defined in a function
            return _parts_of_class(value)
    if type(value).__name__ == "DataFrame":
        return [("index", value.index), *((str(name), column) for name, column in value.items())]
    return sorted(_attributes(value, is_task).items())


def _parts_of_class(kind: type) -> list[tuple[str, Any]]:
    """The values that a class's functions hold, and its other attributes, by name."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(vars(kind).items()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        # Without the __class__ cell that super() uses.
        found += [(name, each) for each in _closure(inner) if each is not kind]
        if not (name.startswith("_") or callable(inner)):
            found.append((name, value))
    return found


def _closure(function: Any) -> list[Any]:
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            held.append(cell.cell_contents)
    return held


def _attributes(value: Any, is_task: bool) -> dict[str, Any]:
    """The attributes of the task, a user's object, a data set or a source."""
    kind = type(value)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    slots = [getattr(each, "__slots__", ()) for each in kind.__mro__]
    names = {*getattr(value, "__dict__", ()), *(field.name for field in fields)}
    names |= {name for each in slots for name in ([each] if isinstance(each, str) else each)}
    found = {name: getattr(value, name) for name in names if _counts(kind, name, value)}
    if any(each.__module__ == "torch.nn.modules.module" for each in kind.__mro__):
        return {n: v for n, v in found.items() if n[0] != "_" and isinstance(v, _PLAIN)}
    return found if is_task or _is_own(kind) else {}


def _counts(kind: type, name: str, value: Any) -> bool:
    """Whether an attribute is no cache, which depends on what was done before."""
    if isinstance(getattr(kind, name, None), functools.cached_property):
        return False
    of_source = kind.__module__.startswith(_OURS) and name[0] == "_" and name != "_arrays"
    return not of_source and not name.startswith("__") and hasattr(value, name)


def _is_own(kind: type) -> bool:
    if kind.__module__.startswith(_OURS):  # a config is compared field by field
        return kind.__module__.startswith(f"{_OURS}data.")
    if kind.__name__.endswith("Namespace"):  # of argparse, or a SimpleNamespace
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    is_python = kind.__module__.partition(".")[0] in {*sys.stdlib_module_names} - {"__main__"}
    return kind.__module__.startswith(_OF_TORCH) or not (installed or is_python)
