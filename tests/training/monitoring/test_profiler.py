"""Traces of a few steps, on chosen ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from processes import Group
from tiny import plain, run_tiny, tiny_config

from raytrain_ddp.config.sections import LogConfig


def test_the_chosen_ranks_trace_the_steps_after_the_first_ten(workers: Group, tmp_path: Path):
    log = LogConfig(tensorboard=False, profile_steps=4, profile_ranks=(0, 2))
    config = tiny_config(tmp_path, "traced", log=log, epochs=2)
    ran = workers(3, run_tiny, plain(config))
    traces = sorted((tmp_path / "traced" / "profiles").iterdir())
    names = [f"rank-{n}-steps-11-14.{end}" for n in (0, 2) for end in ("json.gz", "txt")]
    assert [path.name for path in traces] == names
    assert "aten::convolution" in traces[1].read_text()
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    called = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step") for name in called) == 4
    assert "aten::convolution" in called
    notes = "\n".join(event["text"] for event in ran[0].events if event["kind"] == "note")
    assert "rank-0-steps-11-14.json.gz" in notes
