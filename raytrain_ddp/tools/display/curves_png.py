"""Draws the curves of a run as a PNG, with matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from raytrain_ddp.events import Eval, LogRecord, Train
from raytrain_ddp.tools.display.axes import Panel
from raytrain_ddp.tools.display.curves import RunCurves, curve_panels, steps_per_epoch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH_INCHES, DPI = 10.0, 120
HEIGHT_INCHES = {"low": 1.8}  # of a panel; default 3.6
GREY = "#666666"
# c0 to c7 of the light theme in report/style.css
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3588a", "#c98600", "#3ba3dd", "#7a6ad8", "#6b7280")
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
    "text.parse_math": False,  # names of metrics may contain $
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw_curves(
    records: Sequence[LogRecord], path_or_file: str | os.PathLike[str] | IO[bytes], title: str
) -> None:
    """Writes a PNG, 1200 pixels wide, of `figure_of`."""
    figure_of(records, title).savefig(path_or_file, format="png", dpi=DPI)


def load_matplotlib() -> None:
    """Imports what `figure_of` needs: half a second, while its caller waits for others."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.style  # noqa: F401


def figure_of(records: Sequence[LogRecord], title: str) -> Figure:
    """The panels that the report shows over the steps. A notebook displays it.

    Needs no display and leaves no global state (no pyplot). Zero or one records work, too.
    """
    import matplotlib.style  # see `load_matplotlib`
    from matplotlib import figure as figures
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.ticker import MaxNLocator

    class Curves(figures.Figure):
        def _repr_png_(self) -> bytes:  # for notebooks without pyplot
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    train = [record for record in records if isinstance(record, Train)]
    run = RunCurves(title, train, [record for record in records if isinstance(record, Eval)])
    panels = curve_panels([run])
    heights = [HEIGHT_INCHES.get(panel.height, 3.6) for panel in panels] or [9.0]
    with matplotlib.style.context(["default", STYLE]):  # overrides the user's matplotlibrc
        figure = Curves(figsize=(WIDTH_INCHES, sum(heights)), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        if not panels:
            figure.text(0.5, 0.5, "no training steps yet", ha="center", color=GREY)
            return figure
        grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _draw(axes, panel)
            for x, _, _ in (star for each in panels for star in each.stars[:1]):
                axes.axvline(x, color=GREY, lw=0.9, ls=(0, (2, 3)), zorder=0)
        axes.set_xlabel(panel.x_name)
        axes.set_xlim(0, 1.02 * panel.x.high)
        steps = steps_per_epoch([*run.train, *run.evals])
        if steps is not None:
            epochs = axes.secondary_xaxis(
                -0.68 / heights[-1],
                functions=(lambda step: step / steps, lambda epoch: epoch * steps),
            )
            epochs.set_xlabel("epoch")
            epochs.xaxis.set_major_locator(MaxNLocator(integer=run.last_step >= 2 * steps))
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_yscale("log" if panel.y.log else "linear")
    axes.set_ylim(panel.y.low, panel.y.high)  # single outliers may be cut off
    axes.set_yticks([value for value, _ in panel.y.ticks], [name for _, name in panel.y.ticks])
    axes.set_yticks([], minor=True)
    axes.set_xticks([value for value, _ in panel.x.ticks], [name for _, name in panel.x.ticks])
    for line in panel.lines:
        css = line.css.split()
        color = next((COLORS[int(name[1])] for name in css if name[1:].isdigit()), "#d00000")
        width, alpha = (0.8, 0.35) if "raw" in css else (1.8, 1.0)
        for piece in line.pieces:
            few = "dotted" in css or len(piece) < 3  # a line through one point cannot be seen
            axes.plot(
                [x for x, _ in piece],
                [y for _, y in piece],
                ls="" if "dots" in css else "-",
                lw=width,
                marker="x" if "dots" in css else "o" * few,
                ms=4.5,
                color=color,
                alpha=alpha,
                label=line.label,
            )
    for x, y, text in panel.stars:
        axes.plot(x, y, "*", ms=15, c="#f2b400", mec="#5c4500", mew=0.8, zorder=5, clip_on=False)
        axes.set_title(text, loc="right", color=GREY, weight="normal")
    if any(line.label for line in panel.lines):
        axes.legend()
