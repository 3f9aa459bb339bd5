"""The space of a sweep: which fields vary, and which values each may have."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.recipe import from_dict, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import scalar
from raytrain_ddp.errors import ConfigError

Value = str | int | float | bool | None
Point = Mapping[str, Value]

MAX_POINTS = 10_000
_FORMS = "LOW:HIGH, log:LOW:HIGH with LOW above 0, or a list of different values such as 0.1,0.2"
_FIXED = {"name", "storage", "seed", "scaling", "log", "checkpoint"}


@dataclass(frozen=True)
class Dimension:
    """A field that varies: over `choices`, or from `low` to `high`; `log`: uniform in the
    logarithm."""

    field: str
    choices: Sequence[Value] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def draw(self, numbers: random.Random) -> Value:
        """A value, uniform in the list, the range, or its logarithm."""
        if self.choices:
            return numbers.choice(self.choices)
        if self.log:
            return self.tidy(math.exp(numbers.uniform(math.log(self.low), math.log(self.high))))
        return self.tidy(numbers.uniform(self.low, self.high))

    def tidy(self, value: Any) -> Value:
        """A number of the range with four digits: readable, and fine enough for a run."""
        return value if self.choices else min(max(float(f"{value:.4g}"), self.low), self.high)

    def distribution(self) -> Any:
        """As Optuna has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        return FloatDistribution(self.low, self.high, log=self.log)


def parse_space(words: Sequence[str]) -> list[Dimension]:
    """The dimensions of ``FIELD=VALUES`` words. Whether a config has the fields and takes the
    values is not checked.

    Raises:
        ConfigError: a field cannot vary, or its values are wrong.
    """
    found = {each.field: each for each in map(_dimension, words)}
    if not found or len(found) < len(words):
        raise ConfigError("--space: give each field that varies once, as in optim.lr=log:1e-3:1.")
    return [*found.values()]


def with_point(config: TrainConfig, point: Point) -> TrainConfig:
    """The config with the values of a point.

    Raises:
        ConfigError: a field does not exist, or the config refuses one of the values, or all of them
            together.
    """
    tree = to_dict(config)
    for field, value in point.items():
        *sections, last = field.split(".")
        below = tree
        for section in sections:
            below = below.setdefault(section, {})
        below[last] = as_text(value) if sections in (["task_options"], ["model", "args"]) else value
    return from_dict(tree, "--space")


def grid(space: Sequence[Dimension]) -> list[Point]:
    """All combinations; the last dimension varies fastest.

    Raises:
        ConfigError: a dimension is a range, or there are too many.
    """
    lists = {each.field: each.choices for each in space if each.choices}
    if len(lists) < len(space) or math.prod(map(len, lists.values())) > MAX_POINTS:
        raise ConfigError(f"--search grid takes only lists, of {MAX_POINTS:,} points at most.")
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def random_points(space: Sequence[Dimension], seed: int, count: int) -> list[Point]:
    """So many points, all different; fewer if there are no more. The first do not depend on
    `count`."""
    points: dict[str, Point] = {}
    for number in range(20 * count + 1000):  # enough to find each point of a small space
        numbers = random.Random(f"raytrain sweep {seed} {number}")
        point = {each.field: each.draw(numbers) for each in space}
        points.setdefault(repr(point), point)
        if len(points) == count:
            break
    return [*points.values()]


def _dimension(word: str) -> Dimension:
    name, _, text = word.partition("=")
    field = name.removeprefix("--").replace("-", "_")
    if field.partition(".")[0] in _FIXED:
        raise ConfigError(f"--space {word}: {field} cannot vary; see --seeds for the seed.")
    log = text.startswith("log:")
    ends = [*map(scalar, text.removeprefix("log:").split(":"))]
    if len(ends) == 2 and {*map(type, ends)} <= {int, float}:
        low, high = map(float, ends)
        if low < high and (low > 0 or not log):
            return Dimension(field, (), low, high, log)
    choices = tuple(None if part == "None" else scalar(part) for part in text.split(","))
    if len({*map(repr, choices)}) < max(2, len(choices)):
        raise ConfigError(f"--space {word}: write FIELD=VALUES, where VALUES is {_FORMS}.")
    return Dimension(field, choices)
