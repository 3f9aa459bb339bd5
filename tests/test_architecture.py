"""The import rules, the limits on file length, and the public names of the package."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import raytrain_ddp

PACKAGE = Path(raytrain_ddp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
COMMANDS = {
    *("fit", "evaluate", "predict", "export", "run", "convert", "doctor", "report", "watch"),
    *("chaos", "sweep"),
}

# A part may import those of lower rank, and itself; parts of one rank do not know each other.
RANKS = [
    {"errors", "events"},
    {"messages", "records"},
    {"files", "failpoints", "library_imports", "process_state", "signals", "uri", "user_code"},
    {"warm", "spot"},
    {"config"},
    {"data", "checkpoint"},
    {"tasks"},
    {"training"},
    {"inference"},
    {"result"},
    {"display"},
    {"ray_backend"},
    {"driver"},
    {"launcher"},
    {"command_line"},
    {"sweep"},  # the report shows it
    COMMANDS - {"watch", "sweep"},
    {"watch"},  # shows the pages of the report
    {"__main__"},
]
# The same for the folders and files of the two largest parts.
RANKS_WITHIN = {
    "data": [
        {"order"},
        {"loading"},
        {"formats", "array_source", "iterable_source"},
        {"discovery"},
        {"holdout", "torchvision_datasets"},
        {"splits"},
        {"pixels"},
    ],
    "training": [
        {"runtime"},
        {"monitoring", "run_identity"},
        {"gradients"},
        {"optimizer", "session"},
        {"state"},
        {"steps", "recording"},
        {"metrics", "membership"},
        {"start"},
        {"async_evaluation"},
        {"prepared_run"},
        {"prepare"},
        {"loop"},
    ],
}
# The only parts that import Ray.
SPEAK_RAY = {"ray_backend", "launcher", "doctor", "chaos", "convert", "predict", "sweep"}
# Of a part that does little with Ray: a sweep is drawn, continued and reported without it.
SPEAK_RAY_ALONE = {"sweep": "sweep/tune_engine.py"}
MAX_LINES = 500
MAX_LINES_OF_TRAIN = 45

OFFERED = {
    *("ArraySource", "Data", "Draws", "FitResult", "IterableSource", "MapSource", "RaytrainError"),
    *("Source", "Task", "TrainConfig", "fit", "fit_locally", "load"),
    *("AugmentConfig", "CheckpointConfig", "ComputeConfig", "DataConfig", "DdpConfig"),
    *("EmaConfig", "EvalConfig", "StopConfig"),
    *("LogConfig", "LossConfig", "ModelConfig", "OptimConfig", "ScalingConfig", "ScheduleConfig"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """``training/loop.py`` -> training, ``fit.py`` -> fit."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rank_of(part: str, ranks: Sequence[set[str]] = RANKS) -> int:
    return next(rank for rank, parts in enumerate(ranks) if part in parts)


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


def test_the_import_check_finds_imports():
    assert len(FILES) > 30
    assert {"torch", "raytrain_ddp"} <= {
        name.partition(".")[0] for path in FILES for name in imports(path)
    }


TURN_BACK = {
    # What users call on a result, after the training.
    "result.py": {"display", "report"},
    # The type of what it is given.
    "training/async_evaluation.py": {"prepared_run"},
}


def against_the_ranks(
    path: Path, prefix: str, mine: str, ranks: Sequence[set[str]]
) -> Iterator[str]:
    """Imports of ``prefix.X`` where X is neither ``mine`` nor of a lower rank."""
    for name in imports(path):
        if name.startswith(f"{prefix}."):
            theirs = name.removeprefix(f"{prefix}.").partition(".")[0]
            allowed = theirs == mine or rank_of(theirs, ranks) < rank_of(mine, ranks)
            if not allowed and theirs not in TURN_BACK.get(name_of(path), set()):
                yield f"{name_of(path)} imports {name}"


def test_imports_follow_the_ranks():
    wrong: list[str] = []
    for path in FILES:
        if path == PACKAGE / "__init__.py" or "recipes" in path.parts:
            continue  # offers names from everywhere; holds data
        part = part_of(path)
        wrong += against_the_ranks(path, "raytrain_ddp", part, RANKS)
        if part in RANKS_WITHIN and path.stem != "__init__":
            mine = path.relative_to(PACKAGE / part).parts[0].removesuffix(".py")
            wrong += against_the_ranks(path, f"raytrain_ddp.{part}", mine, RANKS_WITHIN[part])
    assert not wrong


NOT_PUBLIC = {
    # Which nodes will be removed: Ray Train reports it only to workers that end together, and
    # there is no public API. If this is removed, all workers are restarted: see `start_of`.
    "ray_backend/mailbox.py": ("ray._private.state",),
    # Which script sets workers up, and what Ray starts without a dashboard. If these go, all starts
    # as usual: see `quick_start`.
    "ray_backend/ray_settings.py": (
        "ray._private.ray_constants",
        "ray._private.node",
        "ray._private.services",
    ),
}


def test_ray_is_imported_by_few_parts_and_by_public_names():
    wrong = []
    for path in FILES:
        for name in imports(path):
            private = "_internal" in name or "_private" in name
            known = name in NOT_PUBLIC.get(name_of(path), ())
            alone = SPEAK_RAY_ALONE.get(part_of(path), name_of(path))
            speaks = part_of(path) in SPEAK_RAY and name_of(path) == alone
            if (private and not known) or (name.partition(".")[0] == "ray" and not speaks):
                wrong.append(f"{name_of(path)} imports {name}")
    assert not wrong


def test_each_file_stays_within_the_line_limit_and_has_a_docstring():
    """A file is one concept; one that needs more lines has two."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in FILES}
    assert not [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES]
    with_code = {name: text for name, text in texts.items() if text.strip()}
    assert not [name for name, text in with_code.items() if not ast.get_docstring(ast.parse(text))]


def test_the_training_loop_fits_on_one_screen():
    tree = ast.parse((PACKAGE / "training" / "loop.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    train = functions["train"]
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno + 1 <= MAX_LINES_OF_TRAIN


def test_each_command_has_a_main_and_runs_as_a_module():
    for name in COMMANDS:
        file, package = PACKAGE / f"{name}.py", PACKAGE / name / "__main__.py"
        path = file if file.exists() else package
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert "main" in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, path
        assert "run_command(main)" in ast.unparse(tree.body[-1]), path


def test_module_names_are_unique():
    names = [path.stem for path in FILES if not path.stem.startswith("__")]
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}


# ------------------------------------------------------------------ the package's names


def test_the_package_offers_the_documented_names():
    assert set(raytrain_ddp.__all__) == OFFERED
    assert set(dir(raytrain_ddp)) >= OFFERED
    for name in OFFERED:
        assert getattr(raytrain_ddp, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = raytrain_ddp.nothing


def test_type_checkers_see_the_same_names():
    names = {name.rpartition(".")[2] for name in imports(PACKAGE / "__init__.py")}
    assert names >= OFFERED


def loaded_after(statement: str) -> set[str]:
    """Modules in a fresh process after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([*sys.modules]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return set(json.loads(out))


def test_importing_the_package_or_its_config_loads_neither_torch_nor_ray():
    heavy = {"torch", "ray", "numpy", "pyarrow", "pydantic", "matplotlib"}
    assert not loaded_after("import raytrain_ddp") & heavy
    assert not loaded_after("from raytrain_ddp import TrainConfig; TrainConfig()") & heavy
    packages = ("predict", "export", "convert", "doctor", "report", "watch", "chaos", "sweep")
    modules = ["fit", "evaluate", "run", *(f"{name}.__main__" for name in packages)]
    commands = ", ".join(f"raytrain_ddp.{module}" for module in modules)
    assert not loaded_after(f"import {commands}") & {"torch", "ray"}


def test_light_modules_import_neither_torch_nor_ray():
    """The first one: a complete or refused run exits at once."""
    light = ("driver.fit_driver", "driver.preflight", "ray_backend.worker", "spot.__main__")
    light += ("doctor.examine", "report.write", "data.order.epoch_order", "watch.http_server")
    modules = ", ".join(f"raytrain_ddp.{name}" for name in (*light, "sweep.run_sweep"))
    assert not loaded_after(f"import {modules}") & {"torch", "ray"}
    opened = (
        "from raytrain_ddp.data.splits import DataConfig, open_splits; open_splits(DataConfig())"
    )
    assert not loaded_after(opened) & {"torch", "datasets"}


@pytest.mark.parametrize(
    "statements",
    [
        "from raytrain_ddp import fit",
        "import raytrain_ddp.fit; from raytrain_ddp import fit",
        "from raytrain_ddp import fit; import raytrain_ddp.fit; fit = raytrain_ddp.fit",
    ],
)
def test_fit_can_be_called_however_it_was_imported(statements: str):
    """The module `raytrain_ddp.fit` hides the function of that name once it is imported."""
    code = (
        f"{statements}\nimport raytrain_ddp.driver.fit_driver as driver\n"
        "from raytrain_ddp import TrainConfig\n"
        "driver.check = lambda config: 1 / 0\n"
        "try:\n    fit(TrainConfig())\nexcept ZeroDivisionError:\n    print('called')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "called\n"
