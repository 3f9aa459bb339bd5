"""The fields of configs and of commands: their types, limits and other facts, and their checks.

Python does not check types, and a wrong value would fail late, or never.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, quoted

C = TypeVar("C")
LEAST_OF_RESOURCE = 0.0001  # of a CPU or GPU, for Ray
MAY_BE_EMPTY = {"may_be_empty": True}
ADDRESS = {"metavar": "HOST:PORT|auto"}
# C0, C1 and DEL, and what YAML and Unicode treat as the end of a line.
_OF_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff"
CONTROL = re.compile(f"[{_OF_CONTROL}]")
_NOT_PLAIN = re.compile(f"[{_OF_CONTROL}\ud800-\udfff]")  # and surrogates
_UNIONS = (Union, UnionType)
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
        needs, images, on_ray: what the field needs to have an effect; see `idle`.
        of_state: the field decides what the state of a run contains, and in which order.
        of_loop: the training loop reads the field; the others in its section are for the task.
        path: what kind of path the value is; see recipe.py.
        metavar: how the help shows the value.
        aka: the names that other trainers use, if they do not resemble its own; for suggestions.
    """
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: {**default}, metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a dataclass, and all facts about it.

    Args:
        name: its full name, such as ``optim.lr``.
        owner: the dataclass that has it.
        default: MISSING if there is none.
    """

    name: str
    owner: type
    kind: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def members(self) -> Sequence[Any]:
        """The types of a union, or the only type."""
        return get_args(self.kind) if get_origin(self.kind) in _UNIONS else [self.kind]

    def checked(self, value: Any) -> Any:
        """The value as the field's type.

        Raises:
            ConfigError: it is of another type, or violates a rule of the field.
        """
        try:
            fitting = fitted(self.kind, value)
            rule = self._violated(fitting)
        except ValueError:
            rule = f"must be {described(self.kind)}"
        if rule:
            hint = withdrawn(f"{self.name}={value}")
            raise ConfigError(f"{self.name} = {quoted(value)}: {rule}.{hint}")
        return fitting

    def _violated(self, value: Any) -> str:
        """The rule that a value of the field's type violates; empty if there is none."""
        about = self.metadata
        limits = [(*_LIMITS[name], about[name]) for name in _LIMITS if name in about]
        holds, rule = about.get("check", (bool, ""))
        parts = [*value] if isinstance(value, Mapping | tuple) else [value]
        parts += value.values() if isinstance(value, Mapping) else []
        for part in parts:
            if (
                isinstance(part, str)
                and "lines" not in about
                and (found := _NOT_PLAIN.search(part))
            ):
                return _no_control(found[0])
            if isinstance(part, float) and not math.isfinite(part):
                return "must be finite"
            is_number = type(part) in (int, float)
            if is_number and not all(is_within(part, limit) for _, is_within, limit in limits):
                text = " and ".join(text.format(limit) for text, _, limit in limits)
                return f"must be {text}{', or auto' if 'auto' in described(self.kind) else ''}"
        if value == "" and self.default not in ("", None) and "may_be_empty" not in about:
            return "must not be empty"
        return rule if rule and value is not None and not holds(value) else ""


@functools.cache  # 20 ms of CPU for the whole config
def own_fields(kind: Any) -> Mapping[str, Field]:
    """The fields of a dataclass, by the names of its attributes."""
    hints, found = get_type_hints(kind), {}
    start, shared = getattr(kind, "section", ""), getattr(kind, "shared", {})
    for each in dataclasses.fields(kind):
        owner = next(k for k in kind.__mro__ if each.name in vars(k).get("__annotations__", ()))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        full, about = f"{start}.{each.name}".lstrip("."), {**shared, **each.metadata}
        found[each.name] = Field(full, owner, hints[each.name], default, about)
    return found


class Section:
    """Base of the frozen dataclasses of a config.

    What means the same becomes the field's type: paths become text, lists tuples, and NumPy's
    numbers Python's.

    Raises:
        ConfigError: names each value that its field does not take.
    """

    section: ClassVar[str] = ""
    shared: ClassVar[Mapping[str, Any]] = {}
    """Facts for all of its fields, which a field may override."""

    def __init_subclass__(cls, name: str = "", **shared: Any) -> None:
        cls.section, cls.shared = name or cls.section, shared or cls.shared

    def __post_init__(self) -> None:
        wrong = []
        for name, field in own_fields(type(self)).items():  # type: ignore[arg-type]
            try:
                vars(self)[name] = field.checked(vars(self)[name])
            except ConfigError as error:
                wrong.append(str(error))
        if wrong:
            raise ConfigError(" ".join(wrong))


def fields_below(section: type) -> Iterator[Field]:
    """Each field that is not a section, in order, those of the sections in it too."""
    for field in own_fields(section).values():
        is_section = dataclasses.is_dataclass(field.kind)
        yield from fields_below(field.kind) if is_section else [field]


def facts(section: type, fact: str) -> dict[str, Any]:
    """Full name -> value of this fact, for each field that has it."""
    return {f.name: f.metadata[fact] for f in fields_below(section) if f.metadata.get(fact)}


def value_of(config: Any, name: str) -> Any:
    """The value of a field by its full name."""
    return operator.attrgetter(name)(config)


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """A copy with these values of fields, by their full names."""
    changed: C = dataclasses.replace(config, **changes(config, values))  # type: ignore[type-var]
    return changed


def changes(holder: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of `holder` with these values of fields, by their full names; each section is
    replaced as a whole, and therefore checked."""
    own, below = dict[str, Any](), defaultdict[str, dict[str, Any]](dict)
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        (below[first] if dot else own)[rest or first] = value
    return own | {name: with_values(getattr(holder, name), each) for name, each in below.items()}


# ------------------------------------------------------------------ types


def fitted(kind: Any, value: Any) -> Any:
    """The value as that type. Raises ValueError if it is of another one."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in _UNIONS:
        for each in sorted(args, key=lambda each: type(value) is not each):
            with suppress(ValueError):
                return fitted(each, value)
    elif origin is tuple and isinstance(value, tuple | list):
        if ... in args or len(value) == len(args):
            return tuple(fitted(args[0], each) for each in value)
    elif origin is dict and isinstance(value, Mapping):
        return {fitted(str, key): fitted(args[1], each) for key, each in value.items()}
    elif origin in (int, float):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number and (kind is float or value % 1 == 0):
            with suppress(OverflowError):
                return kind(value)
    elif value in args if origin is Literal else not args and isinstance(value, kind):
        return value
    raise ValueError


def described(kind: Any) -> str:
    """A type in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        return listed(described(each) for each in args if each is not NoneType)
    if origin is Literal:
        return listed(map(str, args))
    if origin is tuple:
        plural = f"{_WORDS[args[0]].split()[-1]}s"
        return f"a list of {plural}" if ... in args else f"{len(args)} {plural}"
    if origin is dict:
        return f"a table whose values are {described(args[1])}"
    return _WORDS.get(kind) or f"of type {kind.__name__}, in a file a table [{kind.section}]"


def listed(words: Iterable[str]) -> str:
    """``a, b or c``"""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def as_text(value: str | bool | int | float | None) -> str:
    """The value as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def scalar(value: str | bool | int | float) -> str | bool | int | float:
    """A word of a command line as what it looks like: an integer, a number, true, false, or
    text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            number = kind(value)
            return number if math.isfinite(number) else value
    return value


# ------------------------------------------------------------------ checks


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises ConfigError that names the field, the value and the rule, unless the rule holds."""
    if not holds:
        raise ConfigError(f"{field} = {quoted(value)}: {rule}.")


def require_least(args: object, **least: float) -> None:
    """Requires that the flags of these names have this value or more, where they are given."""
    for name, number in least.items():
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        require(value is None or value >= number, flag, value, f"must be {number:g} or more")


def require_no_control(words: Sequence[str]) -> None:
    """Raises ConfigError if a word of a command line has a control character: an error that quotes
    it would have several lines, or change the terminal."""
    for word in words:
        if found := CONTROL.search(word):
            raise ConfigError(f"the argument {word!r} {_no_control(found[0])}.")


def _no_control(character: str) -> str:
    return f"must not contain the control character U+{ord(character):04X}"
