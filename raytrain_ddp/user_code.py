"""The user's modules, as the run began with them.

A worker that starts later, in place of a dead one, must not run a file that was edited meanwhile,
beside others that run the former one; nor need another node have the files. So the driver sends
the sources of what the task has imported, and each worker imports these.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_MOST_BYTES = 32 * 2**20
_OWN = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}


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
        self.folders: set[str] = set()  # packages of these

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.sources and name not in self.folders:
            return None
        on_disk = PathFinder.find_spec(name, path)
        if name not in self.sources:
            if on_disk is not None:
                return None
            found = ModuleSpec(name, None, is_package=True)  # without a file of its own
            found.submodule_search_locations = []
            return found
        place, source = self.sources[name]
        if on_disk is not None and on_disk.has_location and on_disk.origin:
            place = on_disk.origin  # on another node the file may be elsewhere
        folders = [str(Path(place).parent)] if Path(place).name == "__init__.py" else None
        loader = _Loader(place, source)
        return spec_from_file_location(
            name, place, loader=loader, submodule_search_locations=folders
        )


class _Loader(SourceLoader):
    def __init__(self, path: str, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, name: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._source if path == self._path else Path(str(path)).read_bytes()


_finder = _Sources()


def loaded() -> UserCode:
    """The user's modules that this process has imported: all that are neither installed nor of
    Python itself. Without those that are installed from a folder, which is this package's own."""
    found: dict[str, tuple[str, bytes]] = {}
    python = Path(sysconfig.get_path("stdlib")).resolve()
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or name == "__main__" or name.partition(".")[0] == _OWN:
            continue
        if _INSTALLED.isdisjoint(path.parts) and python not in path.resolve().parents:
            with suppress(OSError):  # it has been removed
                found[name] = _finder.sources.get(name) or (str(path), path.read_bytes())
    is_small = sum(len(source) for _, source in found.values()) < _MOST_BYTES
    return UserCode(found if is_small else {})


def received() -> UserCode:
    """What this process imports from a `UserCode`."""
    return UserCode(_finder.sources)


def has(name: str) -> bool:
    """Whether a module need not be in a file here."""
    return name in _finder.sources


def _installed(sources: Mapping[str, tuple[str, bytes]]) -> UserCode:
    _finder.sources |= {name: each for name, each in sources.items() if name not in sys.modules}
    _finder.folders |= {name.rpartition(".")[0] for name in sources}
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return UserCode(sources)
