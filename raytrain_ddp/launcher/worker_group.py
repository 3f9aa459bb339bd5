"""The workers' seats on the cluster: an actor for each, in one placement group."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.launcher import agent, code_shipping, supervisor
from raytrain_ddp.launcher.agent import Agent
from raytrain_ddp.launcher.capacity import GroupedLayout, capacity_error, missing_capacity
from raytrain_ddp.launcher.code_shipping import path_in_copy
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
from raytrain_ddp.launcher.working_folder import provide_folders
from raytrain_ddp.ray_backend.cluster import live_node_resources
from raytrain_ddp.ray_backend.ray_settings import by_value
from raytrain_ddp.uri import answer_within

OF_AGENT = (agent, code_shipping)  # the modules that it is made of
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 5.0
_CLOCK_ASKED = 5
# Below the range of ports for outgoing connections, and above that of well-known services: a port
# that is free now is still free when the script listens on it seconds later.
# Also above the ports of slurm.sbatch.
_PORTS = range(32_000, 32_768)

Check = Callable[[], None]


class NodeLost(RetriesExhausted):
    """A seat was lost before the script was started on it."""


class WorkerGroup:
    """An agent on each seat, with ranks. `check` is called while waiting, and may raise.

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
        python: str,
        tell: Callable[[str], None],
        check: Check,
    ) -> None:
        import ray

        self._options, self._driver, self._python, self._check = options, driver, python, check
        self._group: Any = None
        self._agents: list[Any] = []
        try:
            self._group = _reserve(options.flags.wait_s, layout, tell, check)
            self._agents = _agents(self._group, layout)
            facts = _wait_for_answers([a.seat.remote() for a in self._agents], check)
            self._facts, self._here = facts, str(ray.get_runtime_context().get_node_id())
            self.workers: Sequence[Worker] = assign_ranks(
                [_seat(number, fact) for number, fact in enumerate(facts)], self._here
            )
            first = [w for w in self.workers if w.local_rank == 0 and w.seat.node != self._here]
            copies = provide_folders(options, first, self._ask, tell)
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
        wanted = [asked] if asked is not None else random.sample(_PORTS, 20)
        (port,) = _wait_for_answers([self.agent(0).free_port.remote(wanted)], self._check)
        if not port:
            where = self.workers[0].where
            raise PreflightError(
                f"--master-port {asked} is in use on {where}: choose another port."
            )
        group = RankedGroup(self.workers, rendezvous_address(self.workers), port, run_id, attempt)
        started = [self._start(group, worker, feeds) for worker in self.workers]
        _wait_for_answers(started, self._check)

    def clocks(self, ranks: Sequence[int]) -> dict[int, float]:
        """How far these ranks' clocks are ahead of this one, in seconds, to about a millisecond;
        without the ranks of a machine that does not respond."""
        import ray

        ahead: dict[str, float] = {}
        nodes = {self.workers[rank].seat.node: rank for rank in ranks}
        for node, rank in nodes.items() if len(nodes) > 1 else ():
            best_s = float("inf")
            for _ in range(_CLOCK_ASKED):
                asked = time.monotonic()
                with suppress(ray.exceptions.RayError):  # GetTimeoutError too
                    theirs = ray.get(self.agent(rank).clock.remote(), timeout=2)
                    if (took_s := time.monotonic() - asked) < best_s:
                        best_s, ahead[node] = took_s, theirs - asked - took_s / 2
        return {r: ahead[n] for r in ranks if (n := self.workers[r].seat.node) in ahead}

    def close(self) -> None:
        """Ends all agents, and with them all processes left by their scripts."""
        # In a thread: if Ray itself has ended, its calls take a minute to fail.
        answer_within(_CLOSE_TIMEOUT_S, partial(_release, self._agents, self._group))
        self._agents, self._group = [], None

    def _start(self, group: RankedGroup, worker: Worker, feeds: bool) -> Any:
        fact, flags = self._facts[worker.seat.number], self._options.flags
        local, here = worker.seat.node == self._here, Path.cwd()
        folder = self._folders.get(worker.node_rank, str(here))
        there = partial(path_in_copy, here=here, there=folder)
        python = self._python if local else fact["python"]
        base = base_environment(self._driver, fact["environment"], local, flags.exported, there)
        return self.agent(worker.rank).start.remote(
            self._options.command(python, placeholder_values(group, worker), there),
            rank_variables(flags, group, worker, base, error_file=""),
            folder,
            flags.env == "slurm",
            feeds and worker.rank == 0,
        )

    def _ask(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        asked = [getattr(self.agent(worker.rank), method).remote(*args) for worker in workers]
        return _wait_for_answers(asked, self._check, [worker.where for worker in workers])


def _release(agents: Sequence[Any], group: Any) -> None:
    import ray

    for each in agents:  # immediately, and even if no head is left to end the agents
        each.signal.remote("kill")
    cleaned = [each.clean.remote() for each in agents]
    if cleaned:
        ray.wait(cleaned, num_returns=len(cleaned), timeout=1)
    for each in agents:
        ray.kill(each, no_restart=True)
    if group is not None:
        ray.util.remove_placement_group(group)


def _reserve(
    wait_s: float, layout: GroupedLayout, tell: Callable[[str], None], check: Check
) -> Any:
    """A placement group with resources for all workers."""
    from ray.util import placement_group, remove_placement_group

    strategy = "STRICT_SPREAD" if layout.apart else "PACK"
    group = placement_group(layout.bundles, strategy=strategy)
    began = time.monotonic()
    reported = False
    try:
        while not group.wait(_POLL_S):
            check()
            waited_s = time.monotonic() - began
            lacks = missing_capacity(layout, live_node_resources())
            if waited_s > wait_s:
                busy = "other jobs use the resources (ray status)"
                raise capacity_error(layout, lacks or busy, "the cluster")
            if not reported and (lacks or waited_s > 2):
                reported = True
                tell(f"waiting up to {wait_s:g} s for {layout.said}: {lacks or 'all busy'}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _agents(group: Any, layout: GroupedLayout) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    source = Path(supervisor.__file__).read_text(encoding="utf-8")
    actor = ray.remote(Agent)
    with by_value(*OF_AGENT):  # nodes need not have this package
        return [
            actor.options(
                num_cpus=layout.per_worker["CPU"],
                num_gpus=layout.per_worker.get("GPU", 0),
                max_concurrency=8,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number // layout.each
                ),
            ).remote(source)
            for number in range(layout.least)
        ]


def _seat(number: int, fact: Mapping[str, Any]) -> Placement:
    named = {name: fact[name] for name in ("node", "ip", "host", "node_has_gpus")}
    return Placement(number, gpus=[str(gpu) for gpu in fact["gpus"]], **named)


def _wait_for_answers(asked: list[Any], check: Check, where: Sequence[str] = ()) -> list[Any]:
    """The agents' answers.

    Args:
        where: the machine of each, for error messages.

    Raises:
        NodeLost: an agent does not respond because its node or process is gone.
        PreflightError: an agent cannot do what is requested.
    """
    import ray

    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while True:
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)
        if len(ready) == len(asked) or time.monotonic() > deadline:
            break
        check()
    answers = []
    for number, each in enumerate(asked):
        try:
            answers.append(ray.get(each, timeout=1))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            explanation = str(error).strip().splitlines()
            raise NodeLost(
                f"a node or a worker of Ray was lost: {(explanation or ['no answer'])[-1]}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            place = where[number] if where else "a node of the cluster"
            raise PreflightError(f"{place}: {error.cause or error}") from None
    return answers
