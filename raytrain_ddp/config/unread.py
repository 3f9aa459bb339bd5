"""Which fields of a config a task of one's own has read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from raytrain_ddp.config.field_types import Section, facts, value_of
from raytrain_ddp.config.rules import IMAGES
from raytrain_ddp.config.train_config import TrainConfig

S = TypeVar("S", bound=Section)
_OF_TASKS = ("model", "data", "augment", "loss")


def watched(config: S, reads: set[str], prefix: str = "") -> S:
    """A copy of the config that adds the name of each field that is read to `reads`.

    It is pickled and copied as a plain config.
    """
    kind: Any = type(config)
    values = dict(vars(config))

    class Watched(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in values:
                reads.add(prefix + name)
            return super().__getattribute__(name)

        def __reduce_ex__(self, _: Any) -> Any:
            return kind, tuple(values[name] for name in kind.kinds())

    copy: S = object.__new__(Watched)
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
    others = facts(TrainConfig, "of_loop")
    fields = [f"{each}.{name}" for each in _OF_TASKS for name in getattr(config, each).kinds()]
    default, names = TrainConfig(), [*fields, "optim.label_smoothing", *replaced]
    return [
        f"{name} = {value_of(config, name)!r} is set, but {config.task} does not read it."
        for name in names
        if name not in {*reads, *others} and value_of(config, name) != value_of(default, name)
    ]
