"""Makes the paths in a config absolute when a run starts, and finds them again if it has moved.

The fact ``path`` of a field gives the kind of path: folder, data, code, weights or options.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from typing import Any

from raytrain_ddp.config.field_types import facts, value_of, with_values
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.files import absolute

Change = Callable[[str], str]


def with_paths(config: TrainConfig, change: Change) -> TrainConfig:
    """Returns a copy in which each path and URI is replaced by what `change` returns for it."""
    made: dict[str, Any] = {}
    for name, kind in facts(TrainConfig, "path").items():
        value = value_of(config, name)
        new = changed_path(kind, value, change)
        if new != value:
            made[name] = new
    return with_values(config, made)


def changed_path(kind: str, value: Any, change: Change) -> Any:
    """Returns the value of a field of this kind, its path replaced by what `change` returns."""
    if isinstance(value, Mapping) and kind == "options":
        return {name: changed_path("option", each, change) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if kind == "code":
        place, colon, name = value.rpartition(":")
        return f"{change(place)}{colon}{name}" if place.endswith(".py") else value
    return change(value) if _is_path(kind, value) else value


def _is_path(kind: str, value: str) -> bool:
    if kind == "data":
        return not is_by_name(value)
    if kind == "weights":  # names of runs and files have become absolute: see check_weights
        return os.path.isabs(value) or "://" in value
    if kind == "option":  # the user's task decides what it means
        looks_like_one = "/" in value or os.path.splitext(value)[1][1:].isalpha()
        return os.path.isabs(value) or (looks_like_one and _exists(value))
    return kind == "folder"


def is_by_name(source: str) -> bool:
    """Whether data are found by their name, on any machine."""
    return source == "digits" or (
        source.startswith(("torchvision:", "hf:")) and "://" not in source
    )


def absolute_path(path: str) -> str:
    """Makes a path absolute like `absolute`; removes the trailing slash of a URI."""
    if "://" in path:
        place, mark, query = path.partition("?")
        return f"{place.rstrip('/') if place[-3:] != '://' else place}{mark}{query}"
    is_pattern = glob.escape(path) != path and not os.path.lexists(path)
    if is_pattern and not path.startswith(("/", "~")):
        return absolute(os.path.join(glob.escape(os.getcwd()), path))
    return absolute(path)


def moved_with(before: str, now: str) -> Change:
    """Returns a function that finds the paths of a run whose folder was `before` and is now `now`.

    If a path no longer exists, the one at the same place relative to the run's folder is used.
    Relative paths, of earlier versions, started in the folder that held the storage.
    """
    if "://" in now or not os.path.isabs(before):
        return lambda path: path

    def find(path: str) -> str:
        if "://" in path or _exists(path):
            return path
        start = os.path.join(os.path.dirname(os.path.dirname(before)), os.path.expanduser(path))
        beside = os.path.normpath(os.path.join(now, os.path.relpath(start, before)))
        return beside if _exists(beside) else path

    return find


def _exists(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))
