"""Examines everything that a run needs: workers, nodes, storage, data, network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import ConfigError, PreflightError, in_one_line
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
from raytrain_ddp.ray_backend.task_transfer import by_value, import_paths
from raytrain_ddp.tools.doctor import node_actor
from raytrain_ddp.tools.doctor.assessment import Report, assess
from raytrain_ddp.tools.doctor.node_actor import versions
from raytrain_ddp.tools.doctor.storage_probe import exercise_storage
from raytrain_ddp.tools.formatting import plural
from raytrain_ddp.uri import without_secrets

_ANSWER_S = 150.0  # importing torch from a cold disk takes a while
_MEASURED_S = 90.0

Answer = dict[str, Any]  # only "error", in one line, if there is none


@dataclass(frozen=True)
class Node:
    """A live node of the cluster. `ranks`: how many of its actors measure all-reduces."""

    ip: str
    resources: Mapping[str, float]
    actors: Sequence[Any]
    ranks: int


@contextmanager
def nodes_with_actors(gpus_per_rank: float) -> Iterator[dict[str, Node]]:
    """The live nodes by name, that of this process first, with actors until the context ends.

    Without GPUs there is one rank per node, but two on the first: each imports torch.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    nodes: dict[str, Node] = {}
    try:
        for number, found in enumerate(alive, start=1):
            host, resources = found["NodeManagerHostname"], found["Resources"]
            name = f"{host}-{number}" if host in nodes else host
            ranks = 1 if nodes else 2
            if gpus_per_rank:
                ranks = int(resources.get("GPU", 0) / gpus_per_rank)
            with by_value(node_actor):
                actor = ray.remote(node_actor.NodeActor).options(
                    num_cpus=0,
                    num_gpus=gpus_per_rank if ranks else 0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(found["NodeID"], soft=False),
                )
                actors = [actor.remote(name) for _ in range(max(1, ranks))]
            nodes[name] = Node(found["NodeManagerAddress"], resources, actors, ranks)
        yield nodes
    finally:
        for each in (actor for node in nodes.values() for actor in node.actors):
            ray.kill(each)


def ask(
    nodes: Mapping[str, Node], method: str, *args: Any, timeout_s: float = _ANSWER_S
) -> dict[str, Answer]:
    """What a method of `NodeActor` returns on each node."""
    calls = {name: getattr(node.actors[0], method).remote(*args) for name, node in nodes.items()}
    until = time.monotonic() + timeout_s
    return {name: _get(call, max(0.1, until - time.monotonic())) for name, call in calls.items()}


def measure_all_reduces(
    nodes: Mapping[str, Node], backend: str, on_gpu: bool, tell: Callable[[str], None]
) -> list[Answer]:
    """All-reduces within each node, and across all nodes, that have several ranks.

    Returns:
        For each: where, nodes, ranks, and the result of `NodeActor.measure` (gpus: of all ranks).
    """
    some = {name: node for name, node in nodes.items() if node.ranks}
    tell(f"loading torch in {sum(node.ranks for node in some.values())} processes")
    groups = [(f"within {name}", [name], node.actors) for name, node in some.items()]
    groups = [group for group in groups if on_gpu or len(group[2]) > 1]
    if len(some) > 1:
        heads = [node.actors[0] for node in some.values()]
        groups.append((f"across {len(some)} nodes", [*some], heads))
    results = []
    for where, names, actors in groups:
        tell(f"all-reduce {where}")
        answer = _measure(actors, some[names[0]].ip, backend, on_gpu)
        results.append({"where": where, "nodes": names, "ranks": len(actors), **answer})
    return results


def _measure(actors: Sequence[Any], host: str, backend: str, on_gpu: bool) -> Answer:
    """What rank 0 measured, or the first error: then the other ranks may wait for long."""
    ports = _get([actor.free_port.remote() for actor in actors], _ANSWER_S)
    if "error" in ports:
        return dict(ports)
    given = host, ports[0], len(actors), backend, on_gpu
    calls = [actor.measure.remote(rank, *given) for rank, actor in enumerate(actors)]
    measured = _get(calls, _MEASURED_S)
    if "error" in measured:
        return dict(measured)
    return {**measured[0], "gpus": [each["gpu"] for each in measured if on_gpu]}


def _get(calls: Any, timeout_s: float) -> Any:
    """The results of calls, or the first error: `ray.get` does not wait for the others."""
    import ray

    try:
        return ray.get(calls, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return {"error": "no answer in time"}
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return {"error": in_one_line(f"{type(cause).__name__}: {' '.join(str(cause).split())}")}


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
