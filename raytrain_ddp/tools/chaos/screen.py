"""Shows each fault as it fires, a progress bar, and the outcome."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from raytrain_ddp.formatting import format_seconds, plural
from raytrain_ddp.tools.chaos.comparison import Row
from raytrain_ddp.tools.display.terminal import terminal

if TYPE_CHECKING:
    from raytrain_ddp.tools.chaos.killed_run import KilledRun

_ROW = "{:>4}  {:>8}  {:<6}  {:<21}  {:>4}  {:>6}"
_COLUMNS = ("{task.description}", BarColumn(), "step", MofNCompleteColumn(), TimeElapsedColumn())


class Screen(Progress):
    """Prints lines, and on a terminal a progress bar below them."""

    def __init__(self) -> None:
        super().__init__(*_COLUMNS, console=terminal(highlight=False), transient=True)
        self.disable = not self.console.is_terminal
        self._bar, self._began = self.add_task("starting", total=None), time.monotonic()

    def phase(self, name: str, planned: int = 0, total_steps: int = 0) -> None:
        self._began = time.monotonic()
        self.update(self._bar, description=name, total=total_steps or None, completed=0)
        self.console.print(f"{name}: {planned} faults in {total_steps} steps" if planned else name)
        if planned:
            self.console.print(_ROW.format("", "after", "what", "where", "rank", "step"))

    def at(self, step: int) -> None:
        self.update(self._bar, completed=step)

    def fired(self, number: int, what: str, where: str, rank: int | None, step: int | None) -> None:
        """Prints what was killed, at which site, rank and step, if they are known."""
        at = ("" if value is None else value for value in (rank, step))
        after = format_seconds(time.monotonic() - self._began)
        self.console.print(_ROW.format(number, after, what, where, *at))

    def outcome(self, rows: Sequence[Row], calm: KilledRun, wild: KilledRun) -> None:
        """Prints the comparison, and how much of the work counted."""
        table = Table("", "undisturbed", "disturbed", "", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row, "equal" if row.equal else "[bold]WRONG[/]")
        steps, executed = len(calm.logged), len(wild.logged)
        share = f"useful {steps} / executed {executed} = {steps / max(1, executed):.1%}"
        if wild.in_memory:  # a survivor's log has other times: a step counts as executed again
            share = f"survivors continued {plural(wild.in_memory, 'time')} and repeated none; "
            share += f"{plural(wild.restored, 'restart')} from a checkpoint"
        before, wall = format_seconds(calm.wall_s), format_seconds(wild.wall_s)
        lost_s = (wild.wall_s - calm.wall_s) / max(1, wild.fired)
        counts = sorted(Counter(wild.sizes).items())
        started = ", ".join(f"{count} on {plural(size, 'worker')}" for size, count in counts)
        self.console.print(
            table,
            f"faults      {wild.fired} of {len(wild.plan)} fired",
            f"starts      of the command: {started}; undisturbed: on {calm.sizes[0]}",
            f"goodput     steps: {share}",
            f"            time: undisturbed {before} / wall {wall} = "
            f"{calm.wall_s / wild.wall_s:.1%}, {lost_s:.2f} s per fault",
            sep="\n",
        )
