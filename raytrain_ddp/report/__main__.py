"""``python -m raytrain_ddp.report RUN...``: writes what is known of runs into one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from raytrain_ddp.command_line import run_command


@dataclass(frozen=True)
class ReportArgs:
    """Write what is known of a run into one HTML file: curves, time, failures, mistakes, config.

    The file asks for nothing from outside, and can be mailed. A run that still goes on, or has
    failed, has one too; several runs are shown side by side.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders or URIs of runs, or their names below runs/."""
    out: str | None = None
    """The file. Default: report.html in the folder of a single local run, else in this one."""
    predict: bool = True
    """Of a single run: what its best checkpoint makes of the evaluation set, by class, with the
    worst mistakes; at most a minute, and only if the data can be opened from here."""
    device: str = "auto"
    """For that: cpu, cuda, cuda:1, ...; auto: a GPU if there is one, and no run that goes on."""
    open: bool = False
    """Open the file in a browser."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = tyro.cli(ReportArgs, prog="python -m raytrain_ddp.report", args=list(argv))
    from raytrain_ddp.errors import ConfigError
    from raytrain_ddp.report.write import write_report

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
