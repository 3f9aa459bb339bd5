"""The fields of a config: their types and limits, which are checked whenever a section is made.

Python does not check them, and a wrong value would fail late, or never.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from raytrain_ddp.config.validation import NOT_PLAIN
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, quoted

C = TypeVar("C")
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_LIMITS = {
    "least": ("{} or more", operator.ge),
    "above": ("above {}", operator.gt),
    "most": ("at most {}", operator.le),
    "below": ("below {}", operator.lt),
}


def setting(default: Any, **facts: Any) -> Any:
    """A field of a config, and all facts about it.

    Args:
        free: the field may change when a run is resumed; all other fields affect the result.
        least, above, most, below: limits of the number, or of each number in the value.
        check: (function, rule): the function must be true for the value.
        may_be_empty: empty text is allowed. lines: several lines are allowed.
        needs, images, on_ray: what the field needs to have an effect; see rules.py.
        of_state: the field decides what the state of a run contains, and in which order.
        of_loop: the training loop reads the field; the others in its section are for the task.
        path: what kind of path the value is; see paths.py.
        metavar: how the help shows the value.
        aka: the names that other trainers use, if they do not resemble its own; for suggestions.
    """
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: {**default}, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


class Section:
    """Base of the frozen dataclasses of a config.

    What means the same becomes the field's type: paths become text, lists tuples, and NumPy's
    numbers Python's.

    Raises:
        ConfigError: names each value that its field does not take.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "", **shared: Any) -> None:
        """Names the section. `shared`: facts for its fields, which a field may override."""
        cls.section = name or cls.section
        for field in vars(cls).get("__annotations__", {}) if shared else ():
            given = vars(cls)[field]
            made = given if isinstance(given, dataclasses.Field) else setting(given)
            made.metadata = {**shared, **made.metadata}
            setattr(cls, field, made)

    @classmethod
    @functools.cache  # 20 ms of CPU for the whole config
    def kinds(cls) -> dict[str, Any]:
        """The type of each field."""
        hints = get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cast(Any, cls))}

    def __post_init__(self) -> None:
        fitting, wrong = checked(type(self), vars(self))
        if wrong:
            raise ConfigError(" ".join(wrong))
        vars(self).update(fitting)


def fields_below(
    section: type[Section], prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """(full name, such as ``optim.lr``, field) for each field that is not a section, in order."""
    for field in dataclasses.fields(cast(Any, section)):
        kind = section.kinds()[field.name]
        if dataclasses.is_dataclass(kind):
            yield from fields_below(cast(Any, kind), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def facts(section: type[Section], fact: str) -> dict[str, Any]:
    """Full name -> value of this fact, for each field that has it."""
    found = ((name, field.metadata) for name, field in fields_below(section))
    return {name: about[fact] for name, about in found if about.get(fact)}


def value_of(config: Any, name: str) -> Any:
    """The value of a field by its full name."""
    return operator.attrgetter(name)(config)


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """A copy with these values of fields, by their full names."""
    changed: C = dataclasses.replace(cast(Any, config), **changes(config, values))
    return changed


def changes(holder: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of `holder` with these values of fields, by their full names; each section is
    replaced as a whole, and therefore checked."""
    given = {name: value for name, value in values.items() if "." not in name}
    for section in dict.fromkeys(name.partition(".")[0] for name in values if "." in name):
        start = f"{section}."
        below = {n.removeprefix(start): v for n, v in values.items() if n.startswith(start)}
        given[section] = with_values(getattr(holder, section), below)
    return given


def checked(section: type[Section], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values as their fields' types, and a line for each that its field does not take."""
    fitting: dict[str, Any] = {}
    wrong: list[str] = []
    fields = {field.name: field for field in dataclasses.fields(cast(Any, section))}
    for name, value in values.items():
        kind = section.kinds()[name]
        try:
            fitting[name] = fitted(kind, value)
            rule = _violated(fields[name], kind, fitting[name])
        except ValueError:
            rule = f"must be {described(kind)}"
        if rule:
            field = f"{section.section}.{name}".lstrip(".")
            wrong.append(f"{field} = {quoted(value)}: {rule}.{withdrawn(f'{field}={value}')}")
    return fitting, wrong


def _violated(field: dataclasses.Field[Any], kind: Any, value: Any) -> str:
    """The rule that a value of the field's type violates; empty if there is none."""
    about = field.metadata
    several = chain(*value.items()) if isinstance(value, Mapping) else value
    parts = [*several] if isinstance(value, Mapping | tuple) else [value]
    given = [each for each in parts if type(each) in (int, float)]
    control = [*filter(None, (NOT_PLAIN.search(each) for each in parts if isinstance(each, str)))]
    limits = [limit for limit in _LIMITS if limit in about]
    holds, rule = about.get("check", (bool, ""))
    if control and "lines" not in about:
        return f"must not contain the control character U+{ord(control[0][0]):04X}"
    if not all(math.isfinite(each) for each in given if isinstance(each, float)):
        return "must be finite"
    if not all(_LIMITS[limit][1](each, about[limit]) for each in given for limit in limits):
        limit = " and ".join(_LIMITS[limit][0].format(about[limit]) for limit in limits)
        return f"must be {limit}{', or auto' if 'auto' in described(kind) else ''}"
    if value == "" and field.default not in ("", None) and "may_be_empty" not in about:
        return "must not be empty"
    return rule if rule and value is not None and not holds(value) else ""


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
    """The value as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fitted(kind: Any, value: Any) -> Any:
    """The value as that type. Raises ValueError if it is of another one."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for each in [each for each in args if type(value) is each] or args:
            with suppress(ValueError):
                return fitted(each, value)
        raise ValueError
    if origin is tuple:
        value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
        if not isinstance(value, tuple | list) or (... not in args and len(value) != len(args)):
            raise ValueError
        return tuple(fitted(args[0], each) for each in value)
    if origin is dict and isinstance(value, Mapping):
        return {fitted(str, key): fitted(args[1], each) for key, each in value.items()}
    if kind in (int, float):
        return _number(kind, value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind is bool and hasattr(value, "item"):  # of NumPy
        value = value.item()
    if not (value in args if origin is Literal else origin is None and isinstance(value, kind)):
        raise ValueError
    return value


def _number(kind: type, value: Any) -> Any:
    """A whole number as float counts as an integer; true and false are no numbers."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or (kind is int and value % 1 != 0):
        raise ValueError
    try:
        return kind(value)
    except OverflowError:
        raise ValueError from None
