"""Command lines by argparse: flags from the fields of dataclasses, errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from raytrain_ddp.config.field_types import changes, listed
from raytrain_ddp.config.flags import Flag, flags_of
from raytrain_ddp.config.help_page import page, summary
from raytrain_ddp.config.suggestions import meant
from raytrain_ddp.config.validation import is_flag, require_no_control
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError

Args = TypeVar("Args")


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
            print(page(f"raytrain {self.name} {self.usage}", self.args, flags, self.main, topic))
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
        holder = self._defaults(**given)
        return self.args(**{**vars(holder), **changes(holder, values)})

    def flags(self, **given: Any) -> list[Flag]:
        """All flags, in the order of the help; `given`: see `parse`."""
        return [*flags_of(self.args, self._defaults(**given), self.name)]

    def _defaults(self, **given: Any) -> SimpleNamespace:
        own: dict[str, Any] = {}
        for each in fields(self.args):  # type: ignore[arg-type]
            made = each.default_factory
            own[each.name] = each.default if made is MISSING else made()
        return SimpleNamespace(**{k: v for k, v in {**own, **given}.items() if v is not MISSING})


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


def add_flags(
    parser: argparse.ArgumentParser, flags: Iterable[Flag], completing: bool = False
) -> None:
    """Adds flags to a parser.

    Args:
        completing: the parser is for shtab: also add what is given by place, help and choices.
    """
    for flag in flags:
        how: dict[str, Any] = {"nargs": flag.nargs or 1, "action": _Keep}
        if flag.is_switch:
            parser.add_argument(f"--{flag.negated()}", action=_Keep, nargs=0).flag = flag  # type: ignore[attr-defined]
        if completing:
            how |= {"help": summary(flag).replace("%", "%%"), "choices": flag.choices or None}
        action: Any = parser.add_argument(flag.positional or f"--{flag.name}", **how)
        action.flag = flag
        if completing and not flag.choices:  # files, as shtab.FILE
            action.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}


class _Keep(argparse.Action):
    """Keeps the value of a flag by its path; the last one wins."""

    flag: Flag

    def __call__(self, _: object, found: Any, words: Any, name: str | None = None) -> None:
        given = [word.removeprefix("\0") for word in words] if self.nargs else ["false"]
        found.values[self.flag.path] = self.flag.value(given)


def _take_flags(
    argv: Sequence[str], flags: Sequence[Flag], values: dict[str, Any]
) -> Sequence[str]:
    """Adds the values of flags by their paths; returns the other words."""
    named = {f"--{flag.name}": flag for flag in flags if not flag.positional}
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    add_flags(parser, named.values())
    try:
        found = argparse.Namespace(values=values)
        _, rest = parser.parse_known_args([*_with_values(argv, named)], found)
    except argparse.ArgumentError as error:
        flag = named.get(str(error.argument_name))
        takes = flag.takes if flag else "no value"
        raise ConfigError(f"{error.argument_name} takes {takes}: {error.message}.") from None
    for word in filter(is_flag, rest):
        raise _unknown(word.partition("=")[0], named)
    return rest


def _with_values(argv: Sequence[str], named: Mapping[str, Flag]) -> Iterator[str]:
    """The words with dashes within names, and a value after each switch: ``--exact`` becomes
    ``--exact=true``, unless the next word is its value."""
    for word, after in pairwise([*argv, ""]):
        name, equals, text = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        flag = named.get(name)
        if flag and flag.is_switch and not equals:
            text = "" if after.lower() in (*flag.choices, "yes", "no") else "=true"
        if flag and flag.nargs and equals:
            yield from (name, f"\0{text}")  # argparse would take "-x" for a flag
        else:
            yield f"{name}{equals}{text}"


def given_flags(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, such as ``optim.lr``; ``--optim.no-nesterov`` also
    gives ``optim.nesterov``."""
    words = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--"]
    parts = [word.rpartition(".") for word in words]
    return {*words, *(f"{a}{dot}{last.removeprefix('no_')}" for a, dot, last in parts)}


def _unknown(name: str, named: Iterable[str]) -> ConfigError:
    known = [*(flag[2:] for flag in named), "help", "help-all"]
    near = [f"--{flag}" for flag in meant(name.lstrip("-"), known)]
    hint = f" Did you mean {listed(near)}?" if near else " See --help-all."
    gone = withdrawn(name[2:]) or withdrawn(name[2:].replace("no-", ""))
    return ConfigError(f"there is no flag {name}.{gone or hint}")
