"""Probes the nodes of a Ray cluster: a task on each, clocks, and all-reduces between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raytrain_ddp.ray_backend.ray_settings import by_value
from raytrain_ddp.tools.doctor import all_reduce, machine_facts, network_facts

_SENT = (machine_facts, network_facts, all_reduce)  # nodes need not have this package
_CLOCK_LOOKS = 5
_CLOCK_TIMEOUT_S = 30.0
_RANK_STARTS_S = 150.0  # importing torch from a cold disk takes a while
_MEASURED_S = 90.0
_LAST_WORDS_S = 3.0
_MOST_RANKS = 8  # on one node

Answer = dict[str, Any]  # only "error" if there is none


@dataclass(frozen=True)
class Node:
    """A live node of the cluster."""

    id: str
    ip: str
    resources: Mapping[str, float]


def live_nodes() -> list[Node]:
    """The live nodes, that of this process first."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    found = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.id != here, node.ip, node.id))


class NodeTasks:
    """A task on each node, submitted on construction."""

    def __init__(
        self,
        nodes: Sequence[Node],
        function: Callable[..., Answer],
        arguments: Callable[[int], tuple[Any, ...]],
    ) -> None:
        import ray

        with by_value(*_SENT):
            task = ray.remote(function)
            self._tasks = [
                task.options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node)).remote(
                    *arguments(number)
                )
                for number, node in enumerate(nodes)
            ]

    def answers(self, timeout_s: float) -> list[Answer]:
        """By node; failed and late tasks have a one-line "error"."""
        import ray

        ready, late = ray.wait(
            self._tasks, num_returns=len(self._tasks), timeout=timeout_s, fetch_local=False
        )
        for task in late:
            with suppress(Exception):
                ray.cancel(task, force=True)
        lost = {"error": f"no answer within {timeout_s:.0f} s"}
        return [_result(task) if task in ready else lost for task in self._tasks]


def measure_clock(node: Node) -> Answer:
    """How far a node's clock is ahead of ours, in s, and the uncertainty."""
    import ray

    with by_value(*_SENT):
        task = ray.remote(machine_facts.now).options(num_cpus=0, scheduling_strategy=_on(node))
        looks = []
        for _ in range(_CLOCK_LOOKS):
            began, tick = time.time(), time.perf_counter()
            try:
                there = ray.get(task.remote(), timeout=_CLOCK_TIMEOUT_S)
            except Exception as error:
                return {"error": describe_error(error)}
            trip_s = time.perf_counter() - tick
            looks.append((trip_s / 2, there - began - trip_s / 2))
    within_s, ahead_s = min(looks)  # the fastest answer is the most precise
    return {"ahead_s": ahead_s, "within_s": within_s}


def measure_all_reduces(
    nodes: Sequence[Node],
    names: Sequence[str],
    ranks: Sequence[int],
    gpus: float,
    backend: str,
    tell: Callable[[str], None],
) -> list[Answer]:
    """All-reduces within each node that has several ranks, and across all nodes that have ranks.

    Args:
        ranks: their number on each node.
        gpus: per rank.

    Returns:
        For each: kind ("within" or "across"), nodes (their names), ranks, and the result of
        `all_reduce.Rank.measure`, or an error.
    """
    import ray

    ranks = [min(count, _MOST_RANKS) for count in ranks]
    some = [number for number, count in enumerate(ranks) if count]
    groups = [("within", [number] * ranks[number]) for number in some if ranks[number] > 1]
    groups += [("across", some)] if len(some) > 1 else []
    if not groups:
        return []
    tell(f"loading torch in {sum(ranks)} processes")
    with by_value(*_SENT):
        actor = ray.remote(all_reduce.Rank)
        actors = [
            [actor.options(num_cpus=0, num_gpus=gpus, scheduling_strategy=_on(node)).remote()
             for _ in range(count)]
            for node, count in zip(nodes, ranks, strict=True)
        ]  # fmt: skip
    flat = [actor for own in actors for actor in own]
    try:
        started = _started(flat)
        results = []
        for kind, numbers in groups:
            there = [names[number] for number in dict.fromkeys(numbers)]
            tell(f"all-reduce within {there[0]}" if kind == "within" else "all-reduce across nodes")
            chosen = actors[numbers[0]] if kind == "within" else [actors[n][0] for n in numbers]
            late = sum(a not in started for a in chosen)
            answer = (
                {"error": f"{late} of {len(chosen)} ranks did not start in {_RANK_STARTS_S:.0f} s"}
                if late
                else _one(chosen, nodes[numbers[0]].ip, backend)
            )
            results.append({"kind": kind, "nodes": there, "ranks": len(chosen), **answer})
        return results
    finally:
        for each in flat:
            ray.kill(each)


def _started(actors: Sequence[Any]) -> list[Any]:
    """The actors that respond in time."""
    import ray

    asked = [a.free_port.remote() for a in actors]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_RANK_STARTS_S)
    return [a for a, question in zip(actors, asked, strict=True) if question in ready]


def _one(actors: Sequence[Any], host: str, backend: str) -> Answer:
    import ray

    try:
        port = ray.get(actors[0].free_port.remote(), timeout=_MEASURED_S)
    except Exception as error:
        return {"error": describe_error(error)}
    size = len(actors)
    calls = [a.measure.remote(host, port, rank, size, backend) for rank, a in enumerate(actors)]
    answers: dict[Any, Answer] = {}
    deadline = time.monotonic() + _MEASURED_S
    while len(answers) < size and time.monotonic() < deadline:
        left = [call for call in calls if call not in answers]
        for call in ray.wait(left, num_returns=1, timeout=1.0)[0]:
            answers[call] = _result(call)
            if "error" in answers[call]:  # the others may wait for it forever
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
    if len(answers) < size:
        late = {"error": f"{size - len(answers)} of {size} ranks did not answer"}
        answers |= {call: late for call in calls if call not in answers}
    errors = [answer["error"] for answer in answers.values() if "error" in answer]
    if errors:
        return {"error": errors[0]}
    talks = sorted({tuple(talk) for answer in answers.values() for talk in answer["talks"]})
    return {**answers[calls[0]], "talks": talks}


def _result(task: Any) -> Answer:
    import ray

    try:
        answer: Answer = ray.get(task, timeout=_CLOCK_TIMEOUT_S)
    except Exception as error:
        return {"error": describe_error(error)}
    return answer


def describe_error(error: Exception) -> str:
    """One line; for a missing module only its name; without C++ source locations."""
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip()
    lacks = re.search(r"(ModuleNotFoundError|ImportError): .*", text)
    first = re.sub(r"\[/[^\]]*\] ?|\$\d+$", "", text.partition("\n")[0])
    return (lacks[0] if lacks else f"{type(cause).__name__}: {first}")[:300]


def _on(node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)
