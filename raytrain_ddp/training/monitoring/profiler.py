"""Traces a few steps with torch.profiler."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raytrain_ddp.checkpoint.run_folder import PROFILES
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.events import Note
from raytrain_ddp.messages import Event
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.watchdog import WRITING
from raytrain_ddp.training.runtime.world import World

_BEFORE = 10  # skipped steps of each start: the first ones are slower
_ROWS, _NAME_WIDTH = 8, 44


class Profile:
    """Traces `log.profile_steps` steps of each start on the ranks of `log.profile_ranks`.

    Args:
        run: receives the trace, in Chrome's format.
        clock: notified, as writing the trace takes time.
        tell: receives a note with the slowest operations, on rank 0.
    """

    def __init__(
        self,
        log: LogConfig,
        world: World,
        run: Storage,
        clock: Clock,
        tell: Callable[[Event], None],
    ) -> None:
        is_traced = world.of_run(world.rank) in log.profile_ranks
        self._steps = log.profile_steps if is_traced else 0
        self._world, self._run, self._clock, self._tell = world, run, clock, tell
        self._begun = 0  # steps of this start
        self._trace: Any = None

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the trace, as the run may end or fail before the trace is complete."""
        if self._trace is not None:
            self._end(self._begun - _BEFORE)

    def begin_step(self, step: int) -> None:
        """Called before each step, from 1."""
        if not self._steps:
            return
        self._begun += 1
        self._clock.mark("data")
        if self._begun == _BEFORE + 1:
            self._first = step
            self._start()
        elif self._begun == _BEFORE + self._steps + 1:
            self._end(self._steps)
        self._clock.mark("other")

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        trace = profile(activities=activities, acc_events=True)  # torch 2.10 warns without it
        try:
            trace.start()
        except RuntimeError as error:  # for example when another profiler is active
            self._steps = 0
            self._tell(Note(f"cannot trace steps: {error}"))
            return
        self._trace = trace

    def _end(self, steps: int) -> None:
        trace, self._trace, self._steps = self._trace, None, 0
        self._clock.doing = WRITING
        trace.stop()
        last = self._first + steps - 1
        rank = self._world.of_run(self._world.rank)
        name = f"rank-{rank}-steps-{self._first}-{last}.json.gz"
        try:
            self._keep(trace, name)
            where = f"; {name} is in {self._run}/{PROFILES}: open it in Perfetto."
        except (OSError, RuntimeError) as error:
            where = f"; {name} cannot be written: {error}"
        table = "\n".join(_table(trace, steps, self._world.device.type == "cuda"))
        self._tell(Note(f"steps {self._first} to {last}{where}\n{table}"))

    def _keep(self, trace: Any, name: str) -> None:
        with TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(plain))
            content = gzip.compress(plain.read_bytes(), 5)
        profiles = self._run.join(PROFILES)
        profiles.mkdir()
        profiles.write_atomic(name, content)


def _table(trace: Any, steps: int, on_gpu: bool) -> list[str]:
    """The operations with the most time of their own: on the GPU if there is one."""
    times = [
        (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count, e.key)
        for e in trace.key_averages()
    ]
    whole = sum(time_us for time_us, _, _ in times) or 1
    rows = sorted(times, reverse=True)[:_ROWS]
    head = f"  {'operation':<{_NAME_WIDTH}}   share  ms/step  calls"
    return [head] + [
        f"  {key[:_NAME_WIDTH]:<{_NAME_WIDTH}}  {100 * time_us / whole:4.0f} %  "
        f"{time_us / 1e3 / steps:7.2f}  {count / steps:5.0f}"
        for time_us, count, key in rows
    ]
