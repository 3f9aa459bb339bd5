"""What the README says is there, is there: files, tests, flags."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raytrain_ddp
from raytrain_ddp import errors
from raytrain_ddp.chaos.__main__ import ChaosArgs
from raytrain_ddp.chaos.__main__ import parse as parse_chaos
from raytrain_ddp.command_line import FitArgs, parse_fit
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.convert.__main__ import COMMAND as CONVERT
from raytrain_ddp.convert.__main__ import ConvertArgs
from raytrain_ddp.doctor.__main__ import DoctorArgs
from raytrain_ddp.evaluate import EvaluateArgs
from raytrain_ddp.launcher.run_options import Flags
from raytrain_ddp.report.__main__ import ReportArgs
from raytrain_ddp.run import parse as parse_run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "raytrain_ddp"
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [ROOT / "clusters" / "README.md", ROOT / "examples" / "README.md"]
DOCUMENTS += [ROOT / "examples" / "launchers" / "README.md"]

# Flags of other programs: torchrun, srun, ray, ruff, pytest, benchmarks/data.py, and of scripts,
# the reader's own or those of examples/launchers/.
FOREIGN = {
    *("nproc-per-node", "nnodes", "rdzv-endpoint"),
    *("head", "num-cpus", "check", "ignore", "resume"),
    *("quick", "only", "out", "working-dir"),
    *("rank", "world-size", "dist-url", "node-rank", "nodes", "lr"),
    *("ntasks-per-node", "nr", "master", "port", "gpus", "local-rank"),
    *("config.file", "storage.tsdb.path", "web.listen-address"),
}


def flags(section: Any, prefix: str = "") -> Iterator[str]:
    """``optim.lr`` and so on: the flags of a dataclass."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        name = f.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from flags(value, "" if f.name in ("config", "shards") else f"{prefix}{name}.")
        else:
            yield prefix + name
            if isinstance(value, bool):
                yield f"{prefix}no-{name}"


DOORS = (
    FitArgs(config=TrainConfig()),
    ChaosArgs(config=TrainConfig()),
    DoctorArgs(config=TrainConfig()),
    EvaluateArgs(run=""),
    ConvertArgs(),
    ReportArgs(runs=()),
    Flags(),
)
KNOWN = {*(flag for door in DOORS for flag in flags(door))}
KNOWN |= {"help", "help-all", "version", "print-completion"}


def file_of_tests(name: str) -> Path:
    """The file of that name anywhere below tests/; no two have the same."""
    found = [*(ROOT / "tests").rglob(name)]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def tree() -> set[str]:
    """The files in the README's tree, relative to the package."""
    block = README.partition("```\nraytrain_ddp/\n")[2].partition("```")[0]
    folders: list[str] = []
    files = set()
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        name = line.split()[0]
        folders = [*folders[:depth], name]
        if not name.endswith("/"):
            assert len(line.split()) > 1, f"{name}: not a word about it"
            files.add("".join(folders))
    return files


def test_the_tree_has_every_file_of_the_package_and_no_other():
    there = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
        if not (path.name == "__init__.py" and path.stat().st_size == 0)
    }
    assert tree() == there


def test_every_promise_names_tests_that_exist():
    rows = README.partition("## Promises")[2].partition("\n## ")[0].splitlines()
    promises = [row for row in rows if row.startswith("| ") and "---" not in row][1:]
    assert len(promises) >= 7
    for promise in promises:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", promise)
        assert named, promise
        for file, test in named:
            parsed = ast.parse(file_of_tests(file).read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef)}
            assert test in functions, f"{file} has no {test}"


def test_every_test_file_and_benchmark_that_is_named_exists():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for name in re.findall(r"\btest_\w+\.py", text):
            assert file_of_tests(name).is_file(), f"{document.name}: {name}"
        for name in re.findall(r"benchmarks/\w+\.py", text):
            assert (ROOT / name).is_file(), f"{document.name}: {name}"


def test_every_door_and_name_that_is_mentioned_exists():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for names in re.findall(r"from raytrain_ddp import ([\w, ]+)", text):
            assert set(names.split(", ")) <= {*raytrain_ddp.__all__}, f"{document.name}: {names}"
        for door in re.findall(r"python -m raytrain_ddp\.(\w+)", text):
            files = (PACKAGE / f"{door}.py", PACKAGE / door / "__main__.py")
            assert any(map(Path.is_file, files)), f"{document.name}: {door}"


def test_every_exit_status_of_an_error_is_in_the_table():
    told = set(re.findall(r"^\| (\d) \|", README, re.MULTILINE))
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    own = {str(kind.exit_status) for kind in kinds if issubclass(kind, errors.RaytrainError)}
    assert told == {"0", *own}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_flag_in_a_document_exists(document: Path):
    text = document.read_text(encoding="utf-8")
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9.-]*\*?)", text):
        name = flag.rstrip(".-")
        if name.endswith("*"):  # --ddp.*
            assert any(known.startswith(name[:-1]) for known in KNOWN), flag
        else:
            assert name in KNOWN | FOREIGN, f"{document.name}: --{flag}"


def commands(door: str) -> list[str]:
    """The lines that call a door, but for those with a recipe that the reader would have."""
    call = rf"^(?: {{4}}|\$ ).*?python -m raytrain_ddp\.{door}(.*)$"
    lines = re.findall(call, README, re.MULTILINE)
    told = [line.partition(" > ")[0].partition("   #")[0] for line in lines]
    return [line.rstrip("'") for line in told if "mine.toml -" not in line]


@pytest.mark.parametrize("command", commands("fit"))
def test_every_fit_command_of_the_readme_is_accepted(command: str):
    assert parse_fit(shlex.split(command))


@pytest.mark.parametrize("command", commands("chaos"))
def test_every_chaos_command_of_the_readme_is_accepted(command: str):
    assert parse_chaos(shlex.split(command))


@pytest.mark.parametrize("command", commands("run"))
def test_every_run_command_of_the_readme_is_accepted(command: str):
    assert parse_run(shlex.split(command))


@pytest.mark.parametrize("command", commands("convert"))
def test_every_convert_command_of_the_readme_is_accepted(command: str):
    assert CONVERT.parse(shlex.split(command))


def test_every_link_leads_to_a_file():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).is_file(), f"{document.name}: {link}"
