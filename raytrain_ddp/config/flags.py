"""A flag of a command: one for each field of its dataclass, by type and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raytrain_ddp.config.field_types import described, fitted
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean

_BOOLS = {"true": True, "yes": True, "false": False, "no": False}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


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
        path: its full name in the command's dataclass, such as ``config.optim.weight_decay``.
        owner: the dataclass that has the field.
        default: MISSING if there is none.
    """

    name: str
    section: str
    path: str
    owner: type
    kind: Any
    default: Any
    metadata: Mapping[str, Any]

    @property
    def positional(self) -> str:
        """The metavar of a field that is given by its place; empty for a flag."""
        return str(self.metadata.get("positional", ""))

    @property
    def members(self) -> Sequence[Any]:
        """The types of a union, or the only type."""
        union = get_origin(self.kind) in (Union, UnionType)
        return get_args(self.kind) if union else [self.kind]

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true, and ``no-`` before its last word means false."""
        return bool in self.members

    def negated(self, no: str = "no-") -> str:
        """The name of a switch that means false: ``optim.no-nesterov``."""
        section, dot, last = self.name.rpartition(".")
        return f"{section}{dot}{no}{last}"

    @property
    def nargs(self) -> int | Literal["*"] | None:
        """The number of words of its value, as argparse has it. None: one."""
        for kind in self.members:
            if get_origin(kind) in (dict, tuple):
                args = get_args(kind)
                return "*" if self._is_table or ... in args else len(args)
        return None

    @property
    def choices(self) -> list[str]:
        """The words that it takes, as far as they can be listed."""
        literals = (get_args(kind) for kind in self.members if get_origin(kind) is Literal)
        return [*("true", "false") * self.is_switch, *(word for each in literals for word in each)]

    @property
    def metavar(self) -> str:
        """What stands for each word of the value in help texts; empty for a switch."""
        own = self.metadata.get("metavar", self.positional)
        if own or self.kind is bool or self._is_table:
            return str(own or "KEY=VALUE" * self._is_table)
        words = [get_args(kind)[0] if get_args(kind) else kind for kind in self.members]
        return "|".join([*(_METAVARS[word] for word in words if word in _METAVARS), *self.choices])

    @property
    def takes(self) -> str:
        """``an integer or auto``: for messages."""
        table = "KEY=VALUE pairs, or KEY and VALUE, each key once" if self._is_table else ""
        return str(self.metadata.get("metavar") or table or described(self.kind))

    @property
    def _is_table(self) -> bool:
        return get_origin(self.kind) is dict

    def value(self, words: Sequence[str]) -> Any:
        """The value that the words stand for.

        Raises:
            ConfigError: they are not of its type, or empty by mistake.
        """
        name, text = self.positional or f"--{self.name}", " ".join(words)
        if self.nargs != "*" and len(words) != (count := self.nargs or 1):
            expected = f"expected {count} argument{'s' * (count > 1)}"
            raise ConfigError(f"{name} takes {self.takes}: {expected}.")
        try:
            value = self._converted(words)
        except ValueError:
            hint = withdrawn(f"{self.name}={text}") or did_you_mean(text, self.choices)
            raise ConfigError(f"{name} takes {self.takes}, not {text!r}.{hint}") from None
        if value == "" and self.default != "" and "may_be_empty" not in self.metadata:
            raise ConfigError(f"{name} is empty, as by a shell variable that is not set.")
        return value

    def _converted(self, words: Sequence[str]) -> Any:
        if NoneType in self.members and [*words] == ["None"]:
            return None
        if self._is_table:
            return _pairs(words)
        for read in (lambda word: _BOOLS[word.lower()], int, float, str):
            with suppress(ValueError, KeyError):
                values = [read(word) for word in words]
                return fitted(self.kind, values if self.nargs else values[0])
        raise ValueError(words)


def flags_of(
    kind: type, holder: Any, section: str, prefix: str = "", path: str = ""
) -> Iterator[Flag]:
    """The flags of a dataclass; those of nested ones start with the name of their field and a dot.

    Args:
        holder: has the defaults, by attribute.
    """
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        below = getattr(holder, field.name, dataclasses.MISSING)
        name, here = prefix + field.name.replace("_", "-"), f"{path}{field.name}"
        if dataclasses.is_dataclass(below):
            inner = field.metadata.get("flat", field.name)
            start = prefix + field.metadata.get("prefix", f"{name}.".removeprefix(prefix))
            yield from flags_of(type(below), below, inner, start, f"{here}.")
        else:
            yield Flag(name, section, here, kind, hints[field.name], below, field.metadata)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` words, or keys and values in turn. Raises ValueError."""
    if all(word.partition("=")[0].isidentifier() and "=" in word for word in words):
        words = [part for word in words for part in word.split("=", 1)]
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    if 2 * len(pairs) < len(words):
        raise ValueError("a name is given twice")
    return pairs
