"""Finds the task that a config names, and checks the name before importing anything."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from contextlib import nullcontext, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from raytrain_ddp import user_code
from raytrain_ddp.config.rules import watched
from raytrain_ddp.config.train_config import TaskName, TrainConfig
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.data.order.sample_rng import seeded_globals
from raytrain_ddp.errors import ConfigError, TaskError, did_you_mean
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_signature import (
    check_options,
    check_task,
    has_constructor,
    typed_options,
)

BUILT_IN = {"image-classification": "raytrain_ddp.tasks.image_classification:ImageClassification"}
_KINDS = {"task": "class", "model.name": "function"}


def load_task(config: TrainConfig, reads: set[str] | None = None) -> Task:
    """Builds the task of a config. The global generators are seeded before a user's task is
    built.

    Args:
        reads: receives the fields of the config that the task reads, now and later.

    Raises:
        ConfigError: the module, file or class does not exist, or it has no such options.
        TaskError: it is not a task; see `check_task`. Errors raised by the task's own code are
            passed through unchanged.
    """
    given = task_of(config)
    if callable(given):
        is_own = config.task not in BUILT_IN
        seen = watched(config, reads) if is_own and reads is not None else config
        has_arguments = has_constructor(given)
        options = typed_options(given, config.task_options) if has_arguments else {}
        with seeded_globals(config.seed) if is_own else nullcontext():  # seeding imports torch
            given = given(seen, **options) if has_arguments else given()
    check_task(given)
    return cast(Task, given)


def task_of(config: TrainConfig) -> Any:
    """The task class, factory function or instance that `config.task` names or holds.

    Raises:
        ConfigError, TaskError: like `load_task`.
    """
    check_task_name(config.task)
    if isinstance(config.task, TaskName):
        given = config.task.target
    else:
        given = imported("task", BUILT_IN.get(config.task) or config.task)
    if isinstance(given, type) or not callable(given):
        check_task(given)
    if callable(given):
        check_options(given, config.task_options)
    elif config.task_options:
        raise ConfigError(
            f"task_options = {config.task_options}: the task is already an instance. Pass its "
            "class instead, or set the options when you create it."
        )
    return given


def imported(field: str, name: str) -> Any:
    """What ``module:Class`` or ``file.py:Class`` names; `field` of the config has it.

    Raises:
        ConfigError: there is no such object. Errors of the module's code are passed through.
        TaskError: the module's code ends the process.
    """
    place, _, object_name = name.rpartition(":")
    if place == "__main__":
        module: Any = sys.modules["__main__"]
    else:
        in_file = place.endswith(".py")
        own = Path(place).stem if in_file else place
        try:
            module = _load_file(Path(place)) if in_file else importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{own}.".startswith(f"{error.name}."):
                raise  # of a module that it imports itself
            raise _no_such_place(field, name) from None
        except SystemExit as error:
            raise _ended(f"{field} = {name!r}", error) from error
        except ImportError as error:
            if not in_file or "no known parent package" not in str(error):
                raise
            module_name = ".".join(Path(place).with_suffix("").parts)
            raise ConfigError(
                f"{field} = {name!r}: the file has relative imports, which need its package: name "
                f"the module, such as {module_name}:{object_name}."
            ) from error
    with suppress(AttributeError):
        return attrgetter(object_name)(module)
    raise ConfigError(
        f"{field} = {name!r}: {place} has no {_KINDS[field]} {object_name!r}."
        f"{did_you_mean(object_name, vars(module))}"
    )


def _ended(what: str, error: SystemExit) -> TaskError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if user_code.is_foreign(f.filename)] or frames
    where = f"{own[-1].filename}, line {own[-1].lineno}"
    return TaskError(
        f"{what}: {where} ends the process while the module is imported (sys.exit(), or arguments "
        'that a parser refuses). Put what a script does under if __name__ == "__main__".'
    )


def check_task_name(name: str) -> None:
    """Raises ConfigError if `name` cannot be a task's; does not import it."""
    if name in BUILT_IN or isinstance(name, TaskName):
        return
    if hint := withdrawn(f"task={name}"):
        raise ConfigError(f"there is no task {name!r}.{hint}")
    place, colon, class_name = name.rpartition(":")
    from_python = class_name.endswith(")") or "<" in class_name
    if from_python or (place == "__main__" and not hasattr(sys.modules["__main__"], class_name)):
        raise ConfigError(
            f"task = {name!r} was defined in a script or notebook and cannot be imported. Run "
            "that again: fit(TrainConfig(...)) continues the run. Or put the class into a file: "
            "--task path/to/file.py:Class."
        )
    if not colon or not all(part.isidentifier() for part in class_name.split(".")):
        raise ConfigError(
            f"task = {name!r}: expected {', '.join(BUILT_IN)}, package.module:Class or "
            f"path/to/file.py:Class.{did_you_mean(name, BUILT_IN)}"
        )
    check_place("task", name)


def check_place(field: str, name: str) -> None:
    """Raises ConfigError if there is no such module or file; does not run it."""
    place, _, object_name = name.rpartition(":")
    if user_code.has(Path(place).stem if place.endswith(".py") else place):
        return  # the driver has checked it
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise _no_such_place(field, name)
        _check_defined(field, name, Path(place), object_name.partition(".")[0])
    elif place != "__main__" and importlib.util.find_spec(place.partition(".")[0]) is None:
        raise _no_such_place(field, name)


def _no_such_place(field: str, name: str) -> ConfigError:
    place = name.rpartition(":")[0]
    if not place.endswith(".py"):
        return ConfigError(f"{field} = {name!r}: no module {place!r} can be imported from here.")
    where = "" if Path(place).is_absolute() else f" in {Path.cwd()}"
    text = f"{field} = {name!r}: there is no file {place}{where}."
    return ConfigError(f"{text} Run the command in the file's folder." if where else text)


def _check_defined(field: str, name: str, path: Path, defined: str) -> None:
    """Parses the file without running it; accepts names that it assigns or imports, too."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field} = {name!r}: {path} is not valid Python: {error}.") from None
    nodes = list(ast.walk(tree))
    named = {n.name for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.alias))}
    named |= {n.asname for n in nodes if isinstance(n, ast.alias) and n.asname}
    named |= {n.id for n in nodes if isinstance(n, ast.Name)}
    if defined not in named:
        kinds = ast.ClassDef if field == "task" else (ast.ClassDef, ast.FunctionDef)
        meant = [node.name for node in nodes if isinstance(node, kinds)]
        raise ConfigError(
            f"{field} = {name!r}: {path} has no {_KINDS[field]} {defined!r}."
            f"{did_you_mean(defined, meant)}"
        )


def _load_file(path: Path) -> object:
    """Imports a file by its stem, so that its objects can be pickled by reference.

    On another machine the file is elsewhere: Ray has put its folder on the import path there.
    """
    folder = str(path.resolve().parent)
    if path.is_file() and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(path.stem)
