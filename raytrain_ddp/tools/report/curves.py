"""Which charts a run has, or several runs over each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raytrain_ddp.tools.report.charts import COLORS, Chart, Line, Numbers, scale_of, smoothed
from raytrain_ddp.tools.report.history import Happening, happenings
from raytrain_ddp.tools.report.run_files import Run

PHASES = [  # of a step, in drawing order
    "compute",
    "communication",
    "optimizer",
    "data",
    "copy",
    "checkpoint",
    "evaluation",
    "other",
]
_MOST_NAMES, _MOST_POINTS, _MOST_MARKS = 8, 200, 80  # metrics and scalars; of a stack; of a chart


def curves(runs: Sequence[Run]) -> list[Chart]:
    """The loss, the scalars and metrics, and the learning rate, as far as there are any.

    Of a single run also each record's loss, and what happened.
    """
    alone = len(runs) == 1
    found: dict[str, list[Line]] = defaultdict(list)
    for number, run in enumerate(runs):
        key, color = f"run{number}", COLORS[number % len(COLORS)]
        for title, line in _lines(run, alone):
            named = line if alone else line._replace(label=run.name, color=color, run=key)
            found[title] += [named] if line.xs.size else []
    marks = marks_of(runs[0]) if alone else []
    return [Chart(title, lines, marks) for title, lines in found.items() if lines]


def speed_charts(run: Run) -> list[Chart]:
    """The speed of a run, and where its time goes."""
    records, marks = run.timed, marks_of(run)
    if len(records) < 2:
        return []
    speed = Line("", *_series(records, [r.samples_per_s for r in records]), scale="zero")
    calm = speed._replace(label=f"{run.plan.unit}/s", ys=smoothed(speed.ys))
    split = [[r.timing.split_s.get(name, 0.0) for r in records] for name in PHASES]
    shares = np.array([smoothed(np.array(each)) for each in split])  # (phases, records)
    shares /= np.maximum(shares.sum(0), 1e-12)
    every = len(records) // _MOST_POINTS + 1
    phases = [
        Line(name, speed.xs[::every], share[::every], color, scale="share")
        for name, share, color in zip(PHASES, shares, COLORS, strict=True)
        if share.any()
    ]
    return [
        Chart("Throughput of all workers", [calm, speed], marks),
        Chart("Where the time goes", phases, marks, "stack"),
    ]


def marks_of(run: Run) -> list[Happening]:
    """Restarts, failures, the best evaluation, and the first loss that is not finite."""
    marks = [e for e in happenings(run) if e.kind in ("restart", "failure") and e.step]
    marks = marks[:: len(marks) // _MOST_MARKS + 1]
    if run.best:
        marks.append(Happening("", run.best.step, "end", f"best: {run.best_summary}", "★"))
    lost = [record.step for record in run.train if not np.isfinite(record.loss)]
    text = f"the loss is not finite, the first of {len(lost)} records"
    return [*marks, *(Happening("", step, "failure", text) for step in lost[:1])]


def _lines(run: Run, alone: bool) -> Iterator[tuple[str, Line]]:
    """Each line of a run, with the title of its chart."""
    loss = Line("", *_series(run.train, [r.loss for r in run.train]))
    yield "Loss", loss._replace(label="training, smoothed", ys=smoothed(loss.ys))
    if alone:
        yield "Loss", loss
    for kind, records, values in (
        ("evaluation", run.evals, [e.metrics for e in run.evals]),
        ("training", run.train, [r.scalars for r in run.train]),
    ):
        names = {name: name != run.monitor for each in values for name in each}
        names.pop("skipped", None)
        for name in sorted(names, key=names.__getitem__)[:_MOST_NAMES]:
            both = alone and name == "loss"  # in one chart with the loss of training
            title, label = ("Loss", kind) if both else (f"{name} ({kind})", name)
            xs, ys = _series(records, [each.get(name) for each in values])
            yield title, Line(label, xs, ys, COLORS[both], scale=scale_of(name))
    rates = _series(run.train, [r.lr for r in run.train])
    yield "Learning rate", Line("learning rate", *rates, scale="zero")


def _series(records: Sequence[Any], values: Sequence[float | None]) -> tuple[Numbers, Numbers]:
    """(steps, values); nan where there is none, or it is not finite."""
    found = np.array(values, dtype=float)
    found[~np.isfinite(found)] = np.nan
    return np.array([record.step for record in records], dtype=float), found
