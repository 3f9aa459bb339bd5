"""Restores the state of the caller's process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

_HOOKS = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "dont_write_bytecode")
_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")
_MATMUL = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)

Fact = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that get and set a part of the state."""


@contextmanager
def process_as_found() -> Iterator[None]:
    """Restores the global state of this process afterward; also usable as a decorator.

    This covers the environment, working folder, import path, hooks, signals, limits, warnings,
    logging, garbage collection, the start method of processes, and the generators and settings of
    Python, and of NumPy and torch if they were already imported. Modules stay imported.
    """
    facts = [(get(), get, put) for get, put in (*_facts_of_python(), *_facts_of_torch())]
    with warnings.catch_warnings():
        try:
            yield
        finally:
            for before, get, put in facts:
                with suppress(Exception):  # such as a working folder that was deleted
                    if get() != before:
                        put(before)


def _facts_of_python() -> Iterator[Fact]:
    yield lambda: dict(os.environ), _set_environment
    yield os.getcwd, os.chdir
    yield lambda: [*sys.path], partial(sys.path.__setitem__, slice(None))
    yield lambda: [*sys.argv], partial(sys.argv.__setitem__, slice(None))
    yield from (_attribute(sys, name) for name in _HOOKS)
    yield _attribute(threading, "excepthook")
    yield (
        faulthandler.is_enabled,
        lambda on: (faulthandler.enable if on else faulthandler.disable)(),
    )
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            yield partial(signal.getsignal, number), partial(signal.signal, number)
    mask = signal.pthread_sigmask
    yield partial(mask, signal.SIG_BLOCK, []), partial(mask, signal.SIG_SETMASK)
    for name, number in vars(resource).items():
        if name.startswith("RLIMIT_"):
            yield partial(resource.getrlimit, number), partial(resource.setrlimit, number)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield partial(_settings_of, logger), partial(vars(logger).update)
    yield logging.getLogRecordFactory, logging.setLogRecordFactory
    yield lambda: logging.root.manager.disable, logging.disable
    yield gc.get_threshold, lambda counts: gc.set_threshold(*counts)
    yield gc.isenabled, lambda on: (gc.enable if on else gc.disable)()
    starts = multiprocessing.get_start_method, multiprocessing.set_start_method
    yield partial(starts[0], allow_none=True), partial(starts[1], force=True)
    yield random.getstate, random.setstate
    if "numpy" in sys.modules:
        yield _pickled(sys.modules["numpy"].random.get_state, sys.modules["numpy"].random.set_state)


def _facts_of_torch() -> Iterator[Fact]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_rng_state"):  # not loaded, or being loaded
        return
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield torch.get_default_dtype, torch.set_default_dtype
    yield lambda: f"{torch.get_default_device()}", torch.set_default_device
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    backends = torch.backends
    for owner, names in ((backends.cudnn, _CUDNN), (backends.cuda.matmul, _MATMUL)):
        yield from (_attribute(owner, name) for name in names if hasattr(owner, name))
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enable = getattr(backends.cuda, f"enable_{name}_sdp")
        yield getattr(backends.cuda, f"{name}_sdp_enabled"), enable
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.is_warn_always_enabled, torch.set_warn_always
    yield _pickled(torch.get_rng_state, torch.set_rng_state)
    gpus = torch.cuda
    if gpus.is_initialized():
        yield gpus.current_device, gpus.set_device
        yield _pickled(gpus.get_rng_state_all, gpus.set_rng_state_all)
    else:  # if they are initialized later, their generators are reseeded
        yield gpus.is_initialized, lambda _: gpus.manual_seed_all(torch.initial_seed())


def _attribute(owner: object, name: str) -> Fact:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _pickled(get: Callable[[], object], put: Callable[[Any], object]) -> Fact:
    """Wraps functions for arrays, which `!=` compares elementwise."""
    return lambda: pickle.dumps(get()), lambda state: put(pickle.loads(state))


def _settings_of(logger: logging.Logger) -> dict[str, Any]:
    found = vars(logger)
    lists = {name: [*found[name]] for name in ("handlers", "filters")}
    return {name: found[name] for name in ("level", "propagate", "disabled")} | lists


def _set_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)
