"""Distinguishes objects of the same task class, such as the folds of a cross-validation.

A run is identified by its config. If Python code passes an object as the task, its contents are
part of the config.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_MOST_VALUES = 1_000_000  # of an array or a list; larger ones are sampled evenly
_BY_CONTENT = ("pandas.", "torch.utils.data", "raytrain_ddp.data.")  # of installed packages
_OURS = "raytrain_ddp."

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
        of_torch = type(value).__module__ == "torch" and not hasattr(value, "detach")
        if type(value) in _PLAIN or of_torch:  # such as a dtype
            return repr(value)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if id(value) not in self._texts:
            self._visited.append(value)
            self._texts[id(value)] = kind  # for what refers back to it
            content = repr(self.inside(value)).encode()
            self._texts[id(value)] = f"{kind} {hashlib.sha256(content).hexdigest()}"
        return self._texts[id(value)]

    def inside(self, value: Any, is_task: bool = False) -> list[Any]:
        """The texts of the parts of a value, in a fixed order."""
        if isinstance(value, (list, tuple)):
            is_plain = all(type(each) in _PLAIN for each in value)  # perhaps millions
            chosen = value[:: 1 + len(value) // _MOST_VALUES]
            return [len(value), *(chosen if is_plain else map(self.text, value))]
        if isinstance(value, (set, frozenset)):  # they may refer to each other, in any order
            return sorted(_Parts().text(each) for each in value)
        if isinstance(value, Mapping):
            return sorted((self.text(key), self.text(each)) for key, each in value.items())
        if array := _array(value):
            *about, content = array
            return array if isinstance(content, str) else [*about, *map(self.text, content)]
        if isinstance(value, _FUNCTIONS) and "<" not in value.__qualname__:
            return [value.__module__, value.__qualname__]
        return [(name, self.text(each)) for name, each in _parts(value, is_task)]


def _array(value: Any) -> list[Any] | None:
    """Type, shape and digest, or the objects, of an array of NumPy or torch; None for others."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        about = [str(value.dtype), tuple(value.shape)]
        flat = value.detach().cpu().to_dense().resolve_conj().resolve_neg().reshape(-1)
        values = flat[:: 1 + len(flat) // _MOST_VALUES].contiguous().view(torch.uint8).numpy()
    elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        about, flat = [str(value.dtype), value.shape], numpy.asarray(value).reshape(-1)
        values = flat[:: 1 + len(flat) // _MOST_VALUES]
    else:
        return None
    is_plain = not values.dtype.hasobject
    return [*about, hashlib.sha256(values.tobytes()).hexdigest() if is_plain else values.tolist()]


def _parts(value: Any, is_task: bool) -> list[tuple[str, Any]]:
    """The parts of an object, a function or a class, by name; none of what counts by its type."""
    kind = type(value)
    if isinstance(value, FunctionType):  # a lambda or a local function
        held = [*(value.__defaults__ or ()), value.__kwdefaults__, *_closure(value)]
        held += [each for each in value.__code__.co_consts if not isinstance(each, CodeType)]
        named = (value.__qualname__, *value.__code__.co_names)
        held = [each for each in held if each is not None]
        return [("", each) for each in (named, *held)] if held else []
    if isinstance(value, type):  # what its functions hold, and its other attributes
        found: list[tuple[str, Any]] = []
        for name, each in sorted(vars(value).items()):
            inner = getattr(each, "fget", None) or getattr(each, "__func__", each)
            found += [(name, held) for held in _closure(inner) if held is not value]
            if not (name.startswith("_") or callable(inner)):
                found.append((name, each))
        return found
    fingerprint = getattr(value, "__dict__", {}).get("_fingerprint")
    if isinstance(fingerprint, str):  # a data set of Hugging Face
        return [("", fingerprint)]
    if any(each.__module__ == "torch.nn.modules.module" for each in kind.__mro__):
        plain = {n: v for n, v in vars(value).items() if n[0] != "_" and isinstance(v, _PLAIN)}
        return sorted(plain.items())
    return _pickled_parts(value) if is_task or _has_contents(kind) else []


def _pickled_parts(value: Any) -> list[tuple[str, Any]]:
    """What pickle would write of an object itself, without the caches among its attributes."""
    kind = type(value)
    try:
        reduce: Any = copyreg.dispatch_table.get(kind)
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    except TypeError:  # a lock, an open file
        return []
    _, given, state, *items = (*reduced, None, None, None)[:5]
    if isinstance(state, tuple) and all(isinstance(each, dict | None) for each in state):
        state = {name: each for part in state for name, each in (part or {}).items()}  # of slots
    if not isinstance(state, dict):
        state = {"": state}
    found = [("", given), *((n, each) for n, each in sorted(state.items()) if _counts(kind, n))]
    return found + [("", [*each]) for each in items if each is not None]


def _counts(kind: type, name: str) -> bool:
    """Whether an attribute is no cache, which depends on what was done before."""
    of_source = kind.__module__.startswith(_OURS) and name[:1] == "_" and name != "_arrays"
    return not (of_source or isinstance(getattr(kind, name, None), functools.cached_property))


def _closure(function: Any) -> list[Any]:
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            held.append(cell.cell_contents)
    return held


def _has_contents(kind: type) -> bool:
    """Whether the contents count of objects of a class: of Python's, of the user's, and data."""
    if kind.__module__.startswith(_BY_CONTENT):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return not installed and not kind.__module__.startswith(_OURS)  # a config is compared itself
