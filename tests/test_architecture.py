"""The import rules, the limits on file length, and the public names of the package."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import raytrain_ddp

PACKAGE = Path(raytrain_ddp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = {
    *("fit", "evaluate", "predict", "export", "run", "convert", "doctor", "report"),
    *("chaos", "sweep"),
}

# A part may import those of lower rank, and itself; parts of one rank do not know each other.
RANKS = [
    {"errors", "events"},
    {"records"},
    {"files", "failpoints", "library_imports", "process_state", "signals", "uri", "user_code"},
    {"warm"},
    {"config"},
    {"data", "checkpoint", "membership"},
    {"tasks"},
    {"training"},
    {"tools", "formatting", "staging"},
    {"inference"},
    {"ray_backend"},
    {"driver"},
    {"report"},
    {"display"},
    {"launcher"},
    COMMANDS - {"report"},
    {"__main__"},
]

# The only parts that import Ray.
SPEAK_RAY = {"ray_backend", "launcher", "doctor", "chaos", "convert", "predict", "sweep"}
# Of a part that does little with Ray: a sweep is drawn, continued and reported without it.
SPEAK_RAY_ALONE = {"sweep": "tools/sweep/tune_engine.py"}
MAX_LINES = 500
ROOT = Path(__file__).resolve().parent.parent
# The lines that each room may have at most: the table in CONTRIBUTING.md.
CEILINGS = {
    room: int(lines)
    for room, lines in re.findall(
        r"\| ([a-z][^|]*?) \| (\d+)(?= \|)", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
}
# Rooms that are still above their ceilings. Names are only ever removed.
STILL_ABOVE = {"the package's top level", "config", "data", "tasks", "training"}
STILL_ABOVE |= {"ray_backend", "driver"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """``training/loop.py`` -> training, ``fit.py`` -> fit, ``tools/chaos/screen.py`` -> chaos."""
    return part_named(*path.relative_to(PACKAGE).parts).removesuffix(".py")


def part_named(first: str, *rest: str) -> str:
    return rest[0] if first == "tools" and len(rest) > 1 else first


def rank_of(part: str) -> int:
    return next(rank for rank, parts in enumerate(RANKS) if part in parts)


@functools.cache
def imports(path: Path) -> list[str]:
    """Full names of all that a file imports, also inside functions and for type checking."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_follow_the_ranks():
    assert "torch" in {name.partition(".")[0] for path in FILES for name in imports(path)}
    wrong = []
    for path in FILES:
        if path == PACKAGE / "__init__.py" or "recipes" in path.parts:
            continue  # offers names from everywhere; holds data
        mine = part_of(path)
        names = [name.split(".")[1:] for name in imports(path) if name.startswith("raytrain_ddp.")]
        ours = {part_named(*name) for name in names}
        for theirs in ours - {mine}:
            if rank_of(theirs) >= rank_of(mine):
                wrong.append(f"{name_of(path)} imports {theirs}")
    assert not wrong


# All of Ray that is not public; `tests/ray_backend/test_ray_private.py` says whether it is there.
NOT_PUBLIC = "ray_backend/ray_private.py"


def test_ray_is_imported_by_few_parts_and_by_public_names():
    wrong = []
    for path in FILES:
        for name in imports(path):
            private = name.startswith("ray.") and "._" in name
            known = name_of(path) == NOT_PUBLIC
            alone = SPEAK_RAY_ALONE.get(part_of(path), name_of(path))
            speaks = part_of(path) in SPEAK_RAY and name_of(path) == alone
            if (private and not known) or (name.partition(".")[0] == "ray" and not speaks):
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def test_each_room_stays_within_its_ceiling():
    """Tests of tools are rewritten with the tools."""
    tests = [p for p in (ROOT / "tests").rglob("*.py") if "tools" not in p.parts]
    assert not [path.name for path in tests if lines_of([path]) > MAX_LINES]
    sources = [*FILES, *PACKAGE.rglob("*.j2")]
    found = dict.fromkeys(CEILINGS, 0)
    for path in sources:
        first, *rest = path.relative_to(PACKAGE).parts
        if first != "recipes":
            found[first if rest else "the package's top level"] += lines_of([path])
    others = {
        "benchmarks": ("*.py", "*.sh"),
        "docs": ("*.md", "*.py"),
        "examples": ("*.py", "*.toml", "*.md"),
        "clusters": ("*.yaml", "*.yml", "*.sbatch", "*.md", "Dockerfile"),
    }
    own = {
        folder: [path for each in names for path in (ROOT / folder).rglob(each)]
        for folder, names in others.items()
    }
    own["docs"] = [path for path in own["docs"] if path.parent.name != "results"]
    found["docs, pages"] = len([path for path in own["docs"] if path.suffix == ".md"])
    found["tests, without tests/tools"] = lines_of(tests)
    found["examples, clusters"] = lines_of(own["examples"] + own["clusters"])
    found |= {room: lines_of(own[room]) for room in ("benchmarks", "docs")}
    assert {*found} == {*CEILINGS}
    assert {room for room in found if found[room] > CEILINGS[room]} <= STILL_ABOVE, found


def test_each_file_stays_within_the_line_limit_and_has_a_docstring_and_a_name_of_its_own():
    """A file is one concept; one that needs more lines has two."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    assert not [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES]
    with_code = {name: text for name, text in texts.items() if text.strip()}
    assert not [name for name, text in with_code.items() if not ast.get_docstring(ast.parse(text))]
    names = [path.stem for path in FILES if not path.stem.startswith("__")]
    assert not [name for name in names if names.count(name) > 1], "names of modules are unique"


def test_the_package_offers_its_names_also_to_type_checkers():
    assert {"TrainConfig", "Task", "fit", "fit_locally", "load"} < {*raytrain_ddp.__all__}
    for name in raytrain_ddp.__all__:
        assert getattr(raytrain_ddp, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError):
        _ = raytrain_ddp.nothing
    for_type_checkers = {name.rpartition(".")[2] for name in imports(PACKAGE / "__init__.py")}
    assert for_type_checkers >= {*raytrain_ddp.__all__}


def test_commands_load_neither_torch_nor_ray_before_they_need_them():
    """A complete or refused run exits at once; a name or config costs even less."""
    heavy = {"torch", "ray", "numpy", "pyarrow", "pydantic", "matplotlib"}

    def loaded_after(statement: str) -> set[str]:
        code = f"import json, sys\n{statement}\nprint(json.dumps([*sys.modules]))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        return set(json.loads(out))

    assert not loaded_after("from raytrain_ddp import TrainConfig; TrainConfig()") & heavy
    packages = ("predict", "export", "convert", "doctor", "report", "chaos", "sweep")
    light = ("fit", "evaluate", "run", *(f"tools.{name}.__main__" for name in packages))
    light += ("tools.spot", "driver.fit_driver", "driver.preflight", "ray_backend.worker")
    light += ("data.order",)
    parts = ("doctor.examine", "report.write", "sweep.trials")
    light += tuple(f"tools.{name}" for name in parts)
    modules = ", ".join(f"raytrain_ddp.{name}" for name in light)
    assert not loaded_after(f"import {modules}") & {"torch", "ray"}
