"""Command lines: flags from the fields of dataclasses, errors in one line."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from raytrain_ddp.config.field_types import changes, listed
from raytrain_ddp.config.flags import Flag, flags_of
from raytrain_ddp.config.help_page import page
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
        own = {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(self.args)  # type: ignore[arg-type]
        }
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
            raise _unknown(name, named)
        words = [text] if equals else []
        if name in off:
            if equals:
                raise ConfigError(f"{name} takes no value, not {text!r}.")
            words = ["false"]
        elif flag.is_switch and not equals:
            is_value = bool(rest) and rest[0].lower() in (*flag.choices, "yes", "no")
            words = [rest.popleft() if is_value else "true"]
        most = len(rest) + 1 if flag.nargs == "*" else flag.nargs or 1
        while rest and len(words) < most and not is_flag(rest[0]):
            words.append(rest.popleft())
        values[flag.path] = flag.value(words)
    return others


def given_flags(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, such as ``optim.lr``; ``--optim.no-nesterov`` also
    gives ``optim.nesterov``."""
    words = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--"]
    parts = [word.rpartition(".") for word in words]
    return {*words, *(f"{a}{dot}{last.removeprefix('no_')}" for a, dot, last in parts)}


def _unknown(name: str, named: Mapping[str, Flag]) -> ConfigError:
    near = [f"--{flag}" for flag in _meant(name.lstrip("-"), [*named.values()])]
    hint = f" Did you mean {listed(near)}?" if near else " See --help-all."
    gone = withdrawn(name[2:]) or withdrawn(name[2:].replace("no-", ""))
    return ConfigError(f"there is no flag {name}.{gone or hint}")


def _meant(name: str, flags: Sequence[Flag]) -> list[str]:
    """The names of the flags that may have been meant by one that there is not."""
    name = name.lower()
    head, _, last = name.rpartition(".")
    last = last.removeprefix("no-")
    known = [*(flag.name for flag in flags), "help", "help-all"]
    of_last = {each.rpartition(".")[2]: each for each in known}
    others = [f for f in flags if last in f.metadata.get("aka", "").split()]
    return (
        [flag.name for flag in others if head in ("", flag.section)]
        or [each for each in known if each.replace(".", "-") == name.replace(".", "-")]
        or [each for each in known if each.rpartition(".")[2] == last][:3]
        or get_close_matches(name, known, n=2, cutoff=0.75)
        or [of_last[near] for near in get_close_matches(last, of_last, n=2, cutoff=0.75)]
        or [each for each in known if name and each.startswith(name)][:3]
    )
