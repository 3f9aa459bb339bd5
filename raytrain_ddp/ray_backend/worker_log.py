"""The log of a worker: in the run's logs/rank-N.log, and in Ray's dashboard."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping

from raytrain_ddp.events import Checkpoint, Eval, Event, Note, Outcome, Plan, Preempted, Train
from raytrain_ddp.tools.formatting import format_count, format_metric, format_number
from raytrain_ddp.training.runtime.world import World

_LINE_EVERY_S = 10.0

_log = logging.getLogger("raytrain_ddp")  # Ray Train writes log records to its files


class WorkerLog:
    """Logs a line for each important event; for steps, evaluations and checkpoints at most one per
    kind in ten seconds."""

    def __init__(self, world: World) -> None:
        self._world, self._total = world, 0
        self._logged_at: dict[type, float] = {}  # time of the last line, by kind

    def take(self, event: Event) -> None:
        """Handles an event of any kind; on rank 0 also from the committing thread."""
        line, now = self._line(event), time.monotonic()
        if isinstance(event, Train | Eval | Checkpoint):
            if now - self._logged_at.get(type(event), -math.inf) < _LINE_EVERY_S:
                return
            self._logged_at[type(event)] = now
        if line:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            _log.info("%s  rank %d: %s", date, self._world.of_run(self._world.rank), line)

    def _line(self, event: Event) -> str:
        line = ""
        match event:
            case Plan():
                self._total = event.total_steps
                line = (
                    f"one of {self._world.size} on {socket.gethostname()}, {event.device}, process "
                    f"{os.getpid()}; from step {event.start_step} to {self._total}"
                )
            case Train():
                speed = f"{format_count(event.samples_per_s)} samples/s"
                loss = format_number(event.loss)
                line = f"step {event.step}/{self._total}, loss {loss}, {speed}"
            case Eval():
                line = f"step {event.step}/{self._total}, evaluation: {_as_text(event.metrics)}"
            case Checkpoint():
                line = f"checkpoint of step {event.step} is committed"
            case Outcome():
                metrics = _as_text(event.metrics)  # of the last evaluation, even if it had no line
                line = f"ended at step {event.step}" + (metrics and f", evaluation: {metrics}")
            case Note() | Preempted():
                line = event.text
        return line


def _as_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in metrics.items())
