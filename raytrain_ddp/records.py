"""Converts events to and from the JSON objects in ``metrics.jsonl`` and ``events.jsonl``."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime, timezone
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from raytrain_ddp.events import LOG_RECORDS, STORED_EVENTS, LogRecord, StoredEvent

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LOG_KINDS = {each.kind: each for each in LOG_RECORDS}
_STORED_KINDS = {each.kind: each for each in STORED_EVENTS}
T = TypeVar("T")


class Timed(NamedTuple):
    """An event of ``events.jsonl``.

    Args:
        time: as it was written, such as 2026-11-20T18:05:31Z.
        wall: seconds since 1970; nan if the time cannot be read.
    """

    event: StoredEvent
    time: str
    wall: float


def to_record(event: LogRecord | StoredEvent) -> dict[str, Any]:
    """The JSON object of an event, with its kind first."""
    return {"kind": event.kind, **_encoded(event)}


def event_line(event: StoredEvent) -> str:
    """The line of ``events.jsonl`` for an event that happens now."""
    now = datetime.now(timezone.utc).strftime(_TIME)
    return json.dumps({"kind": event.kind, "time": now, **_encoded(event)}) + "\n"


def log_records(records: Iterable[Mapping[str, Any]]) -> list[LogRecord]:
    """The records of a log; those of unknown kinds and without a needed field are left out. A value
    of another type counts as missing."""
    decoded = (_decoded(_LOG_KINDS.get(str(each.get("kind"))), each) for each in records)
    return [record for record in decoded if isinstance(record, LOG_RECORDS)]


def stored_events(records: Iterable[Mapping[str, Any]]) -> list[Timed]:
    """The events of an event log; others are left out, as by `log_records`."""
    events = []
    for record in records:
        event = _decoded(_STORED_KINDS.get(str(record.get("kind"))), record)
        if isinstance(event, STORED_EVENTS):
            time, wall = str(record.get("time", "")), math.nan
            with suppress(ValueError):
                wall = datetime.strptime(time, _TIME).replace(tzinfo=timezone.utc).timestamp()
            events.append(Timed(event, time, wall))
    return events


def json_of(value: Any, indent: int | None = None, ascii_only: bool = True) -> str:
    """A JSON document; non-finite numbers become null, which readers of a run's log turn back into
    nan."""
    options: dict[str, Any] = {"indent": indent, "ensure_ascii": ascii_only, "allow_nan": False}
    try:
        return json.dumps(value, **options)
    except ValueError:
        return json.dumps(mapped(_finite, value), **options)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same JSON value with function(leaf) in place of each leaf; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: mapped(function, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(function, inner) for inner in value]
    return function(value)


def _encoded(value: Any) -> dict[str, Any]:
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {
        _key(field): _encoded(each) if is_dataclass(each) else each
        for field, each in pairs
        if not (field.metadata.get("optional") and each == _default(field))
    }


def _decoded(kind: type[T] | None, record: Mapping[str, Any]) -> T | None:
    """The record; None if its kind is unknown, or a field without a default is missing."""
    if kind is None:
        return None
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value, inner = record.get(_key(field), MISSING), field.metadata.get("type")
        if inner is not None and isinstance(value, Mapping):
            value = _decoded(inner, value)
        hint = _hints(kind)[field.name]  # type: ignore[arg-type]
        if isinstance(value, Mapping) and get_origin(hint) is Mapping:  # of values that fit
            value = {k: each for k, each in value.items() if _fits(get_args(hint)[1], each)}
        if _fits(hint, value):
            values[field.name] = value
        elif field.default is MISSING and field.default_factory is MISSING:
            return None
    return kind(**values)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value that was read from JSON is of a field's type."""
    if hint is Any or type(hint) is type:
        number = hint is float and isinstance(value, int)
        return type(value) is hint or number or (hint is Any and value is not MISSING)
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(each, value) for each in args)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(args[1], each) for each in value.values())
    if not isinstance(value, list | tuple):
        return False
    hints = args if origin is tuple else args * len(value)
    return len(hints) == len(value) and all(map(_fits, hints, value))


def _key(field: Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
