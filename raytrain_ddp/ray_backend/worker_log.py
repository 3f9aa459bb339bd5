"""The log of a worker: in the run's logs/rank-N.log, and in Ray's dashboard."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping

from raytrain_ddp.bottleneck import StepSplit
from raytrain_ddp.events import Checkpoint, Eval, Note, Plan, Preempted, Train
from raytrain_ddp.formatting import (
    format_bytes,
    format_count,
    format_metric,
    format_number,
    format_seconds,
)
from raytrain_ddp.messages import Event, Outcome
from raytrain_ddp.training.runtime.world import World

_LINE_EVERY_S = 10.0

_log = logging.getLogger("raytrain_ddp")  # Ray Train writes log records to its files


class WorkerLog:
    """Logs a line for each important event; for steps, evaluations and checkpoints at most one per
    kind in ten seconds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._total = 0
        self._reported_at: dict[str, float] = {}  # time of the last line, by kind
        self._split = StepSplit()

    def take(self, event: Event) -> None:
        """Handles an event of any kind; on rank 0 also from the committing thread."""
        text = self._line(event)
        if text:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            _log.info("%s  rank %d: %s", now, self._world.of_run(self._world.rank), text)

    def _line(self, event: Event) -> str:
        line = ""
        match event:
            case Plan():
                self._total = event.total_steps
                self._split.begin(event.start_step)
                line = (
                    f"one of {self._world.size} on {socket.gethostname()}, {event.device}, process "
                    f"{os.getpid()}; from step {event.start_step} to {self._total}"
                )
            case Train():
                self._split.add(event)
                if not self._is_too_soon("train"):
                    limit = f"; {self._split.limit()}" if self._split.is_settled else ""
                    line = (
                        f"step {event.step}/{self._total}, loss {format_number(event.loss)}, "
                        f"{format_count(event.samples_per_s)} samples/s{limit}"
                    )
            case Eval() if not self._is_too_soon("eval"):
                line = f"step {event.step}/{self._total}, evaluation: {_as_text(event.metrics)}"
            case Checkpoint() if not self._is_too_soon("checkpoint"):
                size = format_bytes(event.size_bytes or 0)
                seconds = format_seconds(event.seconds or 0.0)
                line = f"checkpoint of step {event.step}: {size}, committed in {seconds}"
            case Outcome():
                metrics = _as_text(event.metrics)  # of the last evaluation, even if it had no line
                line = f"ended at step {event.step}" + (metrics and f", evaluation: {metrics}")
            case Note() | Preempted():
                line = event.text
        return line

    def _is_too_soon(self, kind: str) -> bool:
        """Whether another line of this kind is too early; if not, it is logged now."""
        now = time.monotonic()
        if now - self._reported_at.get(kind, -math.inf) < _LINE_EVERY_S:
            return True
        self._reported_at[kind] = now
        return False


def _as_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())
