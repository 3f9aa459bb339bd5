"""Suggestions by Optuna's TPE sampler, each a function of the seed and of the trials that ended.

Optuna keeps nothing: its study is made anew for each suggestion, from the sweep's own file.
"""

from __future__ import annotations

import importlib.util
import zlib
from typing import Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.tools.sweep.space import Dimension, Point
from raytrain_ddp.tools.sweep.sweep_state import OVER, Sweep

_RANDOM_FIRST = 10  # points before the model is used; Optuna's own default


def require_optuna() -> None:
    """Raises PreflightError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise PreflightError(
            "--search optuna: the package is not installed: pip install 'raytrain_ddp[sweep]'."
        )


def suggested_point(sweep: Sweep, seed: int, number: int) -> Point:
    """The point of that number, by the results so far. Points in progress count as bad ones, so
    that trials side by side differ."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = {d.field: _distribution(optuna, d) for d in sweep.settings.space}
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=_RANDOM_FIRST,
        constant_liar=True,
        seed=zlib.crc32(f"raytrain sweep {seed} {number}".encode()),
    )
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if sweep.goal == "max" else directions.MINIMIZE
    study = optuna.create_study(sampler=sampler, direction=direction)
    for first in range(0, len(sweep.trials), sweep.settings.seeds):
        study.add_trial(_told(optuna, sweep, first, space))
    params = study.ask(space).params
    return {each.field: each.tidy(params[each.field]) for each in sweep.settings.space}


def _told(optuna: Any, sweep: Sweep, first: int, space: Any) -> Any:
    """One of Optuna's trials for a point: the mean over its seeds, once all of them have ended."""
    trials = sweep.of_point(sweep.trials[first])
    state, value, steps = optuna.trial.TrialState.RUNNING, None, {}
    if all(trial.status in OVER for trial in trials):
        values = [sweep.best_of(trial) for trial in trials]
        known = [v for v in values if v is not None and sweep.better(v) > float("-inf")]
        if len(known) < len(trials) or any(trial.status == "failed" for trial in trials):
            state = optuna.trial.TrialState.FAIL
        elif any(trial.status == "stopped" for trial in trials):
            state = optuna.trial.TrialState.PRUNED
            steps = {e.step: e.value for e in trials[0].evaluations}
        else:
            state, value = optuna.trial.TrialState.COMPLETE, sum(known) / len(known)
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=dict(trials[0].point),
        distributions=space,
        intermediate_values=steps,
    )


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.kind == "choice":
        return kinds.CategoricalDistribution(list(dimension.choices))
    low, high = dimension.low, dimension.high
    if dimension.kind == "int":
        return kinds.IntDistribution(int(low), int(high), log=dimension.log)
    return kinds.FloatDistribution(low, high, log=dimension.log)
