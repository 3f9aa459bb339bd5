"""Examines everything that a run needs: workers, nodes, storage, data, network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.formatting import plural
from raytrain_ddp.ray_backend.cluster import (
    cluster,
    live_node_resources,
    starts_ray,
    wait_for_room,
)
from raytrain_ddp.ray_backend.placement import (
    Layout,
    choose_layout,
    embedded_resources,
    lack_of_room,
)
from raytrain_ddp.ray_backend.task_transfer import import_paths
from raytrain_ddp.tools.doctor.assessment import assess
from raytrain_ddp.tools.doctor.cluster_nodes import ask, measure_all_reduces, nodes_with_actors
from raytrain_ddp.tools.doctor.node_actor import versions
from raytrain_ddp.tools.doctor.rows import Report
from raytrain_ddp.tools.doctor.storage_probe import exercise_storage
from raytrain_ddp.uri import without_secrets

_DATA_S = 600.0  # they may be downloaded

Tell = Callable[[str], None]


def examine(config: TrainConfig, address: str | None, tell: Tell) -> Report:
    """Everything that can be checked without training, assessed.

    Raises:
        ConfigError, DataError: as `fit` before it takes workers.
        PreflightError: there is no Ray at the address.
    """
    config = check(config)
    # Needs almost nothing: the run's missing resources are a finding, not an error.
    little = replace(config.scaling, num_workers="auto", use_gpu=False, cpus_per_worker=0.01)
    embedded = starts_ray(address)
    with cluster(replace(config, scaling=little), address, False, tell):
        layout, lacks = _capacity(config, embedded, tell)
        on_gpu = layout is not None and layout.use_gpu
        with nodes_with_actors(config.scaling.gpus_per_worker if on_gpu else 0) as nodes:
            tell(f"asking {plural(len(nodes), 'node')}")
            facts = ask(nodes, "facts")
            reached = {name: node for name, node in nodes.items() if "error" not in facts[name]}
            tell("testing the storage")
            uri = config.storage
            storage = exercise_storage(uri, lambda folder: ask(reached, "commit", uri, folder))
            tell("opening the data")
            given = to_dict(config), str(Path.cwd()), import_paths(config)
            data = ask(reached, "data", *given, timeout_s=_DATA_S)
            backend = layout.backend if layout else "gloo"
            reduced = measure_all_reduces(reached, backend, on_gpu, tell)
    findings = {
        "workers": f"{layout.said} over {layout.backend}" if layout else "none",
        "lacks": lacks,
        "versions": versions(),
        "nodes": {
            name: {"ip": node.ip, "ray": dict(node.resources), **facts[name]}
            for name, node in nodes.items()
        },
        "storage": storage,
        "data": data,
        "all_reduce": reduced,
    }
    return assess(findings, without_secrets(uri), without_secrets(config.data.source))


def _capacity(config: TrainConfig, embedded: bool, tell: Tell) -> tuple[Layout | None, str]:
    """The workers, after the wait for a cluster that may grow; why they do not fit, or ""."""
    import ray

    layout = None
    try:
        if embedded:
            have = dict(ray.cluster_resources())
            layout = choose_layout(config, have)
            nodes: list[Mapping[str, float]] = [embedded_resources(config, layout, have)]
        else:
            layout = wait_for_room(config, tell)
            nodes = live_node_resources()
        config.require_synced(layout.least, layout.most, layout.use_gpu)
    except (PreflightError, ConfigError) as error:
        return layout, " ".join(str(error).split())
    return layout, lack_of_room(layout, nodes)
