"""What workers need of code: the user's task, the modules of the task and the model, and ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from raytrain_ddp import user_code
from raytrain_ddp.config.train_config import TaskName, TrainConfig
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tasks.model_zoo import TIMM
from raytrain_ddp.tasks.task_loading import BUILT_IN, imported, task_of
from raytrain_ddp.user_code import UserCode


def pickled_task(config: TrainConfig) -> bytes | None:
    """The config's task, pickled; None if its name suffices. Workers import its module as `code_of`
    has it. Imports Ray, so Ray's settings must already be in the environment.

    Raises:
        ConfigError, TaskError: as `load_task`, or if the task cannot be pickled.
    """
    if config.task in BUILT_IN:
        return None
    task = task_of(config)
    if not isinstance(config.task, TaskName) and not config.task.startswith("__main__:"):
        return None
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(task)
        return pickled
    except Exception as error:  # its contents may raise any exception
        raise TaskError(
            f"{config.task} cannot be sent to the workers: {type(error).__name__}: {error}. Open "
            "files and connections, and create locks, in the task's constructor or later, and "
            "pass the class as TrainConfig(task=...): each worker then builds its own task."
        ) from error


def code_of(config: TrainConfig) -> UserCode:
    """The user's modules, with all that the task and the model import.

    Raises:
        ConfigError: the model is not found. Errors of the modules' own code are passed through.
    """
    if config.task not in BUILT_IN:
        task_of(config)
    elif ":" in config.model.name and not config.model.name.startswith(TIMM):
        imported("model.name", config.model.name)
    return user_code.loaded()


def import_paths(config: TrainConfig) -> tuple[str, ...]:
    """Folders from which workers on this machine import the user's task and model."""
    own = [str(Path(file).resolve().parent) for file in _places(config) if file.endswith(".py")]
    return (*dict.fromkeys(own), str(Path.cwd()))


def _places(config: TrainConfig) -> list[str]:
    """The modules and files of the user's task and model."""
    names = [*([] if config.task in BUILT_IN else [config.task]), config.model.name]
    places = [name.rpartition(":")[0] for name in names if not name.startswith(TIMM)]
    return [place for place in dict.fromkeys(places) if place]


def shipped_code(config: TrainConfig) -> dict[str, Any]:
    """A runtime environment with the user's task and model, as far as they are files or packages in
    this folder."""
    shipped = []
    for place in _places(config):
        package = Path.cwd() / place.partition(".")[0]
        module = Path(place).resolve() if place.endswith(".py") else package.with_suffix(".py")
        is_package = not place.endswith(".py") and package.is_dir()
        if is_package or module.is_file():
            shipped.append(str(package if is_package else module))
    return {"py_modules": shipped} if shipped else {}


@contextmanager
def by_value(*modules: ModuleType) -> Iterator[None]:
    """Within this context, Ray pickles objects of these modules by value: nodes need not have
    them."""
    from ray import cloudpickle

    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
