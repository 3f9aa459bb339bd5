"""``raytrain report RUN...``: writes what is known of runs into one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import positional


@dataclass(frozen=True)
class ReportArgs:
    """Write a report of runs to one HTML file: curves, times, failures, mistakes, and config.

    The file is self-contained, so it can be mailed. Runs that are in progress or have failed can be
    reported, too. Several runs are shown side by side. A sweep has a page of its own.
    """

    runs: tuple[str, ...] = field(default=(), metadata=positional("RUN"))
    """Folders or URIs of runs, or of one sweep, or their names below runs/."""
    out: str | None = None
    """Output file, which ends in .html. Default: report.html in the folder of a single local run,
    else in the current folder."""
    predict: bool = True
    """For a single run: evaluate its best checkpoint, and show the results by class and the worst
    mistakes. Takes at most a minute, and requires access to the data."""
    device: str = "auto"
    """Device for --predict, such as cpu, cuda or cuda:1. auto: a GPU if there is one, unless the
    run is in progress."""
    open: bool = False
    """Open the report in a browser."""


COMMAND = Command("report", ReportArgs, "RUN ... [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = COMMAND.parse(argv)
    from raytrain_ddp.errors import ConfigError
    from raytrain_ddp.tools.report.write import write_report

    if not args.runs:
        raise ConfigError("give a run: its folder, its URI, or its name below runs/.")
    path = write_report(args.runs, args.out, args.predict, args.device)
    print(path)
    if args.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


if __name__ == "__main__":
    run_command(main)
