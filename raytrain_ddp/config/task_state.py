"""Distinguishes objects of the same task class, such as the folds of a cross-validation.

A run is identified by its config. If Python code passes an object as the task, its contents are
part of the config.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_MOST_VALUES = 1_000_000  # of an array; larger ones are sampled evenly
# Types, and modules with types, whose `repr` tells their values apart.
_BY_REPR = (bytearray, range, slice, BuiltinFunctionType)
_MODULES_BY_REPR = {"datetime", "decimal", "fractions", "pathlib", "re", "uuid"}
_OURS, _OF_TORCH = "raytrain_ddp.", "torch.utils.data"  # such as a Subset

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
        inside = _Texts().inside(target, is_task=True)
    digest = _digest(inside)[:8] if inside else ""
    with suppress(TypeError):  # no weak references, as with __slots__
        _known[id(target)] = weakref.ref(target), digest
    return digest


class _Texts:
    """Texts that are equal for equal values; each object is visited once."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str]] = {}  # objects are kept so that ids are not reused

    def text(self, value: Any) -> str:
        kind = type(value)
        of_torch = kind.__module__ == "torch" and not hasattr(value, "detach")  # a dtype, a device
        if isinstance(value, _PLAIN) or of_torch:
            return repr(value)
        if isinstance(value, _FUNCTIONS) and "<" not in value.__qualname__:
            return f"{value.__module__}.{value.__qualname__}"
        if id(value) not in self._texts:
            name = f"{kind.__module__}.{kind.__qualname__}"
            self._texts[id(value)] = value, name  # for what refers back to it
            self._texts[id(value)] = value, f"{name} {_digest(self.inside(value))}"
        return self._texts[id(value)][1]

    def inside(self, value: Any, is_task: bool = False) -> list[Any]:
        """The texts of the parts of a value, in a fixed order."""
        if isinstance(value, (list, tuple, deque)):
            if all(type(each) in _PLAIN for each in value):  # at once, as there may be millions
                return [*value]
            return [*map(self.text, value)]
        if isinstance(value, (set, frozenset)):  # they may refer to each other, in any order
            return sorted(_Texts().text(each) for each in value)
        if isinstance(value, Mapping):
            return sorted((self.text(key), self.text(each)) for key, each in value.items())
        return [*map(self.text, _parts(value, is_task))]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parts(value: Any, is_task: bool) -> Iterable[Any]:
    """The parts of an object, a function, or a class defined in a function."""
    root = type(value).__module__.partition(".")[0].lstrip("_")
    parts: Iterable[Any]
    if root == "pandas":
        import numpy as np

        parts = [str(getattr(value, "columns", "")), np.asarray(value)]
    elif hasattr(value, "reshape") and hasattr(value, "tolist"):  # of NumPy or torch
        parts = _parts_of_array(value)
    elif isinstance(value, (functools.partial, MethodType, FunctionType, type)):
        parts = _parts_of_callable(value)
    elif hasattr(value, "_fingerprint"):  # a data set of Hugging Face
        parts = [str(value._fingerprint)]
    elif root in _MODULES_BY_REPR or isinstance(value, _BY_REPR):
        parts = [repr(value)]
    elif isinstance(value, enum.Enum):
        parts = [value.value]
    else:
        parts = sorted(_attributes(value, is_task).items())
    return parts


def _parts_of_callable(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, type):
        return _parts_of_class(value)
    code = value.__code__
    constants = [each for each in code.co_consts if isinstance(each, _PLAIN)]
    held = [value.__defaults__, value.__kwdefaults__, *_closure(value)]
    return [value.__qualname__, code.co_names, constants, *held]


def _parts_of_array(value: Any) -> Iterable[Any]:
    if hasattr(value, "detach"):
        value = value.detach()
        value = value.values() if value.is_nested else value
        value = value.to_dense() if value.is_sparse else value
    flat = value.reshape(-1)
    chosen = flat[:: 1 + len(flat) // _MOST_VALUES]
    return [str(value.dtype), tuple(value.shape), chosen.tolist()]


def _parts_of_class(kind: type) -> Iterable[Any]:
    """What its functions hold, and its other attributes."""
    for name, value in sorted(vars(kind).items()):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        # Without the __class__ cell that super() uses.
        yield from ((name, each) for each in _closure(inner) if each is not kind)
        if not (name.startswith("_") or callable(inner)):
            yield name, value


def _closure(function: Any) -> Iterable[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            yield cell.cell_contents


def _attributes(value: Any, is_task: bool) -> Mapping[str, Any]:
    """The attributes of the task, a user's object, a data set or a source, without caches, which
    depend on what was done before."""
    kind = type(value)
    if not (is_task or _is_own(kind)):
        return {}
    slots = [getattr(each, "__slots__", ()) for each in kind.__mro__]
    names = {*getattr(value, "__dict__", ())}
    names |= {name for each in slots for name in ([each] if isinstance(each, str) else each)}
    of_source = kind.__module__.startswith(_OURS)
    hidden = {name for name in names if name[:2] == "__" or not hasattr(value, name)}
    hidden |= {n for n in names if of_source and n[0] == "_" and n != "_arrays"}
    hidden |= {n for n in names if isinstance(getattr(kind, n, None), functools.cached_property)}
    found = {name: getattr(value, name) for name in names - hidden}
    if any(each.__module__ == "torch.nn.modules.module" for each in kind.__mro__):
        return {n: v for n, v in found.items() if n[0] != "_" and isinstance(v, _PLAIN)}
    return found


def _is_own(kind: type) -> bool:
    if kind.__module__.startswith(_OURS):  # a config is compared field by field
        return kind.__module__.startswith(f"{_OURS}data.")
    if kind.__name__.endswith("Namespace"):  # of argparse, or a SimpleNamespace
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    is_python = kind.__module__.partition(".")[0] in {*sys.stdlib_module_names} - {"__main__"}
    return kind.__module__.startswith(_OF_TORCH) or not (installed or is_python)
