"""Events for tests, written as records of a run's files and read back as such records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from raytrain_ddp import events
from raytrain_ddp.events import Event
from raytrain_ddp.records import to_record

MESSAGES = {
    "phase": events.Phase,
    "evaluating": events.Evaluating,
    "pause": events.Pause,
    "joined": events.Joined,
    "at": events.InProgress,
    "worker_failed": events.WorkerFailed,
    "died": events.Died,
    "controller": events.ControllerStarted,
    "outcome": events.Outcome,
}
KINDS: dict[str, Any] = {each.kind: each for each in (*events.LOG_RECORDS, *events.STORED_EVENTS)}
KINDS |= MESSAGES
NAMES = {kind: name for name, kind in MESSAGES.items()} | {events.WorkerFailed: "failed"}


def event(record: Mapping[str, Any]) -> Any:
    """The event of a record; fields that are missing get made-up values."""
    kind = "worker_failed" if record["kind"] == "failed" and "start" in record else record["kind"]
    return _made(KINDS[kind], {k: v for k, v in record.items() if k != "kind"})


def record(event: Event) -> dict[str, Any]:
    """``{"kind": ..., field: value ...}`` of any event."""
    if type(event) in NAMES:
        pairs = {field.name: getattr(event, field.name) for field in fields(event)}
        return {"kind": NAMES[type(event)], **pairs}
    return to_record(event)  # type: ignore[arg-type]


def to(reported: list[Any]) -> Callable[[Event], None]:
    """Appends the record of each event it receives."""
    return lambda event: reported.append(record(event))


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    known = {field.metadata.get("key", field.name): field for field in fields(kind)}
    assert {*values} <= {*known}, f"{kind.__name__} has no {sorted({*values} - {*known})}"
    given = {}
    for key, field in known.items():
        inner = field.metadata.get("type")
        if key in values:
            value = values[key]
            nested = inner is not None and isinstance(value, Mapping) and not is_dataclass(value)
            given[field.name] = _made(inner, value) if nested else value
        elif field.default is MISSING and field.default_factory is MISSING:
            given[field.name] = _ANY.get(str(field.type))
    return kind(**given)


_ANY: dict[str, Any] = {"int": 1, "float": 1.0, "str": "", "Sequence[str]": ()}
