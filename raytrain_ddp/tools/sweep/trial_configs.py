"""The configs of trials, all of them checked before the first one starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from raytrain_ddp.config.effects import idle
from raytrain_ddp.config.scaling_section import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import check, try_model
from raytrain_ddp.errors import ConfigError, RaytrainError
from raytrain_ddp.tasks.task_loading import BUILT_IN, task_of
from raytrain_ddp.tools.sweep.space import (
    Dimension,
    Point,
    corners,
    field_of,
    grid,
    random_points,
    with_point,
)
from raytrain_ddp.tools.sweep.sweep_state import Settings, Trial

_SHOWN = 5  # refusals


def trial_config(base: TrainConfig, trial: Trial) -> TrainConfig:
    """The config of a trial's run, which is in the folder of the sweep.

    Args:
        base: `name` and `storage` are those of the sweep.
    """
    folder, question, query = base.storage.partition("?" if "://" in base.storage else "\0")
    storage = f"{folder.rstrip('/')}/{base.name}{question}{query}"
    return replace(with_point(base, trial.point), name=trial.name, storage=storage, seed=trial.seed)


def scaling_of_trial(scaling: ScalingConfig, resources: Mapping[str, str]) -> ScalingConfig:
    """One process with the resources of ``--per-trial``, such as {"cpus": "2", "gpus": "0.5"}.

    Raises:
        ConfigError: there is no such resource, or not so many in a process.
    """
    amounts = {}
    for name, text in resources.items():
        if name == "workers":
            raise ConfigError(
                "--per-trial workers: a trial is one process. Train large models with fit."
            )
        if name not in ("cpus", "gpus"):
            raise ConfigError(f"--per-trial {name}={text}: the resources are cpus and gpus.")
        try:
            amounts[name] = float(text)
        except ValueError:
            raise ConfigError(f"--per-trial {name}={text}: must be a number.") from None
        if not 0 <= amounts[name] < float("inf") or (name == "cpus" and not amounts[name]):
            rule = "of 0 or more" if name == "gpus" else "above 0"
            raise ConfigError(f"--per-trial {name}={text}: must be a number {rule}.")
    gpus = amounts.get("gpus")
    if gpus is not None and gpus > 1:
        raise ConfigError(
            f"--per-trial gpus={gpus:g}: a trial is one process, with one GPU at most."
        )
    made = replace(scaling, num_workers=1, cpus_per_worker=amounts.get("cpus", "auto"))
    if gpus is not None:
        made = replace(made, use_gpu=gpus > 0, gpus_per_worker=gpus or 1.0)
    return replace(made, backend="auto")


def known_points(settings: Settings, seed: int) -> list[Point]:
    """The points that do not depend on results; none of an adaptive search."""
    if settings.search == "grid":
        return grid(settings.space)
    if settings.search == "random":
        return random_points(settings.space, seed, settings.trials)
    return []


def require_valid(
    base: TrainConfig,
    space: Sequence[Dimension],
    points: Sequence[Point],
    given: Iterable[str] = (),
) -> None:
    """Checks the configs of all points; of an adaptive search, which has none yet, those at the
    borders of the space.

    Args:
        base: the recipe with its flags.
        given: the fields that the command line sets.

    Raises:
        ConfigError: at least one config is refused, or a field has no effect in any of them.
        RaytrainError: the data, the model or the task do not exist.
    """
    refusals: list[str] = []
    configs: list[TrainConfig] = []
    adaptive = not points
    for number, point in enumerate(points or corners(space)):
        try:
            configs.append(with_point(base, point))
        except ConfigError as error:
            where = "the corner" if adaptive else f"trial {number}"
            refusals.append(f"{where} ({shown(point)}): {error}")
    if refusals:
        more = len(refusals) - _SHOWN
        lines = [*refusals[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        raise ConfigError(
            f"the config refuses {len(refusals)} of {len(refusals) + len(configs)} "
            f"{'corners of the space' if adaptive else 'trials'}:\n  " + "\n  ".join(lines)
        )
    possible = [*configs]  # also what these draws do not have, but others of the space do
    for point in [] if adaptive else corners(space):
        with suppress(ConfigError):
            possible.append(with_point(base, point))
    _require_effect(possible, [*given, *(dimension.field for dimension in space)])
    _preflight(configs)


def shown(point: Point) -> str:
    """``optim.lr=0.1, augment.policy=none``"""
    return ", ".join(f"{name}={value_text(value)}" for name, value in point.items())


def value_text(value: object) -> str:
    """A value as it would be typed."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require_effect(configs: Sequence[TrainConfig], fields: Iterable[str]) -> None:
    without = [idle(config) for config in configs]
    lines = [
        f"{name} has no effect in any trial: it needs {without[0][field]}. Remove it."
        for name, field in {name: field_of(name) for name in fields}.items()
        if all(field in each for each in without)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def _preflight(configs: Sequence[TrainConfig]) -> None:
    """Looks for data, models and tasks, once for each that differs."""
    seen: set[str] = set()
    for config in configs:
        optim = config.optim
        touched = (optim.groups, optim.head_lr is None, optim.layer_decay)
        key = json.dumps([repr(config.data), repr(config.model), config.loss.name, config.task])
        key += repr((touched, config.task_options))
        if key in seen:
            continue
        seen.add(key)
        try:
            checked = check(config)
            if config.task in BUILT_IN:
                try_model(checked, is_new=True)
            else:
                task_of(checked)
        except RaytrainError as error:
            raise type(error)(f"{error} (in a trial of the sweep)") from None
