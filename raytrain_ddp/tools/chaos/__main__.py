"""``raytrain chaos [RECIPE] [flags]``: does a run survive being killed?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_ddp.command_line import Command, RecipeArgs, parse_with_recipe, run_command
from raytrain_ddp.config.effects import given_flags, require_effect, value_of
from raytrain_ddp.config.validation import require, require_least

_DECIDED = {
    *("name", "scaling.num_workers", "checkpoint.every_s"),
    *("log.every_steps", "log.tensorboard", "log.wandb", "log.mlflow", "log.project", "log.audit"),
    *("log.profile_steps", "log.profile_ranks"),
}
_KILLS_LOCAL, _KILLS_ON_RAY = 50, 3


@dataclass(frozen=True)
class ChaosArgs(RecipeArgs):
    """Train undisturbed, and again while processes are killed, and compare the two runs.

    Weights, optimizer, the samples of each step, and the log must be bitwise identical, and no
    files or processes may be left behind: exit status 0, else 1. What is killed, and when, depends
    on --seed only. --storage must be a folder on this machine.
    """

    kills: int | None = None
    """Number of times that a worker is killed (SIGKILL). Default: 3, with --local 50."""
    drivers: int = 1
    """Number of times that the driver is killed. With --local: all workers at once."""
    workers: int = 3
    """Number of workers. Fewer than three prove less, as two can sum in one order only."""
    resize: bool = False
    """Start with a different number of workers each time, 1 to --workers. Requires --exact, and
    compares with a run on one worker. With --nodes, workers come and go with their nodes."""
    local: bool = False
    """Without Ray: Gloo workers on this machine, which restart in a fraction of a second."""
    nodes: int = 0
    """Use a Ray cluster of this many one-worker nodes on this machine. 0: an embedded Ray."""
    node_kills: int | None = None
    """With --nodes: number of times that a node is killed. Default: 1."""


COMMAND = Command("chaos", ChaosArgs, "[RECIPE] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns 0 if the runs are equal, else 1."""
    args = parse(argv)
    kills = _KILLS_LOCAL if args.local else _KILLS_ON_RAY
    from raytrain_ddp.tools.chaos.experiment import ChaosOptions, chaos
    from raytrain_ddp.tools.chaos.screen import ChaosDisplay

    order = ChaosOptions(
        config=args.config,
        kills=kills if args.kills is None else args.kills,
        drivers=args.drivers,
        node_kills=int(args.nodes > 0) if args.node_kills is None else args.node_kills,
        workers=args.nodes or args.workers,
        resize=args.resize,
        local=args.local,
        nodes=args.nodes,
    )
    with ChaosDisplay() as screen:
        outcome = chaos(order, screen)
    screen.outcome(outcome, f"raytrain chaos {shlex.join(argv)}".strip())
    return 0 if outcome.equal else 1


def parse(argv: Sequence[str]) -> ChaosArgs:
    """Raises ConfigError for a recipe, a flag or a value that is wrong."""
    args = parse_with_recipe(argv, COMMAND)
    require_least(args, kills=0, drivers=0, workers=1, nodes=0, node_kills=0)
    require(args.nodes > 0 or not args.node_kills, "--node-kills", args.node_kills, "needs --nodes")
    require(not (args.local and args.nodes), "--nodes", args.nodes, "is for Ray: remove --local")
    if args.resize:
        require(args.config.exact, "--resize", True, "needs --exact: otherwise the bits differ")
        there = args.local or args.nodes > 0
        require(there, "--resize", True, "needs --local, or --nodes to add and remove workers")
    args.config.require_slots(args.nodes or args.workers)
    given = given_flags(argv)
    once = "workers" not in given or not args.nodes
    require(once, "--workers", args.workers, "--nodes already sets it")
    for name in sorted(given & _DECIDED):
        flag = f"--{name.replace('_', '-')}"
        require(False, flag, value_of(args.config, name), "chaos sets this itself")
    use_gpu = args.config.scaling.use_gpu
    require(not args.local or use_gpu is not True, "--scaling.use-gpu", True, "--local is on CPUs")
    require_effect(argv, args.config, on_ray=not args.local)
    return args


if __name__ == "__main__":
    run_command(main)
