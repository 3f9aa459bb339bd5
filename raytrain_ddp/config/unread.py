"""Which fields of a config a task of one's own has read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.config.rules import IMAGES, value_of
from raytrain_ddp.config.train_config import TrainConfig

S = TypeVar("S", bound=Section)
_OF_TASKS = ("model", "data", "augment", "loss")
# Fields of these sections that tasks do not read.
_NOT_OF_TASKS = {
    *("data.shuffle", "data.shuffle_window", "data.bad_records", "data.max_bad"),
    *("data.workers", "data.prefetch", "data.prefetch_mib", "augment.repeats"),
    "augment.spread_repeats",
}


def watched(config: S, reads: set[str], prefix: str = "") -> S:
    """A copy of the config that adds the name of each field that is read to `reads`.

    It is pickled and copied as a plain config.
    """
    kind: Any = type(config)
    values = dict(vars(config))

    def read(self: Any, name: str) -> Any:
        if name in values:
            reads.add(prefix + name)
        return kind.__getattribute__(self, name)

    def plain(self: Any, *_: object) -> Any:
        return kind, tuple(values[name] for name in kind.kinds())

    made = type(kind.__name__, (kind,), {"__getattribute__": read, "__reduce_ex__": plain})
    copy: S = object.__new__(made)
    for name, value in values.items():
        is_section = isinstance(value, Section)
        seen = watched(value, reads, f"{prefix}{name}.") if is_section else value
        object.__setattr__(copy, name, seen)
    return copy


def unread_notes(
    config: TrainConfig, reads: Collection[str] | None, replaced: Sequence[str] = ()
) -> list[str]:
    """Notes for fields meant for the task, changed from the default, that the task did not read.

    Args:
        replaced: other fields whose effect the task has replaced by methods of its own.
    """
    if reads is None or config.task == IMAGES:
        return []
    fields = [f"{each}.{name}" for each in _OF_TASKS for name in getattr(config, each).kinds()]
    names = [*(name for name in fields if name not in _NOT_OF_TASKS), "optim.label_smoothing"]
    return [
        f"{name} = {value_of(config, name)!r} is set, but {config.task} does not read it."
        for name in (*names, *replaced)
        if name not in reads and value_of(config, name) != value_of(TrainConfig(), name)
    ]
