"""The examples do what their first lines say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_task_of_your_own_the_tabular_example_comes_near_the_noise(tmp_path: Path) -> None:
    """A perfect model reaches an error of noise ** 2 = 0.25; the mean of y would have about 24."""
    task = ["--task", f"{EXAMPLES / 'tabular.py'}:Friedman", "--task-options", "noise", "0.5"]
    training = ["--local", "--epochs", "12", "--optim.lr", "0.02", "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *task, *training]
    subprocess.run(command, check=True, capture_output=True, timeout=280, env=ONE_THREAD)
    lines = (tmp_path / "Friedman" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(evaluations) == 12
    assert evaluations[0]["metrics"]["mse"] > 3
    assert 0.25 < evaluations[-1]["metrics"]["mse"] < 1.5


def test_the_char_lm_recipe_learns_more_than_the_frequencies_of_characters(tmp_path: Path) -> None:
    text = Path(textwrap.__file__).read_text()
    shares = [text.count(character) / len(text) for character in set(text)]
    entropy = -sum(share * math.log(share) for share in shares)  # 3.2 nats, without context
    small = ["length", "32", "width", "64", "depth", "1", "heads", "4", "dropout", "0"]
    task = ["char-lm", "--data.source", textwrap.__file__, "--task-options", *small]
    training = ["--optim.lr", "0.01", "--batch-size", "32", "--steps", "40", "--eval.every-steps"]
    more = ["20", "--compute.precision", "fp32", "--local", "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *task, *training, *more]
    subprocess.run(command, check=True, capture_output=True, timeout=280, env=ONE_THREAD)
    lines = (tmp_path / "char-lm" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r["metrics"]["loss"] for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(evaluations) == 2
    assert 1 < evaluations[-1] < entropy - 0.3
