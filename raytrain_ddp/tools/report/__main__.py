"""``raytrain report RUN...``: writes what is known of runs into one HTML file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from raytrain_ddp.config.command_line import Command, positional
from raytrain_ddp.config.field_types import require_least
from raytrain_ddp.config.process import run_command


@dataclass(frozen=True)
class ReportArgs:
    """Write a report of runs to one HTML file: curves, times, failures, mistakes, and config.

    The file is self-contained, so it can be mailed. Runs that are in progress or have failed can be
    reported, too. Several runs are shown side by side. A storage has a page of all its runs, and a
    sweep one of its trials.
    """

    runs: tuple[str, ...] = field(default=("runs",), metadata=positional("RUN"))
    """Folders or URIs of runs, or their names below runs/; or of one sweep, or of one storage."""
    out: str | None = None
    """Output file, which ends in .html. Default: report.html in the folder of a single local run,
    sweep or storage, else in the current folder."""
    every: int = 0
    """Write the file again every so many seconds, until Ctrl-C, and let an open page reload
    itself. Without predictions. 0: once."""
    predict: bool = True
    """For a single run: evaluate its best checkpoint, and show the results by class and the worst
    mistakes. Takes at most a minute, and requires access to the data."""
    open: bool = False
    """Open the report in a browser."""


COMMAND = Command("report", ReportArgs, "[RUN ...] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; with --every, is ended by Ctrl-C."""
    args = COMMAND.parse(argv)
    from raytrain_ddp.errors import RaytrainError
    from raytrain_ddp.tools.report.write import report

    require_least(args, every=0)
    once = partial(report, *args.runs, out=args.out, predict=args.predict and not args.every)
    path = once(every_s=args.every).path
    print(path, flush=True)
    if args.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    try:
        while args.every:
            time.sleep(args.every)
            try:
                once(every_s=args.every)
            except RaytrainError as error:  # a storage that does not answer now
                print(f"note: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        once()  # a page that does not reload
    return 0


if __name__ == "__main__":
    run_command(main)
