"""Traces of a few steps, on chosen ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from processes import Group
from tiny import plain, run_tiny, tiny_config

from raytrain_ddp.config.sections import LogConfig


def traced(folder: Path, workers: Group, steps: int, **changes: Any) -> tuple[list[Path], str]:
    """The traces of a run on three ranks, and rank 0's notes about them."""
    log = LogConfig(tensorboard=False, profile_steps=steps, profile_ranks=(0, 2))
    config = tiny_config(folder, "traced", log=log, **changes)
    ran = workers(3, run_tiny, plain(config))
    notes = [event["text"] for event in ran[0].events if event["kind"] == "note"]
    return sorted((folder / "traced" / "profiles").iterdir()), "\n".join(notes)


def test_the_chosen_ranks_trace_the_steps_after_the_first_ten(workers: Group, tmp_path: Path):
    traces, reported = traced(tmp_path, workers, 4, epochs=2)
    names = [f"rank-{rank}-steps-11-14.json.gz" for rank in (0, 2)]
    assert [path.name for path in traces] == names
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    called = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in called) == 4
    assert "aten::convolution" in called
    assert reported.startswith("steps 11 to 14; rank-0-steps-11-14.json.gz is in ")
