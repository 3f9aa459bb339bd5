"""On the path of processes: each that imports torch gets the emulated kernels, and at its end
writes what was counted to EMULATED_REPORT, if that is set."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import emulated

        emulated.install()
        import fake_nccl

        fake_nccl.install()
        if "EMULATED_REPORT" in os.environ:
            atexit.register(_write)


def _write() -> None:
    import emulated

    path = Path(f"{os.environ['EMULATED_REPORT']}-{os.environ.get('RANK', 'alone')}")
    path.write_text(json.dumps(emulated.report()))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
