"""What people see of a sweep: a live table on a terminal, a line for each trial elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raytrain_ddp.formatting import format_metric, format_seconds, plural
from raytrain_ddp.tools.display.progress_display import BLOCK_WIDTH
from raytrain_ddp.tools.display.terminal import LastingStream, terminal
from raytrain_ddp.tools.sweep.conductor import Conductor
from raytrain_ddp.tools.sweep.sweep_state import OVER, Sweep, Trial
from raytrain_ddp.tools.sweep.trial_configs import value_text

_BEST, _RUNNING = 5, 8  # rows
_COLORS = {"finished": "green", "failed": "bold red", "stopped": "yellow"}

clock = time.monotonic


class SweepDisplay:
    """Shows a sweep; `begin` says which.

    The live table is drawn by rich's thread, from the conductor.
    """

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        console = console or terminal(file=sys.stdout)
        console.file = cast(IO[str], LastingStream(console.file))
        if live is None:
            utf = console.encoding.startswith("utf")
            live = utf and console.is_interactive and console.file.isatty()
        self._console, self._live = console, live
        self._block = Live(self, console=console, refresh_per_second=4, transient=True)
        self._began, self._phase = clock(), ""
        self._name, self._conductor, self._parallel = "", cast(Conductor, None), 1

    def __enter__(self) -> SweepDisplay:
        if self._live:
            self._block.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._block.stop()

    def begin(self, name: str, conductor: Conductor) -> None:
        self._name, self._conductor = name, conductor
        sweep = conductor.sweep
        done = sweep.count(*OVER)
        total = plural(sweep.total, "trial")
        varied = ", ".join(dimension.field for dimension in sweep.settings.space)
        text = f"{name}: {total} of {varied}"
        self._print(Text(f"{text}; {done} done before" if done else text))

    def phase(self, name: str) -> None:
        """What is done before the first trial."""
        self._phase = name
        if not self._live:
            self._print(Text(name))

    def running(self, parallel: int) -> None:
        """The trials begin, so many at the same time."""
        self._phase, self._parallel = "", parallel

    def note(self, text: str) -> None:
        self._print(Text(f"note: {text}", style="yellow"))

    def ended(self, trial: Trial) -> None:
        """A trial has ended, or pauses."""
        if trial.status in ("waiting", "paused"):
            return
        sweep = self._conductor.sweep
        of = f"({sweep.count(*OVER)} of {sweep.total})"
        cells = [f"{trial.name}  {trial.status}", *_cells(sweep, trial), of]
        self._print(Text("  ".join(cells), style=_COLORS[trial.status]))
        if trial.status == "failed":
            self._print(Text(f"  {trial.message.partition(chr(10))[0]}", style="red"))

    def summary(self, sweep: Sweep, rows: Sequence[tuple[str, str]]) -> None:
        """The end of a sweep."""
        self.__exit__()
        self._print(Text(f"\n{self._name}: {_counts(sweep)}", style="bold"), copied=True)
        for trial in sweep.ranked()[:1]:
            text = "  ".join([trial.name, *_cells(sweep, trial)])
            self._row("best", text)
            same = [sweep.best_of(each) for each in sweep.of_point(trial)]
            values = [value for value in same if value is not None]
            if len(values) > 1:
                shown = spread(sweep.monitor, values)
                self._row("", f"{shown} (mean and spread of {len(values)} seeds)")
        for title, text in rows:
            self._row(title, text)

    def _row(self, title: str, text: str) -> None:
        self._print(Text.assemble((f"  {title:<13}", "dim"), text), copied=True)

    def _print(self, text: Text, copied: bool = False) -> None:
        if not self._live:
            since = "" if copied else f"{format_seconds(clock() - self._began):>7}  "
            encoding = self._console.encoding
            text = Text((since + text.plain).encode(encoding, "replace").decode(encoding))
        self._console.print(text, soft_wrap=copied or not self._live, highlight=False)

    def __rich__(self) -> Text:
        waited = format_seconds(clock() - self._began)
        if self._phase or self._conductor is None:
            return Text.assemble(f"{self._phase}  ", (waited, "dim"))
        width = min(self._console.width, BLOCK_WIDTH)
        lines = [Text.assemble(*part) for part in self._lines(waited, width)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n").join(lines)

    def _lines(self, waited: str, width: int) -> Iterator[list[str | tuple[str, str]]]:
        """The rows of the live table, as parts of text with their styles."""
        sweep = self._conductor.sweep
        total = sweep.total
        share = sweep.count(*OVER) / max(1, total)
        tail = f"{int(100 * share):4} %  {waited}"
        done = int(share * (width - len(tail)))
        yield [("━" * done, "cyan"), ("─" * (width - len(tail) - done), "dim"), tail]
        left_s = self._conductor.left_s(self._parallel)
        left = f", about {format_seconds(left_s)} left" if left_s is not None else ""
        stopping = ", stopping with checkpoints" if self._conductor.stopping else left
        yield [(_counts(sweep), "bold"), stopping]
        for place, trial in enumerate(sweep.ranked()[:_BEST]):
            cells = "  ".join([trial.name, *_cells(sweep, trial)])
            yield [
                ("best     " if not place else "         ", "dim"),
                (cells, "green" if not place else ""),
            ]
        running = [trial for trial in sweep.trials if trial.status == "running"]
        for place, trial in enumerate(running[:_RUNNING]):
            epochs = trial.evaluations[-1].epochs if trial.evaluations else 0.0
            cells = "  ".join([trial.name, f"epoch {epochs:g}", *_cells(sweep, trial)])
            yield [("running  " if not place else "         ", "dim"), cells]
        if len(running) > _RUNNING:
            yield [f"         and {len(running) - _RUNNING} more"]


def spread(name: str, values: Sequence[float]) -> str:
    """``98.33 % ± 0.28 %``: mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{format_metric(name, statistics.fmean(values))} ± {format_metric(name, deviation)}"


def _cells(sweep: Sweep, trial: Trial) -> list[str]:
    """The best value of a trial, and its point."""
    best = sweep.best_of(trial)
    cells = [f"{sweep.monitor} {format_metric(sweep.monitor, best)}"] if best is not None else []
    return [*cells, *(f"{name} {value_text(value)}" for name, value in trial.point.items())]


def _counts(sweep: Sweep) -> str:
    """``17 of 40 finished, 6 stopped, 1 failed, 2 running``"""
    total = sweep.total
    parts = [f"{sweep.count('finished')} of {total} finished"]
    for status in ("stopped", "failed", "paused", "running"):
        count = sweep.count(status)
        parts += [f"{count} {status}"] if count else []
    return ", ".join(parts)
