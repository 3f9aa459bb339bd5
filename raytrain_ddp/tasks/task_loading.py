"""Finds the task that a config names, and checks the name before importing anything."""

from __future__ import annotations

import importlib
import importlib.util
import sys
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
        in_file, file = place.endswith(".py"), Path(place)
        own, folder = file.stem if in_file else place, str(file.resolve().parent)
        # On another machine the file is elsewhere: Ray has put its folder on the import path there.
        if in_file and file.is_file() and folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            module = importlib.import_module(own)  # so that its objects can be pickled
        except ModuleNotFoundError as error:
            if error.name is None or not f"{own}.".startswith(f"{error.name}."):
                raise  # of a module that it imports itself
            raise _absent(field, name) from None
        except SystemExit as error:
            raise TaskError(
                f"{field} = {name!r}: its module ends the process while it is imported "
                "(sys.exit(), or arguments that a parser refuses). Put what a script does under "
                'if __name__ == "__main__".'
            ) from error
        except ImportError as error:
            if not in_file or "no known parent package" not in str(error):
                raise
            module_name = ".".join(file.with_suffix("").parts)
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
    """Raises ConfigError if there is no such module or file, or a file does not define, assign or
    import the name; does not run it."""
    place, _, object_name = name.rpartition(":")
    file, in_file, defined = Path(place), place.endswith(".py"), object_name.partition(".")[0]
    if user_code.has(file.stem if in_file else place) or place == "__main__":
        return  # the driver has checked it
    if not in_file:
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise _absent(field, name)
        return
    if not file.is_file():
        raise _absent(field, name)
    try:
        names = compile(file.read_bytes(), place, "exec", dont_inherit=True).co_names
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field} = {name!r}: {place} is not valid Python: {error}.") from None
    if defined not in names:
        raise ConfigError(
            f"{field} = {name!r}: {place} has no {_KINDS[field]} {defined!r}."
            f"{did_you_mean(defined, names)}"
        )


def _absent(field: str, name: str) -> ConfigError:
    place = name.rpartition(":")[0]
    kind = "file" if place.endswith(".py") else "module"
    return ConfigError(f"{field} = {name!r}: there is no {kind} {place!r} in {Path.cwd()}.")
