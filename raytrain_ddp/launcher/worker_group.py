"""The workers' seats on the cluster: an actor for each, in one placement group."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError, RetriesExhausted
from raytrain_ddp.launcher import agent, code_shipping, guard
from raytrain_ddp.launcher.capacity import GroupedLayout, capacity_error
from raytrain_ddp.launcher.output import tell
from raytrain_ddp.launcher.rank_environment import (
    Placement,
    RankedGroup,
    Worker,
    assign_ranks,
    base_environment,
    rank_variables,
)
from raytrain_ddp.launcher.run_options import RunOptions
from raytrain_ddp.ray_backend.cluster import live_node_resources
from raytrain_ddp.ray_backend.task_transfer import by_value
from raytrain_ddp.uri import answer_within

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 5.0
_SAY_AFTER_S = 2.0

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
        self, options: RunOptions, layout: GroupedLayout, driver: Mapping[str, str], check: Check
    ) -> None:
        import ray

        self._options, self._driver, self._check = options, driver, check
        self._agents: list[Any] = []
        self._reserved = _reserve(options.flags.wait_s, layout, check)
        try:
            self._agents = _agents(self._reserved, layout)
            facts = self._answers([each.seat.remote() for each in self._agents])
            seats = [Placement(number, **fact) for number, fact in enumerate(facts)]
            self._here = str(ray.get_runtime_context().get_node_id())
            self.workers: Sequence[Worker] = assign_ranks(seats, self._here)
            first = [w for w in self.workers if w.local_rank == 0 and w.seat.node != self._here]
            self._folders = code_shipping.provide_folders(options.flags.ship, first, self._ask)
        except BaseException:
            self.close()
            raise

    def agent(self, rank: int) -> Any:
        """The actor of a rank."""
        return self._agents[self.workers[rank].seat.number]

    def start(self, run_id: str, attempt: int) -> None:
        """Starts the script on all workers, nearly simultaneously."""
        asked, where = self._options.flags.master_port, self.workers[0].where
        (port,) = self._answers([self.agent(0).free_port.remote(asked)])
        if not port:
            raise PreflightError(f"--master-port {asked} is in use on {where}: choose another.")
        group = RankedGroup(self.workers, port, run_id, attempt)
        self._answers([self._start(group, worker) for worker in self.workers])

    def close(self) -> None:
        """Ends all agents, and with them all processes left by their scripts."""
        # In a thread: if Ray itself has ended, its calls take a minute to fail.
        answer_within(_CLOSE_TIMEOUT_S, self._release)

    def _start(self, group: RankedGroup, worker: Worker) -> Any:
        seat, flags, here = worker.seat, self._options.flags, Path.cwd()
        is_local = seat.node == self._here
        folder = self._folders.get(worker.node_rank, str(here))
        there = partial(code_shipping.path_in_copy, here=here, there=folder)
        base = base_environment(self._driver, seat.environment, is_local, there)
        python = sys.executable if is_local else seat.python
        return self.agent(worker.rank).start.remote(
            self._options.command(python, group.placeholders(worker), there),
            rank_variables(flags, group, worker, base),
            folder,
            flags.env == "slurm",
            _input() if is_local and worker.rank == 0 else os.devnull,
        )

    def _ask(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        return self._answers([getattr(self.agent(w.rank), method).remote(*args) for w in workers])

    def _answers(self, asked: list[Any]) -> list[Any]:
        """The agents' answers.

        Raises:
            NodeLost: an agent does not respond because its node or process is gone.
            PreflightError: an agent cannot do what is requested.
        """
        import ray

        ready: list[Any] = []
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while len(ready) < len(asked) and time.monotonic() < deadline:
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)
            self._check()
        try:
            return [ray.get(each, timeout=1) for each in asked]
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise NodeLost(f"a node or a worker of Ray was lost: {reason(error)}") from error
        except ray.exceptions.RayTaskError as error:
            raise PreflightError(f"a node of the cluster: {error.cause or error}") from None

    def _release(self) -> None:
        import ray

        # Even if no head is left to end the agents.
        if cleaned := [each.clean.remote() for each in self._agents]:
            ray.wait(cleaned, num_returns=len(cleaned), timeout=1)
        for each in self._agents:
            ray.kill(each, no_restart=True)
        ray.util.remove_placement_group(self._reserved)


def _input() -> str:
    """This process's standard input as a file, unless it is a terminal, which is the shell's."""
    mode = os.fstat(0).st_mode
    is_file = stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return f"/proc/{os.getpid()}/fd/0" if is_file else os.devnull


def reason(error: Exception) -> str:
    """Why an actor does not answer, by Ray, in one line: the last one."""
    return (str(error).strip().splitlines() or ["no answer"])[-1][:300]


def _reserve(wait_s: float, layout: GroupedLayout, check: Check) -> Any:
    """A placement group with resources for all workers."""
    from ray.util import placement_group, remove_placement_group

    strategy = "STRICT_SPREAD" if layout.apart else "PACK"
    group = placement_group(layout.bundles, strategy=strategy)
    ends_at = time.monotonic() + wait_s
    try:
        if not group.wait(_SAY_AFTER_S):
            lacks = layout.lacks(live_node_resources()) or "all busy"
            tell(f"waiting up to {wait_s:g} s for {layout.said}: {lacks}")
        while not group.wait(_POLL_S):
            check()
            if time.monotonic() > ends_at:
                raise capacity_error(layout, live_node_resources(), "the cluster")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _agents(reserved: Any, layout: GroupedLayout) -> list[Any]:
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
                    reserved, placement_group_bundle_index=number // layout.each
                ),
            ).remote(source)
            for number in range(layout.count)
        ]
