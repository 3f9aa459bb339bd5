"""The charts of a run: a PNG for any log, and what it shows; readability needs human eyes."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from event_records import event
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrain_ddp.events import Eval, Train
from raytrain_ddp.tools.report.charts import Chart, Line, curves, drawn, figure_of, smoothed
from raytrain_ddp.tools.report.run_files import Run


def records(total: int = 276, per_epoch: int = 23, monitor: str = "top1") -> list[Any]:
    made: list[dict[str, Any]] = []
    for step in range(1, total + 1):
        known = {"step": step, "epoch": (step - 1) // per_epoch, "seconds": 1.0}
        if step % 5 == 0:
            loss, lr = 2.3 * math.exp(-8 * step / total) + 0.01, 0.1 * (1 - step / total)
            made.append({"kind": "train", "loss": loss, "lr": lr, **known})
        if step % per_epoch == 0:
            top1 = 0.98 - abs(step - 0.7 * total) / total  # the best is not the last
            metrics = {"loss": 1.5 - top1, "top1": top1, "top5": 1.0, "rmse": 40.0}
            fields = {"metrics": metrics, "best": step <= 0.7 * total, "monitor": monitor}
            made.append({"kind": "eval", **known, **fields})
    return [event(each) for each in made]


def run_of(name: str, made: list[Any]) -> Run:
    train = [each for each in made if isinstance(each, Train)]
    return Run(name, train, [each for each in made if isinstance(each, Eval)])


def figure(made: list[Any]) -> Figure:
    return figure_of(curves([run_of("digits", made)]), "digits")


def values(axes: Axes, label: str) -> list[tuple[float, float]]:
    (line,) = (line for line in axes.get_lines() if line.get_label() == label)
    return [*map(tuple, np.array(line.get_data()).T.tolist())]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 66])
def test_any_number_of_records_gives_an_image(count: int):
    out = io.BytesIO()
    figure(records()[:count]).savefig(out, format="png")
    assert out.getvalue().startswith(b"\x89PNG")
    assert struct.unpack(">I", out.getvalue()[16:20]) == (1200,)


def test_the_charts_show_the_records():
    made = records()
    found = {axes.get_title(loc="left"): axes for axes in figure(made).axes}
    tests = [f"{name} (evaluation)" for name in ("top1", "top5", "rmse")]
    assert [*found] == ["Loss", *tests, "Learning rate"]
    train = [each for each in made if isinstance(each, Train)]
    rate = values(found["Learning rate"], "learning rate")
    assert rate == [(each.step, each.lr) for each in train]
    tested = [(each.step, each.metrics["loss"]) for each in made if isinstance(each, Eval)]
    assert values(found["Loss"], "evaluation") == tested
    assert found["Loss"].get_yscale() == "log"  # from 2.3 to 0.01
    assert len(values(found["top5 (evaluation)"], "top5")) == 12


def test_the_best_evaluation_and_the_first_loss_that_is_not_finite_are_marked():
    train = [each for each in records() if isinstance(each, Train)]
    lost = [
        event({"kind": "train", "step": each.step, "loss": math.inf if each.step % 2 else math.nan})
        for each in train
        if each.step > 260
    ]
    made = [each for each in records() if each.step <= 260] + lost
    texts = {text: x for x, ((_, text), *_) in json.loads(drawn(loss_of(made)).texts)}
    assert "best: top1 94.67 % at step 184" in texts
    assert "the loss is not finite, the first of 3 records" in texts


def loss_of(made: list[Any]) -> Chart:
    return curves([run_of("digits", made)])[0]


@pytest.mark.parametrize("kind", [Train, Eval])
def test_records_of_a_single_kind_can_be_drawn(kind: type):
    assert figure([each for each in records() if isinstance(each, kind)]).axes


def test_unusual_names_and_values_are_drawn():
    made = [
        event({"kind": "eval", "step": n, "metrics": {"$_$": n, "{a}_\\b": 1e308, "t": 5e-324}})
        for n in range(9)
    ]
    made += [event({"kind": "train", "step": n, "loss": 10.0 ** (308 - n)}) for n in range(300)]
    assert "$_$ (evaluation)" in [axes.get_title(loc="left") for axes in figure(made).axes]


def test_a_chart_in_a_page_follows_the_theme_and_tells_values_by_run():
    loss = drawn(curves([run_of("one", records()), run_of("<script>", records(138))])[0])
    lines = loss.chart.named
    assert [(line.label, line.run) for line in lines] == [("one", "run0"), ("<script>", "run1")]
    for line in lines:
        assert line.color in loss.svg
        assert f'id="{line.run}"' in loss.svg
    assert "<" not in loss.texts
    told = json.loads(loss.texts)
    assert all(0 <= x <= 1 for x, _ in told)
    at_100 = next(dict(texts) for _, texts in told if texts[0][1] == "step 100")
    assert at_100["run0"].startswith("one 0.")
    assert at_100["run1"].startswith("<script> 0.")
    assert {"run1"} & {key for key, _ in told[-1][1]} == set()  # it has ended before


def test_a_long_log_makes_a_small_chart_that_keeps_its_outliers():
    steps = np.arange(100_000.0)
    noise = np.random.default_rng(0).normal(0, 0.01, steps.size)
    noise[12345] = 5.0
    svg = drawn(Chart("long", [Line("noise", steps, noise)])).svg
    assert len(svg) < 100_000
    heights = [float(y) for y in re.findall(r"L \S+ (\S+)", svg)]
    assert min(heights) < 30  # near the top of the axes


def test_smoothing_reduces_noise_and_leaves_out_what_is_not_finite():
    assert smoothed(np.full(9, 2.0)).tolist() == [2.0] * 9
    noisy = smoothed(np.array([0.0, 1.0] * 200))[10:-10]
    assert noisy.max() - noisy.min() < 0.1
    assert smoothed(np.array([])).tolist() == []
    gaps = smoothed(np.array([1.0, math.nan, 3.0, math.inf, 5.0]))
    assert np.isnan(gaps).tolist() == [False, True, False, True, False]


def test_matplotlib_is_imported_lazily_and_pyplot_never():
    script = (
        "import io, sys, raytrain_ddp.tools.report.charts, raytrain_ddp.tools.report.charts as it\n"
        "assert not {'matplotlib', 'torch', 'ray'} & {*sys.modules}\n"
        "it.figure_of([], '').savefig(io.BytesIO(), format='png')\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_users_matplotlib_settings_are_ignored_and_unchanged():
    import matplotlib

    plain, styled = io.BytesIO(), io.BytesIO()
    figure(records()).savefig(plain, format="png")
    with matplotlib.rc_context({"lines.linewidth": 9.0, "axes.facecolor": "black"}):
        figure(records()).savefig(styled, format="png")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert plain.getvalue() == styled.getvalue()
