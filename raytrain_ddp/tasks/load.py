"""Finds the task that a config names, and checks the name before anything is imported."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import cast

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.errors import ConfigError, did_you_mean
from raytrain_ddp.tasks.task import Task

BUILT_IN = {"image-classification": "raytrain_ddp.tasks.images:ImageClassification"}


def load_task(config: TrainConfig) -> Task:
    """The task that `config.task` names, built.

    Raises:
        ConfigError: the module, file or class does not exist. An error raised by the task's own
            code passes through as it is.
    """
    name = BUILT_IN.get(config.task, config.task)
    place, _, class_name = name.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, class_name):
        raise ConfigError(
            f"task = {config.task!r}: {place} has no class {class_name!r}."
            f"{did_you_mean(class_name, vars(module))}"
        )
    return cast(Task, getattr(module, class_name)(config, **config.task_options))


def check_task_name(name: str) -> None:
    """Raises ConfigError if `name` cannot be a task's; imports nothing of it."""
    if name in BUILT_IN:
        return
    place, colon, class_name = name.rpartition(":")
    if not colon or not class_name.isidentifier():
        raise ConfigError(
            f"task = {name!r}: expected {', '.join(BUILT_IN)}, package.module:Class or "
            f"path/to/file.py:Class.{did_you_mean(name, BUILT_IN)}"
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ConfigError(f"task = {name!r}: there is no file {place}.")
        _check_class(name, Path(place), class_name)
    elif importlib.util.find_spec(place.partition(".")[0]) is None:
        raise ConfigError(
            f"task = {name!r}: no module {place.partition('.')[0]!r} can be imported from here."
        )


def _check_class(name: str, path: Path, class_name: str) -> None:
    """Reads the file without running it; a name that is made or imported there passes too."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"task = {name!r}: {path} is not valid Python: {error}.") from None
    nodes = list(ast.walk(tree))
    named = {n.name for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.alias))}
    named |= {n.asname for n in nodes if isinstance(n, ast.alias) and n.asname}
    named |= {n.id for n in nodes if isinstance(n, ast.Name)}
    if class_name not in named:
        classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
        raise ConfigError(
            f"task = {name!r}: {path} has no class {class_name!r}."
            f"{did_you_mean(class_name, classes)}"
        )


def _load_file(path: Path) -> object:
    """Imports a file by its stem, so that what it defines can be pickled by reference.

    On another machine the file lies elsewhere: Ray has put its folder on the import path there.
    """
    folder = str(path.resolve().parent)
    if path.is_file() and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(path.stem)
