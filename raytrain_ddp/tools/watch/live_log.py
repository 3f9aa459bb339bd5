"""Reads what was added to a run's logs since the last time, and keeps a bounded part of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from raytrain_ddp.checkpoint.growing_file import GrowingFile
from raytrain_ddp.checkpoint.run_folder import EVENTS_FILE, METRICS_FILE, parsed_lines
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.events import Checkpoint, Eval, Note, Ranks, Train
from raytrain_ddp.records import Timed, log_records, stored_events

_TRAIN, _AUDIT = b'{"kind": "train"', b'{"kind": "audit"'
_LOSS = re.compile(rb'"loss": ([^,}]+)')
_LEAST = 50  # training records that are parsed of a piece of a long file
_MANY = (Checkpoint, Ranks, Note)  # events that a long run has without end
T = TypeVar("T", Train, bytes)


class LiveLog:
    """The records of metrics.jsonl and events.jsonl of a run, about `most` of each.

    Of training records, the lowest and highest loss of each stretch are kept, and the newest.
    """

    def __init__(self, run: Storage, most: int) -> None:
        self._most = most
        self._metrics, self._events = GrowingFile(run, METRICS_FILE), GrowingFile(run, EVENTS_FILE)
        self.train: list[Train] = []
        self.evals: list[Eval] = []
        self.events: list[Timed] = []

    def read(self) -> bool:
        """Reads what is new; whether anything is. Raises OSError."""
        is_new = False
        if self._metrics.is_new():
            is_new = True
            if not self._metrics.offset:
                self.train, self.evals = [], []
            most = max(_LEAST, 2 * self._most // self._metrics.pieces)
            for lines in self._metrics.lines():
                self._add(lines, most)
        if self._events.is_new():
            is_new = True
            if not self._events.offset:
                self.events = []
            for lines in self._events.lines():
                found = stored_events(parsed_lines(lines, EVENTS_FILE))
                self.events += [each for each in found if each.time]
                if len(self.events) > 2 * self._most:  # of older ones, only the rare kinds stay
                    old, new = self.events[: -self._most], self.events[-self._most :]
                    self.events = [each for each in old if not isinstance(each.event, _MANY)] + new
        return is_new

    def _add(self, lines: Sequence[bytes], most: int) -> None:
        trained = [line for line in lines if line.startswith(_TRAIN)]
        others = [line for line in lines if not line.startswith((_TRAIN, _AUDIT))]
        kept = others + picked(trained, _loss_in, most)
        for record in log_records(parsed_lines(kept, METRICS_FILE)):
            if isinstance(record, Train) and isinstance(record.step, int):
                self.train.append(record)
            elif isinstance(record, Eval) and isinstance(record.step, int):
                self.evals.append(replace(record, tables={}))
        if len(self.train) > 2 * self._most:
            self.train = picked(self.train, lambda record: record.loss, self._most)
        if len(self.evals) > 2 * self._most:
            old, new = self.evals[: -self._most], self.evals[-self._most :]
            self.evals = [*[one for one in old if one.best][-self._most // 2 :], *new]


def picked(records: Sequence[T], loss: Callable[[T], float], most: int) -> list[T]:
    """About `most` of the records at most: the extremes of each stretch, and the last one."""
    if len(records) <= most:
        return list(records)
    each = -(-2 * len(records) // most)
    kept: list[int] = []
    for first in range(0, len(records), each):
        part = range(first, min(first + each, len(records)))
        values = [loss(records[place]) for place in part]
        values = [math.inf if math.isnan(value) else value for value in values]
        ends = {values.index(min(values)), values.index(max(values))}
        kept += [first + place for place in sorted(ends)]
    if kept[-1] != len(records) - 1:
        kept.append(len(records) - 1)
    return [records[place] for place in kept]


def _loss_in(line: bytes) -> float:
    found = _LOSS.search(line)
    try:
        return float(found[1]) if found else math.nan
    except ValueError:  # null: it was not finite
        return math.nan
