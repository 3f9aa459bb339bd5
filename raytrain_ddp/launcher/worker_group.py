"""The workers' seats on the cluster: an actor for each, in one placement group."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.launcher import agent, code_shipping, guard
from raytrain_ddp.launcher.capacity import GroupedLayout, capacity_error
from raytrain_ddp.launcher.rank_environment import (
    Placement,
    RankedGroup,
    Worker,
    assign_ranks,
    base_environment,
    placeholder_values,
    rank_variables,
    rendezvous_address,
)
from raytrain_ddp.launcher.run_options import RunOptions
from raytrain_ddp.ray_backend.cluster import live_node_resources
from raytrain_ddp.ray_backend.ray_settings import by_value
from raytrain_ddp.uri import answer_within

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 5.0
# Below the range of ports for outgoing connections, and above that of well-known services: a port
# that is free now is still free when the script listens on it seconds later.
# Also above the ports of slurm.sbatch.
_PORTS = range(32_000, 32_768)

Tell = Callable[[str], None]
Check = Callable[[], None]


class NodeLost(RetriesExhausted):
    """A seat was lost before the script was started on it."""


class WorkerGroup:
    """An agent on each seat, with ranks. `check` is called while waiting, and may raise.

    Args:
        driver: the environment of this process.

    Raises:
        PreflightError: there are not enough resources, even after `wait_s`; or the code cannot be
        copied.
        NodeLost: a node was lost during the set-up.
    """

    def __init__(
        self,
        options: RunOptions,
        layout: GroupedLayout,
        driver: Mapping[str, str],
        tell: Tell,
        check: Check,
    ) -> None:
        import ray

        self._options, self._driver, self._check = options, driver, check
        self._agents: list[Any] = []
        self._seats = _reserve(options.flags.wait_s, layout, tell, check)
        try:
            self._agents = _agents(self._seats, layout)
            self._facts = self._answers([each.seat.remote() for each in self._agents])
            named = ("node", "ip", "host", "gpus", "node_has_gpus")
            self._here = str(ray.get_runtime_context().get_node_id())
            self.workers: Sequence[Worker] = assign_ranks(
                [
                    Placement(number, **{name: fact[name] for name in named})
                    for number, fact in enumerate(self._facts)
                ],
                self._here,
            )
            first = [w for w in self.workers if w.local_rank == 0 and w.seat.node != self._here]
            copies = code_shipping.provide_folders(options, first, self._ask, tell)
            self._folders = {self.workers[rank].node_rank: copies[rank] for rank in copies}
        except BaseException:
            self.close()
            raise

    def agent(self, rank: int) -> Any:
        """The actor of a rank."""
        return self._agents[self.workers[rank].seat.number]

    def start(self, run_id: str, attempt: int, feeds: bool) -> None:
        """Starts the script on all workers, nearly simultaneously.

        Args:
            feeds: whether rank 0 has a standard input.
        """
        asked = self._options.flags.master_port
        wanted = [*random.sample(_PORTS, 20), 0] if asked is None else [asked]
        ((port,), where) = self._answers([self.agent(0).free_port.remote(wanted)]), self.workers[0]
        if not port:
            raise PreflightError(
                f"--master-port {asked} is in use on {where.where}: choose another port."
            )
        group = RankedGroup(self.workers, rendezvous_address(self.workers), port, run_id, attempt)
        self._answers([self._start(group, worker, feeds) for worker in self.workers])

    def close(self) -> None:
        """Ends all agents, and with them all processes left by their scripts."""
        # In a thread: if Ray itself has ended, its calls take a minute to fail.
        answer_within(_CLOSE_TIMEOUT_S, partial(_release, self._agents, self._seats))

    def _start(self, group: RankedGroup, worker: Worker, feeds: bool) -> Any:
        fact, flags = self._facts[worker.seat.number], self._options.flags
        local, here = worker.seat.node == self._here, Path.cwd()
        folder = self._folders.get(worker.node_rank, str(here))
        there = partial(code_shipping.path_in_copy, here=here, there=folder)
        base = base_environment(self._driver, fact["environment"], local, flags.exported, there)
        python = sys.executable if local else fact["python"]
        return self.agent(worker.rank).start.remote(
            self._options.command(python, placeholder_values(group, worker), there),
            rank_variables(flags, group, worker, base),
            folder,
            flags.slurm,
            feeds and worker.rank == 0,
        )

    def _ask(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        asked = [getattr(self.agent(worker.rank), method).remote(*args) for worker in workers]
        return self._answers(asked, [worker.where for worker in workers])

    def _answers(self, asked: list[Any], where: Sequence[str] = ()) -> list[Any]:
        """The agents' answers.

        Args:
            where: the machine of each, for error messages.

        Raises:
            NodeLost: an agent does not respond because its node or process is gone.
            PreflightError: an agent cannot do what is requested.
        """
        import ray

        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while len(ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)[0]) < len(asked):
            self._check()
            if time.monotonic() > deadline:
                break
        answers = []
        for number, each in enumerate(asked):
            try:
                answers.append(ray.get(each, timeout=1))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                raise NodeLost(f"a node or a worker of Ray was lost: {reason(error)}") from error
            except ray.exceptions.RayTaskError as error:
                place = where[number] if where else "a node of the cluster"
                raise PreflightError(f"{place}: {error.cause or error}") from None
        return answers


def reason(error: Exception) -> str:
    """Why an actor does not answer, by Ray, in one line: the last one."""
    return (str(error).strip().splitlines() or ["no answer"])[-1][:300]


def _release(agents: Sequence[Any], seats: Any) -> None:
    import ray

    for each in agents:  # immediately, and even if no head is left to end the agents
        each.signal.remote("kill")
    cleaned = [each.clean.remote() for each in agents]
    if cleaned:
        ray.wait(cleaned, num_returns=len(cleaned), timeout=1)
    for each in agents:
        ray.kill(each, no_restart=True)
    ray.util.remove_placement_group(seats)


def _reserve(wait_s: float, layout: GroupedLayout, tell: Tell, check: Check) -> Any:
    """A placement group with resources for all workers."""
    from ray.util import placement_group, remove_placement_group

    strategy = "STRICT_SPREAD" if layout.apart else "PACK"
    group = placement_group(layout.bundles, strategy=strategy)
    began, is_told = time.monotonic(), False
    try:
        while not group.wait(_POLL_S):
            check()
            waited_s, nodes = time.monotonic() - began, live_node_resources()
            lacks = layout.lacks(nodes)
            if waited_s > wait_s:
                raise capacity_error(layout, nodes, "the cluster")
            if not is_told and (lacks or waited_s > 2):
                is_told = True
                tell(f"waiting up to {wait_s:g} s for {layout.said}: {lacks or 'all busy'}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _agents(seats: Any, layout: GroupedLayout) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    source = Path(guard.__file__).read_text(encoding="utf-8")
    actor = ray.remote(agent.Agent)
    with by_value(agent, code_shipping):  # nodes need not have this package
        return [
            actor.options(
                num_cpus=layout.per_worker["CPU"],
                num_gpus=layout.per_worker.get("GPU", 0),
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    seats, placement_group_bundle_index=number // layout.each
                ),
            ).remote(source)
            for number in range(layout.least)
        ]
