"""The help of a command: a page of its main flags, one section, or all of it."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any

from raytrain_ddp.command_line.flags import Flag
from raytrain_ddp.errors import ConfigError, did_you_mean

_LEAST_COLUMNS, _MOST_COLUMNS = 40, 100
_FIRST_COLUMN = 29


def asked_for(argv: Sequence[str]) -> str | None:
    """Which help a command line asks for: a section or flag, ``all``, or empty; None: no help."""
    words = [*argv[: argv.index("--")]] if "--" in argv else [*argv]
    for word, behind in pairwise([*words, "-"]):
        name, equals, text = word.replace("_", "-").partition("=")
        if name in ("-h", "--help"):
            topic = behind.partition("=")[0]
            is_flag = topic.startswith("--") and topic not in ("--help", "--help-all")
            is_topic = is_flag or not topic.startswith("-")
            return text if equals else topic if is_topic else ""
        if name == "--help-all":
            return "all"
    return None


def page(
    usage: str, kind: type, flags: Sequence[Flag], main: Mapping[str, Sequence[str]], topic: str
) -> str:
    """The help on a topic, as `asked_for` returns it.

    Args:
        kind: the command's dataclass; its docstring is the description.
        main: the flags of the short help, by the headings above them.

    Raises:
        ConfigError: there is no such section or flag.
    """
    # Python 3.10 reports 0 columns for a terminal that states no size, as a serial console.
    width = shutil.get_terminal_size().columns or _MOST_COLUMNS
    width = max(_LEAST_COLUMNS, min(width, _MOST_COLUMNS))
    sections = dict.fromkeys(flag.section for flag in flags)
    head = [f"usage: {usage}", "", *_paragraphs(inspect.getdoc(kind) or "", width), ""]
    if topic == "all":
        return "\n".join([*head, *_full(flags, width)])
    if topic:
        wanted = topic.lstrip("-").replace("_", "-")
        found = [f for f in flags if wanted in (f.section, f.name, f.name.rpartition(".")[2])]
        if not found:
            known = [*sections, *(flag.name for flag in flags)]
            hint = did_you_mean(wanted, known) or f" The sections: {', '.join(sections)}."
            raise ConfigError(f"there is no help on {topic!r}.{hint}")
        return "\n".join(_full(found, width))
    placed = [flag for flag in flags if flag.positional]
    lines = [*head, *(line for flag in placed for line in _brief(flag, width))]
    named = {flag.name: flag for flag in flags}
    for title, names in main.items():
        lines += [_bold(title)]
        lines += [line for name in names for line in _brief(named[name], width)]
    of = f", --help SECTION: {', '.join(sections)}" if len(sections) > 1 else ""
    lines += ["", *wrap(f"Defaults in [ ]. More: --help-all, --help FLAG{of}.", width)]
    return "\n".join(lines)


def summary(flag: Flag) -> str:
    """The first sentence of a flag's help."""
    return re.split(r"\.\s", help_of(flag))[0].removesuffix(".")


def help_of(flag: Flag) -> str:
    """The text below the field in the source."""
    for kind in flag.owner.__mro__:
        text = _documented(kind).get(flag.path[-1])
        if text:
            return text
    return ""


@cache
def _documented(kind: type) -> Mapping[str, str]:
    """The strings below the fields of a dataclass, by field."""
    if not is_dataclass(kind):
        return {}
    source = Path(str(sys.modules[kind.__module__].__file__)).read_text(encoding="utf-8")
    (body,) = (
        node.body
        for node in _parsed(source).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _full(flags: Iterable[Flag], width: int) -> Iterator[str]:
    """Each section: its heading, and each flag with its whole help and default."""
    for number, (section, group) in enumerate(groupby(flags, lambda flag: flag.section)):
        members = [*group]
        about = (inspect.getdoc(members[0].owner) or "").partition("\n\n")[0].replace("\n", " ")
        heading = f"{section}: {about}" if "." in members[0].name else section
        yield from [""] * (number > 0)
        yield from map(_bold, wrap(heading, width))
        for flag in members:
            no = f", --{negated(flag.name)}" if flag.kind is bool else ""
            name = flag.metavar if flag.positional else f"--{flag.name} {flag.metavar}{no}"
            yield f"  {name.replace(' ,', ',').rstrip()}"
            default = _default(flag)
            text = f"{help_of(flag)}{f' (default: {default})' if default else ''}"
            yield from _wrapped(text, width, " " * 6)


def _brief(flag: Flag, width: int) -> Iterator[str]:
    """One flag of the short help: the first sentence and the default."""
    is_on = flag.kind is bool and flag.default is True
    name = flag.positional or f"--{negated(flag.name, '[no-]') if is_on else flag.name}"
    metavar = "" if flag.positional else f" {flag.metavar}"
    left = f"  {name}{metavar if len(name + metavar) <= _FIRST_COLUMN - 3 else ''}".rstrip()
    default = _default(flag)
    text = f"{summary(flag)}{f' [{default}]' if default else ''}"
    first, *rest = wrap(text, width - _FIRST_COLUMN, break_on_hyphens=False) or [""]
    if len(left) >= _FIRST_COLUMN:
        yield left
        left = ""
    yield f"{left:<{_FIRST_COLUMN}}{first}"
    yield from (" " * _FIRST_COLUMN + line for line in rest)


def _default(flag: Flag) -> str:
    """As it would be typed; empty if there is none, or if the help says what None means."""
    value = flag.default
    if value is None or value is MISSING or value is False or value in ("", (), {}):
        return ""
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        value = [word for pair in value.items() for word in pair]
    return " ".join(map(_shown, value)) if isinstance(value, tuple | list) else str(value)


def negated(name: str, no: str = "no-") -> str:
    """``optim.no-nesterov`` for ``optim.nesterov``."""
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}{no}{last}"


def _paragraphs(text: str, width: int) -> Iterator[str]:
    """The text wrapped; indented lines, such as commands, are kept."""
    for number, paragraph in enumerate(text.split("\n\n")):
        yield from [""] * (number > 0)
        yield from paragraph.split("\n") if "  " in paragraph[:2] else _wrapped(paragraph, width)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]


def _bold(text: str) -> str:
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\033[1m{text}\033[0m"
