"""The space of a sweep: which fields vary, and which values each may have."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raytrain_ddp.config.field_types import as_text, fields_below, scalar
from raytrain_ddp.config.recipe import from_dict, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

Point = Mapping[str, str | int | float | bool | None]

_FORMS = "LOW:HIGH, log:LOW:HIGH with LOW above 0, or a list of different values such as 0.1,0.2"
_FIXED = {"name", "storage", "seed", "scaling", "log", "checkpoint"}
_TABLES = ("task_options", "model.args")  # their values are texts


class Dimension(NamedTuple):
    """A field that varies, as one of Ray Tune's kinds, with its arguments: "choice" has a list,
    "uniform" and "loguniform" the lowest and the highest value."""

    field: str
    kind: str
    values: Sequence[Any]

    def draw(self, numbers: random.Random) -> Any:
        """A value, uniform in the list, the range, or its logarithm."""
        if self.kind == "choice":
            return numbers.choice(*self.values)
        if self.kind == "uniform":
            return tidy(numbers.uniform(*self.values))
        return tidy(math.exp(numbers.uniform(*map(math.log, self.values))))


def tidy(value: Any) -> Any:
    """A float with four digits: readable, and fine enough for a run."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parse_space(words: Sequence[str]) -> list[Dimension]:
    """The dimensions of ``FIELD=VALUES`` words. Whether a config has the fields and takes the
    values is not checked, except that a range needs a field that takes fractions.

    Raises:
        ConfigError: a field cannot vary, or its values are wrong.
    """
    space = [_dimension(word) for word in words]
    if not space:
        raise ConfigError("--space is missing: give the fields to vary, as in optim.lr=log:1e-3:1.")
    if len({each.field for each in space}) < len(space):
        raise ConfigError("--space: give each field once.")
    return space


def _dimension(word: str) -> Dimension:
    name, _, text = word.partition("=")
    field = name.removeprefix("--").replace("-", "_")
    if field.partition(".")[0] in _FIXED:
        raise ConfigError(f"--space {word}: {field} cannot vary; see --seeds for the seed.")
    is_log = text.startswith("log:")
    try:
        low, high = (tidy(float(end)) for end in text.removeprefix("log:").split(":"))
        is_range = low < high < math.inf and (low > 0 or not is_log)
    except ValueError:
        is_range = False
    if is_range:
        kinds = {each.name: each.members for each in fields_below(TrainConfig)}
        if float not in kinds.get(field, [float]):
            raise ConfigError(f"--space {word}: {field} takes no range, but a list of values.")
        return Dimension(field, "loguniform" if is_log else "uniform", (low, high))
    values = [None if part == "None" else scalar(part) for part in text.split(",")]
    if len({*map(repr, values)}) < max(2, len(values)):
        raise ConfigError(f"--space {word}: write FIELD=VALUES, where VALUES is {_FORMS}.")
    return Dimension(field, "choice", (values,))


def random_points(space: Sequence[Dimension], seed: int, count: int) -> list[Point]:
    """So many points, all different; fewer if there are no more. The first do not depend on
    `count`."""
    numbers, points = random.Random(seed), dict[str, Point]()
    for _ in range(20 * count + 1000):  # enough to find each point of a small space
        point = {each.field: each.draw(numbers) for each in space}
        points.setdefault(repr(point), point)
        if len(points) == count:
            break
    return [*points.values()]


def with_point(config: TrainConfig, point: Point) -> TrainConfig:
    """The config with the values of a point.

    Raises:
        ConfigError: a field does not exist, or the config refuses one of the values, or all of them
            together.
    """
    tree = to_dict(config)
    for field, value in point.items():
        section, _, last = field.rpartition(".")
        below = tree
        for name in filter(None, section.split(".")):
            below = below.setdefault(name, {})
        below[last] = as_text(value) if section in _TABLES else value
    return from_dict(tree, "--space")
