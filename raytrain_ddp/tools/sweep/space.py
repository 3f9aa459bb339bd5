"""The space of a sweep: which fields vary, and which values each may have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.recipe import flat, from_dict, to_dict
from raytrain_ddp.config.rules import value_of
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import scalar
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean

Value = str | int | float | bool | None
Point = Mapping[str, Value]

_MAX_POINTS = 10_000
_TABLES = ("task_options", "model.args")  # whose entries can vary
_FIXED = {"name", "storage", "settled", "seed", "scaling", "log", "checkpoint"}


@dataclass(frozen=True)
class Dimension:
    """A field that varies: over `choices`, or from `low` to `high`, both included.

    Args:
        whole: only integers. log: the logarithm is uniform.
    """

    field: str
    choices: Sequence[Value] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False

    @property
    def size(self) -> float:
        """The number of its values."""
        return len(self.choices) or (self.high - self.low + 1 if self.whole else math.inf)

    def draw(self, numbers: random.Random) -> Any:
        """A value, uniform in the list, the range, or its logarithm."""
        if self.choices:
            return numbers.choice(self.choices)
        half = 0.5 * self.whole  # each integer has an interval of its own
        ends = self.low - half, self.high + half
        if self.log:
            return self.tidy(math.exp(numbers.uniform(*map(math.log, ends))))
        return self.tidy(numbers.uniform(*ends))

    def tidy(self, value: Any) -> Any:
        """A number as one of the range, with four digits: readable, and fine enough for a run."""
        if self.choices:
            return value
        number = round(value) if self.whole else float(f"{value:.4g}")
        return type(number)(min(max(number, self.low), self.high))

    def distribution(self) -> Any:
        """As Optuna has it."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution([*self.choices])
        if self.whole:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)


def parse_space(words: Iterable[str]) -> list[Dimension]:
    """The dimensions of ``FIELD=VALUES`` words. Whether a config takes the values is not checked.

    Raises:
        ConfigError: a field does not exist or cannot vary, or its values are wrong.
    """
    found = [_dimension(word) for word in words]
    fields = [each.field for each in found]
    if twice := {field for field in fields if fields.count(field) > 1}:
        raise ConfigError(f"--space: {min(twice)} is given twice.")
    if not found:
        raise ConfigError("--space is missing: give fields to vary, such as optim.lr=log:1e-3:1.")
    return found


def table_of(field: str) -> str:
    """The field of the config: that of an entry such as ``task_options.width`` is its table."""
    table = field.rpartition(".")[0]
    return table if table in _TABLES else field


def with_point(config: TrainConfig, point: Point) -> TrainConfig:
    """The config with the values of a point.

    Raises:
        ConfigError: the config refuses one of them, or all of them together.
    """
    tree = to_dict(config)
    for field, value in point.items():
        *sections, last = field.split(".")
        below = tree
        for section in sections:
            below = below[section]
        below[last] = value if table_of(field) == field else as_text(value)
    return from_dict(tree, "the space")


def grid(space: Sequence[Dimension]) -> list[Point]:
    """All combinations; the last dimension varies fastest.

    Raises:
        ConfigError: a dimension is a range, or there are too many.
    """
    for each in space:
        if not each.choices:
            raise ConfigError(f"--search grid: {each.field} has a range: list its values.")
    if (size := math.prod(each.size for each in space)) > _MAX_POINTS:
        raise ConfigError(f"--search grid: {size:,} combinations, more than {_MAX_POINTS:,}.")
    fields = [each.field for each in space]
    return [dict(zip(fields, v, strict=True)) for v in product(*(each.choices for each in space))]


def random_points(space: Sequence[Dimension], seed: int, count: int) -> list[Point]:
    """So many points, all different, or all there are. The first do not depend on `count`."""
    points: dict[str, Point] = {}
    number = repeated = 0
    count = int(min(count, math.prod(each.size for each in space)))
    while len(points) < count and repeated < 100 * count + 1000:
        numbers = random.Random(f"raytrain sweep {seed} {number}")
        point = {each.field: each.draw(numbers) for each in space}
        number, repeated = number + 1, repeated + 1 if repr(point) in points else 0
        points.setdefault(repr(point), point)
    return [*points.values()]


def _dimension(word: str) -> Dimension:
    name, _, text = word.partition("=")
    field = name.removeprefix("--").replace("-", "_")
    known, owner, last = flat(TrainConfig()), *field.rpartition(".")[::2]
    if table_of(field) not in known or not last:
        hint = withdrawn(field) or did_you_mean(field, known)
        raise ConfigError(f"--space {word}: there is no field {field}.{hint}")
    if not _FIXED.isdisjoint({field, field.partition(".")[0]}):
        raise ConfigError(f"--space {word}: {field} cannot vary; see --seeds for the seed.")
    ends, log = [*map(scalar, text.removeprefix("log:").split(":"))], text.startswith("log:")
    if len(ends) == 2 and all(type(end) in (int, float) for end in ends):
        low, high = map(float, ends)
        if low >= high or (log and low <= 0):
            rule = " and begin above 0" if log else ""
            raise ConfigError(f"--space {word}: the range must end at a larger number{rule}.")
        section: Any = value_of(TrainConfig(), owner) if owner else TrainConfig()
        kind = section.kinds()[last] if table_of(field) == field else int
        whole = {*map(type, ends)} == {int} and float not in {kind, *get_args(kind)}
        return Dimension(field, (), low, high, whole, log)
    choices = [None if part == "None" else scalar(part) for part in text.split(",")]
    if len(choices) < 2 or len({*map(repr, choices)}) < len(choices):
        forms = "LOW:HIGH, log:LOW:HIGH, or a list of different values such as 0.1,0.2"
        raise ConfigError(f"--space {word}: write FIELD=VALUES, where VALUES is {forms}.")
    return Dimension(field, tuple(choices))
