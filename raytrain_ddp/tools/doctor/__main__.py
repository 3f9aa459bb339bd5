"""``raytrain doctor [RECIPE] [flags]``: checks a cluster before a run, or a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from raytrain_ddp.command_line import Command, RecipeArgs, parse_with_recipe, run_command
from raytrain_ddp.config.effects import given_flags
from raytrain_ddp.config.validation import ADDRESS
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.records import json_of


@dataclass(frozen=True)
class DoctorArgs(RecipeArgs):
    """Check a cluster before a run: versions, GPUs, network, storage, data, and security.

    Takes the recipe and the flags of the planned run. Measures all-reduces, and commits small
    checkpoints, which are removed again. Exit status: 0 if the run would start, 3 if a check fails.
    With --run, check a run in progress or after its end, from any machine that can read its folder.
    """

    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started."""
    run: str | None = None
    """Check whether this run makes progress. Its folder or URI, or its name below runs/. Exit
    status 3 if it does not."""
    json: bool = False
    """Print the checks and all findings as one JSON document."""


COMMAND = Command("doctor", DoctorArgs, "[RECIPE] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse(argv)
    from raytrain_ddp.tools.doctor import output_table

    verdicts = output_table.OF_A_CLUSTER
    if args.run is not None:
        from raytrain_ddp.checkpoint.run_folder import open_run
        from raytrain_ddp.tools.doctor.run_status import assess_run, read_status

        status = read_status(open_run(args.run))
        report = assess_run(status)
        verdicts = output_table.OF_AN_ENDED_RUN if status.has_ended else output_table.OF_A_RUN
    else:
        from raytrain_ddp.tools.doctor.examine import examine

        with output_table.progress() as tell, redirect_stdout(sys.stderr):  # Ray prints there, too
            report = examine(args.config, args.address, tell)
    if args.json:
        print(json_of(report.as_dict(), indent=1))
    else:
        from raytrain_ddp.tools.display.terminal import terminal

        output_table.show(report, terminal(highlight=False), verdicts)
    return report.exit_status


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
