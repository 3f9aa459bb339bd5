"""Sends a task that was passed from Python code to the workers."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from raytrain_ddp import user_code
from raytrain_ddp.config.train_config import TaskName, TrainConfig
from raytrain_ddp.errors import TaskError
from raytrain_ddp.ray_backend.ray_settings import by_value
from raytrain_ddp.tasks.model_zoo import TIMM
from raytrain_ddp.tasks.task_loading import BUILT_IN, imported, task_of
from raytrain_ddp.user_code import UserCode


def pickled_task(config: TrainConfig) -> bytes | None:
    """The config's task, pickled by value because workers may not be able to import it; None if its
    name suffices. Imports Ray, so Ray's settings must already be in the environment.

    Raises:
        ConfigError, TaskError: as `load_task`, or if the task cannot be pickled.
    """
    if config.task in BUILT_IN:
        return None
    task = task_of(config)
    if not isinstance(config.task, TaskName) and not config.task.startswith("__main__:"):
        return None
    from ray import cloudpickle

    kind = task if hasattr(task, "__qualname__") else type(task)
    try:
        with by_value(*_own(kind.__module__)):
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


def _own(name: str) -> list[ModuleType]:
    """That module, unless it belongs to an installed package."""
    module = sys.modules.get(name)
    place = getattr(module, "__file__", None)
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    here = place and not any(Path(place).resolve().is_relative_to(each) for each in installed)
    if name == "__main__" or module is None or not here or name.startswith("raytrain_ddp."):
        return []
    return [module]
