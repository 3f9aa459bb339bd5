"""Writes the parts of the documentation that follow from the code, between their markers.

    python docs/generate.py            # after a change of a flag, an event, an error or a file
    python docs/generate.py --check    # exit status 1 if a page is not up to date

A page has ``<!-- begin NAME ARGUMENT -->`` and ``<!-- end -->``; what lies between them is
the result of the function NAME below. The pages are committed, so that they can be read without a
build; tests/test_docs.py checks that they are up to date. Imports neither torch nor Ray.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from raytrain_ddp import errors, events
from raytrain_ddp.__main__ import COMMANDS, _command
from raytrain_ddp.config.field_types import listed
from raytrain_ddp.config.flags import Flag
from raytrain_ddp.config.help_page import default_of, help_of
from raytrain_ddp.config.recipe import load_with_info, shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "raytrain_ddp"
BLOCK = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def cell(text: str) -> str:
    """As the cell of a table: one line, in which nothing but code in backticks is markup."""
    markup = str.maketrans({"\\": "\\\\", "<": "&lt;", "*": "\\*"})
    parts = " ".join(text.split()).split("`")
    parts[::2] = (part.translate(markup) for part in parts[::2])
    return "`".join(parts).replace("|", "\\|")


def flags_of(command: str) -> list[Flag]:
    """All that a command takes, in the order of its help."""
    made = _command(command)
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
        default = default_of(flag) or ("false" if flag.is_switch else "")
        row = [f"`{name}`", cell(value), f"`{default}`" if default else "", cell(help_of(flag))]
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


def flags(command: str) -> str:
    """What a command is for, and its own flags."""
    own = [flag for flag in flags_of(command) if not is_of_config(flag)]
    return f"\n{inspect.getdoc(_command(command).args)}\n\n{table(own)}\n"


def commands(_: str) -> str:
    """All of them, with a line about each."""
    rows = "".join(f"| [`{name}`](#{name}) | {cell(about)} |\n" for name, about in COMMANDS.items())
    return f"\n| command | what it does |\n| --- | --- |\n{rows}\n"


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


def statuses(_: str) -> str:
    """One row for each error, from the tree that opens errors.py."""
    about = dict(re.findall(r"(\w+) +\d   (.+)", inspect.getdoc(errors) or ""))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    rows = {
        kind.exit_status: f"| {kind.exit_status} | `{kind.__name__}` | {about[kind.__name__]} |\n"
        for kind in kinds
        if issubclass(kind, errors.RaytrainError) and kind.__name__ in about
    }
    head = "\n| status | error | meaning |\n| --- | --- | --- |\n"
    first = "| 0 | | finished, or already complete |\n"
    return head + first + "".join(rows[status] for status in sorted(rows)) + "\n"


def layout(module: str) -> str:
    """The layout of a folder, as the docstring of the module that writes it draws it."""
    parsed = ast.parse((PACKAGE / module.strip()).read_text(encoding="utf-8"))
    _, block, *_ = (ast.get_docstring(parsed) or "").split("\n\n")
    assert "    " in block, f"{module}: its second paragraph draws no layout"
    return f"\n```text\n{textwrap.dedent(block)}\n```\n\n"


def tree(_: str) -> str:
    """Every file of the package, with the first sentence of its docstring."""
    lines = []
    for path in sorted(PACKAGE.rglob("*"), key=lambda p: (p.parent.parts, p.name)):
        name = path.relative_to(PACKAGE)
        if (
            not path.is_file()
            or path.suffix in (".pyc", ".so")  # compiled
            or "clusters" in name.parts
            or path.name == "py.typed"
        ):
            continue
        if path.name == "__init__.py" and not path.stat().st_size:
            continue
        lines.append((name, _about(path)))
    folders: dict[str, list[str]] = {}
    for name, text in lines:
        folders.setdefault(str(name.parent), []).append(f"| `{name.name}` | {cell(text)} |")
    parts = []
    for folder, rows in sorted(folders.items()):
        title = "raytrain_ddp" if folder == "." else f"raytrain_ddp/{folder}"
        parts.append(
            f"### {title}\n\n| file | what it is |\n| --- | --- |\n" + "\n".join(rows) + "\n"
        )
    return "\n" + "\n".join(parts) + "\n"


def _about(path: Path) -> str:
    if path.suffix == ".c":  # the first sentence of its first comment
        comment = path.read_text(encoding="utf-8").removeprefix("/* ")
        return " ".join(comment.partition("\n *\n")[0].split())
    if path.suffix != ".py":
        return ""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.sub(r"``(.+?)``", lambda found: f"`{found[1].replace('|', ' or ')}`", first)


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
    function.__name__: function
    for function in (commands, configuration, flags, recipes, statuses, layout, tree, schema)
}


def renewed(text: str) -> str:
    """A page with all that lies between its markers made anew."""

    def made(found: re.Match[str]) -> str:
        return found[1] + MAKERS[found[2]](found[3].strip()) + found[5]

    return BLOCK.sub(made, text)


def pages() -> Iterator[Path]:
    yield from (page for page in sorted(DOCS.rglob("*.md")) if not page.is_symlink())


def main() -> int:
    outdated = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = renewed(text)
        if new != text:
            outdated.append(str(page.relative_to(DOCS)))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    print(json.dumps(outdated))
    return int("--check" in sys.argv and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
