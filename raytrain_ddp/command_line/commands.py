"""A command: its flags, its help, and the arguments that it gets."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from raytrain_ddp.command_line.flags import Flag, changes, defaults_of, flags_of
from raytrain_ddp.command_line.help_page import asked_for, page
from raytrain_ddp.command_line.parsing import parse
from raytrain_ddp.config.validation import require_no_control

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

        Args:
            given: defaults of fields, instead of those of the class.

        Raises:
            ConfigError: a flag or a value is wrong. SystemExit (0): help was printed.
        """
        holder = self.defaults(**given)
        flags = self.flags(holder)
        require_no_control(argv)
        topic = asked_for(argv)
        if topic is not None:
            print(self.help(topic, flags))
            raise SystemExit(0)
        return self.args(**{**vars(holder), **changes(holder, parse(flags, argv))})

    def defaults(self, **given: Any) -> SimpleNamespace:
        """The defaults of the fields, by attribute: those `given`, else those of the class."""
        return SimpleNamespace(**{**defaults_of(self.args), **given})

    def flags(self, holder: Any) -> list[Flag]:
        """All flags, in the order of the help; `holder` has the defaults."""
        return [*flags_of(self.args, holder, self.name)]

    def help(self, topic: str, flags: Sequence[Flag]) -> str:
        """The help on a topic: a section, a flag, ``all``, or empty for the main flags."""
        own = [flag.name for flag in flags if len(flag.path) == 1 and not flag.positional]
        usage = f"{invocation(self.name)} {self.usage}"
        return page(usage, self.args, flags, self.main or {"Flags": own}, topic)


def program() -> str:
    """How the list of commands was called: ``raytrain`` or ``python -m raytrain_ddp``; empty if it
    was a command's own module."""
    path = Path(sys.argv[0])
    if path.name == "raytrain":
        return "raytrain"
    is_module = path.name == "__main__.py" and path.parent.name == "raytrain_ddp"
    return "python -m raytrain_ddp" if is_module else ""


def invocation(name: str) -> str:
    """How the command was called: ``raytrain sweep`` or ``python -m raytrain_ddp.tools.sweep``."""
    module = name if name in ("fit", "run", "evaluate") else f"tools.{name}"
    return f"{program()} {name}" if program() else f"python -m raytrain_ddp.{module}"
