"""``raytrain chaos [RECIPE] [flags]``: does a run survive being killed?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_ddp.config.command_line import Command, given_flags
from raytrain_ddp.config.field_types import require, require_least
from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.train_config import require_effect
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.formatting import plural

_DECIDED = {"name", "scaling.num_workers", "checkpoint.every_s"}  # and all of the log


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
    """Number of times that the driver's process is killed. With --local there is none."""
    workers: int = 3
    """Number of workers. Fewer than three prove less, as two can sum in one order only."""
    resize: bool = False
    """Start with a different number of workers each time, 1 to --workers. Requires --exact and
    --local, and compares with a run on one worker."""
    local: bool = False
    """Without Ray, on Linux: Gloo workers on this machine, which restart in a fraction of a
    second."""

    @property
    def faults(self) -> tuple[int, int]:
        """The number of killed workers and of killed drivers."""
        kills = (50 if self.local else 3) if self.kills is None else self.kills
        return kills, 0 if self.local else self.drivers


COMMAND = Command("chaos", ChaosArgs, "[RECIPE] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns 0 if the runs are equal, else 1."""
    args = parse(argv)
    from raytrain_ddp.tools.chaos.experiment import chaos

    outcome = chaos(args)
    for row in outcome.rows:
        verdict = "equal" if row.equal else "WRONG"
        print(f"{row.what:<28}  {row.undisturbed:<20}  {row.disturbed:<20}  {verdict}")
    disturbed = outcome.disturbed
    fired = f"{len(disturbed.fired)} of {len(disturbed.plan)} faults fired"
    print(f"{fired}; the command was started {plural(len(disturbed.sizes), 'time')}")
    kept = f"NOT equal; both are kept in {outcome.folder}"
    print("equal to the last bit" if outcome.equal else kept)
    print(f"repeat: raytrain chaos {shlex.join(argv)}".rstrip())
    return 0 if outcome.equal else 1


def parse(argv: Sequence[str]) -> ChaosArgs:
    """Raises ConfigError for a recipe, a flag or a value that is wrong."""
    args = parse_with_recipe(argv, COMMAND)
    require_least(args, kills=0, drivers=0, workers=1)
    may_resize = args.config.exact and args.local
    require(may_resize or not args.resize, "--resize", True, "needs --local and --exact")
    require(not args.local or sys.platform == "linux", "--local", True, "needs Linux")
    args.config.require_slots(args.workers)
    given = given_flags(argv)
    has_driver = not (args.local and "drivers" in given)
    require(has_driver, "--drivers", args.drivers, "--local has no driver")
    for name in sorted(given):
        if name in _DECIDED or name.startswith("log."):
            raise ConfigError(f"--{name}: chaos sets this itself: remove it.")
    use_gpu = args.config.scaling.use_gpu
    require(not args.local or use_gpu is not True, "--scaling.use-gpu", True, "--local is on CPUs")
    require_effect(given, args.config, on_ray=not args.local)
    return args


if __name__ == "__main__":
    run_command(main)
