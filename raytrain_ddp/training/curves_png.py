"""Draws a run's loss, evaluation metrics and learning rate over the steps, as a PNG."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.events import Eval, LogRecord, Train

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SIZE_INCHES, DPI = (10.0, 9.0), 120
BLUE, ORANGE, RED, GREY = "#2a6fb0", "#d9650f", "#c00000", "#666666"
METRIC_COLORS = ("#1b7f5c", "#8a5fb5", "#b0457b", "#7a6a1f")
STYLE: dict[str, Any] = {
    "font.size": 10.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "grid.color": "#e4e4e4",
    "legend.edgecolor": "none",
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw_curves(
    records: Sequence[LogRecord], path_or_file: str | os.PathLike[str] | IO[bytes], title: str
) -> None:
    """Writes a PNG of three panels, 1200 pixels wide, from records of kind "train" and "eval".

    Needs no display and leaves no global state (no pyplot). Zero or one records work, too.
    """
    import matplotlib.style  # takes half a second; needed only at the end of a run
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    train = [record for record in records if isinstance(record, Train)]
    evals = [record for record in records if isinstance(record, Eval)]
    with matplotlib.style.context(["default", STYLE]):  # overrides the user's matplotlibrc
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        loss, metrics, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.5))
        _draw_loss(loss, train, evals)
        _draw_metrics(metrics, evals)
        _draw_rate(rate, train)
        _mark_best((loss, metrics, rate), evals)
        rate.set_xlabel("step")
        shown: list[Train | Eval] = [*train, *evals]
        last = max((record.step for record in shown), default=1)
        rate.set_xlim(0, max(1, last) * 1.02)
        rate.xaxis.set_major_locator(MaxNLocator(integer=True))
        steps = steps_per_epoch(shown)
        if steps is not None:
            epochs = rate.secondary_xaxis(
                -0.38, functions=(lambda step: step / steps, lambda epoch: epoch * steps)
            )
            epochs.set_xlabel("epoch")
            epochs.xaxis.set_major_locator(MaxNLocator(integer=last >= 2 * steps))
        figure.savefig(path_or_file, format="png")


def smoothed(values: Sequence[float], half_width: int) -> list[float]:
    """The mean of each value and its ``half_width`` neighbors on both sides; nan stays nan.

    The window shrinks toward both ends, to a quarter: a wide one would lag behind a steep start.
    """
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if math.isfinite(value) else 0.0))
        counts.append(counts[-1] + math.isfinite(value))
    means = []
    for index in range(len(values)):
        room = min(index, len(values) - 1 - index)
        reach = min(half_width, max(room, math.ceil(half_width / 4)))
        low, high = max(0, index - reach), min(len(values), index + reach + 1)
        count = counts[high] - counts[low]
        known = math.isfinite(values[index])
        means.append((sums[high] - sums[low]) / count if known else math.nan)
    return means


def steps_per_epoch(records: Sequence[Train | Eval]) -> int | None:
    """The number of steps in an epoch, if the records determine it to within 2 %."""
    low, high = 1, math.inf
    for record in records:
        low = max(low, math.ceil(record.step / (record.epoch + 1)))
        if record.epoch > 0:
            high = min(high, record.step / record.epoch)
    # The smallest is exact if an epoch's last step is recorded; usually its evaluation is.
    return low if low <= high <= low * 1.02 + 1 else None


def _draw_loss(axes: Axes, train: Sequence[Train], evals: Sequence[Eval]) -> None:
    axes.set_title("loss")
    steps, values = [r.step for r in train], [_finite(r.loss) for r in train]
    smooth = smoothed(values, len(values) // 40 + 1)
    axes.plot(steps, values, color=BLUE, lw=0.8, alpha=0.35)
    few = "o" * (len(steps) < 3)  # a line through one point cannot be seen
    axes.plot(steps, smooth, marker=few, color=BLUE, lw=2, label="training, smoothed")
    tested = [(r.step, _finite(r.metrics["loss"])) for r in evals if "loss" in r.metrics]
    if tested:
        at, losses = zip(*tested, strict=True)
        axes.plot(at, losses, color=ORANGE, marker=_marker(at), ms=4.5, label="evaluation")
    lost = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
    if lost:
        edge = axes.get_xaxis_transform()  # x in steps, y from the bottom of the panel
        axes.plot(lost, [0.03] * len(lost), "x", color=RED, transform=edge, label="not finite")
    seen = [value for value in (*smooth, *(v for _, v in tested)) if math.isfinite(value)]
    if seen and min(seen) > 0 and max(seen) > 20 * min(seen):
        axes.set_title("loss (logarithmic)")
        axes.set_yscale("log")
        axes.set_ylim(min(seen) / 2, max(seen) * 1.5)  # single outliers may be cut off
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend_or_note(axes, "" if steps or tested else "no training steps yet")


def _draw_metrics(axes: Axes, evals: Sequence[Eval]) -> None:
    names = list(dict.fromkeys(name for r in evals for name in r.metrics if name != "loss"))
    percent = [name for name in names if _is_fraction(name, evals)]
    others = [name for name in names if name not in percent]
    axes.set_title(" and ".join(["accuracy"] * bool(percent) + others[:3]) or "evaluation metrics")
    right = axes
    if percent and others:
        right = axes.twinx()
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
        axes.set_zorder(right.get_zorder() + 1)  # the legend and the star are on `axes`
        axes.patch.set_visible(False)
    for name, color in zip(names, METRIC_COLORS * len(names), strict=False):
        points = [(r.step, _finite(r.metrics[name])) for r in evals if name in r.metrics]
        at, values = zip(*points, strict=True)
        on = axes if name in percent else right
        on.plot(at, values, color=color, marker=_marker(at), ms=4.5, lw=1.6)
        label = name if on is axes else f"{name} (right)"
        axes.plot([], [], color=color, marker=_marker(at), ms=4.5, lw=1.6, label=label)
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    _legend_or_note(axes, "" if names else "no evaluation yet" if not evals else "the loss alone")


def _draw_rate(axes: Axes, train: Sequence[Train]) -> None:
    axes.set_title("learning rate")
    steps = [r.step for r in train]
    axes.plot(steps, [r.lr for r in train], marker="o" * (len(train) < 3), color=GREY, lw=1.6)
    axes.set_ylim(bottom=0)
    if not train:
        axes.set_yticks([])


def _mark_best(panels: Sequence[Axes], evals: Sequence[Eval]) -> None:
    best = next((record for record in reversed(evals) if record.best), None)
    if best is None:
        return
    for axes in panels:
        axes.axvline(best.step, color=GREY, lw=0.9, ls=(0, (2, 3)), zorder=0)
    name = best.monitor
    value = _finite(best.metrics.get(name))
    if math.isnan(value):
        return
    axes = panels[0] if name == "loss" else panels[1]
    shown = f"{100 * value:.4g} %" if _is_fraction(name, evals) else f"{value:.4g}"
    axes.plot(best.step, value, "*", ms=15, color="#f2b400", mec="#5c4500", mew=0.8, zorder=5)
    axes.set_title(
        f"best {name} {shown}, step {best.step}", loc="right", color=GREY, weight="normal"
    )


def _legend_or_note(axes: Axes, note: str) -> None:
    if note:
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", color=GREY)
        axes.set_yticks([])
    else:
        axes.legend()


def _marker(points: Sequence[object]) -> str:
    """Dots, if there are few enough points."""
    return "o" if len(points) <= 60 else ""


def _is_fraction(name: str, evals: Sequence[Eval]) -> bool:
    """Whether this is a top-k accuracy or another fraction in [0, 1], shown as percent."""
    values = [_finite(r.metrics[name]) for r in evals if name in r.metrics]
    named = re.search(r"(^|[/_.])(top\d+|acc(uracy)?)$", name) is not None
    return named and all(0 <= value <= 1 for value in values if not math.isnan(value))


def _finite(value: float | None) -> float:
    """The value, or nan if there is none."""
    return value if value is not None and math.isfinite(value) else math.nan
