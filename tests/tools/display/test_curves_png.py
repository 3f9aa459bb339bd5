"""The curves: a PNG for any run, and the values computed for it; readability needs human eyes."""

import io
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_records import event
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from raytrain_ddp.tools.display import curves, curves_png
from raytrain_ddp.tools.display.axes import smoothed


def draw_curves(records: list[dict[str, Any]], *given: Any) -> None:
    curves_png.draw_curves([event(each) for each in records], *given)


def steps_per_epoch(records: list[dict[str, Any]]) -> int | None:
    return curves.steps_per_epoch([event({"kind": "train", **each}) for each in records])


def run(
    total: int, per_epoch: int, log_every: int = 5, monitor: str = "top1"
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, total + 1):
        known = {"step": step, "epoch": (step - 1) // per_epoch, "seconds": 1.0}
        if step % log_every == 0:
            loss, lr = 2.3 * math.exp(-8 * step / total) + 0.01, 0.1 * (1 - step / total)
            records.append({"kind": "train", "loss": loss, "lr": lr, **known})
        if step % per_epoch == 0:
            top1 = 0.98 - abs(step - 0.7 * total) / total  # the best is not the last
            best = step <= 0.7 * total
            metrics = {"loss": 1.5 - top1, "top1": top1, "top5": 1.0}
            fields = {"metrics": metrics, "best": best, "monitor": monitor}
            records.append({"kind": "eval", **known, **fields})
    return records


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The saved figures, for inspection."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        savefig(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def points(line: Line2D) -> tuple[list[float], list[float]]:
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


@pytest.mark.parametrize(
    ("count", "height"), [(0, 1080), (1, 648), (2, 648), (5, 1080), (66, 1080)]
)
def test_any_number_of_records_gives_an_image(count: int, height: int) -> None:
    out = io.BytesIO()
    draw_curves(run(276, 23)[:count], out, "digits")
    png = out.getvalue()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1200, height)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_records_of_a_single_kind_can_be_drawn(kind: str, drawn: list[Figure]) -> None:
    draw_curves([r for r in run(276, 23) if r["kind"] == kind], io.BytesIO(), "digits")
    loss, other = drawn[0].axes
    assert titles(drawn[0])[1] == ("Learning rate" if kind == "train" else "Accuracy (evaluation)")
    assert labels(loss) == (["training, smoothed"] if kind == "train" else ["evaluation"])
    assert other.get_xlabel() == "step"


def test_an_image_is_written_to_a_path_and_other_records_are_ignored(tmp_path: Path) -> None:
    records = [{"kind": "plan", "total_steps": 276}, *run(276, 23)]
    draw_curves(records, tmp_path / "curves.png", "digits")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_panels_show_the_records(drawn: list[Figure]) -> None:
    records = run(276, 23)
    draw_curves(records, io.BytesIO(), "my run")
    loss, metrics, rate = drawn[0].axes
    assert drawn[0].get_suptitle() == "my run"
    train = [r for r in records if r["kind"] == "train"]
    assert points(loss.lines[0])[1] == [r["loss"] for r in train]
    assert points(rate.lines[0])[1] == [r["lr"] for r in train]
    assert labels(loss) == ["training, smoothed", "evaluation"]
    assert labels(metrics) == ["top1", "top5"]
    assert loss.get_yscale() == "log"  # from 2.3 to 0.01
    assert "80 %" in [label.get_text() for label in metrics.get_yticklabels()]


def test_the_best_point_is_the_last_new_best(drawn: list[Figure]) -> None:
    draw_curves(run(276, 23), io.BytesIO(), "digits")
    loss, metrics, _ = drawn[0].axes
    assert metrics.get_title(loc="right") == "best top1 94.67 % at step 184"
    star = next(line for line in metrics.lines if line.get_marker() == "*")
    assert points(star)[0] == [184]
    assert points(star)[1] == pytest.approx([0.9467], abs=1e-4)
    assert loss.get_title(loc="right") == ""


def test_a_monitored_loss_is_marked_on_the_loss(drawn: list[Figure]) -> None:
    draw_curves(run(276, 23, monitor="loss"), io.BytesIO(), "digits")
    loss, metrics, _ = drawn[0].axes
    assert loss.get_title(loc="right") == "best loss 0.5533 at step 184"
    assert metrics.get_title(loc="right") == ""


def test_a_metric_that_is_not_a_fraction_has_its_own_panel(drawn: list[Figure]) -> None:
    records = [
        r | {"metrics": {"top1": r["metrics"]["top1"], "rmse": 40.0}}
        for r in run(276, 23)
        if r["kind"] == "eval"
    ]
    draw_curves(records, io.BytesIO(), "both")
    assert titles(drawn[0]) == ["Accuracy (evaluation)", "rmse (evaluation)"]
    fraction, error = drawn[0].axes
    assert fraction.get_ylim()[1] <= 1
    assert error.get_ylim()[0] < 40.0 < error.get_ylim()[1]


def test_unusual_names_and_values_are_drawn(drawn: list[Figure]) -> None:
    records = [
        r | {"metrics": {"$_$error": r["step"], "{a}_\\b": 1e308, "tiny": 5e-324}}
        if r["kind"] == "eval"
        else r | {"loss": 10.0 ** (308 - r["step"])}
        for r in run(276, 23)
    ]
    draw_curves([*records, records[-2] | {"loss": 1.7e308}], io.BytesIO(), "$^$")
    assert "$_$error (evaluation)" in titles(drawn[0])


def test_a_diverged_run_is_drawn_and_its_steps_are_marked(drawn: list[Figure]) -> None:
    broken = [
        r | {"loss": math.inf if r["step"] % 2 else math.nan}
        if r["kind"] == "train" and r["step"] > 260
        else r
        for r in run(276, 23)
    ]
    draw_curves(broken, io.BytesIO(), "diverged")
    loss = drawn[0].axes[0]
    crosses = next(line for line in loss.lines if line.get_label() == "not finite (3)")
    assert points(crosses)[0] == [265, 270, 275]


def test_the_epoch_axis_is_drawn_if_epochs_are_known(drawn: list[Figure]) -> None:
    draw_curves(run(276, 23), io.BytesIO(), "digits")
    draw_curves(run(20, 23), io.BytesIO(), "first epoch")
    first, second = (figure.axes[-1].child_axes for figure in drawn)
    assert [axes.get_xlabel() for axes in first] == ["epoch"]
    assert first[0].get_xlim() == pytest.approx((0, 12 * 1.02))
    assert second == []


def test_steps_per_epoch_are_computed_from_the_records() -> None:
    assert steps_per_epoch(run(276, 23)) == 23
    assert steps_per_epoch([r for r in run(276, 23, 1) if r["kind"] == "train"]) == 23
    assert steps_per_epoch(run(20, 23)) is None  # within the first epoch
    assert steps_per_epoch([]) is None
    assert steps_per_epoch([{"step": 100, "epoch": 0}, {"step": 110, "epoch": 5}]) is None
    assert (
        steps_per_epoch([{"step": 100, "epoch": 0}, {"step": 190, "epoch": 1}]) is None
    )  # imprecise


def test_smoothing_preserves_constants_and_lines_and_reduces_noise() -> None:
    assert smoothed([2.0] * 9, 3) == [2.0] * 9
    assert smoothed([0.0, 1.0, 2.0, 3.0, 4.0], 1)[1:-1] == [1.0, 2.0, 3.0]
    noisy = smoothed([0.0, 1.0] * 50, 8)
    assert max(noisy[8:-8]) - min(noisy[8:-8]) < 0.1
    assert 0.2 < noisy[0] < 0.8  # also at the ends
    assert 0.2 < noisy[-1] < 0.8
    assert smoothed([], 3) == []


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    values = smoothed([1.0, math.nan, 3.0, math.inf, 5.0], 1)
    assert [values[0], values[2], values[4]] == [1.0, 3.0, 5.0]
    assert math.isnan(values[1])
    assert math.isnan(values[3])


def test_matplotlib_is_imported_lazily_and_pyplot_never() -> None:
    script = (
        "import io, sys, raytrain_ddp.tools.display.curves_png as curves\n"
        "assert not {'matplotlib', 'torch', 'ray'} & {*sys.modules}\n"
        "curves.draw_curves([], io.BytesIO(), '')\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_users_matplotlib_settings_are_ignored_and_unchanged() -> None:
    import matplotlib

    plain, styled = io.BytesIO(), io.BytesIO()
    draw_curves(run(276, 23), plain, "digits")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.facecolor": "black"}):
        draw_curves(run(276, 23), styled, "digits")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert plain.getvalue() == styled.getvalue()
