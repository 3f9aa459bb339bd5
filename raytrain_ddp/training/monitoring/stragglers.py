"""Reports a rank that keeps slowing the others down: once, and again when it changes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from raytrain_ddp.data.order.epoch_order import relative_load
from raytrain_ddp.events import Slowest, Straggler

_SLOWER = 2.0  # times the others
_LINES = 5


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
            slowest: see `step_timing.summary`; None if there is only one rank.
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
