"""What limits a run's speed, from the time per phase in the log."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from raytrain_ddp.events import LogRecord, Slowest, Train
from raytrain_ddp.tools.formatting import format_share

_OVER_S = 30.0  # of training; less fluctuates, more reacts slowly
_SLOWER = 1.25  # times the median rank, to be named


_CAUSES = {  # of a share of at least: (share, activity, remedy)
    "data": (
        0.10,
        "waits for data",
        "more scaling.cpus_per_worker, smaller images (convert), less augmentation",
    ),
    "copy": (
        0.10,
        "waits for copies of batches to the GPU",
        "images as uint8, smaller images, or a larger data.prefetch",
    ),
    "communication": (
        0.20,
        "waits for all-reduces",
        "a larger batch, ddp.compression, or a faster network (doctor measures it)",
    ),
    "optimizer": (0.25, "updates weights", "a larger batch for fewer updates"),
    "checkpoint": (0.05, "is blocked by checkpoints", "a larger checkpoint.every_s"),
    "evaluation": (0.40, "evaluates", "a larger eval.every_epochs"),
    "other": (0.20, "spends time between steps", "a larger micro_batch"),
}


class StepSplit:
    """Shares of the time by phase.

    Args:
        over_s: the newest seconds of training to include; None: all.
    """

    def __init__(self, over_s: float | None = _OVER_S) -> None:
        self._over_s = over_s
        self._lines: deque[tuple[float, dict[str, float], Slowest | None]] = deque()
        self._spent_s = 0.0
        self._step: int | None = None

    def add(self, record: Train) -> None:
        """Adds a record of kind "train"."""
        steps = record.step - (self._step or 0)
        self._step = record.step
        if steps <= 0:  # a restart: the number of steps of this record is unknown
            return
        timing = record.timing
        split = {phase: each for phase, each in timing.split_s.items() if math.isfinite(each)}
        seconds = {phase: steps * each for phase, each in split.items()}
        spent_s = sum(seconds.values())
        self._lines.append((spent_s, seconds, timing.slowest))
        self._spent_s += spent_s
        while self._over_s is not None and self._spent_s - self._lines[0][0] >= self._over_s:
            self._spent_s -= self._lines.popleft()[0]

    def begin(self, step: int) -> None:
        """The run continues from this step."""
        self._step = step

    @property
    def is_settled(self) -> bool:
        """Whether it covers `over_s` seconds."""
        return self._over_s is None or self._spent_s >= self._over_s

    def shares(self) -> dict[str, float]:
        """By phase, 0 to 1, the largest first; empty at the start."""
        totals: dict[str, float] = defaultdict(float)
        for _, seconds, _ in self._lines:
            for phase, each in seconds.items():
                totals[phase] += each
        whole = sum(totals.values())
        ordered = sorted(totals.items(), key=lambda item: -item[1])
        return {phase: each / whole for phase, each in ordered} if whole > 0 else {}

    def slowest(self) -> tuple[int, str, float] | None:
        """(rank, phase, multiple of the median) of a rank that the others waited for most of the
        time, if there is one."""
        named = Counter[tuple[int, str]]()
        ratios: dict[tuple[int, str], float] = defaultdict(float)
        for spent_s, _, slowest in self._lines:
            if slowest and slowest.ratio >= _SLOWER:
                place = slowest.rank, slowest.phase
                named[place] += round(1000 * spent_s)
                ratios[place] += spent_s * slowest.ratio
        if not named:
            return None
        place, milliseconds = named.most_common(1)[0]
        if milliseconds < 0.6 * 1000 * self._spent_s:
            return None
        return (*place, 1000 * ratios[place] / milliseconds)

    def limit(self) -> str:
        """One line: the main bottleneck, and a remedy; "" at the start."""
        shares, slow = self.shares(), self.slowest()
        if not shares:
            return ""
        over = {phase: shares.get(phase, 0.0) - least for phase, (least, *_) in _CAUSES.items()}
        worst = max(over, key=over.__getitem__)
        if over[worst] < 0:
            return f"computes {format_share(shares.get('compute', 0.0))} of the time"
        _, activity, remedy = _CAUSES[worst]
        share = format_share(shares[worst])
        if worst == "communication" and slow is not None:
            rank, phase, ratio = slow
            return (
                f"waits for rank {rank} {share} of the time: its {phase} takes {ratio:.1f} x as "
                "long as on the others"
            )
        return f"{activity} {share} of the time: {remedy}"


def split_of(records: Iterable[LogRecord]) -> StepSplit:
    """The split of a whole log."""
    split = StepSplit(None)
    for record in records:
        if isinstance(record, Train):
            split.add(record)
    return split
