"""Makes the parts of the documentation that follow from the code, when the site is built.

A page has ``<!-- generated: NAME ARGUMENT -->``, which the result of the function NAME below
replaces: mkdocs calls `on_page_markdown` for each page. Imports neither torch nor Ray, nor anything
else that is not in the standard library.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "raytrain_ddp"
sys.path.insert(0, str(DOCS.parent))  # mkdocs may run where the package is not installed


from raytrain_ddp import events  # noqa: E402
from raytrain_ddp.__main__ import COMMANDS, command_of  # noqa: E402
from raytrain_ddp.config.command_line import Flag  # noqa: E402
from raytrain_ddp.config.field_types import listed  # noqa: E402
from raytrain_ddp.config.recipe import load_with_info, shipped_recipes  # noqa: E402
from raytrain_ddp.config.train_config import TrainConfig  # noqa: E402

MARKER = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.MULTILINE)


def cell(text: str) -> str:
    """As the cell of a table: one line, in which nothing but code in backticks is markup."""
    markup = str.maketrans({"\\": "\\\\", "<": "&lt;", "*": "\\*"})
    parts = " ".join(text.split()).split("`")
    parts[::2] = (part.translate(markup) for part in parts[::2])
    return "`".join(parts).replace("|", "\\|")


def flags_of(command: str) -> list[Flag]:
    """All that a command takes, in the order of its help."""
    made = command_of(command)
    given = {"config": TrainConfig()} if "config" in _fields(made.args) else {}
    return made.flags(**given)


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def is_of_config(flag: Flag) -> bool:
    return flag.path.startswith("config.")


def table(flags: Iterable[Flag], free: bool = False) -> str:
    """Those flags; `free` adds whether each may change when a run is resumed."""
    head = ["flag", "value", "default", "meaning", *["may change"] * free]
    rows = [head, ["---"] * len(head)]
    for flag in flags:
        name = flag.metavar if flag.positional else f"--{flag.name}"
        value = "" if flag.positional else listed(flag.takes.split("|"))
        default = flag.shown_default or ("false" if flag.is_switch else "")
        row = [f"`{name}`", cell(value), f"`{default}`" if default else "", cell(flag.help)]
        rows.append(row + ["yes" if flag.metadata.get("free") else "no"] * free)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def configuration(_: str) -> str:
    """All fields of TrainConfig, a table for each section."""
    sections: dict[str, list[Flag]] = {}
    for flag in filter(is_of_config, flags_of("fit")):
        sections.setdefault(flag.section, []).append(flag)
    parts = []
    for name, flags in sections.items():
        about = inspect.getdoc(flags[0].owner) if flags[0].owner is not TrainConfig else ""
        parts.append(f"## {name}\n\n{about}\n\n{table(flags, free=True)}")
    return "\n" + "\n".join(parts) + "\n"


def commands(_: str) -> str:
    """A table of all commands, then a section for each: its purpose and its own flags."""
    rows = "".join(f"| [`{name}`](#{name}) | {cell(about)} |\n" for name, about in COMMANDS.items())
    parts = [f"| command | what it does |\n| --- | --- |\n{rows}"]
    for name in COMMANDS:
        every = flags_of(name)
        own = [flag for flag in every if not is_of_config(flag)]
        more = "\nAlso every field of the config: [Every field](fields.md).\n" * (own != every)
        about = inspect.getdoc(command_of(name).args)
        parts.append(f"## {name}\n\n{about}\n{more}\n{table(own)}")
    return "\n".join(parts)


def recipes(_: str) -> str:
    """The shipped recipes: a table of all, then where each comes from and differs from it."""
    rows, parts = [], []
    for name in shipped_recipes():
        info = load_with_info(name)[1]
        about = (info.about, info.expected, info.gpu_hours, info.reached)
        rows.append(f"| `{name}` | {' | '.join(map(cell, about))} |\n")
        other = "".join(f"| `{key}` | {cell(why)} |\n" for key, why in info.differs.items())
        source = f"\n### {name}\n\nSource: {cell(info.source)}.\n"
        head = "\n| differs | here, and why |\n| --- | --- |\n"
        parts.append(source + (head + other if other else ""))
    head = "\n| recipe | what it is | expected | GPU hours | reached here |\n"
    return head + "| --- " * 5 + "|\n" + "".join([*rows, *parts]) + "\n"


def layout(module: str) -> str:
    """The layout of a folder, as the docstring of the module that writes it draws it."""
    parsed = ast.parse((PACKAGE / module.strip()).read_text(encoding="utf-8"))
    _, block, *_ = (ast.get_docstring(parsed) or "").split("\n\n")
    assert "    " in block, f"{module}: its second paragraph draws no layout"
    return f"\n```text\n{textwrap.dedent(block)}\n```\n\n"


def schema(name: str) -> str:
    """The records of one file of a run, from the dataclasses of events.py, and what is in them."""
    kinds = [*getattr(events, name)]
    for kind in kinds:  # grows: a nested one is described after those that have it
        inner = dict.fromkeys(field.metadata.get("type") for field in dataclasses.fields(kind))
        kinds += [each for each in inner if each is not None and each not in kinds]
    parts = []
    for kind in kinds:
        fields = dataclasses.fields(kind)
        about, _, described = (inspect.getdoc(kind) or "").partition("\n\nArgs:\n")
        names = "|".join(field.name for field in fields)
        found = re.split(
            rf"(?:^|(?<=\. )|(?<=; ))((?:{names})(?:, (?:{names}))*): ", flat(described)
        )
        of_fields = {
            each: text.strip()
            for named, text in zip(found[1::2], found[2::2], strict=True)
            for each in named.split(", ")
        }
        rows = [
            f"| `{field.metadata.get('key', field.name)}` | {cell(str(field.type))} | "
            f"{cell(of_fields.get(field.name, ''))} |\n"
            for field in fields
        ]
        title = f"`{kind.kind}`" if hasattr(kind, "kind") else kind.__name__
        about = re.sub(r"``(.+?)``", r"`\1`", flat(about))
        head = "| field | type | meaning |\n| --- | --- | --- |\n"
        parts.append(f"### {title}\n\n{about}\n\n{head}{''.join(rows)}")
    return "\n" + "\n".join(parts) + "\n"


def flat(text: str) -> str:
    return " ".join(text.split())


MAKERS: dict[str, Callable[[str], str]] = {
    function.__name__: function for function in (commands, configuration, recipes, layout, schema)
}


def made(text: str) -> str:
    """The page with its markers replaced."""
    return MARKER.sub(lambda found: MAKERS[found[1]](found[2]).strip("\n"), text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in a page; mkdocs calls this."""
    return made(markdown)
