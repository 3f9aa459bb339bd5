"""Exports a run's metrics to Prometheus through Ray's exporter: one gauge per value.

The driver exports them: it outlives the workers, so a run that hangs or restarts stays visible.
It repeats all values, as Ray drops values that were not updated for 20 s. All are gauges, even
those that only increase: a Ray counter cannot be 0, and a series that first appears with its first
failure shows no increase in Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from raytrain_ddp.events import (
    Checkpoint,
    CheckpointFailed,
    End,
    Eval,
    Evaluating,
    Event,
    Failed,
    InProgress,
    Pause,
    Plan,
    Preempted,
    Timing,
    Train,
)

_EXPORT_EVERY_S = 5.0  # Ray exports values updated in the last 10 s

PREFIX = "raytrain_"
ENDED, STARTING, TRAINING, EVALUATING = 0, 1, 2, 3
CAUSES = ("failure", "preemption", "resize")

_STATES = {Plan: TRAINING, Evaluating: EVALUATING, Eval: TRAINING, End: ENDED}
_TIMES = {
    Train: "last_step_timestamp_seconds",
    Eval: "last_step_timestamp_seconds",
    Checkpoint: "last_checkpoint_timestamp_seconds",
}
_COUNTS = {Checkpoint: "checkpoints", CheckpointFailed: "checkpoints_failed"}


class Value(NamedTuple):
    """A value that is exported.

    Args:
        text: its description.
        of: the attribute with the value, by kind of event; empty: it is computed.
        tags: the tags besides "run".
    """

    text: str
    of: Mapping[type, str] = {}
    tags: tuple[str, ...] = ()


# Ray prefixes all names with "ray_".
GAUGES = {
    "state": Value("0: ended, 1: workers are starting or restarting, 2: training, 3: evaluating."),
    "step": Value("Steps done.", {Plan: "start_step", Train: "step"}),
    "steps_planned": Value("Steps of the whole run.", {Plan: "total_steps"}),
    "epoch": Value("Epoch, from 0.", {Train: "epoch"}),
    "epochs_planned": Value("Epochs of the whole run.", {Plan: "epochs"}),
    "world_size": Value("Workers.", {Plan: "world_size"}),
    "last_step_timestamp_seconds": Value(
        "Unix time of the last step or evaluation; before it, of the start."
    ),
    "restarts": Value("Starts of the workers after the first, since fit began.", tags=("cause",)),
    "loss": Value("Mean loss of the last step logged; may be NaN.", {Train: "loss"}),
    "training_scalar": Value("The newest of each number that the loss returned.", tags=("name",)),
    "learning_rate": Value("Learning rate of the last step logged.", {Train: "lr"}),
    "evaluation": Value("The newest value of each metric of the evaluations.", tags=("metric",)),
    "best_evaluation": Value("The best value so far of the monitored metric.", tags=("metric",)),
    "evaluation_seconds": Value("Duration of the last evaluation.", {Eval: "seconds"}),
    "nonfinite_steps": Value(
        "Steps not applied: loss or gradient not finite.", {Train: "nonfinite"}
    ),
    "skipped_samples": Value("Samples that could not be read.", {Train: "skipped"}),
    "samples_per_second": Value(
        "Throughput of all workers, without evaluations and checkpoints.",
        {Train: "samples_per_s"},
    ),
    "step_seconds": Value(
        "Duration of a step, without evaluations and checkpoints.", {Timing: "step_s"}
    ),
    "phase_seconds": Value(
        "Duration of each phase of a step; mean over the ranks.", tags=("phase",)
    ),
    "mfu_ratio": Value(
        "Model FLOPs utilization, 0 to 1, where the GPU's peak is known.", {Timing: "mfu"}
    ),
    "flops_per_second": Value(
        "FLOP/s of a rank, of matrix products and convolutions only.", {Timing: "flops_per_s"}
    ),
    "peak_memory_bytes": Value(
        "Highest of all ranks: tensors on the GPU, or the process.", {Timing: "peak_memory_bytes"}
    ),
    "slowest_rank_ratio": Value(
        "Own work of the rank that waits least, as a multiple of the median; 0: not the slowest.",
        tags=("rank", "phase"),
    ),
    "checkpoints": Value("Checkpoints committed since fit began."),
    "checkpoints_failed": Value("Commits that failed for good, since fit began."),
    "checkpoint_step": Value(
        "Step of the newest checkpoint that was committed.", {Checkpoint: "step"}
    ),
    "checkpoint_seconds": Value(
        "Duration of the last commit, in the background.", {Checkpoint: "seconds"}
    ),
    "checkpoint_bytes": Value("Size of the last checkpoint.", {Checkpoint: "size_bytes"}),
    "checkpoint_stall_seconds": Value(
        "How long the last checkpoint stopped training.", {Pause: "seconds"}
    ),
    "last_checkpoint_timestamp_seconds": Value(
        "Unix time of the last commit; before it, of the start."
    ),
}


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
        self._run, self._make = run, gauge or _ray_gauge
        self._gauges: dict[str, Gauge] = {}
        self._planned = False
        self._lost = ""  # why there are no workers; "" if there are
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._values: dict[tuple[str, ...], float] = {("state",): STARTING}  # by name and tags
        self._values |= {(name,): 0 for name in _COUNTS.values()}
        self._values |= {("restarts", cause): 0 for cause in CAUSES}
        self._values |= {(name,): time.time() for name in _TIMES.values()}
        self._export()
        threading.Thread(target=self._keep_exporting, name="metrics", daemon=True).start()

    def take(self, event: Event) -> None:
        """Handles an event of any kind: those shown, and "at", the step in progress."""
        with suppress(Exception), self._lock:
            self._update(event)
        self._export()

    def close(self) -> None:
        """The run has ended; Ray soon drops its values."""
        self._values[("state",)] = ENDED
        self._export()
        self._closed.set()

    def _keep_exporting(self) -> None:
        while not self._closed.wait(_EXPORT_EVERY_S):
            self._export()

    def _export(self) -> None:
        with suppress(Exception), self._lock:
            for (name, *tags), value in self._values.items():
                text, _, names = GAUGES[name]
                if name not in self._gauges:
                    self._gauges[name] = self._make(PREFIX + name, text, ("run", *names))
                named = {"run": self._run, **dict(zip(names, tags, strict=True))}
                self._gauges[name].set(float(value), named)

    def _update(self, event: Event) -> None:
        values, kind = self._values, type(event)
        self._set_attributes(event)
        values[("state",)] = _STATES.get(kind, values[("state",)])
        if kind in _TIMES:
            values[(_TIMES[kind],)] = time.time()
        if kind in _COUNTS:
            values[(_COUNTS[kind],)] += 1
        match event:
            case Plan():
                if self._planned and not self._lost:
                    values["restarts", "resize"] += 1
                self._planned, self._lost = True, ""
                if event.start_step == 0:
                    values[("nonfinite_steps",)] = values[("skipped_samples",)] = 0
            case InProgress() if event.step > values.get(("step",), 0) + 1:  # one is done
                values[("step",)] = event.step - 1
                values[("last_step_timestamp_seconds",)] = time.time()
            case Train():
                self._set_timing(event.timing)
                self._set_each("training_scalar", event.scalars)
            case Eval():
                self._set_each("evaluation", event.metrics)
                if event.best:
                    values["best_evaluation", event.monitor] = event.metrics[event.monitor]
            case Failed():  # each counts, also of workers that had not begun to train again
                self._restart("failure")
            # A worker that sees it coming reports it, and the driver once the node is gone.
            case Preempted() if self._lost != "preemption":
                self._restart("preemption")

    def _set_timing(self, timing: Timing) -> None:
        self._set_attributes(timing)
        for key in self._values:  # a phase that takes no time anymore, another slowest rank
            if key[0] in ("phase_seconds", "slowest_rank_ratio"):
                self._values[key] = 0
        self._set_each("phase_seconds", timing.split_s)
        if slowest := timing.slowest:  # None with one rank
            self._values["slowest_rank_ratio", f"{slowest.rank}", slowest.phase] = slowest.ratio

    def _set_attributes(self, event: object) -> None:
        for name, (_, of, _) in GAUGES.items():
            value = getattr(event, of.get(type(event), ""), None)
            if value is not None:
                self._values[(name,)] = value

    def _set_each(self, name: str, found: Mapping[str, float]) -> None:
        for tag, value in found.items():
            self._values[name, tag] = value

    def _restart(self, cause: str) -> None:
        self._lost = cause
        self._values["restarts", cause] += 1
        self._values[("state",)] = STARTING


def _ray_gauge(name: str, description: str, tags: tuple[str, ...]) -> Gauge:
    from ray.util import metrics

    made: Gauge = metrics.Gauge(name, description, tags)
    return made
