"""Charts over the steps of one or several runs: loss, scalars, metrics, and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from raytrain_ddp.events import Eval, LogRecord, Train
from raytrain_ddp.formatting import (
    FRACTION,
    format_count,
    format_metric,
    format_number,
)
from raytrain_ddp.tools.report.charts import (
    INK,
    SERIES,
    Chart,
    Hover,
    Mark,
    percents,
    plot_line,
    plot_marks,
    smoothed,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from raytrain_ddp.tools.report.charts import Numbers

_MOST_CHARTS, _MOST_DOTS = 8, 60  # of metrics; of a line
_LOG_FROM = 20  # highest loss by lowest


@dataclass(frozen=True)
class RunCurves:
    """The log of a run: its records in the order in which they were written."""

    name: str
    train: Sequence[Train]
    evals: Sequence[Eval]

    @property
    def monitor(self) -> str:
        """The metric that decides which evaluation is the best; "" before the first."""
        return self.evals[-1].monitor if self.evals else ""

    @property
    def best(self) -> Eval | None:
        """The best evaluation, if it has that metric."""
        found = (e for e in reversed(self.evals) if e.best and self.monitor in e.metrics)
        return next(found, None)

    @property
    def best_summary(self) -> str:
        """``top1 97.50 % at step 184``; "" without an evaluation."""
        if self.best is None:
            return ""
        metric = format_metric(self.monitor, self.best.metrics[self.monitor])
        return f"{self.monitor} {metric} at step {format_count(self.best.step)}"

    @property
    def last_step(self) -> int:
        steps = [record.step for record in self.train[-1:]]
        return max([*steps, *(record.step for record in self.evals[-1:])], default=0)


Curve = Callable[[RunCurves], "tuple[Numbers, Numbers]"]  # steps, values


def draw_curves(records: Sequence[LogRecord], path_or_file: str | IO[bytes], title: str) -> None:
    """Writes a PNG, 1200 pixels wide, of `figure_of`."""
    figure_of(records, title).savefig(path_or_file, format="png", dpi=120)


def load_matplotlib() -> None:
    """Imports what `figure_of` needs: half a second, while its caller waits for others."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.style  # noqa: F401


def figure_of(records: Sequence[LogRecord], title: str) -> Figure:
    """The charts of a run over its steps, as a figure. Zero or one records work, too."""
    train = [record for record in records if isinstance(record, Train)]
    run = RunCurves(title, train, [record for record in records if isinstance(record, Eval)])
    return stacked(curves([run]), title)


def curves(runs: Sequence[RunCurves], marks: Sequence[Mark] = ()) -> list[Chart]:
    """The loss, the scalars and metrics, and the learning rate, as far as there are any.

    Args:
        marks: at steps of a single run.
    """
    alone = len(runs) == 1
    scalars = dict.fromkeys(n for run in runs for r in run.train for n in r.scalars)
    metrics = dict.fromkeys(n for run in runs for r in run.evals for n in r.metrics)
    names = [n for n in metrics if n not in (("skipped", "loss") if alone else ("skipped",))]
    names = sorted(names, key=lambda n: n != runs[0].monitor)[:_MOST_CHARTS]
    shares = [name for name in names if alone and FRACTION.search(name)]
    charts = [_loss(runs, marks)] if any(run.train for run in runs) or "loss" in metrics else []
    for name in [*scalars][:_MOST_CHARTS]:
        charts.append(_chart(f"{name} (training)", runs, {name: _scalar(name)}))
    if shares:
        charts.append(_chart("Accuracy (evaluation)", runs, {n: _tested(n) for n in shares}, marks))
    for name in names:
        if name not in shares:
            charts.append(_chart(f"{name} (evaluation)", runs, {name: _tested(name)}, marks))
    if any(run.train for run in runs):
        rate = _chart("Learning rate", runs, {"learning rate": _trained(lambda r: r.lr)})
        charts.append(rate._replace(height=1.6))
    return charts


def look_of(number: int) -> dict[str, Any]:
    """How the lines of a run look: beyond the colors, they are dashed."""
    dashes = "--" if number >= SERIES else "-"
    return {"color": INK[f"c{number % SERIES}"], "gid": f"run{number}", "linestyle": dashes}


def _chart(
    title: str,
    runs: Sequence[RunCurves],
    shown: Mapping[str, Curve],
    marks: Sequence[Mark] = (),
    starred: str = "",
) -> Chart:
    """Several curves of one run, or one of several.

    Args:
        starred: the metric of a curve, of which the best is marked. Default: each curve's name.
    """

    def paint(axes: Axes) -> Sequence[Hover]:
        from matplotlib.ticker import MaxNLocator

        epochs = {r.step: f", epoch {r.epoch}" for run in runs for r in run.train}
        axes.set_xlim(0, 1.01 * max(1, *(run.last_step for run in runs)))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("step")
        axes.fmt_xdata = lambda x: f"step {x:g}{epochs.get(int(x), '')}"
        axes.fmt_ydata = format_number
        if all(FRACTION.search(name) for name in shown):
            percents(axes)
        for number, run in enumerate(runs):
            for place, (name, curve) in enumerate(shown.items()):
                look = look_of(place if len(runs) == 1 else number)
                label = name if len(runs) == 1 else run.name
                plot_line(axes, *curve(run), label, _MOST_DOTS, **look)
        best = runs[0].best if len(runs) == 1 else None
        if best and runs[0].monitor in ([starred] if starred else shown):
            star: dict[str, Any] = {
                "ms": 12,
                "c": "#f2b400",
                "mec": "#5c4500",
                "mew": 0.7,
                "zorder": 5,
            }
            value = best.metrics[runs[0].monitor]
            axes.plot([best.step], [value], "*", label=f"best: step {best.step}", **star)
        return plot_marks(axes, marks)

    return Chart(title, paint)


def _loss(runs: Sequence[RunCurves], marks: Sequence[Mark]) -> Chart:
    """Smoothed; of a single run also each record, and the evaluations."""
    raw, alone = _trained(lambda r: r.loss), len(runs) == 1

    def smooth(run: RunCurves) -> tuple[Numbers, Numbers]:
        steps, losses = raw(run)
        return steps, smoothed(losses, len(losses) // 40 + 1)

    shown = {"training, smoothed": smooth} | ({"evaluation": _tested("loss")} if alone else {})
    chart = _chart("Loss" if alone else "Loss, smoothed", runs, shown, marks, "loss")

    def paint(axes: Axes) -> Sequence[Hover]:
        hovers = chart.paint(axes)
        seen = np.concatenate([curve(run)[1] for run in runs for curve in shown.values()])
        seen = seen[np.isfinite(seen)]
        if seen.size:  # single outliers may leave the axes
            low, high = seen.min(), seen.max()
            pad = 0.06 * (high - low) or 0.1
            axes.set_ylim(low - pad, high + pad)
            if 0 < _LOG_FROM * low < high:
                axes.set(yscale="log", ylim=(low / 1.5, high * 1.3))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
        if alone:
            steps, losses = raw(runs[0])
            axes.plot(steps, losses, color=INK["c0"], lw=0.8, alpha=0.4)
            lost = steps[np.isnan(losses)]
            foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": INK["bad"]}
            if lost.size:
                axes.plot(lost, 0 * lost + 0.04, "x", label=f"not finite ({lost.size})", **foot)
        return hovers

    return chart._replace(paint=paint)


def _trained(value: Callable[[Train], float | None]) -> Curve:
    return lambda run: _series(run.train, value)


def _scalar(name: str) -> Curve:
    return _trained(lambda record: record.scalars.get(name))


def _tested(name: str) -> Curve:
    return lambda run: _series(
        [e for e in run.evals if name in e.metrics], lambda e: e.metrics[name]
    )


def _series(
    records: Sequence[Any], value: Callable[[Any], float | None]
) -> tuple[Numbers, Numbers]:
    """(steps, values); nan where there is none, or it is not finite."""
    found = np.array([value(record) for record in records], dtype=float)
    steps = np.array([record.step for record in records], dtype=float)
    return steps, np.where(np.isfinite(found), found, math.nan)
