"""What a person sees of a run: a live block on a terminal, plain lines everywhere else.

Receives events on the driver's main thread. Imports little besides the standard
library and rich, so that the first line is there before Ray or torch are.
"""

from __future__ import annotations

import io
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.result import FitResult, Listener
from raytrain_ddp.events import (
    Checkpoint,
    Eval,
    Event,
    Failed,
    Note,
    Pause,
    Phase,
    Plan,
    Preempted,
    Straggler,
    Train,
)
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.display.terminal import Screen
from raytrain_ddp.tools.formatting import (
    format_bytes,
    format_count,
    format_data,
    format_metric,
    format_number,
    format_ranks,
    format_seconds,
    format_share,
    plural,
)
from raytrain_ddp.tools.report.bottleneck import StepSplit, split_of

if TYPE_CHECKING:
    from raytrain_ddp.checkpoint.storage import Storage

PLAIN_LINE_EVERY_S = 2.0
LIMIT_EVERY_S = 60.0  # at most, and only if another one
BLOCK_WIDTH, CELL_WIDTH = 100, 20  # characters: the first at most, the second at least


@dataclass(frozen=True)
class _Now:
    """The state of training that is shown; replaced, never changed. `line`: the latest one."""

    plan: Plan
    step: int
    epoch: int
    line: Train | None = None


class Pace:
    """The time left: the usual seconds a step (median of recent lines) plus the usual pauses.

    Evaluations and checkpoint stalls are taken out of the lines and spread over the steps so far,
    so that neither one slow line nor an evaluation just made lets the time left jump.
    """

    def __init__(self, start_step: int, total_steps: int, began_s: float) -> None:
        self._start, self._total, self._last = start_step, total_steps, (start_step, began_s)
        self._step_s: deque[float] = deque(maxlen=25)
        self.paused_s = 0.0

    def left_s(self, step: int, seconds: float) -> float:
        """Takes in a training line; returns the seconds left, nan while they are unknown."""
        running_s = seconds - self.paused_s
        steps, took_s = step - self._last[0], running_s - self._last[1]
        self._last = (step, running_s)
        if steps > 0 and took_s >= 0:  # not so: a clock that began anew, or is not known (nan)
            self._step_s.append(took_s / steps)
        if not self._step_s:
            return math.nan
        usual_s = sorted(self._step_s)[len(self._step_s) // 2]
        return (self._total - step) * (usual_s + self.paused_s / max(1, step - self._start))


class Display(Listener):
    """Shows the events of a run, by default live on a terminal and in a notebook, plain elsewhere.

    One thread calls ``handle`` (another may for checkpoints); rich's refresh thread only reads.

    Args:
        console, live, clock: see `Screen`.
    """

    def __init__(
        self,
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen, self._clock = Screen(self.block, console, live, clock), clock
        self._live, self._print = self._screen.is_live, self._screen.print
        self._spinner, self._phase = Spinner("dots", style="cyan"), ("", 0.0)  # name, since when
        self._bar = Progress(BarColumn(None), TextColumn("{task.description}"), expand=True)
        self._bar.add_task("")
        self._now: _Now | None = None  # before the first plan
        self._pace, self._ends_at = Pace(0, 0, 0.0), math.nan  # when all will be done, by our clock
        self._smooth_loss, self._saved = math.nan, ""
        self._split, self._limit, self._limit_at = StepSplit(), "", -math.inf
        self._held_back, self._printed_at = False, -math.inf  # of the latest training line

    def __enter__(self) -> Display:
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self._screen.__exit__()

    def handle(self, event: Event) -> None:
        """Takes in one event of any kind; those that people need not see are ignored."""
        match event:
            case Phase():
                self._settle(next_phase=(event.name, self._clock()))
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

    def draw(self, run: Storage, name: str) -> None:
        """Draws the run's curves.png. Raises OSError."""
        from raytrain_ddp.checkpoint.run_folder import CURVES_FILE
        from raytrain_ddp.tools.report.charts import curves, figure_of
        from raytrain_ddp.tools.report.run_files import read_run

        image = io.BytesIO()
        figure_of(curves([read_run(run, name)]), name).savefig(image, format="png")
        run.write_atomic(CURVES_FILE, image.getvalue())

    def summary(self, config: TrainConfig, end: FitResult, flags: str) -> None:
        """Prints the end of a run, in place of the live block; see `Listener`."""
        from raytrain_ddp.tools.display.run_summary import next_steps  # with PyArrow

        self.__exit__()
        of = f"of {end.total_steps}"
        if end.step > end.total_steps:  # it had already gone further
            of = f"({end.total_steps} asked for)"
        color = "yellow" if end.status == "interrupted" else "green"
        reached = f"\n{config.name}: {end.status} at step {end.step} {of}"
        self._print(Text(reached, style=f"bold {color}"), copied=True)
        for name, metrics in (("best", end.best), ("last", end.last)):
            if metrics:
                step = _cell("step", str(int(metrics["step"])))
                self._row(name, step, *_metrics(metrics, end.monitor))
        if end.seconds:
            parts = {k: format_seconds(s) for k, s in end.seconds.items()}
            if any(title.startswith("until") for title in parts):
                parts = {k.replace("training", "training since then"): s for k, s in parts.items()}
            self._row("time", *(_cell(title, shown) for title, shown in parts.items()))
        if limit := split_of(log_records(end.history)).limit():
            self._row("training", Text(limit), copied=not self._live)
        for name, text in next_steps(config, end, flags):
            self._row(name, Text(text))

    def _row(self, name: str, *cells: Text, copied: bool = True) -> None:
        self._print(Text(f"  {name:<17}", style="dim"), *cells, copied=copied)

    def _settle(self, next_phase: tuple[str, float] = ("", 0.0)) -> None:
        """Ends what is open: a phase leaves its duration, a held-back training line is printed."""
        (phase, began), self._phase = self._phase, next_phase
        held_back, self._held_back = self._held_back, False
        if self._live and phase:
            took = format_seconds(self._clock() - began)
            self._print(Text(f"  {phase}  {took}", style="dim"))
        elif not self._live and held_back and self._now and self._now.line:
            self._printed_at = self._clock()
            self._print(*_place(self._now), *self._measured(self._now, self._now.line.loss))

    def _begin(self, plan: Plan) -> None:
        self._settle()
        before, start, total = self._now, plan.start_step, plan.total_steps
        # Whether the seconds of restarted workers begin anew, only their first line will tell.
        self._pace, self._ends_at = Pace(start, total, math.nan if before else 0.0), math.nan
        epoch = min(start // plan.steps_per_epoch, plan.epochs - 1)  # at its very end, too
        self._now = _Now(plan, start, epoch)
        self._split.begin(start)
        if before is None:
            for line in _plan_lines(plan):
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
        if self._phase[0] or line.epoch != self._now.epoch:
            self._settle()  # the last line of an epoch is not held back forever
        # The live block smooths the loss lightly for the eye; what is not finite shows at once.
        loss, before = line.loss, self._smooth_loss
        self._smooth_loss = 0.7 * before + 0.3 * loss if math.isfinite(before + loss) else loss
        self._ends_at = self._clock() + self._pace.left_s(line.step, line.seconds)
        self._split.add(line)
        self._now = _Now(self._now.plan, line.step, line.epoch, line)
        self._held_back = True
        epoch_ends = line.step % self._now.plan.steps_per_epoch == 0
        if epoch_ends or self._clock() - self._printed_at >= PLAIN_LINE_EVERY_S:
            self._settle()
        is_due = self._clock() - self._limit_at >= LIMIT_EVERY_S and self._split.is_settled
        if not self._live and is_due:
            self._limit_at = self._clock()
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
        if event.step == self._now.plan.total_steps:  # half a second, while the workers end
            args = ("matplotlib.backends.backend_agg",)  # what `draw` needs
            threading.Thread(target=import_module, args=args, daemon=True).start()

    def _measured(self, now: _Now, loss: float) -> list[Text]:
        """The figures of the latest training line, and the time left."""
        line, ends_at = now.line, self._ends_at
        if line is None:
            return []
        cells = [
            _cell("loss", format_number(loss)),
            _cell("lr", format_number(line.lr)),
            _cell("", format_count(line.samples_per_s), f" {now.plan.unit}/s"),
        ]
        if self._live:
            cells += [_cell(p, format_share(s)) for p, s in self._split.shares().items()]
            if line.timing.mfu is not None:
                cells.append(_cell("MFU", format_share(line.timing.mfu)))
            cells.append(_cell("memory", format_bytes(line.timing.peak_memory_bytes)))
        else:
            cells += _largest_but_compute(line.timing.split_s)
        for count, label in ((line.skipped, "skipped"), (line.nonfinite, "not finite")):
            if count:
                cells.append(_cell(label, str(count)))
        if math.isfinite(ends_at) and now.step < now.plan.total_steps:
            cells.append(_cell("", format_seconds(max(0.0, ends_at - self._clock())), " left"))
        return cells

    def block(self) -> RenderableType:
        """The live part, drawn several times a second: the open phase, or the training."""
        (phase, began), now = self._phase, self._now  # read once: `handle` may replace them
        if phase:
            waited = format_seconds(self._clock() - began)
            self._spinner.update(text=Text.assemble(f"{phase}  ", (waited, "dim")))
            return self._spinner
        if now is None:
            return Text("")
        cells = [*_place(now), *self._measured(now, self._smooth_loss)]
        cells += [_cell("saved step", self._saved)] if self._saved else []
        for cell in cells:
            cell.no_wrap, cell.overflow = True, "ellipsis"
        width = min(self._screen.console.width, BLOCK_WIDTH)
        column = width // max(1, width // CELL_WIDTH) - 2  # and a gap of 2
        part = min(1.0, now.step / now.plan.total_steps)  # more, if fewer epochs are wanted now
        tail = f"{int(100 * part):3} %  {format_seconds(self._screen.waited_s)}"
        self._bar.update(self._bar.task_ids[0], completed=100 * part, description=tail)
        shown = Group(self._bar, Columns(cells, (0, 2), width=column), self._split.limit())
        return Constrain(shown, width)


def _plan_lines(plan: Plan) -> tuple[str, str]:
    """The batch arithmetic in one line, and what is trained in another."""
    unit, resumed = plan.unit, plan.resumed_from
    return (
        f"{plan.batch_size} = {plan.slots} slots x {plan.micro_batch}, "
        f"on {plural(plan.world_size, 'worker')}; {format_count(plan.train_samples)} {unit}, "
        f"{plural(plan.steps_per_epoch, 'step')} an epoch, {plan.total_steps} in all",
        f"{plan.run}: {plural(plan.epochs, 'epoch')} on {plan.device}, "
        f"{plan.parameters:,} parameters, {format_count(plan.eval_samples)} {unit} to "
        f"evaluate{f'; resumed from {resumed}' if resumed else ''}",
    )


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
