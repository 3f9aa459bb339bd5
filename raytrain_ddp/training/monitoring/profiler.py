"""Traces a few steps with torch.profiler."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from raytrain_ddp.checkpoint.run_folder import PROFILES
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.events import Note
from raytrain_ddp.messages import Event
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.monitoring.watchdog import WRITING
from raytrain_ddp.training.runtime.world import World

if TYPE_CHECKING:
    from torch.profiler import profile

_BEFORE = 10  # skipped steps of each start: the first ones are slower
_ROWS, _NAME_WIDTH = 100, 80


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
        self._rank = world.of_run(world.rank)
        self._left = log.profile_steps if self._rank in log.profile_ranks else 0
        self._on_gpu = world.device.type == "cuda"
        self._run, self._clock, self._tell = run, clock, tell
        self._first = self._step = 0
        self._trace: profile | None = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the trace, as the run may end or fail before the trace is complete."""
        if self._trace is not None:
            self._end(self._trace)

    def begin_step(self, step: int) -> None:
        """Starts or ends the trace; called before each step, counted from 1."""
        if not self._left:
            return
        self._clock.mark("data")
        self._first, self._step = self._first or step + _BEFORE, step
        if self._trace is not None and step == self._first + self._left:
            self._step -= 1
            self._end(self._trace)
        elif self._trace is None and step == self._first:
            self._start()
        self._clock.mark("other")

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        trace = profile(activities=kinds, acc_events=True)  # torch 2.10 warns without it
        try:
            trace.start()
            self._trace = trace
        except RuntimeError as error:  # for example when another profiler is active
            self._left = 0
            self._tell(Note(f"cannot trace steps: {error}"))

    def _end(self, trace: profile) -> None:
        self._trace, self._left = None, 0
        self._clock.doing = WRITING
        trace.stop()
        name = f"rank-{self._rank}-steps-{self._first}-{self._step}"
        times = trace.key_averages().table(
            sort_by=f"self_{'device' if self._on_gpu else 'cpu'}_time_total",
            row_limit=_ROWS,
            max_name_column_width=_NAME_WIDTH,
        )
        where = f"{self._run}/{PROFILES}"
        text = f"the trace of steps {self._first} to {self._step} is in {where}: {name}.json.gz, "
        text += f"for Perfetto, and {name}.txt, its operations by time"
        try:
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
