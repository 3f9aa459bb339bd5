"""The user's modules, as the run began with them.

A worker that starts later, in place of a dead one, must not run a file that was edited meanwhile,
while others still run the old one. Other nodes need not have the files. So the driver sends the
sources of what the task has imported, and of the packages that it belongs to; workers import these.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import pkgutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_MOST_BYTES = 32 * 2**20
_OWN, _PACKAGE = __name__.partition(".")[0], Path(__file__).parent
_INSTALLED = ("/site-packages/", "/dist-packages/")
_OF_PYTHON = {"__main__", "__mp_main__", "sitecustomize", "usercustomize"}
_not_users: set[str] = set()  # imported modules that are not the user's: not looked at again


@dataclass(frozen=True)
class UserCode:
    """Modules of the user. Unpickling it makes this process import these sources.

    Args:
        sources: name -> the path of its file where it was loaded, and its content.
    """

    sources: Mapping[str, tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return _installed, (dict(self.sources),)


class _Sources(MetaPathFinder):
    """Finds the modules of a `UserCode`, before any files."""

    def __init__(self) -> None:
        self.sources: dict[str, tuple[str, bytes]] = {}
        self.folders: set[str] = set()  # their parent packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.sources and name not in self.folders:
            return None
        on_disk = PathFinder.find_spec(name, path)
        if name not in self.sources:
            if on_disk is not None:
                return None
            found = ModuleSpec(name, None, is_package=True)  # a namespace package
            found.submodule_search_locations = []
            return found
        place, source = self.sources[name]
        if on_disk is not None and on_disk.has_location and on_disk.origin:
            place = on_disk.origin  # on another node the file may be elsewhere
        folders = [str(Path(place).parent)] if Path(place).name == "__init__.py" else None
        loader = _Loader(name, place, source)
        return spec_from_file_location(
            name, place, loader=loader, submodule_search_locations=folders
        )


class _Loader(SourceFileLoader):
    """Loads a source that need not be in its file."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("compiled code may be of another source")

    def exec_module(self, module: ModuleType) -> None:
        text = self.get_source(module.__name__) or ""
        lines = text.splitlines(keepends=True)
        linecache.cache[self.path] = len(text), None, lines, self.path  # also for inspect.getsource
        super().exec_module(module)


_finder = _Sources()


def is_foreign(path: str) -> bool:
    """Whether a file belongs neither to this package nor to torch or Python."""
    if path.startswith((f"{_PACKAGE}/", "<frozen ")):
        return False
    for folder in _INSTALLED:
        if folder in path:
            return not path.rpartition(folder)[2].startswith("torch/")
    return not path.startswith(f"{sysconfig.get_path('stdlib')}/")


def hashes(*names: str) -> dict[str, str]:
    """Returns module -> hex SHA-256 of its source, for the names that refer to a user's code, such
    as ``file.py:Task`` or ``package.module:model``. Imports nothing. Leaves out an installed module
    (``timm:resnet50``), and one whose file does not exist here and was not received."""
    found = {}
    for name in names:
        place = name.rpartition(":")[0]
        is_file = place.endswith(".py")
        own, below = Path(place).stem if is_file else place, Path(*place.split("."))
        files = [Path(folder, below) for folder in sys.path] if place else []
        files = [path for each in files for path in (each.with_suffix(".py"), each / "__init__.py")]
        for path in [Path(place)] if is_file else files:
            if any(part in str(path) for part in _INSTALLED):
                continue
            with suppress(OSError):
                _, source = _finder.sources.get(own) or ("", path.read_bytes())
                found[own] = hashlib.sha256(source).hexdigest()
                break
    return found


def loaded() -> UserCode:
    """The user's modules that this process has imported: all except installed packages, the
    standard library and raytrain_ddp; and those of the same packages, which may be imported later.
    Of very large ones only the imported modules, or none."""
    imported = _imported()
    for found in ({**dict(_of_packages(imported)), **imported}, imported):
        if sum(len(source) for _, source in found.values()) < _MOST_BYTES:
            return UserCode(found)
    return UserCode()


def _imported() -> dict[str, tuple[str, bytes]]:
    found: dict[str, tuple[str, bytes]] = {}
    python = sysconfig.get_path("stdlib")
    # By their text, as there are thousands. (A warm process has loaded files of ours alone.)
    others = tuple(f"{folder}/" for folder in (_PACKAGE, python, os.path.realpath(python)))
    for name, module in sys.modules.copy().items():
        if name in _not_users:
            continue
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or not place.endswith(".py"):
            continue
        is_ours = name in _OF_PYTHON or name.partition(".")[0] == _OWN
        if is_ours or place.startswith(others) or any(part in place for part in _INSTALLED):
            _not_users.add(name)
            continue
        with suppress(OSError):  # the file has been removed, or is in a zip
            found[name] = _finder.sources.get(name) or (place, Path(place).read_bytes())
    return found


def _of_packages(
    found: Mapping[str, tuple[str, bytes]],
) -> Iterator[tuple[str, tuple[str, bytes]]]:
    for name, (place, _) in found.items():
        if Path(place).name == "__init__.py" and name.rpartition(".")[0] not in found:
            yield from _below(name, Path(place).parent)


def _below(package: str, folder: Path) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """Looks into folders of subpackages only: others may hold a data set."""
    for module in pkgutil.iter_modules([str(folder)]):
        name, path = f"{package}.{module.name}", folder / f"{module.name}.py"
        if module.ispkg:
            path = folder / module.name / "__init__.py"
            yield from _below(name, path.parent)
        with suppress(OSError):  # a compiled extension
            yield name, (str(path), path.read_bytes())


def received() -> UserCode:
    """What this process imports from a `UserCode`."""
    return UserCode(_finder.sources)


def has(name: str) -> bool:
    """Whether the source of this module was received."""
    return name in _finder.sources


def _installed(sources: Mapping[str, tuple[str, bytes]]) -> UserCode:
    _finder.sources |= {name: each for name, each in sources.items() if name not in sys.modules}
    for name in sources:
        while name := name.rpartition(".")[0]:
            _finder.folders.add(name)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return UserCode(sources)
