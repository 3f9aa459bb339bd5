"""Fixtures shared by several test files."""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from processes import Group
from s3 import S3, s3_server

from raytrain_ddp.process_state import process_as_found

# Otherwise, each process and its children would use busy-waiting threads on all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests import a million permanent objects; see pytest_collection_finish.
gc.disable()

# The store of a process group that a test ends would print a stack trace among the dots.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Ray reads it when it is imported, which the first of many tests may do.
os.environ.setdefault("RAY_AUTH_MODE", "token")

# Under nohup or in the background, all test processes would ignore them; some tests send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an example may take any time: slowness is not a failure. All runs have the same
# examples, so failures in CI can be reproduced locally; --hypothesis-profile=search tries others.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    for profile, repeatable in (("repeatable", True), ("search", False)):
        settings.register_profile(
            profile,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=repeatable,
        )
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def workers() -> Iterator[Group]:
    """``workers(3, function, *args)``: function(rank, 3, *args) on each of three gloo workers."""
    group = Group()
    yield group
    group.end()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    pytest.importorskip("moto")
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def unchanged_process() -> Iterator[None]:
    """For a file whose tests connect this process to Ray, which leaves much behind."""
    with process_as_found():
        yield


HERE = Path(__file__).parent
MARKED_FOLDERS = {"tools": "tools", "fakecuda": "emulated"}  # the mark of all tests in a folder


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed")


_PROCESSES = 3  # one more than cores: many tests wait, for a process or a time limit


@pytest.hookimpl(tryfirst=True)  # before that of pytest-xdist
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Unless files are named, tests run in three processes, if pytest-xdist is there."""
    has_xdist = config.pluginmanager.hasplugin("xdist")
    is_all = config.args_source is not config.ArgsSource.ARGS and not config.option.usepdb
    is_all &= "not" in config.getoption("markexpr")  # neither -m gpu nor -m lab
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if has_xdist and is_all and not is_worker and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = _PROCESSES, "loadfile"
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, and one all files that start Ray."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "ray" if _starts_ray(config.rootpath / file) else file

    return Scheduler(config, log) if config.option.dist == "loadfile" else None


@cache
def _starts_ray(file: Path) -> bool:
    return "mark.ray" in file.read_text("utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")


# Machines with GPUs have packages of their own, often without Ray. There, `pytest -m gpu` reads
# only the files that have such tests, and skips those that import what is not installed.


def _wants_gpu_tests_only(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not _wants_gpu_tests_only(config):
        return None
    is_folder = collection_path.is_dir()
    files = collection_path.rglob("test_*.py") if is_folder else [collection_path]
    return None if any("mark.gpu" in file.read_text("utf-8") for file in files) else True


class _GpuTests(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            name = getattr(error.__cause__, "name", None) or "raytrain_ddp"
            if isinstance(error.__cause__, ModuleNotFoundError) and "raytrain_ddp" not in name:
                pytest.skip(f"{name} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if not _wants_gpu_tests_only(parent.config):
        return None
    return _GpuTests.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(MARKED_FOLDERS[folder])
    if "PYTEST_XDIST_WORKER" in os.environ:  # what takes longest comes first
        items.sort(
            key=lambda item: (_starts_ray(item.path), item.path.stat().st_size), reverse=True
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the wait is not part of the test's time limit
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """One test with Ray at a time: each starts dozens of processes."""
    if not item.get_closest_marker("ray"):
        return (yield)
    with open(Path(gettempdir()) / f"raytrain_ddp-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_finish() -> None:
    """Imported objects stay alive: the garbage collector need not scan them repeatedly."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise, nanobind reports objects that were never freed
