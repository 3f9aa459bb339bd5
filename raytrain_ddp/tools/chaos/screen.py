"""Shows each fault as it fires, a progress bar, and the outcome."""

from __future__ import annotations

import time
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from raytrain_ddp.tools.chaos.experiment import ChaosOutcome
from raytrain_ddp.tools.chaos.fault_plan import DRIVER
from raytrain_ddp.tools.chaos.observation import FiredFault, Watcher
from raytrain_ddp.tools.display.formatting import format_seconds, plural
from raytrain_ddp.tools.display.terminal import terminal

_ROW = "{:>4}  {:>8}  {:<6}  {:<21}  {:>4}  {:>6}"


class ChaosDisplay(Watcher):
    """Prints lines, and on a terminal a progress bar below them."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or terminal(highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("starting", total=None)
        self._began = time.monotonic()
        self._planned = 0

    def __enter__(self) -> ChaosDisplay:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, name: str, planned: int = 0, total_steps: int = 0) -> None:
        self._began = time.monotonic()
        self._bar.update(self._task, description=name, total=total_steps or None, completed=0)
        if planned:
            self._planned = planned
            self._console.print(f"{name}: {planned} faults in {total_steps} steps")
            self._console.print(_ROW.format("", "after", "what", "where", "rank", "step"))
        else:
            self._console.print(name)

    def at(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def fired(self, fired: FiredFault) -> None:
        fault = fired.fault
        what = "driver" if fault.site == DRIVER else fault.action
        where = "log" if fault.site == DRIVER else fault.site
        rank, step = _or_blank(fired.rank), _or_blank(fired.step)
        after = format_seconds(time.monotonic() - self._began)
        self._console.print(_ROW.format(fired.number, after, what, where, rank, step))
        self._bar.update(self._task, description=f"fault {fired.number} of {self._planned}")

    def outcome(self, outcome: ChaosOutcome, command: str) -> None:
        table = Table("", "undisturbed", "disturbed", "", box=None, pad_edge=False)
        for row in outcome.rows:
            mark = "equal" if row.right and row.undisturbed == row.disturbed else ""
            mark = mark or ("right" if row.right else "[bold]WRONG[/]")
            table.add_row(row.what, row.undisturbed, row.disturbed, mark)
        self._console.print(table)
        undisturbed, disturbed, steps = outcome.undisturbed, outcome.disturbed, outcome.total_steps
        executed, wall_s = max(1, disturbed.executed), max(1e-9, disturbed.wall_s)
        share = f"useful {steps} / executed {disturbed.executed} = {steps / executed:.1%}"
        if disturbed.in_memory:  # a survivor's log has other times: a step counts as executed again
            lost = plural(disturbed.in_memory, "time")
            share = f"survivors continued {lost} and repeated none; "
            share += f"{plural(disturbed.restored, 'restart')} from a checkpoint"
        self._console.print(
            f"faults      {outcome.fired} of {outcome.planned} fired; starts of the command: "
            f"{disturbed.starts}\n"
            f"goodput     steps: {share}\n"
            f"            time: undisturbed {format_seconds(undisturbed.wall_s)} / wall "
            f"{format_seconds(disturbed.wall_s)} = {undisturbed.wall_s / wall_s:.1%}, "
            f"{(disturbed.wall_s - undisturbed.wall_s) / max(1, outcome.fired):.2f} s per fault"
        )
        if len(set(disturbed.sizes)) > 1:
            counts = sorted(Counter(disturbed.sizes).items())
            started = ", ".join(f"{count} on {plural(size, 'worker')}" for size, count in counts)
            self._console.print(f"starts      {started}; undisturbed: on {undisturbed.sizes[0]}")
        if outcome.equal:
            self._console.print("equal to the last bit")
        else:
            self._console.print(f"NOT equal; both are kept in {outcome.folder}", soft_wrap=True)
        self._console.print(f"repeat      {command}", soft_wrap=True)


def _or_blank(number: int | None) -> str:
    return "" if number is None else str(number)
