"""``raytrain doctor [RECIPE] [flags]``: checks a cluster before a run, or a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field

from raytrain_ddp.config.command_line import Command, given_flags
from raytrain_ddp.config.field_types import ADDRESS
from raytrain_ddp.config.process import run_command
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.records import json_of


@dataclass(frozen=True)
class DoctorArgs(RecipeArgs):
    """Check a cluster before a run: versions, GPUs, network, storage, and data.

    Takes the recipe and the flags of the planned run. Measures all-reduces, and commits small
    checkpoints, which are removed again. Exit status: 0 if the run would start, 3 if a check fails.
    With --run, check a run in progress or after its end, from any machine that can read its folder;
    it says how to stop the run.
    """

    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started."""
    run: str | None = None
    """Check whether this run makes progress, and say how to stop it. Its folder or URI, or its name
    below runs/. Exit status 3 if it makes none."""
    json: bool = False
    """Print the checks and all findings as one JSON document."""


COMMAND = Command("doctor", DoctorArgs, "[RECIPE] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse(argv)
    from raytrain_ddp.tools.display.terminal import terminal
    from raytrain_ddp.tools.doctor.assessment import show

    if args.run is not None:
        from raytrain_ddp.checkpoint.run_folder import open_run
        from raytrain_ddp.tools.doctor.run_status import examine_run

        report = examine_run(open_run(args.run))
    else:
        from raytrain_ddp.tools.doctor.examine import examine

        with redirect_stdout(sys.stderr):  # Ray prints there, too
            report = examine(args.config, args.address, lambda text: print(f"doctor: {text}"))
    status = PreflightError.exit_status if report.count("fail") else 0
    if args.json:
        rows = [asdict(row) for row in report.rows]
        print(json_of({"status": status, "rows": rows, "findings": report.findings}, indent=1))
    else:
        show(report, terminal(highlight=False))
    return status


def parse(argv: Sequence[str]) -> DoctorArgs:
    """Raises ConfigError for a recipe, SystemExit (2) for a flag that is wrong."""
    args = parse_with_recipe(argv, COMMAND)
    others = sorted(given_flags(argv) - {"run", "json"})
    if args.run is not None and (others or args.recipe):
        first = args.recipe or f"--{others[0].replace('_', '-')}"
        raise ConfigError(f"{first} has no effect with --run, which only inspects an existing run.")
    return args


if __name__ == "__main__":
    run_command(main)
