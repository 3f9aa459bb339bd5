"""Everything that the README and the documentation mention exists: files, tests, flags,
commands."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import raytrain_ddp
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.launcher.torchrun_flags import parse as parse_run
from raytrain_ddp.tools import spot
from raytrain_ddp.tools.chaos.__main__ import parse as parse_chaos
from raytrain_ddp.tools.doctor.__main__ import parse as parse_doctor
from raytrain_ddp.tools.sweep.__main__ import parse as parse_sweep

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, DOCS = ROOT / "raytrain_ddp", ROOT / "docs"


SPEC = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert SPEC is not None
assert SPEC.loader is not None
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
PAGES = sorted(page for page in DOCS.rglob("*.md") if not page.is_symlink())
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [*ROOT.glob("clusters/**/README.md"), *ROOT.glob("examples/**/README.md"), *PAGES]
TEXTS = {page: generate.made(page.read_text(encoding="utf-8")) for page in DOCUMENTS}

PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "fit": parse_fit,
    "chaos": parse_chaos,
    "doctor": parse_doctor,
    "sweep": parse_sweep,
    "run": parse_run,
    "spot": spot.parser().parse_args,
    **{
        name: generate.command_of(name).parse
        for name in ("evaluate", "predict", "export", "convert", "report")
    },
}


def file_of_tests(name: str) -> Path:
    """The file of that name anywhere below tests/; file names are unique."""
    found = [*(ROOT / "tests").rglob(name)]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


FAULTS = (ROOT / "tests" / "FAULTS.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_exist():
    rows = FAULTS.partition("## Faults")[0]
    promises = [row for row in rows.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(promises) >= 7
    for promise in promises:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", promise)
        assert named, promise
        for file, test in named:
            parsed = ast.parse(file_of_tests(file).read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(parsed) if isinstance(n, ast.FunctionDef)}
            assert test in functions, f"{file} has no {test}"


FAULT_ROWS = range(1, 64)


def rows_of(test: str) -> list[int]:
    """``test_fault_17_and_18_...`` -> 17, 18."""
    match = re.match(r"test_faults?_((?:\d\d_(?:and_)?)+)", test)
    return [int(number) for number in re.findall(r"\d\d", match[1])] if match else []


def by_row() -> tuple[dict[int, set[str]], dict[int, set[str]]]:
    """Row -> the names of its tests that run by default, and of the others."""
    by_default, opt_in = defaultdict(set), defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        marks = re.findall(r"^pytestmark = .*", text, re.MULTILINE)
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                words = " ".join([*marks, *map(ast.unparse, node.decorator_list)])
                tests = opt_in if re.search(r"mark\.(slow|gpu|lab)", words) else by_default
                for row in rows_of(node.name):
                    tests[row].add(node.name)
    return by_default, opt_in


def test_each_row_of_the_fault_matrix_has_a_test_by_default_or_says_why_not():
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]*)\|$", FAULTS, re.MULTILINE)
    assert [int(row) for row, _ in rows] == list(FAULT_ROWS)
    by_default, opt_in = by_row()
    assert {*by_default, *opt_in} <= {*FAULT_ROWS}
    without = [(int(row), remark) for row, remark in rows if int(row) not in by_default]
    for row, remark in without:
        others = [int(number) for number in re.findall(r"\d+", remark)]
        elsewhere = remark.startswith("With row") and all(by_default[other] for other in others)
        assert elsewhere or (remark.startswith("Opt in") and opt_in[row]), f"row {row}"


def test_every_marker_is_replaced_and_every_field_and_command_is_described():
    assert "<!-- generated" not in "".join(TEXTS.values())
    fields, commands = (TEXTS[DOCS / "reference" / f"{name}.md"] for name in ("fields", "commands"))
    assert "| `--optim.lr` |" in fields
    assert [*re.findall(r"^## (\w+)$", commands, re.MULTILINE)] == [*generate.COMMANDS]


def test_every_command_of_a_benchmark_has_flags_that_exist():
    """Also on the pages of results, whose figures it made."""
    shared = (ROOT / "benchmarks" / "series.py").read_text(encoding="utf-8")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.md")]
    for text in (*TEXTS.values(), *pages):
        whole = text.replace("\\\n", " ")
        for script, given in re.findall(r"python benchmarks/(\w+\.py)([^`#\n]*)", whole):
            source = (ROOT / "benchmarks" / script).read_text(encoding="utf-8") + shared
            for flag in re.findall(r" (--[a-z-]+)", given):
                assert f'"{flag}"' in source, f"{script} {flag}"


@pytest.mark.parametrize("tiny", [False, True])
def test_each_fit_of_the_gpu_benchmark_has_a_valid_config(
    tiny: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    given = {"images": 60, "minutes": 12.0, "ray_wheels": None, "only": [], "tiny": tiny}
    trainers = {"timm_train": None, "torchvision_train": None}
    jobs = importlib.import_module("gpu").jobs(Namespace(**given, **trainers), tmp_path, 4)
    commands = [job.command for job in jobs if job.log]
    for command in commands:
        parse_fit(command[command.index("raytrain_ddp.fit") + 1 :])
    assert len(commands) == 13


def test_every_name_and_file_that_is_mentioned_exists():
    for text in TEXTS.values():
        for names in re.findall(r"from raytrain_ddp import (\w+(?:, \w+)*)", text):
            assert {*names.split(", ")} <= {*raytrain_ddp.__all__}, names
        for name in re.findall(r"\btest_\w+\.py", text):
            assert file_of_tests(name).is_file(), name
        for name in re.findall(r"(?:benchmarks|clusters|examples)/[\w/]+\.\w+", text):
            assert (ROOT / name).is_file(), name


def lines_of_code(text: str) -> Iterator[str]:
    """The lines of indented blocks, and those after ``$`` in fenced ones, joined if continued."""
    text = re.sub(r"```(python|toml|text)\n.*?```", "", text, flags=re.DOTALL)
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for line in "".join(fenced).splitlines():
        if line.startswith("$ "):
            yield line[2:]
    rest = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    for block in re.findall(r"(?<=\n\n)((?: {4}.*\n)+)", f"\n{rest}\n"):
        yield from (line.strip() for line in block.splitlines())


def commands_of(text: str) -> Iterator[str]:
    """The commands of this package that a reader may type: code lines, and commands in a
    sentence."""
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)]
    for line in (*lines_of_code(text), *inline):
        name = r"(?:python -m raytrain_ddp(?:\.tools)?[. ]|\braytrain )"
        for found in re.findall(rf"{name}([a-z]+\b.*)", line):
            yield f"python -m raytrain_ddp.{found}"
        if line.startswith("sbatch clusters/slurm.sbatch "):
            yield line.replace("sbatch clusters/slurm.sbatch", "python -m raytrain_ddp.fit")


def test_every_command_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs = ("runs/digits/config", "runs/mine/config", "runs/digits-sweep/trial-0007/config")
    for recipe in ("mine", "photos", *runs):
        path = tmp_path / f"{recipe}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("batch_size = 256\n")
    for script in ("train.py", *(path.name for path in (ROOT / "examples/launchers").glob("*.py"))):
        (tmp_path / script).touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    found = [line for text in TEXTS.values() for line in commands_of(text)]
    assert {re.findall(r"raytrain_ddp\.(\w+)", line)[0] for line in found} == {*PARSERS}
    whole = dict.fromkeys(re.split(r" > |   #|' && |  #|'$", line)[0].strip() for line in found)
    placeholder = re.compile(r" \.\.\.|RUN\b|\bNAME\b|SCRIPT|\[|\|")
    for line in whole:
        command, *argv = shlex.split(line.removeprefix("python -m raytrain_ddp."), comments=True)
        if not placeholder.search(line) and len(argv) > 1:
            assert PARSERS[command](argv), line


def test_every_link_leads_to_a_file_and_every_recipe_is_valid(tmp_path: Path):
    for document, text in TEXTS.items():
        for link in re.findall(r"\]\(([^):#]+)[#)]", re.sub(r"(?s)```.*?```", "", text)):
            assert (document.parent / link).exists(), f"{document}: {link}"
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            ast.parse(code)
        for code in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
            (tmp_path / "recipe.toml").write_text(code)
            load(str(tmp_path / "recipe.toml"))


def test_the_readme_begins_with_its_commands_and_its_task_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.torch import load_file

    two = ["pip install -e . && python -m raytrain_ddp.fit", "pip install -e '.[test]' && pytest"]
    assert [*lines_of_code(TEXTS[ROOT / "README.md"])][1:3] == two
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[ROOT / "README.md"], re.DOTALL)
    (task,) = [code for code in blocks if "(Task)" in code]
    assert len([line for line in task.splitlines() if line]) <= 25
    (tmp_path / "sine.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    from raytrain_ddp import OptimConfig, fit_locally

    sizes = {"epochs": 4, "batch_size": 400, "micro_batch": 200}
    config = TrainConfig(task="sine.py:Sine", optim=OptimConfig(lr=0.05), **sizes)
    result = fit_locally(config)
    assert result.metrics["mse"] < 0.1  # of a variance of 0.5
    names: dict[str, Any] = {}
    exec(task, names)  # what the README shows
    model = names["Sine"](config).model()
    assert result.last_checkpoint is not None
    model.load_state_dict(load_file(Path(result.last_checkpoint) / "model.safetensors"))
