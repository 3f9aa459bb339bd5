"""The space of a sweep: which fields vary, and which values each may have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal

from raytrain_ddp.config.effects import value_of
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.flags import Flag, changes, flags_of
from raytrain_ddp.config.suggestions import meant
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import scalar
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError

Value = str | int | float | bool | None
Point = Mapping[str, Value]

MOST_TRIALS = 10_000
_FORMS = "LOW:HIGH, log:LOW:HIGH, or a list such as 0.1,0.2"
TABLES = ("task_options", "model.args")  # whose entries can vary
_DIGITS = 4  # of a drawn number: readable, and finer than any run can tell
_ANEW, _NEAR = 0.25, 0.2
_NOT_SEARCHED = {
    "name": "the sweep names its runs",
    "storage": "all runs of a sweep are in one storage",
    "settled": "fit sets it",
    "seed": "--seeds repeats each point with several seeds",
    "scaling": "a trial is one process; --per-trial sets its resources",
    "log": "it does not change the result",
    "checkpoint": "it does not change the result",
}


@dataclass(frozen=True)
class Dimension:
    """A field that varies.

    Args:
        field: its full name, such as ``optim.lr``.
        kind: "choice" has `choices`; the others have a range from `low` to `high`, both included.
        log: the logarithm is uniform.
    """

    field: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: Sequence[Value] = ()

    def draw(self, random_numbers: random.Random) -> Value:
        """A value, uniform in the range, or in its logarithm."""
        if self.kind == "choice":
            return random_numbers.choice(self.choices)
        low, high = self.low, self.high
        if self.kind == "int":  # each integer has an interval of its own
            low, high = low - 0.5, high + 0.5
        if self.log:
            number = math.exp(random_numbers.uniform(math.log(low), math.log(high)))
        else:
            number = random_numbers.uniform(low, high)
        if self.kind == "int":
            return int(min(max(round(number), self.low), self.high))
        return self.tidy(number)

    def near(self, value: Value, random_numbers: random.Random) -> Value:
        """A value for a trial that starts from another one's state: drawn anew once in four times,
        else the next choice, or 0.8 or 1.2 times the value, within the range."""
        if random_numbers.random() < _ANEW:
            return self.draw(random_numbers)
        way = random_numbers.choice((-1, 1))
        if self.kind == "choice":
            place = self.choices.index(value) + way
            return self.choices[min(max(place, 0), len(self.choices) - 1)]
        assert isinstance(value, int | float)
        number = value * (1 + _NEAR * way)
        if self.kind == "int":
            step = max(1, round(abs(number - value)))
            return int(min(max(value + way * step, self.low), self.high))
        return self.tidy(number)

    def tidy(self, value: Value) -> Value:
        """The value with few digits, if it is a number of a continuous range."""
        if self.kind != "float":
            return value
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)

    @property
    def ends(self) -> Sequence[Value]:
        """The values at the border: both ends of a range, or all choices."""
        if self.kind == "choice":
            return self.choices
        kind = int if self.kind == "int" else float
        return (kind(self.low), kind(self.high))

    @property
    def size(self) -> float:
        """How many values it has."""
        if self.kind == "choice":
            return len(self.choices)
        return self.high - self.low + 1 if self.kind == "int" else math.inf

    def share(self, value: Value) -> float:
        """Where a value lies in the dimension, from 0 to 1."""
        if self.kind == "choice":
            return self.choices.index(value) / max(1, len(self.choices) - 1)
        assert isinstance(value, int | float)
        low, high, at = self.low, self.high, float(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low)


def parse_space(words: Iterable[str]) -> list[Dimension]:
    """The dimensions of ``FIELD=VALUES`` words.

    Raises:
        ConfigError: a field does not exist or cannot vary, or its values are wrong.
    """
    flags = {flag.name: flag for flag in flags_of(TrainConfig, TrainConfig(), "run")}
    found: dict[str, Dimension] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text:
            raise ConfigError(f"--space {word}: write FIELD=VALUES, where VALUES is {_FORMS}.")
        key = name.removeprefix("--").replace("_", "-")
        entry = _entry(name.removeprefix("--"), text)
        if entry is not None:
            flags[key] = entry
        if key not in flags:
            near = meant(key, flags)
            hint = f" Did you mean {' or '.join(n.replace('-', '_') for n in near)}?" * bool(near)
            raise ConfigError(f"--space {word}: there is no field {name}.{withdrawn(key) or hint}")
        dimension = _dimension(word, flags[key], text)
        if dimension.field in found:
            raise ConfigError(f"--space {word}: {dimension.field} is given twice.")
        found[dimension.field] = dimension
    if not found:
        raise ConfigError(
            "give the space to search: --space optim.lr=log:1e-3:1 model.dropout=0:0.5."
        )
    return [*found.values()]


def field_of(name: str) -> str:
    """The field of a dimension: that of an entry is its table."""
    table = name.rpartition(".")[0]
    return table if table in TABLES else name


def with_point(config: TrainConfig, point: Point) -> TrainConfig:
    """The config with the values of a point.

    Raises:
        ConfigError: the config refuses one of them, or all of them together.
    """
    values: dict[tuple[str, ...], Any] = {}
    for field, value in point.items():
        table, _, key = field.rpartition(".")
        if table in TABLES:
            path = tuple(table.split("."))
            assert value is not None  # no entry may be None
            values[path] = {**values.get(path, value_of(config, table)), key: as_text(value)}
        else:
            values[tuple(field.split("."))] = value
    return replace(config, **changes(config, values))


def random_points(space: Sequence[Dimension], seed: int, count: int) -> list[Point]:
    """So many points, all of them different. The first ones do not depend on `count`.

    Raises:
        ConfigError: the space has fewer points.
    """
    size = size_of(space)
    if size < count:
        raise ConfigError(
            f"the space has {size:.0f} points, fewer than --trials {count}: set "
            f"--trials {size:.0f}, or --search grid for lists."
        )
    points: dict[str, Point] = {}
    number, repeated = 0, 0
    while len(points) < count:
        numbers = random.Random(f"raytrain sweep {seed} {number}")
        point = {dimension.field: dimension.draw(numbers) for dimension in space}
        number, repeated = number + 1, repeated + 1 if repr(point) in points else 0
        points.setdefault(repr(point), point)
        if repeated > 100 * count + 1000:  # so a range has few numbers with this many digits
            raise ConfigError(
                f"the space has {len(points)} points with {_DIGITS} significant digits, fewer than "
                f"--trials {count}: set --trials {len(points)}, or wider ranges."
            )
    return [*points.values()]


def size_of(space: Sequence[Dimension]) -> float:
    """How many points it has; infinite with a range of real numbers."""
    return math.prod(dimension.size for dimension in space)


def grid(space: Sequence[Dimension]) -> list[Point]:
    """All combinations; the last dimension varies fastest.

    Raises:
        ConfigError: a dimension is a range of numbers, or there are too many.
    """
    for dimension in space:
        if dimension.kind != "choice":
            raise ConfigError(
                f"--search grid: {dimension.field} has a range: list its values, as in "
                f"{dimension.field}={dimension.low:g},{dimension.high:g}."
            )
    size = int(size_of(space))
    if size > MOST_TRIALS:
        raise ConfigError(
            f"--search grid: {size:,} combinations, above the limit of {MOST_TRIALS:,} trials: "
            "list fewer values, or use --search random --trials N."
        )
    return [_combination(space, number) for number in range(size)]


def corners(space: Sequence[Dimension], most: int = 256) -> Iterator[Point]:
    """The points at the borders of the space; `most` of them, spread evenly, if there are more."""
    count = math.prod(len(dimension.ends) for dimension in space)
    step = max(1, -(-count // most))
    for number in range(0, count, step | 1 if step > 1 else 1):
        yield _combination(space, number)


def _combination(space: Sequence[Dimension], number: int) -> Point:
    """One of all combinations of the ends; the last dimension varies fastest."""
    point: dict[str, Value] = {}
    for dimension in reversed(space):
        number, place = divmod(number, len(dimension.ends))
        point[dimension.field] = dimension.ends[place]
    return dict(reversed(point.items()))


def _entry(name: str, text: str) -> Flag | None:
    """The flag of an entry of a table, as ``task_options.width``; None for any other name. Its
    type is that of its values."""
    table, _, key = name.rpartition(".")
    table = table.replace("-", "_")
    if table not in TABLES or not key:
        return None
    words = text.removeprefix("log:").replace(":", ",").split(",")
    kinds = {type(scalar(word)) for word in words}
    kind = int if kinds == {int} else float if kinds <= {int, float} else str
    path = (*table.split("."), key)
    return Flag(name, "", path, TrainConfig, kind, MISSING, {})


def _dimension(word: str, flag: Flag, text: str) -> Dimension:
    field = ".".join(flag.path)
    for name in (field, flag.path[0]):
        if name in _NOT_SEARCHED:
            raise ConfigError(f"--space {word}: {field} cannot vary: {_NOT_SEARCHED[name]}.")
    if flag.nargs is not None:
        raise ConfigError(f"--space {word}: {field} takes several values, and cannot vary.")
    parts = text.split(":")
    log = parts[0] == "log" and len(parts) == 3
    if log or (len(parts) == 2 and {int, float} & {*flag.members}):
        return _range(word, flag, field, parts[-2:], log)
    try:
        choices = [flag.value([part]) for part in text.split(",")]
    except ValueError:
        some = ",".join(map(str, flag.choices[:2])) or "true,false"
        forms = _FORMS if {int, float} & {*flag.members} else f"a list such as {some}"
        raise ConfigError(f"--space {word}: {field} takes {flag.takes}; write {forms}.") from None
    if len({*map(repr, choices)}) < max(2, len(choices)):
        remedy = "list at least two values, or remove it and give the flag --" + flag.name
        what = "a value is listed twice" if len(choices) > 1 else f"it does not vary: {remedy}"
        raise ConfigError(f"--space {word}: {what}.")
    return Dimension(field, "choice", choices=tuple(choices))


def _range(word: str, flag: Flag, field: str, ends: Sequence[str], log: bool) -> Dimension:
    if not {int, float} & {*flag.members}:
        raise ConfigError(f"--space {word}: {field} is not a number: list its values.")
    kind: Any = float if float in flag.members else int
    try:
        low, high = (kind(end) for end in ends)
        finite = math.isfinite(low) and math.isfinite(high)
    except (ValueError, OverflowError):  # of integers beyond all floats
        finite = False
    if not finite:
        what = "numbers" if kind is float else "integers"
        raise ConfigError(f"--space {word}: the ends of the range must be {what}.")
    if low >= high:
        raise ConfigError(f"--space {word}: the range must end above {low:g}, where it begins.")
    if log and low <= 0:
        raise ConfigError(
            f"--space {word}: a logarithmic range must begin above 0, not at {low:g}."
        )
    return Dimension(field, "float" if kind is float else "int", float(low), float(high), log)
