"""Contexts around Ray: environment variables, modules pickled by value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from raytrain_ddp.config.train_config import TrainConfig

_MAX_FOLDER_BYTES = 36  # the path of a socket has at most 107 bytes, and Ray adds up to 70
PREEMPTION_WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
# How long each part of Ray may take to start, where this is configurable: see ray_start.py.
_SLOW_START = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
# Read by Ray in the driver, and by the processes of an embedded Ray; the user's own values win.
SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a report waits for this poll (default 2 s)
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise each print of a worker appears twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the driver's folder
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # workers use the existing environment
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",  # notices may be short (default 5 s)
    "RAY_DASHBOARD_ENABLE_PROFILING": "1",  # stack traces and flame graphs of workers
    **_SLOW_START,
    # Ray aborts a process 60 s after its head is lost; our processes report it earlier and exit.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_worker_niceness": "0",  # training is this Ray's purpose (default 15: lowest priority)
}


def ray_settings(config: TrainConfig, embedded: bool) -> dict[str, str]:
    """Ray's settings for this run."""
    timeout_s = config.scaling.start_timeout_s
    least, most = config.scaling.worker_range()
    if timeout_s == "auto":
        timeout_s = 5 if least < most else 120
    settings = {**SETTINGS, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{timeout_s:g}"}
    if embedded:  # a few workers: Ray Train sees sooner that one has died
        settings["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
        settings[PREEMPTION_WATCHER] = "0"  # no preemption on this machine: saves a process
        settings["RAY_prestart_worker_first_driver"] = "0"  # without the runtime environment
    return settings


def short_folder() -> dict[str, str]:
    """Returns the setting that keeps the socket paths of a Ray started here short enough, if TMPDIR
    does not."""
    is_short = len(os.fsencode(os.environ.get("TMPDIR", ""))) <= _MAX_FOLDER_BYTES
    return {} if is_short else {"RAY_TMPDIR": "/tmp"}


@contextmanager
def applied_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets these environment variables, except those that the user has set; removes them
    afterward."""
    unset = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


@contextmanager
def by_value(*modules: ModuleType) -> Iterator[None]:
    """Within this context, Ray pickles objects of these modules by value: nodes need not have
    them."""
    from ray import cloudpickle

    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
