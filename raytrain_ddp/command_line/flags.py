"""The flags of a command: one for each field of its dataclass, by type and default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raytrain_ddp.config.field_types import described, listed

_BOOLS: dict[str, Any] = {"true": True, "yes": True, "false": False, "no": False}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}
_PAIRS = "pairs of KEY and VALUE, or KEY=VALUE, each key once"


def positional(metavar: str) -> dict[str, str]:
    """Metadata of a field that is given by its place, not as a flag."""
    return {"positional": metavar}


def flat(section: str, prefix: str = "") -> dict[str, str]:
    """Metadata of a nested dataclass whose flags have another name in front, or none; its section
    in the help."""
    return {"flat": section, "prefix": prefix}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field that can be set on a command line.

    Args:
        name: as typed after the two dashes, such as ``optim.weight-decay``.
        section: the part of the help that has it, such as ``optim``.
        path: names of the fields that lead to it, from the command's dataclass.
        owner: the dataclass that has the field.
        default: MISSING if there is none.
    """

    name: str
    section: str
    path: tuple[str, ...]
    owner: type
    kind: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def positional(self) -> str:
        """The metavar of a field that is given by its place; empty for a flag."""
        return str(self.metadata.get("positional", ""))

    @cached_property
    def members(self) -> Sequence[Any]:
        """The types of a union, or the only type, in the order in which they are tried: None first,
        text last, as it takes everything."""
        union = get_origin(self.kind) in (Union, UnionType)
        kinds = get_args(self.kind) if union else [self.kind]
        return sorted(kinds, key=lambda kind: (kind is not NoneType, kind is str))

    @property
    def may_be_empty(self) -> bool:
        """Whether an empty text is a value, and not a shell variable that is not set."""
        return "may_be_empty" in self.metadata or self.default == ""

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true, and ``no-`` before its last word means false."""
        return bool in self.members

    @property
    def counts(self) -> tuple[int, int | None]:
        """The least and the most words that it takes; None: any number."""
        for kind in self.members:
            if get_origin(kind) is dict or (get_origin(kind) is tuple and ... in get_args(kind)):
                return 0, None
            if get_origin(kind) is tuple:
                return (len(get_args(kind)),) * 2
        return 1, 1

    def value(self, words: Sequence[str]) -> Any:
        """Raises ValueError if the words are not of the flag's type."""
        for kind in self.members:
            with suppress(ValueError):
                return _converted(kind, words)
        raise ValueError

    @property
    def choices(self) -> list[str]:
        """The words that it takes, as far as they can be listed."""
        return [word for kind in self.members for word in _words(kind)]

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts; empty for a switch."""
        if self.positional or "metavar" in self.metadata:
            return str(self.metadata.get("metavar") or self.positional)
        if self.kind is bool:
            return ""
        return "|".join(filter(None, map(_metavar, self.members)))

    @property
    def takes(self) -> str:
        """``auto or an integer``: for messages."""
        if "metavar" in self.metadata:
            return self.metavar
        if any(get_origin(kind) is dict for kind in self.members):
            return _PAIRS
        words = [
            _words(kind) or [described(kind).removeprefix("a list of ")]
            for kind in self.members
            if kind is not NoneType
        ]
        return listed(word for several in words for word in several)


def flags_of(
    kind: type, holder: Any, section: str, prefix: str = "", path: tuple[str, ...] = ()
) -> Iterator[Flag]:
    """The flags of a dataclass; those of nested ones start with the name of their field and a dot.

    Args:
        holder: has the defaults, by attribute.
    """
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        below = getattr(holder, field.name, dataclasses.MISSING)
        name, here = prefix + field.name.replace("_", "-"), (*path, field.name)
        if dataclasses.is_dataclass(below):
            inner = field.metadata.get("flat", field.name)
            start = prefix + field.metadata.get("prefix", f"{name}.".removeprefix(prefix))
            yield from flags_of(type(below), below, inner, start, here)
        else:
            yield Flag(name, section, here, kind, hints[field.name], below, field.metadata)


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass, by field; fields without one are left out."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def changes(holder: Any, values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The fields of `holder` that get another value, by the paths of flags; nested dataclasses are
    replaced as a whole, and so are checked."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in values):
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        if () in below:
            result[name] = below[()]
        else:
            inner = getattr(holder, name)
            result[name] = dataclasses.replace(inner, **changes(inner, below))
    return result


def _words(kind: Any) -> list[str]:
    """The words of a type that has only some."""
    if kind is bool:
        return ["true", "false"]
    return [*map(str, get_args(kind))] if get_origin(kind) is Literal else []


def _metavar(kind: Any) -> str:
    """What stands for a value of a type; empty for None."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is NoneType or _words(kind):
        return "|".join(_words(kind))
    if origin is dict:
        return "KEY VALUE ..."
    if origin is not tuple:
        return _METAVARS[kind]
    one = _METAVARS[args[0]]
    return f"{one} ..." if ... in args else " ".join([one] * len(args))


def _converted(kind: Any, words: Sequence[str]) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        if all(word.partition("=")[0].isidentifier() and "=" in word for word in words):
            words = [part for word in words for part in word.split("=", 1)]
        if len({*words[::2]}) < len(words[::2]):
            raise ValueError("a name is given twice")
        return dict(zip(words[::2], words[1::2], strict=True))
    if origin is tuple:
        kinds = args[:1] * len(words) if ... in args else args
        return tuple(_converted(one, [word]) for one, word in zip(kinds, words, strict=True))
    (word,) = words
    if kind is bool:
        known, word = _BOOLS, word.lower()
    elif kind is NoneType:
        known = {"None": None}
    elif origin is Literal:
        known = dict(zip(_words(kind), args, strict=True))
    else:
        value = kind(word)
        if kind is float and not math.isfinite(value):
            raise ValueError(word)
        return value
    if word not in known:
        raise ValueError(word)
    return known[word]
