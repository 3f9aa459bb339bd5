"""From the words of a command line to the values of flags; what is wrong, in one line."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from raytrain_ddp.command_line.flags import Flag
from raytrain_ddp.command_line.suggestions import meant
from raytrain_ddp.config.field_types import listed
from raytrain_ddp.config.validation import is_flag
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean

Path = tuple[str, ...]


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> dict[Path, Any]:
    """The values given on a command line, by the paths of their flags; a flag's last value wins.

    ``--flag VALUE`` and ``--flag=VALUE`` are the same, as are ``-`` and ``_`` within a name. All
    words after ``--`` are positional.

    Raises:
        ConfigError: for an unknown flag, a wrong or empty value, and a word that is missing or
            unexpected.
    """
    named = {flag.name: flag for flag in flags if not flag.positional}
    words, values, placed = deque(argv), dict[Path, Any](), list[str]()
    while words:
        word = words.popleft()
        if word == "--":
            placed += words
            break
        if not is_flag(word):
            placed.append(word)
            continue
        name, equals, text = word.partition("=")
        flag, is_negated = _find(name, named)
        if not is_negated:
            values[flag.path] = _value(name, flag, [text] if equals else [], words)
        elif not equals:
            values[flag.path] = False
        else:
            raise ConfigError(f"{name} takes no value: write --{flag.name}={text}.")
    values |= _by_place([flag for flag in flags if flag.positional], placed)
    for flag in flags:
        if values.get(flag.path) == "" and not flag.may_be_empty:
            name = flag.positional or f"--{flag.name}"
            raise ConfigError(f"{name} is empty, as by a shell variable that is not set.")
    return values


def _wrong_value(name: str, words: Sequence[str], flag: Flag) -> ConfigError:
    """The error that names the flag, the value and what it takes."""
    if not words:
        return ConfigError(f"{name} takes {flag.takes}, but no value was given.")
    text = " ".join(words)
    hint = withdrawn(f"{flag.name}={text}") or did_you_mean(text, flag.choices)
    return ConfigError(f"{name} takes {flag.takes}, not {text!r}.{hint}")


def _find(word: str, named: Mapping[str, Flag]) -> tuple[Flag, bool]:
    """The flag, and whether ``no-`` is in front of the last word of its name."""
    name = word[2:].replace("_", "-") if word.startswith("--") else ""
    if name in named:
        return named[name], False
    section, dot, last = name.rpartition(".")
    positive = named.get(f"{section}{dot}{last.removeprefix('no-')}")
    if last.startswith("no-") and positive is not None and positive.is_switch:
        return positive, True
    found = [f"--{flag}" for flag in meant(word.lstrip("-"), [*named, "help", "help-all"])]
    hint = f" Did you mean {listed(found)}?" if found else " See --help-all."
    gone = withdrawn(name) or withdrawn(f"{section}{dot}{last.removeprefix('no-')}")
    raise ConfigError(f"there is no flag {word}.{gone or hint}")


def _value(name: str, flag: Flag, given: list[str], words: deque[str]) -> Any:
    """Takes the words that belong to the flag; `given`: the one after its equals sign."""
    least, most = flag.counts
    if flag.is_switch and not given:
        return _switched(flag, words)
    while words and (most is None or len(given) < most) and not is_flag(words[0]):
        given.append(words.popleft())
    if len(given) < least and words:
        hint = f" If {words[0]!r} is its value, write {name}={words[0]}." if least == 1 else ""
        raise ConfigError(f"{_wrong_value(name, given, flag)}{hint}")
    try:
        return flag.value(given)
    except ValueError:
        raise _wrong_value(name, given, flag) from None


def _switched(flag: Flag, words: deque[str]) -> Any:
    """True, unless the next word is a value: no other word is taken by a switch."""
    try:
        value = flag.value([words[0]])
    except (IndexError, ValueError):
        return True
    words.popleft()
    return value


def _by_place(flags: Sequence[Flag], words: Sequence[str]) -> dict[Path, Any]:
    rest, values = [*words], dict[Path, Any]()
    for flag in flags:
        count = len(rest) if flag.counts[1] is None else 1
        if rest:
            values[flag.path], rest = flag.value(rest[:count]), rest[count:]
        elif flag.default is MISSING:
            raise ConfigError(f"{flag.positional} is missing. See --help.")
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}. See --help.")
    return values
