"""When a trial stops, and which one continues: pure functions of the sweep so far.

- asha: asynchronous successive halving (Li et al., 2020) in the stopping form of Ray Tune: a trial
  that reaches a rung continues if it is among the best of those that have reached it before.
- halving: synchronous successive halving. All trials pause at a rung, and the best continue.
- pbt: population based training (Jaderberg et al., 2017), synchronous. All trials pause at a rung;
  the worst end, and others start in their place from the state of one of the best, with a point
  near its point.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from raytrain_ddp.formatting import format_metric
from raytrain_ddp.tools.sweep.sweep_state import Settings, Sweep, Trial


def rungs(settings: Settings) -> list[int]:
    """The epochs after which a trial may be stopped; none without a scheduler."""
    if settings.scheduler == "none":
        return []
    last = int(settings.config["epochs"])
    if settings.scheduler == "pbt":
        return [*range(settings.first_rung, last, settings.first_rung)]
    found, epochs = [], settings.first_rung
    while epochs < last:
        found.append(epochs)
        epochs *= settings.factor
    return found


def begin(settings: Settings, trial: Trial) -> None:
    """Sets where a new trial pauses."""
    if settings.scheduler in ("halving", "pbt"):
        trial.until = next(iter(rungs(settings)), 0)


def stop_reason(sweep: Sweep, trial: Trial) -> str:
    """Why a trial is to stop after its newest evaluation; "" if it continues."""
    newest = trial.evaluations[-1]
    if sweep.settings.scheduler in ("halving", "pbt"):
        if 0 < trial.until <= newest.epochs:
            return f"paused after epoch {trial.until}, to be compared with the others"
        return ""
    before = trial.evaluations[-2].epochs if len(trial.evaluations) > 1 else 0.0
    reached_now = [rung for rung in rungs(sweep.settings) if before < rung <= newest.epochs]
    for rung in reached_now[-1:]:
        others = [t.at(rung) for t in sweep.trials if t.number != trial.number]
        values = [sweep.better(value) for value in others if value is not None]
        cutoff = _quantile(values, 1 - 1 / sweep.settings.factor) if values else -math.inf
        if not math.isfinite(newest.value) or sweep.better(newest.value) < cutoff:
            shown = format_metric(sweep.monitor, newest.value)
            best = f"among the best 1/{sweep.settings.factor} of {len(values) + 1}"
            return f"{sweep.monitor} {shown} after epoch {newest.epochs:g}: not {best}"
    return ""


def promote(sweep: Sweep, seed: int = 0) -> tuple[list[Trial], list[Trial]]:
    """If all trials have paused at a rung, the best of them wait for their next start, and the
    others are stopped. Does nothing as long as a trial is to be trained.

    Returns:
        The trials that are stopped, and of pbt those that replace them, with their origin; they are
        not yet among the trials of the sweep.
    """
    paused = [trial for trial in sweep.trials if trial.status == "paused"]
    if not paused or sweep.count("waiting", "running"):
        return [], []
    rung = min(trial.until for trial in paused)
    levels = [*rungs(sweep.settings), 0]
    following = levels[levels.index(rung) + 1]
    # Those that failed at this rung have competed, too.
    began = [t for t in sweep.trials if t.until == rung and t.status in ("paused", "failed")]
    kept = max(1, len(began) // sweep.settings.factor)
    if sweep.settings.scheduler == "pbt":
        kept = max(1, len(paused) - kept)
    order = sorted(paused, key=lambda t: (-sweep.better(t.at(rung)), t.number))
    for place, trial in enumerate(order):
        if place < kept:
            trial.status, trial.until, trial.message = "waiting", following, ""
        else:
            trial.status = "stopped"
            trial.message = (
                f"place {place + 1} of {len(began)} after epoch {rung}; the first {kept} continue"
            )
    if sweep.settings.scheduler != "pbt":
        return order[kept:], []
    return order[kept:], [
        _clone(sweep, order[place % kept], len(sweep.trials) + place, following, seed)
        for place in range(len(order) - kept)
    ]


def _clone(sweep: Sweep, origin: Trial, number: int, until: int, seed: int) -> Trial:
    numbers = random.Random(f"raytrain pbt {seed} {number}")
    near = {d.field: d.near(origin.point[d.field], numbers) for d in sweep.settings.space}
    name = f"trial-{number:04}"
    return Trial(number, name, near, origin.seed, until=until, origin=origin.name)


def _quantile(values: Sequence[float], share: float) -> float:
    """With linear interpolation, as NumPy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == -math.inf:
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
