"""The help of a command: a page of its main flags, one section, or all of it."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import fill

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.flags import Flag
from raytrain_ddp.errors import ConfigError, did_you_mean

_MIN_COLUMNS, _MAX_COLUMNS, _HELP_AT = 40, 100, 28


def page(
    usage: str, kind: type, flags: Sequence[Flag], main: Mapping[str, Sequence[str]], topic: str
) -> str:
    """The help on a topic, a section or flag, ``all``, or empty.

    Args:
        kind: the command's dataclass; its docstring is the description.
        main: the flags of the short help, by the headings above them.

    Raises:
        ConfigError: there is no such section or flag.
    """
    # Python 3.10 reports 0 columns for a terminal that states no size, as a serial console.
    width = max(_MIN_COLUMNS, min(shutil.get_terminal_size().columns or _MAX_COLUMNS, _MAX_COLUMNS))
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    parts = [f"usage: {usage}"]  # indented lines, such as commands, are kept
    parts += [each if each[:2] == "  " else fill(each, width) for each in paragraphs]
    if topic:
        parts = parts if topic == "all" else []
        for section, found in groupby(_found(flags, topic), lambda flag: flag.section):
            members = [*found]
            about = (inspect.getdoc(members[0].owner) or "").partition("\n\n")[0]
            text = fill(about, width, initial_indent="  ", subsequent_indent="  ")
            parts.append(f"{section}:\n{text}\n" if "." in members[0].name else f"{section}:")
            parts[-1] += "".join(f"\n{_row(flag, width, brief=False)}" for flag in members)
        return "\n\n".join(parts)
    named = {flag.name: flag for flag in flags}
    own = [flag.name for flag in flags if "." not in flag.path and not flag.positional]
    rows = [_row(flag, width, brief=True) for flag in flags if flag.positional]
    for title, names in (main or {"Flags": own}).items():
        rows += [f"{title}:", *(_row(named[name], width, brief=True) for name in names)]
    sections = dict.fromkeys(flag.section for flag in flags)
    of = f", --help SECTION: {', '.join(sections)}" if len(sections) > 1 else ""
    end = fill(f"Defaults in [ ]. More: --help-all, --help FLAG{of}.", width)
    return "\n\n".join([*parts, "\n".join(rows), end])


def summary(flag: Flag) -> str:
    """The first sentence of a flag's help."""
    return re.split(r"\.\s", help_of(flag))[0].removesuffix(".")


def help_of(flag: Flag) -> str:
    """The text below the field in the source."""
    texts = (_documented(kind).get(flag.path.rpartition(".")[2], "") for kind in flag.owner.__mro__)
    return next(filter(None, texts), "")


def default_of(flag: Flag) -> str:
    """The default as it would be typed; empty if there is none, or if the help explains None."""
    value = flag.default
    if value is None or value is MISSING or value is False or value in ("", (), {}):
        return ""
    if isinstance(value, dict):
        value = [f"{key}={each}" for key, each in value.items()]
    several = value if isinstance(value, tuple | list) else [value]
    return " ".join(f"{v:g}" if type(v) is float else as_text(v) for v in several)


def _found(flags: Sequence[Flag], topic: str) -> Sequence[Flag]:
    wanted = topic.replace("_", "-")
    found = [f for f in flags if wanted in ("all", f.section, f.name, f.name.rpartition(".")[2])]
    if not found:
        sections = dict.fromkeys(flag.section for flag in flags)
        hint = did_you_mean(wanted, [*sections, *(flag.name for flag in flags)])
        hint = hint or f" The sections: {', '.join(sections)}."
        raise ConfigError(f"there is no help on {topic!r}.{hint}")
    return found


def _row(flag: Flag, width: int, brief: bool) -> str:
    """The help on a flag; `brief`: the first sentence, and no long list of values."""
    text, shown = summary(flag) if brief else help_of(flag), default_of(flag)
    left, several = f"--{flag.name}", flag.nargs if "metavar" not in flag.metadata else None
    values = f"[{flag.metavar} ...]" if several == "*" else f" {flag.metavar}" * (several or 1)
    if flag.positional:
        left = flag.positional
    elif flag.kind is bool and not brief:
        left += f", --{flag.negated()}"
    elif flag.kind is bool:
        left = f"--{flag.negated('[no-]')}" if flag.default is True else left
    elif not brief or len(f"  {left} {flag.metavar}  ") <= _HELP_AT:
        left += f" {values.strip()}"
    indent, text = " " * _HELP_AT, f"{text} [{shown}]" if shown else text
    start = f"  {left}  ".ljust(_HELP_AT)
    is_long = len(start) > _HELP_AT
    first = indent if is_long else start
    row = fill(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {left}\n{row}" if is_long else row.rstrip()


@cache
def _documented(kind: type) -> Mapping[str, str]:
    """The strings below the fields of a dataclass, by field."""
    if not is_dataclass(kind):
        return {}
    body = _classes(str(sys.modules[kind.__module__].__file__))[kind.__name__].body
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@cache
def _classes(path: str) -> Mapping[str, ast.ClassDef]:
    parsed = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}
