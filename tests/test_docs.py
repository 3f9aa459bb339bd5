"""Everything that the README and the documentation mention exists: files, tests, flags,
commands."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raytrain_ddp
from raytrain_ddp.chaos.__main__ import parse as parse_chaos
from raytrain_ddp.checkpoint import run_folder
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.doctor.__main__ import parse as parse_doctor
from raytrain_ddp.run import parse as parse_run
from raytrain_ddp.spot import __main__ as spot
from raytrain_ddp.sweep.__main__ import parse as parse_sweep

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, DOCS = ROOT / "raytrain_ddp", ROOT / "docs"
README = ROOT / "README.md"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _generator()
PAGES = sorted(page for page in DOCS.rglob("*.md") if not page.is_symlink())
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += [ROOT / "clusters" / "README.md", ROOT / "clusters" / "monitoring" / "README.md"]
DOCUMENTS += [ROOT / "examples" / "README.md", ROOT / "examples" / "launchers" / "README.md"]
DOCUMENTS += PAGES
TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
WRITTEN = {page: generate.BLOCK.sub("", text) for page, text in TEXTS.items()}  # by hand

PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "fit": parse_fit,
    "chaos": parse_chaos,
    "doctor": parse_doctor,
    "sweep": parse_sweep,
    "run": parse_run,
    **{
        name: generate._command(name).parse
        for name in ("evaluate", "predict", "export", "convert", "report", "watch")
    },
}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Programs of this package that people do not type every day: `raytrain` does not list them.
BESIDES: dict[str, Callable[[Sequence[str]], Any]] = {"spot": spot.parser().parse_args}


def file_of_tests(name: str) -> Path:
    """The file of that name anywhere below tests/; file names are unique."""
    found = [*(ROOT / "tests").rglob(name)]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_generated_documentation_is_up_to_date():
    old = [shown(page) for page in PAGES if generate.renewed(TEXTS[page]) != TEXTS[page]]
    assert not old, "run: python docs/generate.py"


def test_the_tree_has_every_file_of_the_package():
    tree = TEXTS[DOCS / "contributing" / "tree.md"]
    for path in PACKAGE.rglob("*.py"):
        if path.stat().st_size:
            folder = f"### raytrain_ddp/{path.parent.relative_to(PACKAGE)}".removesuffix("/.")
            rows = tree.partition(f"{folder}\n")[2].partition("\n### ")[0]
            about = re.search(rf"^\| `{re.escape(path.name)}` \| (.+) \|$", rows, re.MULTILINE)
            assert about, f"{path}: not a word about it"


def test_the_code_walkthroughs_name_existing_code():
    text = TEXTS[DOCS / "contributing" / "paths.md"]
    steps = [line for line in text.splitlines() if re.match(r"[\w/]+\.py ", line)]
    assert len(steps) > 35
    for line in steps:
        file, name, about = line[:41].strip(), line[41:62].strip(), line[62:]
        code = (PACKAGE / file).read_text(encoding="utf-8")
        if name:
            assert re.search(rf"^(?:class|def) {name}\b", code, re.MULTILINE), f"{file}: {name}"
        for method in re.findall(r"\b(\w+)\(\)", about):
            assert f"def {method}(" in code, f"{file}: {method}"


def test_every_promise_names_tests_that_exist():
    rows = TEXTS[DOCS / "contributing" / "promises.md"].splitlines()
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
        for name in re.findall(r"\btest_\w+\.py", TEXTS[document]):
            assert file_of_tests(name).is_file(), name
        for name in re.findall(r"(?:benchmarks|clusters|examples)/[\w/]+\.\w+", TEXTS[document]):
            assert (ROOT / name).is_file(), name


def test_every_command_and_name_that_is_mentioned_exists():
    for document in DOCUMENTS:
        text = TEXTS[document]
        for names in re.findall(r"from raytrain_ddp import (\w+(?:, \w+)*)", text):
            assert {*names.split(", ")} <= {*raytrain_ddp.__all__}, names
        for module, name in re.findall(r"from raytrain_ddp\.([\w.]+) import (\w+)", text):
            path = (PACKAGE / module.replace(".", "/")).with_suffix(".py")
            names = {n.name for n in ast.parse(path.read_text()).body if hasattr(n, "name")}
            assert name in names, f"{module}: {name}"
        for command in re.findall(r"python -m raytrain_ddp\.(\w+)|`raytrain ([a-z]+)", text):
            assert "".join(command) in {*PARSERS, *BESIDES}, command


def test_every_file_of_a_run_is_in_the_reference():
    names = [value for name, value in vars(run_folder).items() if name.isupper()]
    names = [name for name in names if isinstance(name, str)]
    assert "metrics.jsonl" in names
    text = WRITTEN[DOCS / "reference" / "files.md"]
    for name in names:
        if not name.startswith("damaged"):
            assert f"`{name}" in text, name


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
        for found in re.findall(r"(?:python -m raytrain_ddp[. ]|\braytrain )([a-z]+\b.*)", line):
            yield f"python -m raytrain_ddp.{found}"
        if line.startswith("sbatch clusters/slurm.sbatch "):
            yield line.replace("sbatch clusters/slurm.sbatch", "python -m raytrain_ddp.fit")


def typed() -> list[str]:
    """All commands of this package except those without arguments or with a placeholder."""
    found = [line for text in TEXTS.values() for line in commands_of(text)]
    found = [re.split(r" > |   #|' && |  #|'$", line)[0].strip() for line in found]
    placeholder = re.compile(r" \.\.\.|RUN\b|\bNAME\b|SCRIPT|\[|\|")
    alone = "python -m raytrain_ddp.fit", "python -m raytrain_ddp.chaos"
    return [
        *dict.fromkeys(
            line
            for line in found
            if not placeholder.search(line) and (line.count(" ") > 2 or line in alone)
        )
    ]


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
    assert {re.findall(r"raytrain_ddp\.(\w+)", line)[0] for line in found} == {*PARSERS, *BESIDES}
    for line in typed():
        command, *argv = shlex.split(line.removeprefix("python -m raytrain_ddp."), comments=True)
        assert {**PARSERS, **BESIDES}[command](argv), line


def test_python_and_recipes_are_valid(tmp_path: Path):
    for document in DOCUMENTS:
        for code in re.findall(r"```python\n(.*?)```", TEXTS[document], re.DOTALL):
            ast.parse(code)
        for code in re.findall(r"```toml\n(.*?)```", TEXTS[document], re.DOTALL):
            (tmp_path / "recipe.toml").write_text(code)
            assert isinstance(load(str(tmp_path / "recipe.toml")), TrainConfig)


def links_of(document: Path) -> Iterator[tuple[Path, str]]:
    """(file, anchor) of the links that lead to other files of this repository."""
    text = re.sub(r"```.*?```", "", TEXTS.get(document, ""), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^):]+)\)", text):
        name, _, anchor = link.partition("#")
        yield (document.parent / name).resolve() if name else document, anchor


def anchors_of(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in kept}


def test_every_link_leads_to_a_file_and_a_heading():
    for document in DOCUMENTS:
        for file, anchor in links_of(document):
            assert file.exists(), file
            if anchor and document.name == "README.md":  # mkdocs checks those of the other pages
                assert anchor in anchors_of(file), f"{file.name}#{anchor}"


def test_the_readme_is_short_and_begins_with_the_two_commands():
    text = TEXTS[README]
    assert len(text.splitlines()) <= 150
    two = ["pip install -e . && python -m raytrain_ddp.fit", "pip install -e '.[test]' && pytest"]
    assert [*lines_of_code(text)][:2] == two
    assert text.index(two[0]) < text.index("```")
    assert "`bash .ci/run`" in text
    assert "reference/exit-statuses.md" in text


def test_the_task_of_the_readme_trains_and_its_weights_are_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.torch import load_file

    blocks = re.findall(r"```python\n(.*?)```", TEXTS[README], re.DOTALL)
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


def test_the_weights_of_a_torchvision_model_load_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the parameter names of torchvision's own model, created as by the class that trains
    it."""
    from safetensors.torch import save_file
    from torchvision.models import resnet18

    folder = tmp_path / "runs/photos/checkpoints/step-00000010-a0001"
    folder.mkdir(parents=True)
    save_file(resnet18(num_classes=2).state_dict(), folder / "model.safetensors")
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[README], re.DOTALL)
    (loading,) = [code for code in blocks if "load_file" in code]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(loading, names)
    assert names["newest"].parent.resolve() == folder
    assert os.path.basename(folder) == "step-00000010-a0001"
