"""What tells two objects of one task class apart, such as the folds of a cross-validation.

A run is recognized by its config. If Python code passes an object, its attributes are part of that.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 8
_MOST_VALUES = 1_000_000  # of an array: others are skipped evenly
_DATA_SETS = "torch.utils.data"  # such as a Subset

_known: dict[int, tuple[weakref.ref[Any], str]] = {}  # as it was when it was first seen


def state_digest(target: Any) -> str:
    """Eight hex digits of what an object, a function, a partial or a class made in a function
    holds; "" if that is nothing.

    It is the same in another process. Values count as such, arrays by a million of their values,
    modules of torch by their type; and other objects of installed packages, too. An object that
    training has changed keeps its digest.
    """
    if isinstance(target, type):
        parts = [*_closures(target)]
        return _digest(parts) if parts else ""
    known = _known.get(id(target))
    if known is not None and known[0]() is target:
        return known[1]
    parts = [*_parts(target, 0)]
    digest = _digest(parts) if len(parts) > 1 else ""
    with suppress(TypeError):  # a class with __slots__
        _known[id(target)] = weakref.ref(target), digest
    return digest


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def _closures(kind: type) -> Iterator[str]:
    for name, value in sorted(vars(kind).items()):
        for each in _held_by(value):
            if each is not kind:  # as super() has it
                yield name
                yield from _parts(each, 1)


def _held_by(function: Any) -> list[Any]:
    """What the closure of a function holds; empty for anything else."""
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is not set yet
            held.append(cell.cell_contents)
    return held


def _parts(value: Any, depth: int) -> Iterator[str]:
    """Texts that decide whether two values are alike; the first one is the type's name."""
    yield f"{type(value).__module__}.{type(value).__qualname__}"
    text = _text(value)
    if text is not None:
        yield text
    elif depth <= _DEEPEST:
        for name, each in _inside(value):
            yield name
            yield from _parts(each, depth + 1)


def _text(value: Any) -> str | None:
    """What a value is, if it has nothing inside."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):  # a table of pandas
        return f"{[*value.columns]} {_array(value.to_numpy())}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array(value)
    fingerprint = getattr(value, "_fingerprint", None)  # of Hugging Face's data sets
    return fingerprint if isinstance(fingerprint, str) else None


def _inside(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value, by name, in a fixed order."""
    match value:
        case Mapping():
            found = sorted(((repr(name), each) for name, each in value.items()), key=_name)
        case list() | tuple():
            found = [("", each) for each in value]
        case set() | frozenset():
            found = sorted((("\n".join(_parts(each, 1)), None) for each in value), key=_name)
        case functools.partial():
            found = [("", value.func), ("", value.args), ("", value.keywords)]
        case MethodType():
            found = [("", value.__func__), ("", value.__self__)]
        case FunctionType():
            held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
            held += _held_by(value)
            if "<" in value.__qualname__:  # it has no name of its own
                held += [each for each in value.__code__.co_consts if isinstance(each, _PLAIN)]
            found = [("", each) for each in held]
        case _:
            named = getattr(value, "__dict__", {}) if _is_own(type(value)) else {}
            found = sorted(named.items(), key=_name)
    return found


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _array(value: Any) -> str:
    import numpy as np

    try:
        values = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # of a type that NumPy lacks
        return f"{value.dtype} {tuple(value.shape)}"
    chosen = values.reshape(-1)[:: 1 + values.size // _MOST_VALUES]
    is_plain = not values.dtype.hasobject
    content = np.ascontiguousarray(chosen).tobytes() if is_plain else repr(chosen.tolist()).encode()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


def _is_own(kind: type) -> bool:
    """Whether a class is the user's, so that its attributes count, and no module of torch, whose
    initial weights may be drawn anew."""
    if any(each.__module__ == "torch.nn.modules.module" for each in kind.__mro__):
        return False
    if kind.__name__.endswith("Namespace"):  # of argparse, or a SimpleNamespace
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    installed |= kind.__module__.startswith("raytrain_ddp.config")  # compared field by field
    is_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return kind.__module__.startswith(_DATA_SETS) or not (installed or is_python)
