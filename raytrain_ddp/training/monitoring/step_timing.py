"""Combines the ranks' clocks: time per phase, the slowest rank, GPU utilization (MFU).

A rank that keeps slowing the others down is reported: once, and again when it changes.
"""

from __future__ import annotations

import math
import re
import resource
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from raytrain_ddp.data.order.epoch_order import relative_load
from raytrain_ddp.events import Slowest, Straggler, Timing
from raytrain_ddp.torch_compat import all_gather
from raytrain_ddp.training.monitoring.phase_clock import PHASES
from raytrain_ddp.training.runtime.world import World

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
_WORK = ("data", "copy", "compute", "optimizer")  # phases in which a rank does not wait for others
_SLOWER = 2.0  # times the others
_LINES = 5


class Reading(NamedTuple):
    """One rank's measurements since the last reading.

    Args:
        seconds: of training since the last reading; see `Clock.window`.
        phases: seconds by phase, in the order of PHASES.
        peak_memory_bytes: of the device, or of this process.
    """

    seconds: float
    phases: tuple[float, ...]
    peak_memory_bytes: int


def gathered(mine: Reading, world: World) -> list[Reading]:
    """The readings of all ranks, by rank; all ranks take part. As one tensor: this is in the
    training loop, where `from_all_ranks` would cost two collectives and pickles."""
    if world.size == 1:
        return [mine]
    flat = [mine.seconds, float(mine.peak_memory_bytes), *mine.phases]
    parts = torch.empty(world.size * len(flat), dtype=torch.float64)
    all_gather(parts, torch.tensor(flat, dtype=torch.float64))
    rows = parts.view(world.size, -1).tolist()
    return [Reading(seconds, tuple(phases), int(memory)) for seconds, memory, *phases in rows]


def summary(
    readings: Sequence[Reading],
    steps: int,
    flops_per_s: float,
    peak: float | None,
    of_run: Callable[[int], int] = int,
) -> Timing:
    """The timing of `steps` steps for the log.

    Args:
        flops_per_s: achieved by a rank; 0 if unknown.
        peak: FLOP/s that its GPU can achieve; None if unknown.
        of_run: see `World.of_run`.
    """
    slowest = _slowest(readings) if len(readings) > 1 else None
    return Timing(
        step_s=max(reading.seconds for reading in readings) / steps,
        split_s=_split(readings, steps),
        peak_memory_bytes=max(reading.peak_memory_bytes for reading in readings),
        slowest=slowest and replace(slowest, rank=of_run(slowest.rank)),
        flops_per_s=flops_per_s or None,
        mfu=flops_per_s / peak if flops_per_s and peak else None,
    )


def by_rank(
    readings: Sequence[Reading], steps: int, of_run: Callable[[int], int] = int
) -> list[dict[str, float]]:
    """Seconds per step by phase, for phases that took any time, of each rank of the run; nothing
    for one that is missing."""
    found = {
        of_run(rank): {
            p: float(f"{s / steps:.3g}") for p, s in zip(PHASES, r.phases, strict=True) if s > 0
        }
        for rank, r in enumerate(readings)
    }
    return [found.get(rank, {}) for rank in range(max(found) + 1)]


def _split(readings: Sequence[Reading], steps: int) -> dict[str, float]:
    """Seconds per step by phase, for phases that took any time; means over the ranks."""
    by_phase = zip(*(reading.phases for reading in readings), strict=True)
    means = (math.fsum(each) / len(each) / steps for each in by_phase)
    return {phase: mean for phase, mean in zip(PHASES, means, strict=True) if mean > 0}


def _slowest(readings: Sequence[Reading]) -> Slowest:
    """The rank whose own work took longest; the others waited for it in communication."""
    work = [[r.phases[PHASES.index(phase)] for phase in _WORK] for r in readings]
    busy = [math.fsum(each) for each in work]
    rank = max(range(len(busy)), key=busy.__getitem__)
    others = work[:rank] + work[rank + 1 :]
    usual = [median(each) for each in zip(*others, strict=True)]
    usually = median(math.fsum(each) for each in others)
    beyond = [own - other for own, other in zip(work[rank], usual, strict=True)]
    phase = _WORK[max(range(len(_WORK)), key=beyond.__getitem__)]
    return Slowest(rank, phase, busy[rank] / max(usually, 1e-9))


def in_order(phases: Mapping[str, float]) -> tuple[float, ...]:
    """The values in the order of PHASES; 0 if missing."""
    return tuple(phases.get(phase, 0.0) for phase in PHASES)


def peak_memory_bytes(device: torch.device) -> int:
    """Of tensors on a GPU; else of this process, as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """Of a GPU in fp16 or bf16; None if unknown, and for fp32, which is partly TF32."""
    other = "(?! Ti| D| Laptop)"  # whose peak is another one
    name = next((n for n in _PEAKS if re.search(rf"\b{n}\b{other}", device_name)), None)
    if name is None or precision == "fp32" or (precision == "bf16" and name in _FP16_ONLY):
        return None
    return _PEAKS[name]


class _NoModules(nullcontext[None]):
    """Replaces a tracker of modules, with whose hooks `torch.autograd.grad` fails in a loss."""

    parents = ("Global",)


@contextmanager
def counting_flops(compiled: bool) -> Iterator[FlopCounterMode]:
    """Counts floating-point operations: those of matrix products and convolutions.

    Args:
        compiled: parts are compiled, and must run uncompiled here.
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
        slots: per step; if they are dealt unevenly, a rank with more of them may take longer.
        size: the number of ranks.
        of_run: see `World.of_run`; also of those that it is given.
    """

    def __init__(self, slots: int, size: int, of_run: Callable[[int], int] = int) -> None:
        self._slots, self._size = slots, size
        self._present = [of_run(rank) for rank in range(size)]
        self._lines: deque[tuple[int, str, float]] = deque(maxlen=_LINES)
        self._reported: int | None = None

    def look(self, step: int, slowest: Slowest | None, hosts: Sequence[str]) -> Straggler | None:
        """An event, if there is something new to report.

        Args:
            slowest: see `summary`; None if there is only one rank.
            hosts: of all ranks that are present.
        """
        if slowest is None:
            return None
        rank = slowest.rank
        ratio = slowest.ratio / relative_load(self._slots, self._size, self._present.index(rank))
        self._lines.append((rank if ratio >= _SLOWER else -1, slowest.phase, ratio))
        if len({each for each, _, _ in self._lines}) > 1 or len(self._lines) < _LINES:
            return None
        rank = self._lines[0][0]
        before, self._reported = self._reported, None if rank < 0 else rank
        if before == self._reported:
            return None
        if self._reported is None:
            text = f"rank {before} keeps up with the others again, as of step {step}"
            return Straggler(step, None, text)
        phase = Counter(phase for _, phase, _ in self._lines).most_common(1)[0][0]
        ratio = sorted(ratio for _, _, ratio in self._lines)[_LINES // 2]
        host = dict(zip(self._present, hosts, strict=False)).get(rank, "")
        where = f" on {host}" if host else ""
        text = f"rank {rank}{where} takes {ratio:.1f} x as long as the others, which wait for it: "
        text += f"mostly in {phase}, as of step {step}"
        return Straggler(step, rank, text, host, phase, ratio)
