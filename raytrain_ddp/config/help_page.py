"""The help of a command: a page of its main flags, one section, or all of it."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache, partial
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from raytrain_ddp.config.flags import Flag
from raytrain_ddp.errors import ConfigError, did_you_mean

_MIN_COLUMNS, _MAX_COLUMNS, _HELP_AT = 40, 100, 29


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Names of flags are not broken at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)


def topic_of(argv: Sequence[str]) -> str | None:
    """Which help a command line asks for: a section or flag, ``all``, or empty; None: no help."""
    for word, after in pairwise([*argv, "-"]):
        name, _, text = word.replace("_", "-").partition("=")
        if name == "--help-all":
            return "all"
        if name in ("-h", "--help"):
            is_topic = after.startswith("--") or not after.startswith("-")
            return text or (after.lstrip("-") if is_topic else "")
    return None


def page(
    usage: str, kind: type, flags: Sequence[Flag], main: Mapping[str, Sequence[str]], topic: str
) -> str:
    """The help on a topic, as `topic_of` returns it.

    Args:
        kind: the command's dataclass; its docstring is the description.
        main: the flags of the short help, by the headings above them.

    Raises:
        ConfigError: there is no such section or flag.
    """
    # Python 3.10 reports 0 columns for a terminal that states no size, as a serial console.
    width = shutil.get_terminal_size().columns or _MAX_COLUMNS
    width = max(_MIN_COLUMNS, min(width, _MAX_COLUMNS))
    formatter = partial(_Formatter, max_help_position=_HELP_AT, width=width)
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=formatter
    )
    if topic in ("", "all"):  # indented lines, such as commands, are kept
        parts = (inspect.getdoc(kind) or "").split("\n\n")
        text = "\n\n".join(part if part[:2] == "  " else fill(part, width) for part in parts)
        parser.usage, parser.description = usage, text
    if topic:
        for section, found in groupby(_found(flags, topic), lambda flag: flag.section):
            members = [*found]
            about = (inspect.getdoc(members[0].owner) or "").partition("\n\n")[0]
            text = fill(about, width - 2) if "." in members[0].name else ""
            _add(parser.add_argument_group(section, text), members, brief=False)
        return parser.format_help().strip("\n")
    named = {flag.name: flag for flag in flags}
    own = [flag.name for flag in flags if len(flag.path) == 1 and not flag.positional]
    placed = [flag.name for flag in flags if flag.positional]
    for title, names in {"": placed, **(main or {"Flags": own})}.items():
        _add(parser.add_argument_group(title or None), [named[name] for name in names], brief=True)
    sections = dict.fromkeys(flag.section for flag in flags)
    of = f", --help SECTION: {', '.join(sections)}" if len(sections) > 1 else ""
    parser.epilog = fill(f"Defaults in [ ]. More: --help-all, --help FLAG{of}.", width)
    return re.sub(r"\n(?=\n[A-Z][\w ]+:\n)", "", parser.format_help().rstrip())


def summary(flag: Flag) -> str:
    """The first sentence of a flag's help."""
    return re.split(r"\.\s", help_of(flag))[0].removesuffix(".")


def help_of(flag: Flag) -> str:
    """The text below the field in the source."""
    texts = (_documented(kind).get(flag.path[-1], "") for kind in flag.owner.__mro__)
    return next(filter(None, texts), "")


def default_of(flag: Flag) -> str:
    """As it would be typed; empty if there is none, or if the help says what None means."""
    value = flag.default
    if value is None or value is MISSING or value is False or value in ("", (), {}):
        return ""
    if isinstance(value, dict):
        value = [f"{key}={each}" for key, each in value.items()]
    several = value if isinstance(value, tuple | list) else [value]
    return " ".join(f"{v:g}" if type(v) is float else str(v) for v in several).replace(
        "True", "true"
    )


def _found(flags: Sequence[Flag], topic: str) -> Sequence[Flag]:
    wanted = topic.replace("_", "-")
    found = [f for f in flags if wanted in ("all", f.section, f.name, f.name.rpartition(".")[2])]
    if not found:
        sections = dict.fromkeys(flag.section for flag in flags)
        hint = did_you_mean(wanted, [*sections, *(flag.name for flag in flags)])
        hint = hint or f" The sections: {', '.join(sections)}."
        raise ConfigError(f"there is no help on {topic!r}.{hint}")
    return found


def _add(group: Any, flags: Sequence[Flag], brief: bool) -> None:
    """Adds flags to what is printed; `brief`: the first sentence, and no long list of values."""
    for flag in flags:
        text, shown = summary(flag) if brief else help_of(flag), default_of(flag)
        text = (f"{text} [{shown}]" if shown else text).replace("%", "%%")
        if flag.positional:
            group.add_argument(flag.name, metavar=flag.positional, help=text)
            continue
        names = [f"--{flag.name}"]
        if flag.kind is bool and not brief:
            names += [f"--{flag.negated()}"]
        elif flag.default is True and flag.kind is bool:
            names = [f"--{flag.negated('[no-]')}"]
        how: dict[str, Any] = {"action": "store_true"}
        if flag.metavar and not (brief and len(f"  {names[0]} {flag.metavar}  ") > _HELP_AT):
            nargs = None if "metavar" in flag.metadata else flag.nargs
            how = {"metavar": flag.metavar, "nargs": nargs}
        group.add_argument(*names, dest=flag.name, help=text, **how)


@cache
def _documented(kind: type) -> Mapping[str, str]:
    """The strings below the fields of a dataclass, by field."""
    if not is_dataclass(kind):
        return {}
    tree = _parsed(str(sys.modules[kind.__module__].__file__))
    names = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(names[kind.__name__].body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))
