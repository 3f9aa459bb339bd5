"""Measures where the time goes: each moment of the training belongs to one phase."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

PHASES = (
    "data",  # waiting for a batch
    "copy",  # of it to the device, as far as the previous step did not hide it
    "compute",  # forward and backward
    "communication",  # all-reduces of gradients and buffers that compute did not hide
    "optimizer",
    "checkpoint",  # blocked by a checkpoint
    "evaluation",
    "other",  # agreement, logging, kernel launches
)

STARTING, EXCHANGING, AGREEING = "start-up", "gradient exchange", "agreement"
_NEXT = {  # what the host does after a mark of this phase
    "other": "data wait",
    "data": "compute",
    "copy": "compute",
    "compute": EXCHANGING,
    "communication": "optimizer",
    "optimizer": AGREEING,
    "checkpoint": AGREEING,
    "evaluation": AGREEING,
}


class Clock:
    """Ends a phase at each mark: the time between two marks belongs to the phase of the second.

    On a GPU the phases are those of the device, measured by events in its stream without waiting
    for it: "data" is its idle time. On a CPU they are the host's.

    Args:
        device: of the training.

    Attributes:
        doing: what the host does now; read by the watchdog, in another thread.
        steps: finished since `start`.
        moved_s: the time of the last progress, by `time.monotonic`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []
        self.doing = STARTING
        self.start()

    def start(self) -> None:
        """Starts the clock; earlier time does not count."""
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        self._window: dict[str, float] = defaultdict(float)
        self._started = self._window_started = self.moved_s = time.monotonic()
        self.steps = 0
        self._open: deque[tuple[str, torch.cuda.Event]] = deque()  # not yet reached by the device
        self._last_s = time.perf_counter()
        if self._on_gpu:
            self._last = self._event()

    def mark(self, phase: str) -> None:
        """The time since the last mark was `phase`. May be called by a thread of the backward
        pass."""
        self.doing = _NEXT[phase]
        if self._on_gpu:
            self._open.append((phase, self._event()))
            return
        now_s = time.perf_counter()
        self._add(phase, now_s - self._last_s)
        self._last_s = now_s

    @contextmanager
    def part(self, phase: str) -> Iterator[None]:
        self.mark("other")
        self.doing = phase
        self.beat()
        try:
            yield
        finally:
            self.doing = "other"  # also after an error: the watchdog waits longer for some phases
        self.mark(phase)
        self.beat()

    @contextmanager
    def also(self, what: str) -> Iterator[None]:
        """Tells the watchdog what rank 0 does while the others wait for it, unless it waits longer
        for what is done now."""
        before = self.doing
        if before not in ("checkpoint", "evaluation", STARTING):
            self.doing = what
        try:
            yield
        finally:
            self.doing = before

    def beat(self) -> None:
        """Reports progress within an operation that takes longer than a step."""
        self.moved_s = time.monotonic()

    def waits(self, steps: Iterator[T]) -> Iterator[T]:
        """Passes the steps' items on; the time spent waiting for them is "data"."""
        while True:
            self.mark("other")
            self._drain()
            try:
                item = next(steps)
            except StopIteration:
                return
            self.mark("data")
            yield item
            self.steps += 1
            self.beat()

    def after_backward(self, loss: Tensor) -> None:
        """Ends "compute" when all gradients of `loss` exist but are not yet summed over ranks;
        the rest of the backward pass is "communication"."""
        engine = torch.autograd.Variable._execution_engine  # as DDP itself does
        loss.register_hook(lambda _: engine.queue_callback(lambda: self.mark("compute")))

    def window(self) -> tuple[float, dict[str, float]]:
        """(seconds of training, seconds by phase) since the last call. Training excludes evaluation
        and checkpoints. On a GPU, phases are included as far as the device has come."""
        self._drain()
        now = time.monotonic()
        phases = dict(self._window)
        besides = phases.get("evaluation", 0.0) + phases.get("checkpoint", 0.0)
        trained = max(1e-9, now - self._window_started - besides)
        self._window_started = now
        self._window.clear()
        return trained, phases

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _drain(self) -> None:
        """Collects the events that the device has reached."""
        while self._open and self._open[0][1].query():
            phase, event = self._open.popleft()
            self._add(phase, self._last.elapsed_time(event) / 1e3)
            self._free.append(self._last)
            self._last = event

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds
        self._window[phase] += seconds
