"""Drives a run to its end although it is killed: starts its command again, and again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_ddp.checkpoint.run_folder import METRICS_FILE
from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.formatting import format_seconds
from raytrain_ddp.tools.chaos.fault_plan import Fault
from raytrain_ddp.tools.chaos.launchers import Launch, Process

STUCK_S = 300.0
_POLL_S = 0.02


@dataclass
class KilledRun:
    """A run and its faults. Each is printed when it occurs.

    Args:
        config: with a name and a storage of its own.
        environment: of its processes.
        next_sizes: the number of workers of each start.
        sizes: those of the starts so far.
        fired: the faults so far.
    """

    config: TrainConfig
    launch: Launch
    environment: Mapping[str, str]
    plan: Sequence[Fault]
    next_sizes: Iterator[int]
    sizes: list[int] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)

    def drive(self) -> None:
        """Restarts the run as long as a fault ends it.

        Raises:
            RaytrainError: it failed without a fault, or logged nothing for `STUCK_S`.
        """
        folder = Path(self.config.storage) / str(self.config.name)
        self._recipe, self._log = folder.with_suffix(".toml"), folder / METRICS_FILE
        self._recipe.write_text(dumps(self.config), encoding="utf-8")
        self._marks = folder.with_name(f"{folder.name}-fired")
        self._marks.mkdir()
        self._open = {f"fired-{number}": fault for number, fault in enumerate(self.plan)}
        self._began = time.monotonic()
        while not self._is_done():
            pass

    def _is_done(self) -> bool:
        """Starts the run once; False: a fault has ended it."""
        self.sizes.append(next(self.next_sizes))
        before, seen = len(self.fired), time.time()
        armed_by = {VARIABLE: ";".join(map(str, self.plan)), FOLDER_VARIABLE: str(self._marks)}
        processes = self.launch(self._recipe, {**self.environment, **armed_by}, self.sizes[-1])
        see = f"see {self._recipe.with_suffix('.log')}"
        try:
            while None in (statuses := [process.poll() for process in processes]):
                self._note_faults()
                if any(statuses):  # one that has failed ends the others, as by torchrun
                    _end(processes)
                with suppress(FileNotFoundError):  # each start writes it anew
                    seen = max(seen, self._log.stat().st_mtime)
                if time.time() - seen > STUCK_S:
                    raise RaytrainError(f"{self.config.name}: no step in {STUCK_S:.0f} s: {see}.")
                time.sleep(_POLL_S)
        finally:
            _end(processes)
        self._note_faults()
        if any(statuses) and len(self.fired) == before:
            raise RaytrainError(f"{self.config.name}: ended ({statuses}) without a fault: {see}.")
        return not any(statuses)

    def _note_faults(self) -> None:
        for name in sorted(self._open.keys() & {*os.listdir(self._marks)}):
            self.fired.append(fault := self._open.pop(name))
            after = format_seconds(time.monotonic() - self._began)
            print(f"{len(self.fired):>4}  {after:>8}  {fault}", flush=True)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
