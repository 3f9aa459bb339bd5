"""Traces of a few steps, on chosen ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.profiler import Profile
from raytrain_ddp.training.monitoring.watchdog import WRITING
from raytrain_ddp.training.runtime.world import World


def traced(folder: Path, workers: Group, steps: int, **changes: Any) -> tuple[list[Path], str]:
    """The traces of a run on three ranks, and rank 0's notes about them."""
    log = LogConfig(tensorboard=False, profile_steps=steps, profile_ranks=(0, 2))
    config = tiny_config(folder, "traced", log=log, **changes)
    ran = workers(3, run_tiny, plain(config))
    notes = [event["text"] for event in ran[0].events if event["kind"] == "note"]
    return sorted((folder / "traced" / "profiles").iterdir()), "\n".join(notes)


@pytest.mark.each_version
def test_the_chosen_ranks_trace_the_steps_after_the_first_ten(workers: Group, tmp_path: Path):
    traces, reported = traced(tmp_path, workers, 4, epochs=2)
    names = [f"rank-{rank}-steps-11-14.json.gz" for rank in (0, 2)]
    assert [path.name for path in traces] == names
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    called = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in called) == 4
    assert "aten::convolution" in called
    assert reported.startswith("steps 11 to 14; rank-0-steps-11-14.json.gz is in ")
    operations = [line.split()[0] for line in reported.splitlines()[2:]]
    assert len(operations) == 8
    assert any(name.startswith("aten::") for name in operations)


def test_a_run_that_ends_early_writes_the_trace_of_its_steps(workers: Group, tmp_path: Path):
    traces, reported = traced(tmp_path, workers, 100, epochs=2)
    assert traces[0].name == "rank-0-steps-11-20.json.gz"
    assert reported.startswith("steps 11 to 20")


def test_a_profiler_failure_does_not_end_the_run_and_writing_a_trace_is_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    phases: list[str] = []

    class Failing:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            if len(notes) == 0:
                raise RuntimeError("there is another profiler")

        def stop(self) -> None:
            phases.append(clock.doing)

        def export_chrome_trace(self, path: str) -> None:
            phases.append(clock.doing)
            raise RuntimeError("the device has gone")

        def key_averages(self) -> list[Any]:
            return []

    monkeypatch.setattr("torch.profiler.profile", Failing)
    notes: list[str] = []
    world = World(0, 1, 0, torch.device("cpu"), 1)
    clock = Clock(world.device)
    clock.start()
    for _ in range(2):
        log = LogConfig(profile_steps=1, profile_ranks=(0,))
        tell = lambda record: notes.append(record.text)  # noqa: E731
        with Profile(log, world, open_storage(str(tmp_path)), clock, tell) as trace:
            for step in range(1, 14):
                trace.begin_step(step)
    assert notes[0] == "cannot trace steps: there is another profiler"
    assert "cannot be written: the device has gone" in notes[1]
    assert phases == [WRITING, WRITING]


def test_profile_ranks_are_ranks_of_the_run_even_if_a_worker_is_missing(tmp_path: Path):
    log, clock = LogConfig(profile_steps=1, profile_ranks=(2,)), Clock(torch.device("cpu"))
    run = open_storage(str(tmp_path))
    for rank, steps in ((0, 0), (1, 1)):
        world = World(rank, 2, 0, torch.device("cpu"), 1, ranks=(0, 2))
        assert Profile(log, world, run, clock, print)._steps == steps


def test_the_flag_profile_means_five_steps_by_default():
    assert parse_fit(["--profile"]).config.log.profile_steps == 5
    assert parse_fit(["--profile", "--log.profile-steps", "2"]).config.log.profile_steps == 2
    assert parse_fit([]).config.log.profile_steps == 0
