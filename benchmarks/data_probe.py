"""One job of data.py in a process of its own: runs it and writes what it found as JSON.

python benchmarks/data_probe.py JOB SIZE.json FOUND.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_actor import DESIGNS, in_actor
from data_costs import COSTS
from data_measure import Size, loads
from data_ours import OURS, STARTS, first_batch
from data_peers import PEERS


@dataclass(frozen=True)
class Job:
    """What runs in a process of its own.

    Args:
        section: of the report.
        run: what it finds is a flat mapping of numbers.
        rounds: in how many rounds it runs; 0: in all.
    """

    section: str
    title: str
    run: Callable[[Size], Mapping[str, Any]]
    rounds: int = 0


CONTENDERS = {**PEERS, **OURS}
JOBS: dict[str, Job] = {
    **{
        name: Job("loaders", contender.title, partial(loads, contender), contender.rounds)
        for name, contender in CONTENDERS.items()
    },
    **{
        f"start-{name}": Job("start", name, partial(first_batch, share))
        for name, share in STARTS.items()
    },
    **{
        f"actor-{name}": Job("actor", title, partial(in_actor, name))
        for name, title in DESIGNS.items()
    },
    **{name: Job("costs", title, run, rounds) for name, (title, run, rounds) in COSTS.items()},
}


def main() -> int:
    job, size, out = sys.argv[1:]
    found = JOBS[job].run(Size(**json.loads(Path(size).read_text())))
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
