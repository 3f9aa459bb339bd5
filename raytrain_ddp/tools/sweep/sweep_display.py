"""What people see of a sweep: a line for each trial that ends, and on a terminal one of all."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.text import Text

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.formatting import format_metric, format_seconds
from raytrain_ddp.tools.display.terminal import Screen
from raytrain_ddp.tools.sweep.trials import OVER, Sweep, Trial

_COLORS = {"done": "green", "failed": "bold red", "stopped": "yellow"}


class SweepDisplay:
    """Shows a sweep while its context is entered."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._screen, self._before = sweep, Screen(self._line), len(sweep.of(*OVER))

    def __enter__(self) -> SweepDisplay:
        self.note(f"{self._sweep.base.name}: {' '.join(self._sweep.settings['space'])}")
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.__exit__()

    def note(self, text: str) -> None:
        self._screen.print(Text(text))

    def ended(self, trial: Trial) -> None:
        """A trial is over."""
        over, reason = len(self._sweep.of(*OVER)), trial.message.partition("\n")[0]
        text = f"{trial.state}  {self._shown(trial)}  ({over} of {self._sweep.total})  {reason}"
        self._screen.print(Text(text.rstrip(), _COLORS[trial.state]))

    def summary(self, rows: Iterable[tuple[str, str]]) -> None:
        """The end of a sweep, with what follows from it as (title, text)."""
        ranked = self._sweep.ranked()
        for best in ranked[:1]:
            rows = [("best", self._shown(best)), *rows]
            values = [each.value or 0.0 for each in ranked if each.point == best.point]
            if len(values) > 1:
                numbers = statistics.fmean(values), statistics.stdev(values)
                mean, deviation = (format_metric(self._sweep.metric, each) for each in numbers)
                rows.insert(1, ("", f"{mean} ± {deviation} (mean of {len(values)} seeds)"))
        for title, text in [(f"\n{self._sweep.base.name}", self._counts()), *rows]:
            self._screen.print(Text(f"{title:<9} {text}"), copied=True)

    def _counts(self) -> str:
        """``17 done, 6 stopped, 2 running of 40``"""
        counts = {state: len(self._sweep.of(state)) for state in (*OVER, "running")}
        shown = (f"{count} {state}" for state, count in counts.items() if count)
        return f"{', '.join(shown) or 'none'} of {self._sweep.total}"

    def _shown(self, trial: Trial) -> str:
        """A trial with its best value, and its point."""
        value = "-" if trial.value is None else format_metric(self._sweep.metric, trial.value)
        point = "  ".join(f"{name} {as_text(value)}" for name, value in trial.values.items())
        return f"{trial.name}  {self._sweep.metric} {value}  {point}"

    def _line(self) -> Text:
        """What runs now, and the time left."""
        spent_s, over = self._screen.waited_s, len(self._sweep.of(*OVER))
        left_s = spent_s * (self._sweep.total - over) / max(1, over - self._before)
        left = f"  about {format_seconds(left_s)} left" * (over > self._before)
        return Text(f"{self._counts()}  {format_seconds(spent_s)}{left}")
