"""The types of a config's fields, which are checked whenever a section is made.

Python does not check them, and a value of another type would fail late, or never.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

from raytrain_ddp.config.validation import require
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, quoted

_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


class Section:
    """Base of the frozen dataclasses of a config.

    What means the same becomes the field's type: paths become text, lists tuples, and NumPy's
    numbers Python's.

    Raises:
        ConfigError: a line for each value of another type.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section = name or cls.section

    @classmethod
    @functools.cache  # 20 ms of CPU for the whole config
    def kinds(cls) -> dict[str, Any]:
        """The type of each field."""
        hints = get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cast(Any, cls))}

    def __post_init__(self) -> None:
        given = {field: getattr(self, field) for field in self.kinds()}
        fitting, wrong = checked(type(self), given)
        if wrong:
            raise ConfigError("\n".join(wrong))
        for field, value in fitting.items():
            object.__setattr__(self, field, value)

    def require(self, field: str, holds: object, rule: str) -> None:
        """Raises ConfigError that names the field, its value and the rule, unless the rule
        holds."""
        require(bool(holds), f"{self.section}.{field}".lstrip("."), getattr(self, field), rule)

    def at_least(self, least: float, *fields: str) -> None:
        """Requires that the fields are `least` or more. These methods also accept
        `auto`."""
        self._require_each(fields, lambda value: value >= least, f"must be {least:g} or more")

    def at_most(self, most: int, *fields: str) -> None:
        """Requires that the fields are `most` or less: far more is a slip, and would take all
        memory."""
        self._require_each(fields, lambda value: value <= most, f"must be {most} or less")

    def above_zero(self, *fields: str) -> None:
        """Requires that the fields are above 0."""
        self._require_each(fields, lambda value: value > 0, "must be above 0")

    def below_one(self, *fields: str) -> None:
        """Requires that the fields lie in [0, 1)."""
        self._require_each(fields, lambda value: 0 <= value < 1, "must be 0 or more and below 1")

    def _require_each(self, fields: Iterable[str], fits: Callable[[Any], bool], rule: str) -> None:
        for field in fields:
            value = getattr(self, field)
            may = ", or auto" if "auto" in described(self.kinds()[field]) else ""
            self.require(field, value == "auto" or fits(value), f"{rule}{may}")


def checked(section: type[Section], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values as their fields' types, and a line for each that is of another type."""
    fitting: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in values.items():
        kind = section.kinds()[name]
        rule = described(kind)
        with suppress(ValueError):
            fitting[name] = fitted(kind, value)
            if _is_finite(fitting[name]):
                continue
            rule = "finite"
        field = f"{section.section}.{name}".lstrip(".")
        hint = withdrawn(f"{field}={value}")
        wrong.append(f"{field} = {quoted(value)}: must be {rule}.{hint}")
    return fitting, wrong


def listed(words: Iterable[str]) -> str:
    """``a, b or c``"""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def described(kind: Any) -> str:
    """A type in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return listed(described(each) for each in args if each is not NoneType)
    if origin is Literal:
        return listed(map(str, args))
    if origin is tuple:
        plural = f"{_WORDS[args[0]].split()[-1]}s"
        return f"a list of {plural}" if ... in args else f"{len(args)} {plural}"
    if origin is dict:
        return f"a table whose values are {described(args[1])}"
    if kind in _WORDS:
        return _WORDS[kind]
    name = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    return f"{name}, in a file a table [{kind.section}]"


def as_text(value: str | bool | int | float | None) -> str:
    """As the value is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fitted(kind: Any, value: Any) -> Any:
    """The value as that type. Raises ValueError if it is of another one."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        own = [each for each in args if type(value) is each]
        return _first_fitting(own or args, value)
    if origin is Literal:
        fits = isinstance(value, str) and value in args
    elif origin is tuple:
        value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
        if not isinstance(value, tuple | list) or (... not in args and len(value) != len(args)):
            raise ValueError
        return tuple(fitted(args[0], each) for each in value)
    elif origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError
        return {fitted(str, key): fitted(args[1], each) for key, each in value.items()}
    elif kind in (int, float):
        return _number(kind, value)
    elif kind is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        fits = isinstance(value, str)
    else:
        value = value.item() if kind is bool and hasattr(value, "item") else value  # of NumPy
        fits = isinstance(value, kind)
    if not fits:
        raise ValueError
    return value


def _is_finite(value: Any) -> bool:
    """Whether a number, or all in a list, are neither infinite nor nan."""
    values = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(each) for each in values if isinstance(each, float))


def _first_fitting(kinds: Iterable[Any], value: Any) -> Any:
    for kind in kinds:
        with suppress(ValueError):
            return fitted(kind, value)
    raise ValueError


def _number(kind: type, value: Any) -> Any:
    """A whole number as float counts as an integer; true and false are no numbers."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or (kind is int and value % 1 != 0):
        raise ValueError
    try:
        return kind(value)
    except OverflowError:
        raise ValueError from None
