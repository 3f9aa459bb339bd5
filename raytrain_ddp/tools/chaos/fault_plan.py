"""Draws the faults of a run from one seed, before the run starts.

A fault is an entry of failpoints.py: a process kills itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from random import Random

DRIVER = "driver.event"

_OF_STEPS = ("train.before_step", "train.loss", "train.after_backward", "train.after_step")
_OF_STARTS = ("start.opened", "start.warmed_up", "start.loaded")
_OF_PRUNING = ("prune.manifest", "prune.done")
_OF_COMMITS = (  # (site, hit): a checkpoint has four files, model, optimizer, state and log
    *(("checkpoint.payload", 1 + file) for file in range(4)),
    *((f"checkpoint.{site}", None) for site in ("snapshot", "begin", "manifest", "committed")),
)


@dataclass(frozen=True)
class Fault:
    """A process is killed at `site` if rank, step, hit and after (if set) match. If the
    rank is missing in that step, because others continue without it, it is killed in its next."""

    site: str
    rank: int | None = None
    step: int | None = None
    hit: int | None = None
    after: int | None = None

    def __str__(self) -> str:
        """In the syntax of failpoints.py."""
        step = "step" if self.rank is None else "from"
        values = {"rank": self.rank, step: self.step, "hit": self.hit, "after": self.after}
        given = ",".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.site}:kill{'@' if given else ''}{given}"


def draw_faults(
    seed: int, total_steps: int, workers: int, save_every: int, kills: int, drivers: int = 0
) -> list[Fault]:
    """`kills` killed workers and `drivers` killed drivers (in a short run fewer), roughly in the
    order in which they occur. A pure function; no fault occurs twice.

    Faults with a step occur at that step, in whichever start of the run reaches it first: of those
    of one commit, each ends another attempt at it. Faults of starts and pruning occur at the next
    one after a number of others: so starts that follow a kill are killed, even repeatedly.

    Args:
        total_steps: of the run.
        workers: of the run; 0: their number changes, and any rank is killed.
        save_every: steps between its checkpoints.
    """
    random, ranks = Random(seed), range(workers) or [None]
    steps, saves = range(2, total_steps), range(save_every, total_steps, save_every)
    # Steps take most of a run's time; commits, pruning and starts are the most delicate.
    shares = {
        0.45: [Fault(*each) for each in product(_OF_STEPS, ranks, steps)],
        0.27: [Fault(site, None, step, hit) for (site, hit), step in product(_OF_COMMITS, saves)],
        0.13: [Fault(*each) for each in product(_OF_STARTS, ranks)] * kills,
        0.10: [Fault("data.read", *at) for at in product(ranks, steps)],
        0.05: [Fault(site) for site in _OF_PRUNING] * kills,
    }
    waits = [  # each fault waits for a random time; those that come first are drawn
        (random.expovariate(share / len(faults)), fault)
        for share, faults in shares.items()
        for fault in faults
    ]
    drawn = [fault for _, fault in sorted(waits, key=lambda wait: wait[0])[:kills]]
    drawn += [Fault(DRIVER, 0, step) for step in random.sample(steps, min(drivers, len(steps)))]
    plan = sorted((fault for fault in drawn if fault.step), key=lambda fault: fault.step or 0)
    for fault in (fault for fault in drawn if not fault.step):
        plan.insert(1 + int(random.random() * len(plan)), fault)
    return [
        replace(fault, after=place) if fault.step is None else fault
        for place, fault in enumerate(plan)
    ]
