"""Measures where the time goes: each moment of the training belongs to one phase.

Each rank has a clock. At each record of the log the clocks are combined: time per phase, the
slowest rank, GPU utilization (MFU). A rank that keeps slowing the others down is reported: once,
and again when it changes. `Profile` traces a few steps with torch.profiler.
"""

from __future__ import annotations

import gzip
import re
import resource
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from raytrain_ddp.checkpoint.run_folder import PROFILES
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.data.order import relative_load
from raytrain_ddp.events import Event, Note, Slowest, Straggler, Timing
from raytrain_ddp.membership.connections import all_gather
from raytrain_ddp.training.runtime.world import World

if TYPE_CHECKING:
    from torch.profiler import profile

T = TypeVar("T")

PHASES = (
    "data",  # waiting for a batch
    "copy",  # copying it to the device, as far as the previous step did not hide that
    "compute",  # forward and backward
    "communication",  # all-reduces of gradients and buffers that compute did not hide
    "optimizer",
    "checkpoint",  # blocked by a checkpoint
    "evaluation",
    "other",  # agreement, logging, kernel launches
)
_WORK = ("data", "copy", "compute", "optimizer")  # phases in which a rank does not wait for others

STARTING, EXCHANGING, AGREEING = "start-up", "gradient exchange", "agreement"
WRITING = "writing"
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

# Dense peak FLOP/s in fp16 and bf16 with fp32 accumulation, from NVIDIA's data sheets. The first
# name that is among the words of a GPU's name applies.
_PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100-PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
_FP16_ONLY = {"V100-PCIE", "V100", "T4"}
_SLOWER = 2.0  # times the others
_LINES = 5
_UNTRACED = 10  # steps of each start: the first ones are slower
_ROWS, _NAME_WIDTH = 100, 80


class Clock:
    """Ends a phase at each mark: the time between two marks belongs to the phase of the second.

    On a GPU the phases are those of the device, measured by events in its stream without waiting
    for it: "data" is its idle time. On a CPU they are the host's.

    Args:
        device: the device of the training.

    Attributes:
        doing: what the host does now; read by the watchdog, in another thread.
        steps: the number of steps finished since `start`.
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
        self._before: dict[str, float] = {}  # `seconds` when the window began
        self._started = self._window_started = self.moved_s = time.monotonic()
        self.steps = 0
        self._open: deque[tuple[str, torch.cuda.Event]] = deque()  # not yet reached by the device
        self._last_s = time.perf_counter()
        if self._on_gpu:
            self._last = self._event()

    def mark(self, phase: str) -> None:
        """Counts the time since the last mark as `phase`. A thread of the backward pass may call
        it."""
        self.doing = _NEXT[phase]
        if self._on_gpu:
            self._open.append((phase, self._event()))
            return
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._last_s
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
        phases = {phase: s - self._before.get(phase, 0.0) for phase, s in self.seconds.items()}
        self._before = dict(self.seconds)
        besides = phases.get("evaluation", 0.0) + phases.get("checkpoint", 0.0)
        trained = max(1e-9, now - self._window_started - besides)
        self._window_started = now
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
            self.seconds[phase] += self._last.elapsed_time(event) / 1e3
            self._free.append(self._last)
            self._last = event


def measured(seconds: float, phases: Mapping[str, float], world: World) -> Tensor:
    """What each rank has measured since the last record; all ranks take part.

    Args:
        seconds, phases: see `Clock.window`.

    Returns:
        Shape (ranks, 2 + phases): seconds, the peak memory of the device (on a CPU, of the
        process) in bytes, and the seconds of each of PHASES. One tensor, as this is in the
        training loop, where `from_all_ranks` would cost two collectives and pickles.
    """
    if world.device.type == "cuda":
        memory_bytes = torch.cuda.max_memory_allocated(world.device)
    else:
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    each = [phases.get(phase, 0.0) for phase in PHASES]
    mine = torch.tensor([seconds, memory_bytes, *each], dtype=torch.float64)
    if world.size == 1:
        return mine.unsqueeze(0)
    table = mine.new_empty(world.size, len(mine))
    all_gather(table, mine)
    return table


def summary(
    table: Tensor,
    steps: int,
    flops_per_s: float,
    peak: float | None,
    of_run: Callable[[int], int] = int,
) -> Timing:
    """The timing of `steps` steps for the log.

    Args:
        table: see `measured`.
        flops_per_s: achieved by a rank; 0 if unknown.
        peak: FLOP/s that its GPU can achieve; None if unknown.
        of_run: see `World.of_run`.
    """
    spent = table[:, 2:]
    means = zip(PHASES, (spent.mean(0) / steps).tolist(), strict=True)
    return Timing(
        step_s=table[:, 0].max().item() / steps,
        split_s={phase: mean for phase, mean in means if mean > 0},
        peak_memory_bytes=int(table[:, 1].max()),
        slowest=_slowest(spent, of_run) if len(table) > 1 else None,
        flops_per_s=flops_per_s or None,
        mfu=flops_per_s / peak if flops_per_s and peak else None,
    )


def _slowest(spent: Tensor, of_run: Callable[[int], int]) -> Slowest:
    """The rank whose own work took longest; the others waited for it in communication."""
    work = spent[:, [PHASES.index(phase) for phase in _WORK]]
    busy = work.sum(1)
    rank = int(busy.argmax())
    is_other = torch.arange(len(work)) != rank
    beyond = work[rank] - work[is_other].quantile(0.5, 0)
    usual = busy[is_other].quantile(0.5).item()
    ratio = busy[rank].item() / max(usual, 1e-9)
    return Slowest(of_run(rank), _WORK[int(beyond.argmax())], ratio)


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """The peak of a GPU in fp16 or bf16; None if unknown, and for fp32, which is partly TF32."""
    other = "(?! Ti| D| Laptop)"  # models with another peak
    name = next((n for n in _PEAKS if re.search(rf"\b{n}\b{other}", device_name)), None)
    if name is None or precision == "fp32" or (precision == "bf16" and name in _FP16_ONLY):
        return None
    return _PEAKS[name]


class _NoModules(nullcontext[None]):
    """Replaces a tracker of modules, whose hooks make `torch.autograd.grad` fail in a loss."""

    parents = ("Global",)


@contextmanager
def counting_flops(compiled: bool) -> Iterator[FlopCounterMode]:
    """Counts floating-point operations: those of matrix products and convolutions.

    Args:
        compiled: whether parts are compiled, which then run uncompiled here.
    """
    torch.compiler.set_stance("force_eager" if compiled else "default")
    try:
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        with counter:
            yield counter
    finally:
        torch.compiler.set_stance("default")


class Stragglers:
    """Collects the slowest rank of each log record.

    Args:
        slots: slots per step; if they are dealt unevenly, a rank with more may take longer.
    """

    def __init__(self, slots: int, world: World) -> None:
        self._slots, self._world = slots, world
        self._lines: deque[Slowest] = deque(maxlen=_LINES)
        self._reported = -1  # the rank; -1: none

    def look(self, step: int, slowest: Slowest | None, hosts: Sequence[str]) -> Straggler | None:
        """An event, if there is something new to report.

        Args:
            slowest: see `summary`; None if there is only one rank.
            hosts: the hosts of all ranks; empty if unknown.
        """
        if slowest is None:
            return None
        rank, size = slowest.rank, self._world.size
        place = [*map(self._world.of_run, range(size))].index(rank)
        ratio = slowest.ratio / relative_load(self._slots, size, place)
        self._lines.append(Slowest(rank if ratio >= _SLOWER else -1, slowest.phase, ratio))
        ranks = {line.rank for line in self._lines}
        if len(self._lines) < _LINES or len(ranks) > 1 or self._reported in ranks:
            return None
        before, self._reported = self._reported, ranks.pop()
        if self._reported < 0:
            text = f"rank {before} keeps up with the others again, as of step {step}"
            return Straggler(step, None, text)
        phase = Counter(line.phase for line in self._lines).most_common(1)[0][0]
        ratio = median(line.ratio for line in self._lines)
        host = hosts[place] if hosts else ""
        where = f" on {host}" if host else ""
        text = f"rank {rank}{where} takes {ratio:.1f} x as long as the others, which wait for it: "
        text += f"mostly in {phase}, as of step {step}"
        return Straggler(step, rank, text, host, phase, ratio)


class Profile:
    """Traces `log.profile_steps` steps of each start on the ranks of `log.profile_ranks`.

    Args:
        run: receives the trace, in Chrome's format, and the slowest operations, as text.
        clock: receives a sign of progress, as writing the trace takes time.
        tell: receives a note, on rank 0.
    """

    def __init__(
        self,
        log: LogConfig,
        world: World,
        run: Storage,
        clock: Clock,
        tell: Callable[[Event], None],
    ) -> None:
        self._rank, self._on_gpu = world.of_run(world.rank), world.device.type == "cuda"
        self._steps = log.profile_steps if self._rank in log.profile_ranks else 0
        self._run, self._clock, self._tell = run, clock, tell
        self._trace: profile | None = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the trace, as the run may end or fail before the trace is complete."""
        if self._trace is not None:
            self._trace.stop()

    def begin_step(self, step: int) -> None:
        """Starts or ends the trace; called before each step, counted from 1."""
        if not self._steps:
            return
        self._clock.mark("data")
        try:
            if self._trace is None:
                self._first, self._trace = step + _UNTRACED, self._begun()
            else:
                self._trace.step()
            self._step = step
        except RuntimeError as error:  # for example when another profiler is active
            self._steps, self._trace = 0, None
            self._tell(Note(f"cannot trace steps: {error}"))
        self._clock.mark("other")

    def _begun(self) -> profile:
        from torch.profiler import ProfilerActivity, profile, schedule

        trace = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * self._on_gpu)],
            schedule=schedule(
                skip_first=_UNTRACED - 1, wait=0, warmup=1, active=self._steps, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,  # torch 2.10 warns without it
        )
        trace.start()
        return trace

    def _write(self, trace: profile) -> None:
        self._clock.doing = WRITING
        name = f"rank-{self._rank}-steps-{self._first}-{self._step}"
        text = f"the trace of steps {self._first} to {self._step} is in {self._run}/{PROFILES}: "
        text += f"{name}.json.gz, for Perfetto, and {name}.txt, its operations by time"
        try:
            times = trace.key_averages().table(
                sort_by=f"self_{'device' if self._on_gpu else 'cpu'}_time_total",
                row_limit=_ROWS,
                max_name_column_width=_NAME_WIDTH,
            )
            with TemporaryDirectory() as folder:
                plain = Path(folder, "trace.json")
                trace.export_chrome_trace(str(plain))
                content = gzip.compress(plain.read_bytes(), 5)
            profiles = self._run.join(PROFILES)
            profiles.mkdir()
            profiles.write_atomic(f"{name}.json.gz", content)
            profiles.write_atomic(f"{name}.txt", times.encode())
        except (OSError, RuntimeError) as error:
            text = f"the trace {name} cannot be written: {error}"
        self._tell(Note(text))
