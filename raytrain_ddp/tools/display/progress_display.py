"""What a person sees of a run: a live block on a terminal, plain lines everywhere else.

Receives events on the driver's main thread. Imports little besides the standard
library and rich, so that the first line is there before Ray or torch are.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raytrain_ddp.events import Checkpoint, Eval, Failed, Note, Plan, Preempted, Straggler, Train
from raytrain_ddp.messages import Event, Pause, Phase
from raytrain_ddp.result import FitResult
from raytrain_ddp.tools.display.bottleneck import Pace, StepSplit
from raytrain_ddp.tools.display.formatting import (
    format_bytes,
    format_count,
    format_data,
    format_metric,
    format_number,
    format_plan,
    format_ranks,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.display.notebook import NotebookBlock, in_notebook, notebook_console
from raytrain_ddp.tools.display.redraw import LastingStream, RedrawnBlock
from raytrain_ddp.tools.display.terminal import terminal

PLAIN_LINE_EVERY_S = 2.0
LIMIT_EVERY_S = 60.0  # at most, and only if another one
BLOCK_WIDTH, CELL_WIDTH = 100, 20  # characters: the first at most, the second at least
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

clock = time.monotonic


def flow(parts: Sequence[Text], width: int, indent: int = 4) -> Text:
    """The parts, two spaces between them, in as many lines as they need."""
    out, column = Text(), 0
    for part in parts:
        fits = column + 2 + part.cell_len <= width
        gap = "" if not column else "  " if fits else "\n" + " " * indent
        column = part.cell_len + (column + len(gap) if fits or not column else indent)
        out.append(gap).append_text(part)
    return out


@dataclass(frozen=True)
class _Now:
    """The state of training that is shown; replaced, never changed. `line`: the latest one."""

    plan: Plan
    step: int
    epoch: int
    line: Train | None = None


class Display:
    """Shows the events of a run, by default live on a terminal and in a notebook, plain elsewhere.

    One thread calls ``handle`` (another may for checkpoints); rich's refresh thread only reads.
    """

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        is_notebook = console is None and live is None and in_notebook()
        console = console or (notebook_console() if is_notebook else terminal(file=sys.stdout))
        self._console = console
        console.file = cast(IO[str], LastingStream(console.file))
        if live is None:  # isatty besides: FORCE_COLOR makes rich take a pipe for a terminal
            utf = console.encoding.startswith("utf")
            live = is_notebook or (utf and console.is_interactive and console.file.isatty())
        self._live = live
        self._picture = RedrawnBlock(self.__rich__)
        self._block: Live | NotebookBlock = NotebookBlock(self.__rich__)
        if not is_notebook:
            self._block = Live(self._picture, console=console, refresh_per_second=8, transient=True)
        self._began = clock()
        self._phase: tuple[str, float] | None = None  # name, since when
        self._now: _Now | None = None  # before the first plan
        self._pace, self._ends_at = Pace(0, 0, 0.0), math.nan  # when all will be done, by our clock
        self._smooth_loss, self._saved = math.nan, ""
        self._split, self._limit, self._limit_at = StepSplit(), "", -math.inf
        self._held_back, self._printed_at = False, -math.inf  # of the latest training line

    def __enter__(self) -> Display:
        if self._live:
            self._block.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self._block.stop()

    def handle(self, event: Event) -> None:
        """Takes in one event of any kind; those that people need not see are ignored."""
        match event:
            case Phase():
                self._settle(next_phase=(event.name, clock()))
                if not self._live:
                    self._print(Text(event.name))
            case Plan():
                self._begin(event)
            case Train():
                self._train(event)
            case Eval():
                self._evaluated(event)
            case Pause():
                self._pace.paused_s += event.seconds
            case Checkpoint():
                self._saved = str(event.step)
            case Note() | Preempted() | Straggler():
                self._print(Text(f"note: {event.text}", style="yellow"))
            case Failed():
                self._settle()
                if self._now is not None:  # it got further than was shown
                    step = max(self._now.step, event.step or 0)
                    self._now = replace(self._now, step=step)
                who = "failed" if event.rank is None else f"rank {event.rank} failed"
                self._print(Text(f"{who}: {event.message}", style="bold red"))
                if event.traceback:
                    self._print(Text.from_ansi(event.traceback.rstrip()), copied=True)

    def summary(
        self, run: str, end: FitResult, limit: str = "", more: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Prints the end of a run, in place of the live block.

        Args:
            limit: what stood most in the way of computing.
            more: (title, path or command).
        """
        self.__exit__()
        of = f"of {end.total_steps}"
        if end.step > end.total_steps:  # it had already gone further
            of = f"({end.total_steps} asked for)"
        reached = f"\n{run}: {end.status} at step {end.step} {of}"
        color = "yellow" if end.status == "interrupted" else "green"
        self._print(Text(reached, style=f"bold {color}"), copied=True)
        rows: list[tuple[str, list[Text]]] = [
            (name, [_cell("step", str(int(metrics["step"]))), *_metrics(metrics, end.monitor)])
            for name, metrics in (("best", end.best), ("last", end.last))
            if metrics
        ]
        if end.seconds:
            parts = {k: format_seconds(s) for k, s in end.seconds.items()}
            if any(title.startswith("until") for title in parts):
                parts = {k.replace("training", "training since then"): s for k, s in parts.items()}
            rows.append(("time", [_cell(title, shown) for title, shown in parts.items()]))
        if limit:
            room = max(1, self._console.width - 4) if self._live else 10**6
            rows.append(("training", [Text("\n    ".join(wrap(limit, room)))]))
        rows += [(name, [Text(text)]) for name, text in more]
        for name, cells in rows:
            self._print(Text(f"  {name:<17}", style="dim"), *cells, copied=True)

    def _settle(self, next_phase: tuple[str, float] | None = None) -> None:
        """Ends what is open: a phase leaves its duration, a held-back training line is printed."""
        phase, self._phase = self._phase, next_phase
        held_back, self._held_back = self._held_back, False
        if self._live and phase:
            self._print(Text(f"  {phase[0]}  {format_seconds(clock() - phase[1])}", style="dim"))
        elif not self._live and held_back and self._now and self._now.line:
            self._printed_at = clock()
            line = self._now.line
            self._print(*_place(self._now), *self._measured(self._now, line, line.loss))

    def _begin(self, plan: Plan) -> None:
        self._settle()
        before, start, total = self._now, plan.start_step, plan.total_steps
        # Whether the seconds of restarted workers begin anew, only their first line will tell.
        self._pace, self._ends_at = Pace(start, total, math.nan if before else 0.0), math.nan
        epoch = min(start // plan.steps_per_epoch, plan.epochs - 1)  # at its very end, too
        self._now = _Now(plan, start, epoch)
        self._split.begin(start)
        if before is None:
            for line in format_plan(plan):
                self._print(Text(line))
            for title, text in format_data(plan.data, plan.unit):
                self._print(Text(f"{title}: {text}", style="yellow" if title == "note" else ""))
            return
        workers, where = plural(plan.world_size, "worker"), f"after step {start} of {total}"
        text = f"restarted with {workers} (before: {before.plan.world_size}) {where}"
        text += f", {again} steps again" if (again := before.step - start) > 0 else ""
        if plan.replaced is not None:  # the step in progress was not done
            new = f"{format_ranks(plan.replaced)} replaced; continuing"
            text = f"{new if plan.replaced else f'continuing with {workers}'} {where}"
            if plan.world_size > before.plan.world_size:
                text = f"grew from {before.plan.world_size} to {workers} {where}, nothing repeated"
        self._print(Text(text, style="yellow"))

    def _train(self, line: Train) -> None:
        assert self._now is not None  # a plan comes first
        if self._phase or line.epoch != self._now.epoch:
            self._settle()  # the last line of an epoch is not held back forever
        # The live block smooths the loss lightly for the eye; what is not finite shows at once.
        loss, before = line.loss, self._smooth_loss
        self._smooth_loss = 0.7 * before + 0.3 * loss if math.isfinite(before + loss) else loss
        self._ends_at = clock() + self._pace.left_s(line.step, line.seconds)
        self._split.add(line)
        self._now = _Now(self._now.plan, line.step, line.epoch, line)
        self._held_back = True
        epoch_ends = line.step % self._now.plan.steps_per_epoch == 0
        if epoch_ends or clock() - self._printed_at >= PLAIN_LINE_EVERY_S:
            self._settle()
        if not self._live and clock() - self._limit_at >= LIMIT_EVERY_S and self._split.is_settled:
            self._limit_at = clock()
            previous, self._limit = self._limit, self._split.limit()
            if _without_figures(self._limit) != _without_figures(previous):
                self._print(Text(self._limit))

    def _evaluated(self, event: Eval) -> None:
        assert self._now is not None
        self._settle()
        self._pace.paused_s += event.seconds
        self._now = replace(self._now, step=event.step, epoch=event.epoch)
        star = [Text("★" if self._live else "* best", style="bold green")]
        cells = [*_metrics(event.metrics), *(star if event.best else [])]
        self._print(*_place(self._now), Text("eval", style="cyan"), *cells)

    def _measured(self, now: _Now, line: Train, loss: float) -> list[Text]:
        """The figures of the latest training line, and the time left."""
        ends_at, timing = self._ends_at, line.timing
        cells = [
            _cell("loss", format_number(loss)),
            _cell("lr", format_number(line.lr)),
            _cell("", format_count(line.samples_per_s), f" {now.plan.unit}/s"),
        ]
        if self._live:
            cells += [_cell(p, format_share(s)) for p, s in self._split.shares().items()]
            if timing.mfu is not None:
                cells.append(_cell("MFU", format_share(timing.mfu)))
            cells.append(_cell("memory", format_bytes(timing.peak_memory_bytes)))
        else:
            cells += _largest_but_compute(timing.split_s)
        for count, label in ((line.skipped, "skipped"), (line.nonfinite, "not finite")):
            if count:
                cells.append(_cell(label, str(count)))
        if math.isfinite(ends_at) and now.step < now.plan.total_steps:
            cells.append(_cell("", format_seconds(max(0.0, ends_at - clock())), " left"))
        return cells

    def _print(self, *parts: Text, copied: bool = False) -> None:
        """Permanent lines above the block; what may be copied (a path, a command) is not broken."""
        text = flow(parts, self._console.width if self._live else 10**6)
        if not self._live:  # no style: no control codes, not even where FORCE_COLOR is set
            since = "" if copied else f"{format_seconds(clock() - self._began):>7}  "
            encoding = self._console.encoding
            text = Text((since + text.plain).encode(encoding, "replace").decode(encoding))
        if self._picture.is_broken(self._console.width):  # or what is printed would be erased
            self._block.refresh()
        self._console.print(text, soft_wrap=copied or not self._live, highlight=False)

    def __rich__(self) -> Text:
        """The live part, drawn 8 times a second: the open phase, or the block of the training."""
        phase, now = self._phase, self._now  # read once: `handle` may replace them
        if phase:
            spinner, waited = SPINNER[int(10 * clock()) % 10], format_seconds(clock() - phase[1])
            return Text.assemble((spinner, "cyan"), f" {phase[0]}  ", (waited, "dim"))
        if now is None:
            return Text("")
        cells = _place(now)
        if now.line is not None:
            cells += self._measured(now, now.line, self._smooth_loss)
        cells += [_cell("saved step", self._saved)] if self._saved else []
        width = min(self._console.width, BLOCK_WIDTH)
        wide = (width + 2) // max(1, width // CELL_WIDTH)  # each cell, with the gap after it
        for cell in cells:
            cell.truncate(wide - 2, overflow="ellipsis", pad=True)
        part = min(1.0, now.step / now.plan.total_steps)  # more, if fewer epochs are wanted now
        tail = f"{int(100 * part):4} %  {format_seconds(clock() - self._began)}"
        done = int(part * (width - len(tail)))
        bar = ("━" * done, "cyan"), ("─" * (width - len(tail) - done), "dim"), tail
        limit = Text("\n".join(wrap(self._split.limit(), width)))
        return Text("\n").join([Text.assemble(*bar), flow(cells, width, indent=0), limit])


def _place(now: _Now) -> list[Text]:
    """``epoch  3/12`` and ``step  55/276``, padded so that lines below each other align."""
    epochs, steps = str(now.plan.epochs), str(now.plan.total_steps)
    epoch, step = f"{now.epoch + 1:>{len(epochs)}}", f"{now.step:>{len(steps)}}"
    return [_cell("epoch", f"{epoch}/{epochs}"), _cell("step", f"{step}/{steps}")]


def _cell(name: str, value: str, unit: str = "") -> Text:
    return Text.assemble((f"{name} " if name else "", "dim"), (value, "bold"), (unit, "dim"))


def _largest_but_compute(seconds: Mapping[str, float]) -> list[Text]:
    """The one that tells most, in a line of a log."""
    phase = max((p for p in seconds if p != "compute"), key=seconds.__getitem__, default=None)
    return [_cell(phase, format_share(seconds[phase] / sum(seconds.values())))] if phase else []


def _without_figures(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit())


def _metrics(metrics: Mapping[str, float], first: str = "") -> list[Text]:
    ordered = sorted(metrics.items(), key=lambda item: item[0] != first)
    return [_cell(name, format_metric(name, value)) for name, value in ordered if name != "step"]
