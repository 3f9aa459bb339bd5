"""Fixtures shared by several test files."""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

import pytest
from processes import Group

from raytrain_ddp.process_state import process_as_found

# Otherwise, each process and its children would use busy-waiting threads on all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests import a million permanent objects; see pytest_collection_finish.
gc.disable()

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
def unchanged_process() -> Iterator[None]:
    """For a file whose tests connect this process to Ray, which leaves much behind."""
    with process_as_found():
        yield


HERE = Path(__file__).parent
MARKED_FOLDERS = {"tools": "tools", "fakecuda": "emulated"}  # the mark of all tests in a folder

# Files that take longest, so that no process is left with one of them at the end.
LONGEST = (
    *(
        "test_fit_on_ray",
        "test_generations",
        "test_chaos",
        "test_hang_diagnosis",
        "test_emulated_gpu",
        "test_exact",
    ),
    *("test_training", "test_convert", "test_slurm", "test_run_local", "test_own_datasets"),
    *("test_loader_processes", "test_distributions", "test_recipes"),
    *("test_nonfinite", "test_config", "test_broken_inputs", "test_replaced_gpu_workers"),
    *("test_snapshot", "test_s3_network", "test_help", "test_epoch_order", "test_task_state"),
    *("test_gradient_compression", "test_task_optimizer", "test_export", "test_examples"),
    *("test_lease", "test_run_naming", "test_evaluation", "test_cli", "test_several_optimizers"),
    *("test_device_feed", "test_predict", "test_notebook", "test_faults", "test_tasks"),
    *("test_branching", "test_python_tasks", "test_recorder", "test_settling", "test_early_stop"),
    *("test_initial_weights", "test_replica_check", "test_param_groups", "test_fork_server"),
)


_LONG_S, _OTHERS_S = 0.2, 0.02
_took: dict[str, float] = {}  # seconds, by test


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed")
    parser.addoption("--save-times", metavar="FILE", help="write how long each test took")
    parser.addoption(
        "--short",
        metavar="FILE",
        help=f"leave out what took over {_LONG_S:g} s when FILE was written with --save-times, and "
        f"over {_OTHERS_S:g} s if another case of the same test is quicker, unless it is marked "
        "each_version",
    )


_PROCESSES = 3  # one more than cores: many tests wait, for a process or a time limit


@pytest.hookimpl(tryfirst=True)  # before that of pytest-xdist
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests, unless some are named, run in three processes, if pytest-xdist is there."""
    has_xdist = config.pluginmanager.hasplugin("xdist")
    is_all = config.args_source is not config.ArgsSource.ARGS and not config.option.usepdb
    is_all &= config.getoption("markexpr").startswith("not slow")  # as in pyproject.toml
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if has_xdist and is_all and not is_worker and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = _PROCESSES, "loadfile"
        config.option.loadscopereorder = False


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took[report.nodeid] = _took.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """(With xdist, the process that collects the reports is not a worker.)"""
    path = session.config.getoption("--save-times")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        file = Path(path)
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**before, **_took}, indent=0))


def _leave_out_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--short")
    took = json.loads(Path(path).read_text()) if path else {}
    quickest: dict[str, str] = {}  # case, by test
    for item in sorted(items, key=lambda item: took.get(item.nodeid, 0.0)):
        quickest.setdefault(item.nodeid.partition("[")[0], item.nodeid)
    ours = {*quickest.values()}
    left_out = [
        item
        for item in items
        if took.get(item.nodeid, 0.0) > (_LONG_S if item.nodeid in ours else _OTHERS_S)
        and not item.get_closest_marker("each_version")
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With xdist, one process runs all tests of a file, and the longest files come first."""
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(MARKED_FOLDERS[folder])
    _leave_out_long(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


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
