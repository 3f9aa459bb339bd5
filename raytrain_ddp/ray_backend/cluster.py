"""Connects to a Ray cluster, or starts an embedded Ray."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from raytrain_ddp.config.recipe import have_bf16
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.events import Note
from raytrain_ddp.ray_backend.placement import (
    Layout,
    choose_layout,
    embedded_resources,
    lack_of_room,
    local_resources,
    require_room,
)
from raytrain_ddp.ray_backend.ray_private import quick_start
from raytrain_ddp.ray_backend.ray_process import caller
from raytrain_ddp.ray_backend.ray_start import (
    RAY_START_S,
    applied_settings,
    ray_settings,
    require_listener,
    require_same,
    short_folder,
    start_with_retries,
    use_token,
)
from raytrain_ddp.ray_backend.task_transfer import shipped_code
from raytrain_ddp.uri import answer_within
from raytrain_ddp.warm.warm_start import py_executable, start_early, why_cold

_SHUTDOWN_S = 30.0
# Of a job's runtime environment: its processes are not started by the Python of this one.
_OTHER_PYTHONS = ("pip", "uv", "conda", "container", "image_uri", "py_executable", "nsight")
_in_use = threading.Lock()  # the connection to Ray, of which a process has one


def is_connected() -> bool:
    """Whether this process is connected to Ray already."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def starts_ray(address: str | None) -> bool:
    """Whether a Ray is started here: none is running at an address, and this process has none."""
    return not address and not os.environ.get("RAY_ADDRESS") and not is_connected()


@contextmanager
def ray_connection(
    address: str | None,
    settings: Mapping[str, str],
    options: Mapping[str, Any],
    tell: Callable[[str], None],
    during_start: Callable[[], None] = lambda: None,
    wait_s: float = 0.0,
) -> Iterator[None]:
    """Connects to the Ray at an address; without an address, starts a Ray here and stops it
    afterward. Does neither if this process is already connected. Afterward, the environment is
    restored, except for the token's mode: see `use_token`.

    Args:
        settings: environment variables, set unless the user has set them.
        options: other arguments of `ray.init`.
        during_start: called in a thread while Ray starts.
        wait_s: how long Ray may take to start, if that is more than `RAY_START_S`.

    Raises:
        PreflightError: there is no Ray at the address, it cannot be started, or this process is
            connected to a different Ray.
    """
    if is_connected():
        if address and address != os.environ.get("RAY_ADDRESS"):
            import ray

            require_same(address, ray.get_runtime_context().gcs_address)
        with applied_settings(settings):
            tell("using the Ray that this process is connected to")
            yield
        return
    if address:
        require_listener(address)
    with applied_settings(settings if address else {**settings, **short_folder()}):
        use_token(embedded=not address, tell=tell)
        tell(f"connecting to Ray at {address}" if address else "starting Ray")
        import ray

        threading.Thread(target=during_start, name="during-start", daemon=True).start()
        where = {"address": address or "local", "log_to_driver": False, "logging_level": "ERROR"}
        is_warm = bool(options.get("runtime_env"))
        is_seen = options.get("include_dashboard") is not False
        quick = iter([] if address else [quick_start(is_warm, is_seen)])  # the first time

        def init() -> None:
            with next(quick, nullcontext()):
                ray.init(**where, **options)

        limit_s = max(RAY_START_S, wait_s)
        try:
            start_with_retries(init, ray.shutdown, address or "this machine", limit_s, tell)
            yield
        finally:  # if the head is lost, Ray may wait for it
            answer_within(_SHUTDOWN_S, ray.shutdown)


@contextmanager
def only_one() -> Iterator[None]:
    """Raises PreflightError if this process is already in this context."""
    if not _in_use.acquire(blocking=False):
        raise PreflightError(
            "This process is already training on Ray, in another thread or around this call. It "
            "has only one connection to Ray: wait, or start each run in its own process."
        )
    try:
        yield
    finally:
        _in_use.release()


@contextmanager
def cluster(
    config: TrainConfig, address: str | None, dashboard: bool, tell: Callable[[str], None]
) -> Iterator[Layout]:
    """Connects to Ray, or starts one for this run and stops it afterward.

    Yields:
        The workers that this cluster can place.

    Raises:
        PreflightError: there is no Ray at the address, or the cluster is too small; for an
            embedded Ray this is checked before it is started.
    """
    address, embedded = address or os.environ.get("RAY_ADDRESS"), starts_ray(address)
    layout: Layout | None = None
    options: dict[str, Any]
    if embedded:
        have = local_resources()
        layout = choose_layout(config, have)
        have = embedded_resources(config, layout, have)
        require_room(layout, [have], "this machine")
        options = {"num_cpus": int(have["CPU"]), "num_gpus": int(have["GPU"])}
        options |= {"include_dashboard": dashboard, "runtime_env": _warm(config, caller())}
    else:
        options = {"runtime_env": shipped_code(config) | _warm(config, 0)}
    settings, wait_s = ray_settings(config, embedded), config.scaling.wait_s
    # Ray Train imports torch: load it while Ray's processes and the mailbox start.
    with ray_connection(address, settings, options, tell, _import_ray_train, wait_s):
        if layout is None:
            layout = wait_for_room(config, tell)
            require_room(layout, live_node_resources(), "the cluster")
            if not layout.use_gpu and config.scaling.use_gpu == "auto":
                tell("training on CPUs: the cluster has no GPU (--scaling.use-gpu waits for one)")
        yield replace(layout, has_bf16=layout.use_gpu and have_bf16(live_node_resources()))


def start_warm_server(config: TrainConfig, address: str | None) -> str:
    """Starts the server of warm processes early if `cluster` will start a Ray here. Loading its
    modules takes seconds, in which the caller can do something else.

    Returns:
        Why the processes of a Ray that is started here are not warm, although the config allows
        it; or "".
    """
    if not starts_ray(address) or not config.scaling.warm_processes:
        return ""
    _warm(config, caller())
    return why_cold() if _forks(config) else "they need Linux, and this environment's Python"


def _forks(config: TrainConfig) -> bool:
    """Whether Ray's processes are forks, as far as this process can tell."""
    given = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    own_python = not given.keys().isdisjoint(_OTHER_PYTHONS)
    return bool(config.scaling.warm_processes) and sys.platform == "linux" and not own_python


def _warm(config: TrainConfig, owner: int) -> dict[str, Any]:
    """A runtime environment whose processes are forked, see warm/; its server is started here for
    an embedded Ray.

    Args:
        owner: the process that the server ends with; 0: each node's raylet.
    """
    if not _forks(config):
        return {}
    if owner:
        start_early(config.scaling.threads, owner)
    return {"py_executable": py_executable(owner, config.scaling.threads)}


def wait_for_room(config: TrainConfig, tell: Callable[[str], None]) -> Layout:
    """Requests the missing resources from a cluster that may be growing; waits up to `wait_s`. They
    may still be missing then."""
    import ray
    from ray.autoscaler.sdk import request_resources

    deadline = time.monotonic() + config.scaling.wait_s
    layout = choose_layout(config, ray.cluster_resources(), live_node_resources())
    if lack_of_room(layout, live_node_resources()):
        tell(f"waiting up to {config.scaling.wait_s:g} s for {layout.said}")
        request_resources(bundles=[dict(layout.per_worker)] * layout.least)
        try:
            while time.monotonic() < deadline and lack_of_room(layout, live_node_resources()):
                time.sleep(0.5)
        finally:  # the request would last forever and keep idle nodes alive
            request_resources(bundles=[])
        if not lack_of_room(layout, live_node_resources()):
            # The new nodes may have more CPUs for each GPU, or fewer.
            layout = choose_layout(config, ray.cluster_resources(), live_node_resources())
    return layout


def dashboard_note() -> Note | None:
    """The address of the run's page in the dashboard of the connected Ray; None if it has none."""
    import ray

    # For a connected Ray, this only returns its address.
    ray_context = ray.init(ignore_reinit_error=True, configure_logging=False, logging_level="ERROR")
    host, _, port = (ray_context.dashboard_url or "").rpartition(":")
    context = ray.get_runtime_context()
    head = context.gcs_address.rpartition(":")[0]
    is_here = head == ray.util.get_node_ip_address()
    try:
        if is_here:  # Ray gives an address also if it runs none
            socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        port = ""
    if not port:
        return None
    text = f"dashboard: http://{host}:{port}/#/jobs/{context.get_job_id()}"
    if not is_here and host in ("127.0.0.1", "localhost", "::1"):
        text += f", after ssh -NL {port}:{host}:{port} {head}"
    return Note(text)


def live_node_resources() -> list[Mapping[str, float]]:
    """The resources of each live node of the cluster."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _import_ray_train() -> None:
    import ray.train.torch  # noqa: F401
