"""Command lines: flags from the fields of dataclasses, errors in one line, and the help."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import groupby, pairwise
from textwrap import fill, wrap
from types import NoneType, SimpleNamespace
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from raytrain_ddp.config.field_types import (
    Field,
    as_text,
    changes,
    described,
    fitted,
    listed,
    own_fields,
    require_no_control,
)
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean

Args = TypeVar("Args")
_BOOLS = {"true": True, "yes": True, "false": False, "no": False}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}
_MIN_COLUMNS, _MAX_COLUMNS, _HELP_AT = 40, 100, 28


def positional(metavar: str) -> dict[str, str]:
    """Metadata of a field that is given by its place, not as a flag."""
    return {"positional": metavar}


def flat(section: str, prefix: str = "") -> dict[str, str]:
    """Metadata of a nested dataclass whose flags have another name in front, or none; its section
    in the help."""
    return {"flat": section, "prefix": prefix}


@dataclass(frozen=True)
class Flag(Field):
    """A field that can be set on a command line; its name is as typed after the two dashes.

    Args:
        section: the part of the help that has it, such as ``optim``.
        path: its full name in the command's dataclass, such as ``config.optim.weight_decay``.
    """

    section: str
    path: str

    @property
    def positional(self) -> str:
        """The metavar of a field that is given by its place; empty for a flag."""
        return str(self.metadata.get("positional", ""))

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
        args = [get_args(kind) for kind in self.members if get_origin(kind) in (dict, tuple)]
        return ("*" if self._is_table or ... in args[0] else len(args[0])) if args else None

    @property
    def choices(self) -> list[str]:
        """The words that it takes, as far as they can be listed."""
        literals = (get_args(kind) for kind in self.members if get_origin(kind) is Literal)
        return [*("true", "false") * self.is_switch, *(word for each in literals for word in each)]

    @property
    def metavar(self) -> str:
        """What stands for each word of the value in help texts; empty for a switch."""
        own = self.metadata.get("metavar") or self.positional or "KEY=VALUE" * self._is_table
        kinds = [(*get_args(kind), kind)[0] for kind in self.members] * (self.kind is not bool)
        named = [_METAVARS[kind] for kind in kinds if kind in _METAVARS]
        return str(own) or "|".join(named + self.choices * bool(kinds))

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

    @property
    def help(self) -> str:
        """The text below the field in the source, of its dataclass or of one below that."""
        name = self.path.rpartition(".")[2]
        kinds = [kind for kind in self.owner.__mro__ if is_dataclass(kind)]
        found = (_texts(kind.__module__).get((kind.__name__, name)) for kind in kinds)
        return next(filter(None, found), "")

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return re.split(r"\.\s", self.help)[0].removesuffix(".")

    @property
    def shown_default(self) -> str:
        """The default as it would be typed; empty if there is none, or if the help explains
        None."""
        value = self.default
        if value is None or value is MISSING or value is False or value in ("", (), {}):
            return ""
        if isinstance(value, dict):
            value = [f"{key}={each}" for key, each in value.items()]
        several = value if isinstance(value, tuple | list) else [value]
        return " ".join(f"{v:g}" if type(v) is float else as_text(v) for v in several)

    @property
    def last(self) -> str:
        """The last word of its name."""
        return self.name.rpartition(".")[2]

    def add_to(self, parser: Any, brief: bool = False) -> Any:
        """Adds the flag to a parser of argparse, which writes its help; returns the action.

        Args:
            brief: the first sentence, and no long list of values.
        """
        name, text = f"--{self.name}", self.summary if brief else self.help
        text += f" [{self.shown_default}]" if self.shown_default else ""
        names, options = [name], dict[str, Any](help=text.replace("%", "%%"))
        if self.kind is bool and brief:
            names = [f"--{self.negated('[no-]')}"] if self.default is True else names
        elif self.kind is bool:
            names = [name, f"--{self.negated()}"]
        if self.kind is bool or (brief and len(f"  {name} {self.metavar}  ") > _HELP_AT):
            return parser.add_argument(*names, **options, action="store_true")
        nargs = None if "metavar" in self.metadata else self.nargs
        names = [self.positional] if self.positional else names
        options |= {"nargs": nargs, "choices": self.choices or None}
        return parser.add_argument(*names, **options, metavar=self.metavar)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)  # names of flags stay whole


def flags_of(
    kind: type, holder: Any, section: str, prefix: str = "", path: str = ""
) -> Iterator[Flag]:
    """The flags of a dataclass; those of nested ones start with the name of their field and a dot.

    Args:
        holder: has the defaults, by attribute.
    """
    for name, each in own_fields(kind).items():
        below, about = getattr(holder, name, MISSING), each.metadata
        flag, here = prefix + name.replace("_", "-"), f"{path}{name}"
        if is_dataclass(below):
            start = prefix + about["prefix"] if "prefix" in about else f"{flag}."
            inner = about.get("flat", name)
            yield from flags_of(type(below), below, inner, start, f"{here}.")
        else:
            yield Flag(flag, kind, each.kind, below, about, section, here)


@dataclass(frozen=True)
class Command(Generic[Args]):
    """What a command takes.

    Args:
        args: the frozen dataclass of its flags; its docstring is the description.
        usage: what follows the name in the line of usage.
        main: the flags of the short help, by the headings above them. Default: all.
    """

    name: str
    args: type[Args]
    usage: str = "[--FLAG VALUE ...]"
    main: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def parse(self, argv: Sequence[str], **given: Any) -> Args:
        """The arguments; prints the help and exits if the command line asks for it.

        ``--flag VALUE`` and ``--flag=VALUE`` are the same, as are ``-`` and ``_`` within a name. A
        flag's last value wins. All words after ``--`` are positional.

        Args:
            given: defaults of fields, instead of those of the class.

        Raises:
            ConfigError: a flag or a value is wrong. SystemExit (0): help was printed.
        """
        require_no_control(argv)
        flags, end = self.flags(**given), [*argv, "--"].index("--")
        topic = _topic_of(argv[:end])
        if topic is not None:
            print(self.help(flags, topic))
            raise SystemExit(0)
        values: dict[str, Any] = {}
        place = [*_take_flags(argv[:end], flags, values), *argv[end + 1 :]]
        for flag in flags:
            if flag.positional and place:
                count = len(place) if flag.nargs else 1
                values[flag.path], place = flag.value(place[:count]), place[count:]
            elif flag.positional and flag.default is MISSING:
                raise ConfigError(f"{flag.positional} is missing. See --help.")
        if place:
            raise ConfigError(f"unexpected argument {place[0]!r}. See --help.")
        return self.args(**given | changes(self._defaults(given), values))

    def flags(self, **given: Any) -> list[Flag]:
        """All flags, in the order of the help; `given`: see `parse`."""
        return [*flags_of(self.args, self._defaults(given), self.name)]

    def _defaults(self, given: dict[str, Any]) -> SimpleNamespace:
        fields = own_fields(self.args)  # type: ignore[arg-type]
        own = {name: each.default for name, each in fields.items()}
        return SimpleNamespace(**own | given)

    def help(self, flags: Sequence[Flag], topic: str) -> str:
        """The help on a topic: a section or flag, ``all``, or empty for the main flags.

        Raises:
            ConfigError: there is no such section or flag.
        """
        sections = dict.fromkeys(flag.section for flag in flags)
        wanted, named = topic.replace("_", "-"), {flag.name: flag for flag in flags}
        found = [f for f in flags if wanted in ("all", f.section, f.name, f.last)]
        if topic and not found:
            hint = did_you_mean(wanted, [*sections, *named])
            hint = hint or f" The sections: {', '.join(sections)}."
            raise ConfigError(f"there is no help on {topic!r}.{hint}")
        groups: Any = groupby(found, lambda flag: flag.section)
        if not topic:
            own = [flag.name for flag in flags if "." not in flag.path and not flag.positional]
            main = (self.main or {"Flags": own}).items()
            groups = [(None, [flag for flag in flags if flag.positional])]
            groups += [(title, [named[name] for name in names]) for title, names in main]
        # Python 3.10 reports 0 columns for a terminal that states no size, as a serial console.
        columns = shutil.get_terminal_size().columns or _MAX_COLUMNS
        width = max(_MIN_COLUMNS, min(columns, _MAX_COLUMNS))
        form = partial(_Formatter, max_help_position=_HELP_AT, width=width)
        parser = argparse.ArgumentParser(
            usage=argparse.SUPPRESS, formatter_class=form, add_help=False
        )
        if topic in ("", "all"):
            paragraphs = (inspect.getdoc(self.args) or "").split("\n\n")  # indented ones are kept
            filled = [each if each[:1] == " " else fill(each, width) for each in paragraphs]
            parser.usage = f"raytrain {self.name} {self.usage}"
            parser.description = "\n\n".join(filled)
        for title, each in groups:
            members, about = [*each], ""
            if topic and "." in members[0].name:
                about = (inspect.getdoc(members[0].owner) or "").partition("\n\n")[0]
            group = parser.add_argument_group(title, fill(about, width - 2) or None)
            for flag in members:
                flag.add_to(group, brief=not topic)
        if topic:
            return parser.format_help().rstrip()
        of = f", --help SECTION: {', '.join(sections)}" if len(sections) > 1 else ""
        parser.epilog = fill(f"Defaults in [ ]. More: --help-all, --help FLAG{of}.", width)
        return re.sub(r"(\n  .*)\n\n(?=.*:\n  -)", r"\1\n", parser.format_help()).rstrip()


def _topic_of(argv: Sequence[str]) -> str | None:
    """Which help a command line asks for: a section or flag, ``all``, or empty; None: no help."""
    for word, after in pairwise([*argv, "-"]):
        name, _, text = word.replace("_", "-").partition("=")
        if name == "--help-all":
            return "all"
        if name in ("-h", "--help"):
            is_topic = after.startswith("--") or not after.startswith("-")
            return text or (after.lstrip("-") if is_topic else "")
    return None


def _take_flags(
    argv: Sequence[str], flags: Sequence[Flag], values: dict[str, Any]
) -> Sequence[str]:
    """Adds the values of flags by their paths; returns the other words."""
    named = {f"--{flag.name}": flag for flag in flags if not flag.positional}
    off = {f"--{flag.negated()}": flag for flag in named.values() if flag.is_switch}
    others, rest = [], deque(argv)
    while rest:
        word = rest.popleft()
        if not is_flag(word):
            others.append(word)
            continue
        name, equals, text = word.partition("=")
        name = name.replace("_", "-")
        flag = named.get(name) or off.get(name)
        if flag is None:
            raise _unknown(name, [*named.values()])
        if name in off and equals:
            raise ConfigError(f"{name} takes no value, not {text!r}.")
        words = ["false"] if name in off else [text] if equals else []
        if flag.is_switch and not words:
            is_value = bool(rest) and rest[0].lower() in (*flag.choices, "yes", "no")
            words = [rest.popleft() if is_value else "true"]
        most = len(rest) + 1 if flag.nargs == "*" else flag.nargs or 1
        while rest and len(words) < most and not is_flag(rest[0]):
            words.append(rest.popleft())
        values[flag.path] = flag.value(words)
    return others


def is_flag(word: str) -> bool:
    """Whether a word starts with a dash; a dash alone and negative numbers are values."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


def given_flags(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, such as ``optim.lr``; ``--optim.no-nesterov`` also
    gives ``optim.nesterov``."""
    words = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--"]
    return {*words, *(re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", word) for word in words)}


def _unknown(wrong: str, flags: Sequence[Flag]) -> ConfigError:
    """The error for a flag that there is not, with those that may have been meant."""
    name = wrong.lstrip("-").lower()
    last = name.rpartition(".")[2].removeprefix("no-")
    known = {"help": ["help"], "help-all": ["help-all"]}  # by each name that one may have
    for flag in flags:
        for each in {flag.name, flag.name.replace(".", "-"), flag.last}:
            known.setdefault(each, []).append(flag.name)
    known |= {each: [f.name] for f in flags for each in f.metadata.get("aka", "").split()}
    like = partial(get_close_matches, possibilities=known, n=2, cutoff=0.75)
    alike = [known[each][0] for each in like(name) or like(last)]
    begun = [known[each][0] for each in known if name and each.startswith(name)]
    near = [*dict.fromkeys(known.get(name) or known.get(last) or alike or begun)][:3]
    gone = withdrawn(wrong[2:]) or withdrawn(wrong[2:].replace("no-", ""))
    hint = f" Did you mean {listed(f'--{each}' for each in near)}?" if near else " See --help-all."
    return ConfigError(f"there is no flag {wrong}.{gone or hint}")


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` words, or keys and values in turn. Raises ValueError."""
    if all(word.partition("=")[0].isidentifier() and "=" in word for word in words):
        words = [part for word in words for part in word.split("=", 1)]
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    if 2 * len(pairs) < len(words):
        raise ValueError("a name is given twice")
    return pairs


@cache
def _texts(module: str) -> Mapping[tuple[str, str], str]:
    """The strings below the fields of the dataclasses of a module, by class and field."""
    return {
        (kind.name, ast.unparse(each.target)): " ".join(str(text.value.value).split())
        for kind in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(kind, ast.ClassDef)
        for each, text in pairwise(kind.body)
        if isinstance(each, ast.AnnAssign) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant)
    }
