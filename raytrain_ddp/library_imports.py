"""Keeps the user's files from shadowing library modules in commands.

Python searches the working folder first, so torch would get a csv.py there by ``import csv``. Here,
imports of libraries search all other folders first. Imports of the user's own files are unchanged.
This module imports nothing that such a file could shadow.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(__file__) + os.sep
_INSTALLED = ("/site-packages/", "/dist-packages/")
_LOADS_USERS = _PACKAGE + os.path.join("tasks", "task_loading.py")


class _OfLibraries:
    """Finds top-level modules that a library imports, in all folders but the user's."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or not _is_library(_importer()):
            return None
        return PathFinder.find_spec(name, self._folders)


def protect() -> None:
    """Protects the imports of this process from now on. The user's folders are the current one, and
    those that are added to the search path later."""
    try:
        folder = os.getcwd()
    except OSError:  # deleted; the command reports it
        return
    places = [place for place in sys.path if place and os.path.realpath(place) != folder]
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _OfLibraries(places))


def _importer() -> str:
    """Returns the file whose code is importing a module."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_library(file: str) -> bool:
    is_ours = file.startswith((_PYTHON, _PACKAGE, "<frozen ")) and file != _LOADS_USERS
    return is_ours or any(part in file for part in _INSTALLED)
