"""What people see of a sweep: a live table on a terminal, and a line for each trial that ends."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.formatting import format_metric, format_seconds, plural
from raytrain_ddp.tools.sweep.trials import OVER, Sweep, Trial

_BEST, _RUNNING = 5, 8  # rows
_COLORS = {"done": "green", "failed": "bold red", "stopped": "yellow"}


class SweepDisplay:
    """Shows a sweep while its context is entered."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._phase = sweep, ""
        self._began, self._over_before = time.monotonic(), sweep.count(*OVER)
        self._console = Console(file=sys.stdout, highlight=False)  # also once it is redirected
        self._live = Live(
            console=self._console,
            get_renderable=self._table,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> SweepDisplay:
        trials, fields = plural(self._sweep.total, "trial"), ", ".join(self._sweep.fields)
        before = f"; {self._over_before} done before" if self._over_before else ""
        self.note(f"{self._sweep.base.name}: {trials} of {fields}{before}")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def phase(self, name: str) -> None:
        """What is done before the first trial."""
        self._phase = name
        if not self._console.is_terminal:
            self.note(name)

    def note(self, text: str, style: str = "") -> None:
        since = format_seconds(time.monotonic() - self._began)
        self._console.print(Text(f"{since:>7}  {text}", style), soft_wrap=True)

    def ended(self, trial: Trial) -> None:
        """A trial is over."""
        reason = trial.message.partition("\n")[0] if trial.state == "failed" else ""
        of = f"({self._sweep.count(*OVER)} of {self._sweep.total})  {reason}".rstrip()
        self.note(f"{trial.name}  {trial.state}  {self._shown(trial)}  {of}", _COLORS[trial.state])

    def summary(self, rows: Iterable[tuple[str, str]]) -> None:
        """The end of a sweep, with what follows from it as (title, text)."""
        metric = self._sweep.metric
        self._console.print(Text(f"\n{self._sweep.base.name}: {self._counts()}", "bold"))
        for best in self._sweep.ranked()[:1]:
            rows = [("best", f"{best.name}  {self._shown(best)}"), *rows]
            values = [each.value or 0.0 for each in self._sweep.of_point(best)]
            if len(values) > 1:
                mean = format_metric(metric, statistics.fmean(values))
                deviation = format_metric(metric, statistics.stdev(values))
                rows.insert(1, ("", f"{mean} ± {deviation} (mean of {len(values)} seeds)"))
        for title, text in rows:
            self._console.print(Text.assemble((f"  {title:<13}", "dim"), text), soft_wrap=True)

    def _counts(self) -> str:
        """``17 done, 6 stopped, 2 running of 40``"""
        counts = {state: self._sweep.count(state) for state in (*OVER, "running")}
        shown = ", ".join(f"{n} {state}" for state, n in counts.items() if n or state == "done")
        return f"{shown} of {self._sweep.total}"

    def _shown(self, trial: Trial) -> str:
        """The best value of a trial, and its point."""
        point = "  ".join(f"{name} {as_text(value)}" for name, value in trial.values.items())
        return f"{self._sweep.metric} {self._value(trial)}  {point}".strip()

    def _value(self, trial: Trial) -> str:
        return "-" if trial.value is None else format_metric(self._sweep.metric, trial.value)

    def _table(self) -> Group:
        """The best trials, those that run, and the time left."""
        sweep, spent_s = self._sweep, time.monotonic() - self._began
        title = f"{self._counts()}  {format_seconds(spent_s)}"
        if new := sweep.count(*OVER) - self._over_before:
            left_s = spent_s / new * (sweep.total - sweep.count(*OVER))
            title += f", about {format_seconds(left_s)} left"
        elif not sweep.count("running"):
            title = f"{self._phase}  {format_seconds(spent_s)}"
        names = ("trial", "state", "epochs", sweep.metric, *sweep.fields)
        table = Table(*names, box=None)
        best = [trial for trial in sweep.ranked() if trial.is_over][:_BEST]
        running = [trial for trial in sweep.trials if trial.state == "running"][:_RUNNING]
        for trial in [*best, *running]:
            values = [as_text(trial.values[name]) for name in sweep.fields]
            cells = [trial.name, trial.state, str(trial.epochs), self._value(trial), *values]
            table.add_row(*cells, style=_COLORS.get(trial.state, ""))
        return Group(Text(title), table)
