"""Panels over the steps: loss, metrics and learning rate, of one or several runs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from raytrain_ddp.events import Eval, Train
from raytrain_ddp.formatting import (
    FRACTION,
    format_count,
    format_metric,
    format_number,
)
from raytrain_ddp.tools.display.axes import (
    MOST_POINTS,
    Line,
    Mark,
    Panel,
    Point,
    Scale,
    linear_scale,
    log_scale,
    sampled,
    smoothed,
    thinned,
    tick_percent,
)

COLORS = 8
_DOTS_UP_TO = 60
_MOST_METRICS = 8

Format = Callable[[float], str]
Series = tuple[str, Sequence[Point], Format]  # what a hover shows of a line


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
        """The best evaluation."""
        return next((record for record in reversed(self.evals) if record.best), None)

    @property
    def best_summary(self) -> str:
        """``top1 97.50 % at step 184``; "" without an evaluation."""
        value = self.best.metrics.get(self.monitor) if self.best else None
        if self.best is None or value is None:
            return ""
        metric = format_metric(self.monitor, value)
        return f"{self.monitor} {metric} at step {format_count(self.best.step)}"

    @property
    def last_step(self) -> int:
        last: list[Train | Eval] = [*self.train[-1:], *self.evals[-1:]]
        return max((record.step for record in last), default=0)


def color(number: int) -> str:
    return f"c{number % COLORS}" + (" dashed" if number >= COLORS else "")


def curve_panels(runs: Sequence[RunCurves], marks: Sequence[Mark] = ()) -> list[Panel]:
    """The loss, one or more panels of metrics, and the learning rate, as far as there are any.

    Args:
        marks: at steps of a single run.
    """
    last = max(1, *(run.last_step for run in runs))
    x = linear_scale(0, last, ticks=6, whole=True, snap=False)
    curves = [*_scalars(runs, x), *_metrics(runs, x, marks)]
    rate = _over_steps(runs, x, "Learning rate", lambda r: r.lr, floor=0.0)
    panels = [_loss(runs, x, marks), *curves, rate]
    return [panel for panel in panels if panel is not None]


def hovers(
    series: Sequence[Series], name: Callable[[float], str], most: int = 300
) -> list[tuple[float, str]]:
    """(x, text) pairs: the values of all lines at x, or their last ones before it."""
    places = sorted({x for _, points, _ in series for x, _ in points})
    places = places[:: -(-len(places) // most) or 1]
    texts = []
    ends = [[x for x, _ in points] for _, points, _ in series]
    for x in places:
        parts = [name(x)]
        for (label, points, describe), xs in zip(series, ends, strict=True):
            at = bisect.bisect_right(xs, x) - 1
            if at >= 0 and (at + 1 < len(xs) or xs[at] == x):
                parts.append(f"{label} {describe(points[at][1])}".strip())
        texts.append((x, "\n".join(parts)))
    return texts


def _step_name(runs: Sequence[RunCurves]) -> Callable[[float], str]:
    epochs = {steps_per_epoch([*run.train, *run.evals]) for run in runs}
    steps = epochs.pop() if len(epochs) == 1 else None
    if steps is None:
        return lambda step: f"step {step:g}"
    return lambda step: f"step {step:g}, epoch {step / steps:.3g}"


def _loss(runs: Sequence[RunCurves], x: Scale, marks: Sequence[Mark]) -> Panel | None:
    alone = len(runs) == 1
    lines: list[Line] = []
    series: list[Series] = []
    seen: list[float] = []
    lost: list[float] = []
    count = 0
    for number, run in enumerate(runs):
        train, css = run.train, color(number)
        steps = [float(r.step) for r in train]
        losses = [_finite(r.loss) for r in train]
        smooth = list(zip(steps, smoothed(losses, len(losses) // 40 + 1), strict=True))
        tested = [p for p in _evaluated(run, "loss") if math.isfinite(p[1])]
        count = max(count, len(train))
        seen += [y for _, y in (*smooth, *(tested if alone else ())) if math.isfinite(y)]
        lost += [step for step, loss in zip(steps, losses, strict=True) if math.isnan(loss)]
        raw, line = thinned(list(zip(steps, losses, strict=True))), sampled(smooth)
        if alone:
            lines.append(Line("", f"raw {css}", [raw]))
            lines.append(Line("training, smoothed", css, [line]))
            lines.append(_dotted("evaluation", color(1), tested))
            series += [("training", raw, format_number), ("smoothed", line, format_number)]
            series.append(("evaluation", tested, format_number))
        else:
            lines.append(Line(run.name, css, [line]))
            series.append((run.name, line, format_number))
    if not seen and not lost:
        return None
    is_log = bool(seen) and min(seen) > 0 and max(seen) > 20 * min(seen)
    y = log_scale(min(seen) / 1.5, max(seen) * 1.3) if is_log else _room(seen)
    if lost:
        foot = y.low * (y.high / y.low) ** 0.03 if y.log else y.low + 0.03 * (y.high - y.low)
        places = sampled([(step, foot) for step in lost], 200)
        lines.append(Line(f"not finite ({len(lost)})", "dots bad", [places]))
    return Panel(
        title="Loss" + (" (logarithmic)" if is_log else "") + ("" if alone else ", smoothed"),
        x=x,
        y=y,
        x_name="step",
        lines=[line for line in lines if any(line.pieces)],
        marks=marks,
        hovers=hovers(series, _step_name(runs)),
        note=thinned_note(count),
        height="high",
        stars=_stars(runs, "loss"),
    )


def _metrics(runs: Sequence[RunCurves], x: Scale, marks: Sequence[Mark]) -> list[Panel]:
    names = list(dict.fromkeys(n for run in runs for r in run.evals for n in r.metrics))
    first = runs[0].monitor
    hidden = ("skipped", "loss") if len(runs) == 1 else ("skipped",)  # the loss has a panel
    names = sorted((n for n in names if n not in hidden), key=lambda n: n != first)
    names = names[:_MOST_METRICS]
    fractions = [name for name in names if _is_fraction(name, runs)]
    groups = [fractions] if len(runs) == 1 and fractions else [[name] for name in fractions]
    groups += [[name] for name in names if name not in fractions]
    return [_metric(runs, group, x, group[0] in fractions, marks) for group in groups]


def _metric(
    runs: Sequence[RunCurves],
    names: Sequence[str],
    x: Scale,
    is_fraction: bool,
    marks: Sequence[Mark],
) -> Panel:
    alone = len(runs) == 1
    lines: list[Line] = []
    series: list[Series] = []
    for number, run in enumerate(runs):
        for place, name in enumerate(names):
            points = [p for p in _evaluated(run, name) if math.isfinite(p[1])]
            label = name if alone else run.name
            lines.append(_dotted(label, color(2 + place if alone else number), points))
            series.append((label, points, partial(format_metric, name)))
    values = [y for line in lines for piece in line.pieces for _, y in piece]
    y = _room(values, tick_percent if is_fraction else None, floor=is_fraction)
    title = "Accuracy" if is_fraction and alone else names[0]
    return Panel(
        title=f"{title} (evaluation)",
        x=x,
        y=y,
        x_name="step",
        lines=lines,
        marks=marks,
        hovers=hovers(series, _step_name(runs)),
        stars=_stars(runs, *names),
    )


def _scalars(runs: Sequence[RunCurves], x: Scale) -> list[Panel | None]:
    """What tasks log with the loss."""
    names = list(dict.fromkeys(n for run in runs for r in run.train for n in r.scalars))
    values = [partial(lambda name, r: r.scalars.get(name), name) for name in names[:_MOST_METRICS]]
    pairs = zip(names, values, strict=False)
    return [_over_steps(runs, x, f"{name} (training)", value) for name, value in pairs]


def _over_steps(
    runs: Sequence[RunCurves],
    x: Scale,
    title: str,
    value: Callable[[Train], float | None],
    floor: float | None = None,
) -> Panel | None:
    lines, series = [], []
    for number, run in enumerate(runs):
        points = [(float(r.step), _finite(value(r))) for r in run.train]
        line = sampled(points)
        label = "" if len(runs) == 1 else run.name
        lines.append(Line(label, color(number), [line]))
        series.append((label or title.lower(), line, format_number))
    known = [y for line in lines for _, y in line.pieces[0] if math.isfinite(y)]
    if not known:
        return None
    return Panel(
        title=title,
        x=x,
        y=_room(known) if floor is None else linear_scale(floor, max(known) or 1.0, ticks=4),
        x_name="step",
        lines=lines,
        hovers=hovers(series, _step_name(runs)),
        height="low",
    )


def thinned_note(count: int) -> str:
    """A note for a picture that does not show all records."""
    if count <= MOST_POINTS:
        return ""
    return f"thinned: {count:,} records; lowest and highest of each stretch are kept"


def _dotted(label: str, css: str, points: Sequence[Point]) -> Line:
    """With dots, if there are few enough points."""
    few = len(points) <= _DOTS_UP_TO
    return Line(label, f"dotted {css}" if few else css, [thinned(points)])


def _evaluated(run: RunCurves, name: str) -> list[Point]:
    return [(float(r.step), _finite(r.metrics[name])) for r in run.evals if name in r.metrics]


def _stars(runs: Sequence[RunCurves], *names: str) -> list[tuple[float, float, str]]:
    """The best evaluations, in a panel that shows the metric they were chosen by."""
    stars = []
    for run in runs:
        best, monitor = run.best, run.monitor
        value = _finite(best.metrics.get(monitor)) if best else math.nan
        if best and monitor in names and math.isfinite(value):
            whose = "" if len(runs) == 1 else f"{run.name}: "
            stars.append((float(best.step), value, f"{whose}best {run.best_summary}"))
    return stars


def _room(values: Iterable[float], name: Format | None = None, floor: bool = False) -> Scale:
    """A scale that contains all values; fractions end at 1."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return linear_scale(0.0, 1.0, name)
    low, high = min(known), max(known)
    if not floor and 0 < low < 0.5 * high:
        low = 0.0
    if floor and high <= 1:
        scale = linear_scale(low, min(1.0, high + 0.05 * (high - low)), name)
        ticks = [tick for tick in scale.ticks if tick[0] <= 1 + 1e-9]
        return Scale(scale.low, min(1.0, scale.high), ticks)
    return linear_scale(low, high, name)


def _is_fraction(name: str, runs: Sequence[RunCurves]) -> bool:
    values = [y for run in runs for _, y in _evaluated(run, name) if math.isfinite(y)]
    return FRACTION.search(name) is not None and all(0 <= value <= 1 for value in values)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def steps_per_epoch(records: Sequence[Train | Eval]) -> int | None:
    """The number of steps in an epoch, if the records determine it to within 2 %."""
    low, high = 1, math.inf
    for record in records:
        low = max(low, math.ceil(record.step / (record.epoch + 1)))
        if record.epoch > 0:
            high = min(high, record.step / record.epoch)
    # The smallest is exact if an epoch's last step is recorded; usually its evaluation is.
    return low if low <= high <= low * 1.02 + 1 else None
