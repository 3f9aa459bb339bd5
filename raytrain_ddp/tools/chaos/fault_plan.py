"""Draws the faults of a run from one seed, before the run starts.

A fault is an entry of failpoints.py, or `driver`: all processes of the run are killed from outside
when its log reaches a step, and the same command is run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import TypeVar

from raytrain_ddp.errors import ConfigError

T = TypeVar("T")
DRIVER = "driver"

_OF_STEPS = ("train.before_step", "train.loss", "train.after_backward", "train.after_step")
_OF_STARTS = ("start.opened", "start.warmed_up", "start.loaded")
_OF_PRUNING = ("prune.manifest", "prune.done")
_OF_COMMITS = ("snapshot", "begin", "manifest", "committed")
_PAYLOADS = 4  # files of a checkpoint: model, optimizer, state, log

# Steps take most of a run's time; commits, pruning and starts are the most delicate.
_SHARES = {"step": 0.45, "commit": 0.27, "prune": 0.05, "start": 0.13, "read": 0.10}


@dataclass(frozen=True)
class Fault:
    """A process is killed at `site`, by itself, if rank, step, hit and after (if set) match. If the
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


def armed(plan: Sequence[Fault]) -> str:
    """The plan in the syntax of failpoints.py: the faults that processes inflict on themselves."""
    return ";".join(str(fault) for fault in plan if fault.site != DRIVER)


def draw_faults(
    seed: int, total_steps: int, workers: int, save_every: int, kills: int, drivers: int = 0
) -> list[Fault]:
    """`kills` killed workers and `drivers` killed drivers, roughly in the order in which they
    occur. A pure function; no fault occurs twice.

    Faults with a step occur at that step, in whichever start of the run reaches it first; those of
    a commit come in pairs, so that it is killed twice. Faults of starts and pruning occur at the
    next one after a number of others: so starts that follow a kill are killed, even repeatedly.

    Args:
        total_steps, workers: of the run.
        save_every: steps between its checkpoints.

    Raises:
        ConfigError: the run is too short for that many.
    """
    random, ranks = Random(seed), range(workers)
    steps, saves = range(2, total_steps), range(save_every, total_steps, save_every)
    commits = [_shuffled(random, _of_commit(step)) for step in saves]
    pairs = [faults[n : n + 2] for faults in commits for n in range(0, len(faults), 2)]
    of_steps = [Fault(*each) for each in product(_OF_STEPS, ranks, steps)]
    pools = {
        "step": _shuffled(random, of_steps),
        "read": _shuffled(random, [Fault("data.read", *at) for at in product(ranks, steps)]),
        "commit": [fault for pair in _shuffled(random, pairs) for fault in pair],
    }
    plan: list[Fault] = []
    at_once: list[Fault] = []
    for _ in range(kills):
        kind = _kind(random)
        if kind == "start":
            at_once.append(Fault(one_of(random, _OF_STARTS), one_of(random, ranks)))
        elif kind == "prune":
            at_once.append(Fault(one_of(random, _OF_PRUNING)))
        elif pool := pools[kind] or pools["step"]:
            plan.append(pool.pop())
        else:
            raise _too_short("kills")
    if drivers > len(steps):
        raise _too_short("drivers")
    plan += [Fault(DRIVER, step=step) for step in _shuffled(random, steps)[:drivers]]
    plan.sort(key=lambda fault: fault.step or 0)
    for fault in at_once:
        plan.insert(1 + int(random.random() * len(plan)), fault)
    return [
        replace(fault, after=place) if fault.step is None else fault
        for place, fault in enumerate(plan)
    ]


def _of_commit(step: int) -> list[Fault]:
    """All faults within one commit; each may end one attempt at it."""
    payloads = [Fault("checkpoint.payload", step=step, hit=n + 1) for n in range(_PAYLOADS)]
    return payloads + [Fault(f"checkpoint.{site}", step=step) for site in _OF_COMMITS]


def _too_short(what: str) -> ConfigError:
    return ConfigError(f"too many {what} for so short a run: use more --epochs or fewer --{what}.")


def _kind(random: Random) -> str:
    point = random.random()
    for kind, share in _SHARES.items():
        point -= share
        if point < 0:
            return kind
    return "step"


def one_of(random: Random, items: Sequence[T]) -> T:
    """Uses only `random.random`: other methods may change with Python's version."""
    return items[int(random.random() * len(items))]


def _shuffled(random: Random, items: Iterable[T]) -> list[T]:
    """As `one_of`, uses only `random.random`."""
    return [item for _, item in sorted(((random.random(), i) for i in items), key=lambda x: x[0])]
