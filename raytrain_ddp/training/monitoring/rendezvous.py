"""How the ranks of one start exchange their process ids and their status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import HANGS
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.training.monitoring.hang_diagnosis import RankStatus

Exchange = Callable[[RankStatus | None], Mapping[int, RankStatus]]
"""Publishes this rank's status, or removes it (None), and returns the status of all ranks."""


def start_folder(owners: Sequence[Owner]) -> str:
    """The folder name that the ranks of one start share, and no other start uses."""
    first = owners[0]
    return f"{''.join(c for c in first.since if c.isdigit())}-{first.token[:4]}"


def through_folder(run: Storage, rank: int, owners: Sequence[Owner]) -> Exchange:
    """An exchange by files in the run's folder; nothing is written before a hang."""
    folder = run.join(HANGS).join(start_folder(owners))

    def exchange(status: RankStatus | None) -> dict[int, RankStatus]:
        if status is None:
            folder.delete_file(f"rank-{rank}.json")
            return {}
        folder.mkdir()
        folder.write_atomic(f"rank-{rank}.json", json.dumps(asdict(status)).encode())
        names = [(r, f"rank-{r}.json") for r in range(len(owners))]
        found = [(r, folder.read(name)) for r, name in names if folder.exists(name)]
        return {r: RankStatus(**json.loads(data)) for r, data in found}

    return exchange
