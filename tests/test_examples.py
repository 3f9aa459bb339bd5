"""The examples do what their first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_task_of_your_own_the_tabular_example_comes_near_the_noise(tmp_path: Path) -> None:
    """A perfect model reaches an error of noise ** 2 = 0.25; the mean of y would have about 24."""
    task = ["--task", f"{EXAMPLES / 'tabular.py'}:Friedman", "--task-options", "noise", "0.5"]
    training = ["--local", "--epochs", "12", "--optim.lr", "0.02", "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *task, *training]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    lines = (tmp_path / "Friedman" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(evaluations) == 12
    assert evaluations[0]["metrics"]["mse"] > 3
    assert 0.25 < evaluations[-1]["metrics"]["mse"] < 1.5
