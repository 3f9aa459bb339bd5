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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raytrain_ddp import errors, events
from raytrain_ddp.chaos.__main__ import ChaosArgs
from raytrain_ddp.command_line import FitArgs
from raytrain_ddp.config.recipe import shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.convert.__main__ import ConvertArgs
from raytrain_ddp.convert.options import ConvertConfig
from raytrain_ddp.doctor.__main__ import DoctorArgs
from raytrain_ddp.evaluate import EvaluateArgs
from raytrain_ddp.launcher.run_options import RunFlags
from raytrain_ddp.report.__main__ import ReportArgs

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "raytrain_ddp"
BLOCK = re.compile(r"(<!-- begin (\w+)([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COMMANDS: dict[str, type] = {
    "fit": FitArgs,
    "evaluate": EvaluateArgs,
    "run": RunFlags,
    "convert": ConvertArgs,
    "doctor": DoctorArgs,
    "report": ReportArgs,
    "chaos": ChaosArgs,
}


def docstrings(kind: type) -> dict[str, tuple[str, str]]:
    """Field -> (its type as written, the string below it), those of base classes included."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for this, following in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name):
                text = ""
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    text = inspect.cleandoc(str(following.value.value))
                found[this.target.id] = (ast.unparse(this.annotation), text)
    return found


def cell(text: str) -> str:
    """As the cell of a table: one line, in which nothing is taken for markup."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("<", "&lt;").replace("*", "\\*")


def kind_of(annotation: str) -> str:
    """``int | Literal['auto']`` -> int, auto."""
    annotation = re.sub(r"Annotated\[([^\[\]]*(?:\[[^\]]*\])?[^\[\],]*),.*\]", r"\1", annotation)
    annotation = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", ""), annotation)
    annotation = annotation.replace("TaskLike", "str").replace("dict[str, str]", "KEY VALUE ...")
    tupled = re.search(r"tuple\[(\w+), \.\.\.\]", annotation)
    if tupled:
        annotation = annotation.replace(tupled[0], f"{tupled[1]} ...")
    annotation = re.sub(r"tuple\[([^\]]*)\]", lambda m: m[1].replace(",", ""), annotation)
    names = {"str": "text", "int": "integer", "float": "number", "bool": "yes or no"}
    for name, told in names.items():
        annotation = re.sub(rf"\b{name}\b", told, annotation)
    return annotation.replace(" | None", "").replace(" | ", ", ")


def default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value in ({}, ()):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text}`" if text.strip() else ""


def rows_of(kind: type, prefix: str, free: bool) -> Iterator[str]:
    """A row for each field that is no section."""
    texts = docstrings(kind)
    for field in dataclasses.fields(kind):
        if field.name in ("config", "shards") and prefix == "":
            continue
        if dataclasses.is_dataclass(field.default_factory):  # a section, with a table of its own
            continue
        annotation, text = texts[field.name]
        flag = f"`--{prefix}{field.name.replace('_', '-')}`"
        if "Positional" in annotation:
            metavar = re.search(r"metavar='(\w+)'", annotation)
            flag = f"`{metavar[1] if metavar else field.name.upper().removesuffix('S')}`"
        change = f" {'yes' if field.metadata.get('free') else 'no'} |" if free else ""
        told = f"{flag} | {kind_of(annotation)} | {cell(default_of(field))} | {cell(text)}"
        yield f"| {told} |{change}"


def table(kind: type, prefix: str = "", free: bool = False) -> str:
    change = (" may change |", " --- |") if free else ("", "")
    head = (
        f"| flag | value | default | meaning |{change[0]}\n| --- | --- | --- | --- |{change[1]}\n"
    )
    return head + "\n".join(rows_of(kind, prefix, free)) + "\n"


def sections() -> dict[str, type]:
    """Those of TrainConfig, by name."""
    made = {field.name: field.default_factory for field in dataclasses.fields(TrainConfig)}
    return {
        name: kind
        for name, kind in made.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }


def configuration(_: str) -> str:
    """All fields of TrainConfig, a table for each section."""
    parts = ["## Run\n", table(TrainConfig, free=True)]
    for name, section in sections().items():
        parts += [f"## {name}\n", f"{inspect.getdoc(section)}\n"]
        parts.append(table(section, f"{name}.", free=True))
    return "\n" + "\n".join(parts) + "\n"


def flags(command: str) -> str:
    """What a command is for, and its own flags."""
    kind = COMMANDS[command]
    text = "" if kind is RunFlags else f"{inspect.getdoc(kind)}\n\n"
    more = ""
    if kind is ConvertArgs:
        more = "\n".join(rows_of(ConvertConfig, "", False)) + "\n"
    return f"\n{text}{table(kind)}{more}\n"


def recipes(_: str) -> str:
    """The shipped recipes, with the comment that opens each."""
    lines = []
    for name in shipped_recipes():
        text = (PACKAGE / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        words = re.match(r"(?:#.*\n)+", text)
        told = " ".join(words[0].replace("#", " ").split()) if words else ""
        lines.append(f"| `{name}` | {cell(told)} |\n")
    return "\n| recipe | what it is |\n| --- | --- |\n" + "".join(lines) + "\n"


def statuses(_: str) -> str:
    """One row for each error, from the tree that opens errors.py."""
    told = dict(re.findall(r"(\w+) +\d   (.+)", inspect.getdoc(errors) or ""))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    rows = {
        kind.exit_status: f"| {kind.exit_status} | `{kind.__name__}` | {told[kind.__name__]} |\n"
        for kind in kinds
        if issubclass(kind, errors.RaytrainError) and kind.__name__ in told
    }
    head = "\n| status | error | meaning |\n| --- | --- | --- |\n"
    first = "| 0 | | finished, or already complete |\n"
    return head + first + "".join(rows[status] for status in sorted(rows)) + "\n"


def layout(module: str) -> str:
    """The layout of a folder, as the docstring of the module that writes it draws it."""
    parsed = ast.parse((PACKAGE / module.strip()).read_text(encoding="utf-8"))
    _, block, *_ = (ast.get_docstring(parsed) or "").split("\n\n")
    return f"\n```text\n{textwrap.dedent(block)}\n```\n\n"


def tree(_: str) -> str:
    """Every file of the package, with the first sentence of its docstring."""
    lines = []
    for path in sorted(PACKAGE.rglob("*"), key=lambda p: (p.parent.parts, p.name)):
        name = path.relative_to(PACKAGE)
        if (
            not path.is_file()
            or path.suffix == ".pyc"
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
        told = {
            each: text.strip()
            for named, text in zip(found[1::2], found[2::2], strict=True)
            for each in named.split(", ")
        }
        rows = [
            f"| `{field.metadata.get('key', field.name)}` | {cell(str(field.type))} | "
            f"{cell(told.get(field.name, ''))} |\n"
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
    for function in (configuration, flags, recipes, statuses, layout, tree, schema)
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
