"""Exports a run's metrics to Prometheus through Ray's exporter: one gauge per value.

The driver exports them: it outlives the workers, so a run that hangs or restarts stays visible.
It repeats all values, as Ray drops values that were not updated for 20 s. All are gauges, even
those that only increase: a Ray counter cannot be 0, and a series that first appears with its first
failure shows no increase in Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    Timing,
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

# Gauges that are attributes of an event.
_ATTRIBUTES: dict[type, dict[str, str]] = {
    Plan: {
        "step": "start_step",
        "steps_planned": "total_steps",
        "epochs_planned": "epochs",
        "world_size": "world_size",
    },
    Train: {
        "step": "step",
        "epoch": "epoch",
        "loss": "loss",
        "learning_rate": "lr",
        "samples_per_second": "samples_per_s",
        "nonfinite_steps": "nonfinite",
        "skipped_samples": "skipped",
    },
    Timing: {
        "step_seconds": "step_s",
        "peak_memory_bytes": "peak_memory_bytes",
        "flops_per_second": "flops_per_s",
        "mfu_ratio": "mfu",
    },
    Eval: {"evaluation_seconds": "seconds"},
    Checkpoint: {
        "checkpoint_step": "step",
        "checkpoint_seconds": "seconds",
        "checkpoint_bytes": "size_bytes",
    },
    Pause: {"checkpoint_stall_seconds": "seconds"},
}

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
        self._newest[(name, *tags.values())] = name, value, tags

    def _samples(self, event: Event) -> Iterator[Sample]:
        now = time.time()
        match event:
            case Plan():
                yield from self._plan(event)
            case InProgress() if event.step > self._step + 1:  # the previous one is done
                self._step = event.step - 1
                yield "step", self._step, {}
                yield "last_step_timestamp_seconds", now, {}
            case Train():
                self._step = event.step
                yield "last_step_timestamp_seconds", now, {}
                yield from self._train(event)
            case Evaluating():
                yield "state", EVALUATING, {}
            case Eval():
                yield "state", TRAINING, {}
                yield "last_step_timestamp_seconds", now, {}
                yield from _tagged("evaluation", "metric", event.metrics)
                if event.best:
                    best = {event.monitor: event.metrics[event.monitor]}
                    yield from _tagged("best_evaluation", "metric", best)
            case Checkpoint():
                yield self._count("checkpoints")
                yield "last_checkpoint_timestamp_seconds", now, {}
            case CheckpointFailed():
                yield self._count("checkpoints_failed")
            case Failed():  # each counts, also of workers that had not begun to train again
                yield from self._restart("failure")
            # A worker that sees it coming reports it, and the driver once the node is gone.
            case Preempted() if self._lost != "preemption":
                yield from self._restart("preemption")
            case End():
                yield "state", ENDED, {}
        yield from _attributes(event)

    def _begin(self) -> Iterator[Sample]:
        now = time.time()
        yield "state", STARTING, {}
        yield "last_step_timestamp_seconds", now, {}
        yield "last_checkpoint_timestamp_seconds", now, {}
        yield from _tagged("restarts", "cause", self._restarts)
        for name, count in self._commits.items():
            yield name, count, {}

    def _plan(self, event: Plan) -> Iterator[Sample]:
        if self._planned and not self._lost:
            yield from self._restart("resize")
        self._planned, self._lost, self._step = True, "", event.start_step
        yield "state", TRAINING, {}
        if self._step == 0:
            yield "nonfinite_steps", 0, {}
            yield "skipped_samples", 0, {}

    def _train(self, event: Train) -> Iterator[Sample]:
        yield from _attributes(event.timing)
        yield from _tagged("training_scalar", "name", event.scalars)
        split = event.timing.split_s
        self._phases |= {*split}  # resets a phase that takes no time anymore
        yield from _tagged("phase_seconds", "phase", {p: split.get(p, 0.0) for p in self._phases})
        slowest = event.timing.slowest  # None with one rank
        place = {"rank": str(slowest.rank), "phase": slowest.phase} if slowest else {}
        if self._slowest not in ({}, place):
            yield "slowest_rank_ratio", 0, self._slowest
        self._slowest = place
        if slowest:
            yield "slowest_rank_ratio", slowest.ratio, place

    def _restart(self, cause: str) -> Iterator[Sample]:
        self._lost = cause
        self._restarts[cause] += 1
        yield "restarts", self._restarts[cause], {"cause": cause}
        yield "state", STARTING, {}

    def _count(self, name: str) -> Sample:
        self._commits[name] += 1
        return name, self._commits[name], {}


def _attributes(event: object) -> Iterator[Sample]:
    for name, attribute in _ATTRIBUTES.get(type(event), {}).items():
        value = getattr(event, attribute)
        if value is not None:
            yield name, value, {}


def _tagged(name: str, tag: str, values: Mapping[str, float]) -> Iterator[Sample]:
    for key, value in values.items():
        yield name, value, {tag: key}


def _ray_gauge(name: str, description: str, tags: tuple[str, ...]) -> Gauge:
    from ray.util import metrics

    made: Gauge = metrics.Gauge(name, description, tags)
    return made
