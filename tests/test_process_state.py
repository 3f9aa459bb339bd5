"""A process that has called `fit`, `fit_locally`, `load` or a sweep is as it was before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm_python

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.errors import ConfigError

TASK = """
import faulthandler, logging, multiprocessing, os, random, resource, signal, sys, threading
import warnings
import numpy, torch
from raytrain_ddp.tasks.image_classification import ImageClassification

def change_everything():
    os.environ["PYTHONBREAKPOINT"] = "0"
    os.environ.pop("KEPT", None)
    os.chdir("/")
    sys.path.append("/nowhere")
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *_: None
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())
    logging.disable(logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    multiprocessing.set_start_method("spawn", force=True)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    random.random(), numpy.random.rand(), torch.rand(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark

class Rude(ImageClassification):
    def model(self):
        change_everything()
        return super().model()
    def loss(self, model, batch):
        change_everything()
        if os.path.exists(FAIL):
            if open(FAIL).read() == "raise":
                raise ZeroDivisionError
            os.remove(FAIL)
            os.kill(os.getpid(), signal.SIGINT)
        return super().loss(model, batch)
"""
SCRIPT = """
import faulthandler, logging, multiprocessing, os, random, resource, signal, sys, threading
import warnings
import numpy, torch
from rich.console import Console
from raytrain_ddp import TrainConfig, fit, fit_locally, load
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tools.display.progress_display import Display

case, storage, fail = sys.argv[1:]
os.environ["KEPT"] = "1"
known = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]

def snapshot():
    cudnn = torch.backends.cudnn
    return {
        "environment": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0o022),
        "path": [*sys.path], "faulthandler": faulthandler.is_enabled(),
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook],
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "filters": [*warnings.filters], "showwarning": warnings.showwarning,
        "logging": [(o.name, o.level, o.propagate, o.disabled, *o.handlers) for o in known],
        "disabled": logging.root.manager.disable,
        "start": multiprocessing.get_start_method(allow_none=True),
        "threads": {*threading.enumerate()},
        "generators": [str(random.getstate()), str(numpy.random.get_state()),
                       torch.get_rng_state().tolist()],
        "torch": [torch.get_deterministic_debug_mode(), torch.get_default_dtype(),
                  torch.get_num_threads(), torch.get_float32_matmul_precision(),
                  torch.is_grad_enabled(), torch.distributed.is_initialized(),
                  cudnn.benchmark, cudnn.deterministic],
    }

task = f"{storage}/rude.py:Rude" if "own task" in case else "image-classification"
config = TrainConfig(name="run", storage=storage, steps=3, task=task,
                     scaling=ScalingConfig(num_workers=1))

quiet = {"display": Display(Console(quiet=True), live=False)}
if case.startswith("load"):
    fit_locally(config, **quiet)
before = snapshot()
try:
    if case.startswith("load"):
        load(f"{storage}/run", device="cpu" if "fails" not in case else "none")
    elif case.startswith("fit_locally"):
        fit_locally(config, **quiet)
    else:
        fit(config, **quiet)
    ended = "well"
except BaseException as error:
    ended = type(error).__name__
    if isinstance(error, TaskError):  # with the user's own traceback, once
        said = str(error)
        ended += f" {error.exit_status} {said.count('Traceback')} {said.count('rude.py')}"
        ended += " " + said.splitlines()[-1] + " of ours" * ("raytrain_ddp/training" in said)
for thread in {*threading.enumerate()} - before["threads"]:
    thread.join(20)
after = snapshot()
for name in before:
    if before[name] != after[name]:
        print("differs:", name, before[name], after[name])
print("ended", ended)
"""


@pytest.mark.parametrize(
    ("case", "fails", "ended"),
    [
        ("fit_locally own task", "raise", "ZeroDivisionError"),
        ("fit_locally own task", "interrupt", "well"),
        ("load own task", "", "well"),
        ("load fails", "", "ConfigError"),
        pytest.param(
            "fit own task", "raise", "TaskError 1 1 1 ZeroDivisionError", marks=pytest.mark.ray
        ),
    ],
)
def test_a_call_leaves_the_process_as_it_was(case: str, fails: str, ended: str, tmp_path: Path):
    if case == "fit own task":
        pytest.importorskip("ray")
    fail = tmp_path / "fail"
    if fails:
        fail.write_text(fails)
    (tmp_path / "rude.py").write_text(f"FAIL = {str(fail)!r}\n{TASK}")
    command = [sys.executable, "-c", SCRIPT, case, str(tmp_path), str(fail)]
    done = warm_python.run(command, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("differs", "ended"))]
    assert lines == [f"ended {ended}"]


def test_changed_defaults_of_torch_are_refused_before_a_run_starts(tmp_path: Path):
    import torch

    config = TrainConfig(storage=str(tmp_path / "runs"))
    try:
        torch.set_default_dtype(torch.float64)
        with pytest.raises(ConfigError, match="dtype"):
            fit_locally(config)
        torch.set_default_dtype(torch.float32)
        with torch.device("meta"), pytest.raises(ConfigError, match="device"):
            fit_locally(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not (tmp_path / "runs").exists()
