"""Examines everything that a run needs: machines, network, storage, data."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.ray_backend.cluster import (
    cluster,
    import_paths,
    live_node_resources,
    starts_ray,
    wait_for_room,
)
from raytrain_ddp.ray_backend.dashboard import dashboard_address
from raytrain_ddp.ray_backend.placement import (
    Layout,
    choose_layout,
    embedded_resources,
    missing_resources,
    workers_that_fit,
)
from raytrain_ddp.tools.doctor import cluster_probe, dataset_probe, machine_facts, storage_probe
from raytrain_ddp.tools.doctor.assessment import assess
from raytrain_ddp.tools.doctor.cluster_probe import Answer, Node, NodeTasks
from raytrain_ddp.tools.doctor.rows import Report
from raytrain_ddp.uri import without_secrets

_FACTS_S, _COMMIT_S, _DATA_S = 120.0, 120.0, 600.0  # data may be downloaded first
_SEEN_S = 10.0  # until a file of one node appears on another; NFS caches listings for seconds
_CLEANED_S = 30.0

Tell = Callable[[str], None]


def examine(config: TrainConfig, address: str | None, tell: Tell) -> Report:
    """Everything that can be checked without training, assessed.

    Raises:
        ConfigError: the config cannot work on any cluster.
        PreflightError: there is no Ray at the address.
    """
    # As `fit` resolves it; the data are checked later, on each node.
    config = replace(check(replace(config, data=DataConfig())), data=config.data)
    # Needs almost nothing: the run's missing resources are a finding, not an error.
    little = replace(config.scaling, num_workers="auto", use_gpu=False, cpus_per_worker=0.01)
    embedded = starts_ray(address)
    with cluster(replace(config, scaling=little), address, False, tell):
        return assess(_findings(config, embedded, tell))


def _findings(config: TrainConfig, embedded: bool, tell: Tell) -> dict[str, Any]:
    run, layout = _capacity(config, embedded, tell)
    nodes = cluster_probe.live_nodes()
    dashboard = dashboard_address()
    places = _facts(config, nodes, dashboard, tell)
    _probe_storage(config, nodes, places, tell)
    tell("checking the data")
    arguments = (to_dict(config), str(Path.cwd()), import_paths(config))
    _store_answers(
        "data",
        places,
        _run_everywhere(nodes, dataset_probe.probe_data, lambda _: arguments, _DATA_S),
    )
    ranks, gpus = _ranks(config, layout, nodes)
    backend = layout.backend if layout else "gloo"
    names = [place["name"] for place in places if not place["driver"]]
    return {
        "embedded": embedded,
        "dashboard": list(dashboard) if dashboard else None,
        "run": run,
        "places": places,
        "all_reduce": cluster_probe.measure_all_reduces(nodes, names, ranks, gpus, backend, tell),
    }


def _capacity(
    config: TrainConfig, embedded: bool, tell: Tell
) -> tuple[dict[str, Any], Layout | None]:
    """Whether the workers fit, after the wait for a cluster that may grow."""
    import ray

    result: dict[str, Any] = {
        "storage": without_secrets(config.storage),
        "data": without_secrets(config.data.source),
        "cpus_per_worker": config.scaling.cpus_without_gpu,
        "use_gpu": config.scaling.use_gpu is True,
    }
    have = dict(ray.cluster_resources())
    try:
        if embedded or not config.scaling.wait_s:
            layout = choose_layout(config, have, [have] if embedded else live_node_resources())
        else:
            layout = wait_for_room(config, ray.cluster_resources, live_node_resources, tell)
            have = dict(ray.cluster_resources())
        config.require_synced(layout.least, layout.most, layout.use_gpu)
    except (PreflightError, ConfigError) as error:
        return {**result, "lacks": str(error)}, None
    if embedded:
        have = embedded_resources(config, layout, have)
    places = [have] if embedded else [node.resources for node in cluster_probe.live_nodes()]
    result |= {
        "workers": layout.said,
        "cpus_per_worker": layout.per_worker["CPU"],
        "per_worker": dict(layout.per_worker),
        "backend": "nccl" if "nccl" in layout.backend else "gloo",
        "use_gpu": layout.use_gpu,
        "least": layout.least,
        "fit": workers_that_fit(layout, places),
        "lacks": missing_resources(layout, have),
    }
    return result, layout


def _facts(
    config: TrainConfig, nodes: Sequence[Node], dashboard: tuple[str, int] | None, tell: Tell
) -> list[dict[str, Any]]:
    """The facts of each node and, last, of this process."""
    tell("asking 1 node" if len(nodes) == 1 else f"asking {len(nodes)} nodes")
    try:
        root = open_storage(config.storage)
        local = root.path if root.is_local else None
    except PreflightError:  # each place that tries it reports it
        local = None
    given = (local, dashboard[1] if dashboard else None)
    answers = _run_everywhere(nodes, machine_facts.gather_machine_facts, lambda _: given, _FACTS_S)
    hosts = [answer.get("host") or node.ip for answer, node in zip(answers, nodes, strict=False)]
    names = [h if hosts.count(h) == 1 else f"{h}#{n}" for n, h in enumerate(hosts, start=1)]
    places = [
        {
            "name": name,
            "driver": False,
            "ip": node.ip,
            "resources": {k: v for k, v in node.resources.items() if k in ("CPU", "GPU")},
            "clock": cluster_probe.measure_clock(node),
        }
        for name, node in zip(names, nodes, strict=True)
    ]
    places.append({"name": "driver", "driver": True, "on": names[0]})
    _store_answers("facts", places, answers)
    return places


def _probe_storage(
    config: TrainConfig, nodes: Sequence[Node], places: list[dict[str, Any]], tell: Tell
) -> None:
    """Each place commits checkpoints, then looks for those of all others; all are removed."""
    tell("testing the storage")
    uri, folder = config.storage, f"doctor-{uuid.uuid4().hex[:8]}"
    own = [f"place-{number}" for number in range(len(places))]
    names = {mark: place["name"] for mark, place in zip(own, places, strict=True)}
    made: list[list[str]] = [[] for _ in places]
    try:
        tried = _run_everywhere(
            nodes, storage_probe.probe_commit, lambda n: (uri, folder, own[n]), _COMMIT_S
        )
        made = [answer.get("made", []) for answer in tried]
        there = [mark for mark, answer in zip(own, tried, strict=True) if "error" not in answer]
        wanted = [_rotated(there, mark) for mark in own]
        seen = _run_everywhere(
            nodes,
            storage_probe.probe_visibility,
            lambda n: (uri, folder, wanted[n], _SEEN_S),
            _SEEN_S + _COMMIT_S,
        )
    finally:
        # One after the other, in case they share it: then it is already gone for the nodes.
        here = storage_probe.clean_up(uri, folder, made[-1])
        asked = NodeTasks(nodes, storage_probe.clean_up, lambda n: (uri, folder, made[n]))
        left = [*asked.answers(_CLEANED_S), here]
    for answer, marks in zip(seen, wanted, strict=True):
        sees = answer.get("sees", marks)
        answer["misses"] = [names[mark] for mark in marks if mark not in sees]
    _store_answers("storage", places, tried)
    _store_answers("seen", places, seen)
    _store_answers("cleaned", places, left)


def _rotated(marks: Sequence[str], own: str) -> list[str]:
    """The others; the next one in a ring comes last and is read completely."""
    others = [m for m in marks if m > own] + [m for m in marks if m < own]
    return others[1:] + others[:1]


def _run_everywhere(
    nodes: Sequence[Node],
    function: Callable[..., Answer],
    arguments: Callable[[int], tuple[Any, ...]],
    timeout_s: float,
) -> list[Answer]:
    """The answers of each node and of this process."""
    asked = NodeTasks(nodes, function, arguments)
    here = function(*arguments(len(nodes)))
    return [*asked.answers(timeout_s), here]


def _store_answers(
    part: str, places: Sequence[dict[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> None:
    for place, answer in zip(places, answers, strict=True):
        place[part] = dict(answer)


def _ranks(
    config: TrainConfig, layout: Layout | None, nodes: Sequence[Node]
) -> tuple[list[int], float]:
    """The number of ranks that measure on each node, and the GPUs per rank.

    On CPUs one per node, but two on the first: they share its memory, and each imports torch.
    """
    if layout and layout.use_gpu:
        gpus = config.scaling.gpus_per_worker
        return [int(node.resources.get("GPU", 0) / gpus) for node in nodes], gpus
    cpus = [node.resources.get("CPU", 0) for node in nodes]
    enough = min(config.scaling.cpus_without_gpu, max(cpus))
    able = [count > 0 and count >= enough for count in cpus]
    first = able.index(True) if any(able) else -1
    return [int(is_able) + (n == first) for n, is_able in enumerate(able)], 0
