"""Exports a run's metrics to Prometheus through Ray's exporter: one gauge per value.

The driver exports them: it outlives the workers, so a run that hangs or restarts stays visible.
It repeats all values, as Ray drops values that were not updated for 20 s. All are gauges, even
those that only increase: a Ray counter cannot be 0, and a series that first appears with its first
failure shows no increase in Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Eval,
    Failed,
    Plan,
    Preempted,
    Train,
)
from raytrain_ddp.messages import Evaluating, Event, InProgress, Pause

_EXPORT_EVERY_S = 5.0  # Ray exports values updated in the last 10 s

PREFIX = "raytrain_"
ENDED, STARTING, TRAINING, EVALUATING = 0, 1, 2, 3
CAUSES = ("failure", "preemption", "resize")

# Name: (description, tags besides "run"). Ray prefixes all names with "ray_".
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "state": ("0: ended, 1: workers are starting or restarting, 2: training, 3: evaluating.", ()),
    "step": ("Steps done.", ()),
    "steps_planned": ("Steps of the whole run.", ()),
    "epoch": ("Epoch, from 0.", ()),
    "epochs_planned": ("Epochs of the whole run.", ()),
    "world_size": ("Workers.", ()),
    "last_step_timestamp_seconds": (
        "Unix time of the last step or evaluation; before it, of the start.",
        (),
    ),
    "restarts": ("Starts of the workers after the first, since fit began.", ("cause",)),
    "loss": ("Mean loss of the last step logged; may be NaN.", ()),
    "training_scalar": ("The newest value of each number that the loss returned.", ("name",)),
    "learning_rate": ("Learning rate of the last step logged.", ()),
    "evaluation": ("The newest value of each metric of the evaluations.", ("metric",)),
    "best_evaluation": ("The best value so far of the metric that is monitored.", ("metric",)),
    "evaluation_seconds": ("Duration of the last evaluation.", ()),
    "nonfinite_steps": ("Steps not applied: loss or gradient not finite.", ()),
    "skipped_samples": ("Samples that could not be read.", ()),
    "samples_per_second": ("Throughput of all workers, without evaluations and checkpoints.", ()),
    "step_seconds": ("Duration of a step, without evaluations and checkpoints.", ()),
    "phase_seconds": ("Duration of each phase of a step; mean over the ranks.", ("phase",)),
    "mfu_ratio": ("Model FLOPs utilization, 0 to 1, where the GPU's peak is known.", ()),
    "flops_per_second": ("Of a rank, matrix products and convolutions only.", ()),
    "peak_memory_bytes": ("Of any rank: of its GPU's tensors, or of its process.", ()),
    "slowest_rank_ratio": (
        "Own work of the rank that waits least, as a multiple of the median; 0: not the slowest.",
        ("rank", "phase"),
    ),
    "checkpoints": ("Checkpoints committed since fit began.", ()),
    "checkpoints_failed": ("Commits that failed for good, since fit began.", ()),
    "checkpoint_step": ("Step of the newest checkpoint that was committed.", ()),
    "checkpoint_seconds": ("Duration of the last commit, in the background.", ()),
    "checkpoint_bytes": ("Size of the last checkpoint.", ()),
    "checkpoint_stall_seconds": ("How long the last checkpoint stopped training.", ()),
    "last_checkpoint_timestamp_seconds": (
        "Unix time of the last commit; before it, of the start.",
        (),
    ),
}

# Its 0 is exported once: otherwise a series of each rank and phase would remain.
_PASSING = {"slowest_rank_ratio"}

Sample = tuple[str, float, dict[str, str]]  # name, value, the tags besides "run"


class Gauge(Protocol):
    def set(self, value: float, tags: dict[str, str]) -> None: ...


class PrometheusMetrics:
    """Exports one run's metrics until it is closed. Its errors never fail the run.

    Args:
        run: the name of the run.
        gauge: makes a gauge: name, description, tags. Default: Ray's.
    """

    def __init__(
        self, run: str, gauge: Callable[[str, str, tuple[str, ...]], Gauge] | None = None
    ) -> None:
        self._run = run
        self._make = gauge or _ray_gauge
        self._gauges: dict[str, Gauge] = {}
        self._newest: dict[tuple[str, ...], Sample] = {}  # the newest for each name and tags
        self._step = 0
        self._restarts = dict.fromkeys(CAUSES, 0)
        self._planned = False
        self._lost = ""  # why there are no workers; "" if there are
        self._commits = {"checkpoints": 0, "checkpoints_failed": 0}
        self._phases: set[str] = set()
        self._slowest: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._say_all(self._begin())
        threading.Thread(target=self._keep_exporting, name="metrics", daemon=True).start()

    def take(self, event: Event) -> None:
        """Handles an event of any kind: those shown, and "at", the step in progress."""
        self._say_all(self._samples(event))

    def _say_all(self, samples: Iterable[Sample]) -> None:
        with suppress(Exception), self._lock:
            for name, value, tags in samples:
                self._export(name, float(value), tags)
                if name in _PASSING and not value:
                    del self._newest[_key(name, tags)]

    def close(self) -> None:
        """The run has ended; Ray soon drops its values."""
        self._say_all([("state", ENDED, {})])
        self._closed.set()

    def _keep_exporting(self) -> None:
        while not self._closed.wait(_EXPORT_EVERY_S):
            with suppress(Exception), self._lock:
                for sample in list(self._newest.values()):
                    self._export(*sample)

    def _export(self, name: str, value: float, tags: dict[str, str]) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            description, besides = GAUGES[name]
            gauge = self._gauges[name] = self._make(PREFIX + name, description, ("run", *besides))
        gauge.set(value, {"run": self._run, **tags})
        self._newest[_key(name, tags)] = name, value, tags

    def _samples(self, event: Event) -> Iterator[Sample]:
        match event:
            case Plan():
                yield from self._plan(event)
            case InProgress():
                yield from self._in_progress(event)
            case Train():
                yield from self._train(event)
            case Evaluating():
                yield "state", EVALUATING, {}
            case Eval():
                yield from self._eval(event)
            case Checkpoint():
                yield from self._checkpoint(event)
            case CheckpointFailed():
                yield self._count("checkpoints_failed")
            case Pause():
                yield "checkpoint_stall_seconds", event.seconds, {}
            case Failed():  # each counts, also of workers that had not begun to train again
                yield from self._restart("failure")
            # A worker that sees it coming reports it, and the driver once the node is gone.
            case Preempted() if self._lost != "preemption":
                yield from self._restart("preemption")
            case End():
                yield "state", ENDED, {}

    def _begin(self) -> Iterator[Sample]:
        now = time.time()
        yield "state", STARTING, {}
        yield "last_step_timestamp_seconds", now, {}
        yield "last_checkpoint_timestamp_seconds", now, {}
        for cause, count in self._restarts.items():
            yield "restarts", count, {"cause": cause}
        for name, count in self._commits.items():
            yield name, count, {}

    def _plan(self, event: Plan) -> Iterator[Sample]:
        if self._planned and not self._lost:
            yield from self._restart("resize")
        self._planned, self._lost = True, ""
        self._step = event.start_step
        yield "state", TRAINING, {}
        yield "step", self._step, {}
        yield "steps_planned", event.total_steps, {}
        yield "epochs_planned", event.epochs, {}
        yield "world_size", event.world_size, {}
        if self._step == 0:
            yield "nonfinite_steps", 0, {}
            yield "skipped_samples", 0, {}

    def _in_progress(self, event: InProgress) -> Iterator[Sample]:
        """A step is in progress: the previous one is done."""
        if event.step > self._step + 1:
            self._step = event.step - 1
            yield "step", self._step, {}
            yield "last_step_timestamp_seconds", time.time(), {}

    def _train(self, event: Train) -> Iterator[Sample]:
        timing = event.timing
        self._step = event.step
        yield "step", self._step, {}
        yield "last_step_timestamp_seconds", time.time(), {}
        yield "epoch", event.epoch, {}
        yield "loss", event.loss, {}
        yield "learning_rate", event.lr, {}
        for name, value in event.scalars.items():
            yield "training_scalar", value, {"name": name}
        yield "samples_per_second", event.samples_per_s, {}
        yield "nonfinite_steps", event.nonfinite, {}
        yield "skipped_samples", event.skipped, {}
        yield "step_seconds", timing.step_s, {}
        yield "peak_memory_bytes", timing.peak_memory_bytes, {}
        split = timing.split_s
        self._phases |= {*split}
        for phase in self._phases:  # resets a phase that takes no time anymore
            yield "phase_seconds", split.get(phase, 0.0), {"phase": phase}
        if timing.flops_per_s is not None:
            yield "flops_per_second", timing.flops_per_s, {}
        if timing.mfu is not None:
            yield "mfu_ratio", timing.mfu, {}
        slowest = timing.slowest  # None with one rank
        place = {"rank": str(slowest.rank), "phase": slowest.phase} if slowest else {}
        if self._slowest not in ({}, place):
            yield "slowest_rank_ratio", 0, self._slowest
        self._slowest = place
        if slowest:
            yield "slowest_rank_ratio", slowest.ratio, place

    def _eval(self, event: Eval) -> Iterator[Sample]:
        yield "state", TRAINING, {}
        yield "last_step_timestamp_seconds", time.time(), {}
        yield "evaluation_seconds", event.seconds, {}
        for metric, value in event.metrics.items():
            yield "evaluation", value, {"metric": metric}
        if event.best:
            monitor = event.monitor
            yield "best_evaluation", event.metrics[monitor], {"metric": monitor}

    def _checkpoint(self, event: Checkpoint) -> Iterator[Sample]:
        yield self._count("checkpoints")
        yield "last_checkpoint_timestamp_seconds", time.time(), {}
        yield "checkpoint_step", event.step, {}
        yield "checkpoint_seconds", event.seconds or 0.0, {}
        yield "checkpoint_bytes", event.size_bytes or 0, {}

    def _restart(self, cause: str) -> Iterator[Sample]:
        self._lost = cause
        self._restarts[cause] += 1
        yield "restarts", self._restarts[cause], {"cause": cause}
        yield "state", STARTING, {}

    def _count(self, name: str) -> Sample:
        self._commits[name] += 1
        return name, self._commits[name], {}


def _key(name: str, tags: dict[str, str]) -> tuple[str, ...]:
    return name, *tags.values()


def _ray_gauge(name: str, description: str, tags: tuple[str, ...]) -> Gauge:
    from ray.util import metrics

    made: Gauge = metrics.Gauge(name, description, tags)
    return made
