"""Command lines by argparse: flags from the fields of dataclasses, errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from raytrain_ddp.config.field_types import listed
from raytrain_ddp.config.flags import Flag, flags_of
from raytrain_ddp.config.help_page import page, summary, topic_of
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
        topic = topic_of(argv[:end])
        if topic is not None:
            print(page(f"raytrain {self.name} {self.usage}", self.args, flags, self.main, topic))
            raise SystemExit(0)
        values: dict[tuple[str, ...], Any] = {}
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
        return self.args(**{**vars(holder), **_changed(holder, values)})

    def flags(self, **given: Any) -> list[Flag]:
        """All flags, in the order of the help; `given`: see `parse`."""
        return [*flags_of(self.args, self._defaults(**given), self.name)]

    def _defaults(self, **given: Any) -> SimpleNamespace:
        own: dict[str, Any] = {}
        for each in fields(self.args):  # type: ignore[arg-type]
            made = each.default_factory
            own[each.name] = each.default if made is MISSING else made()
        return SimpleNamespace(**{k: v for k, v in {**own, **given}.items() if v is not MISSING})


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
    argv: Sequence[str], flags: Sequence[Flag], values: dict[tuple[str, ...], Any]
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


def _changed(holder: Any, values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The fields of `holder` that get another value, by the paths of flags; nested dataclasses are
    replaced as a whole, and so are checked."""
    result: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in values if len(path) > 1):
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        inner: Any = getattr(holder, name)
        result[name] = replace(inner, **_changed(inner, below))
    return result


def _unknown(name: str, named: Iterable[str]) -> ConfigError:
    known = [*(flag[2:] for flag in named), "help", "help-all"]
    near = [f"--{flag}" for flag in meant(name.lstrip("-"), known)]
    hint = f" Did you mean {listed(near)}?" if near else " See --help-all."
    gone = withdrawn(name[2:]) or withdrawn(name[2:].replace("no-", ""))
    return ConfigError(f"there is no flag {name}.{gone or hint}")
