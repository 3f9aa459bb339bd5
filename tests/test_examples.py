"""The examples do what their first lines state."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import warm_python
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


def trained(folder: Path, task: str, *flags: str, recipe: str = "digits") -> list[dict[str, Any]]:
    """The metrics of each evaluation of a run without Ray."""
    place, name = task.split(":")
    command = [sys.executable, "-m", "raytrain_ddp.fit", recipe]
    command += ["--task", f"{EXAMPLES / place}:{name}"]
    more = ["--local", "--storage", str(folder), "--name", "run", "--data.workers", "1", *flags]
    done = warm_python.run([*command, *more], timeout=280)
    assert done.returncode == 0, done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [r["metrics"] for r in map(json.loads, lines) if r["kind"] == "eval"]


def squares(folder: Path, count: int, seed: int) -> None:
    """Noise with a bright square of class 1; the border of the mask is unlabeled."""
    random = np.random.Generator(np.random.Philox(seed))
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        image = random.integers(0, 100, (32, 32, 3), np.uint8)
        mask = np.zeros((32, 32), np.uint8)
        row, column = random.integers(0, 16, 2)
        image[row : row + 16, column : column + 16, 0] += 150
        mask[row : row + 16, column : column + 16] = 1
        mask[0] = 255
        Image.fromarray(image).save(folder / "images" / f"{number}.jpg", quality=95)
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def customers(path: Path, rows: int, seed: int) -> None:
    random = np.random.Generator(np.random.Philox(seed))
    age, paid = random.normal(40, 10, rows), random.choice([0, 1], rows)
    score = (age - 40) / 5 + 2 * paid
    left = random.random(rows) < 1 / (1 + np.exp(-score))
    lines = [f"{a},{p},{int(n)}" for a, p, n in zip(age, paid, left, strict=True)]
    path.write_text("\n".join(["age,paid,churned", *lines]))


def test_the_examples_learn_what_can_be_learned(tmp_path: Path) -> None:
    def of(*words: str) -> list[str]:
        return list(words)

    squares(tmp_path / "photos" / "train", 48, seed=1)
    squares(tmp_path / "photos" / "val", 9, seed=2)
    flags = of("--batch-size", "16", "--epochs", "6", "--optim.lr", "0.05", "--task-options")
    flags += of("folder", str(tmp_path / "photos"), "classes", "2", "size", "32")
    found = trained(tmp_path / "1", "segmentation.py:Segmentation", *flags)
    assert found[-1]["mean_iou"] > 0.6  # 0.38 if everything is predicted as background

    # A perfect model has an error of noise ** 2 = 0.25; predicting the mean of y has about 24.
    flags = of("--epochs", "12", "--optim.lr", "0.02", "--task-options", "noise", "0.5")
    found = trained(tmp_path / "2", "friedman.py:Friedman", *flags)
    assert len(found) == 12
    assert found[0]["mse"] > 3
    assert 0.25 < found[-1]["mse"] < 1.5

    text = Path(textwrap.__file__).read_text()
    shares = [text.count(character) / len(text) for character in set(text)]
    entropy = -sum(share * math.log(share) for share in shares)  # 3.2 nats, without context
    flags = of("--data.source", textwrap.__file__, "--optim.lr", "0.01", "--batch-size", "32")
    flags += of("--steps", "40", "--eval.every-steps", "20", "--compute.precision", "fp32")
    flags += of("--task-options", "length", "32", "width", "64", "depth", "1", "heads", "4")
    recipe = str(EXAMPLES / "char-lm.toml")
    found = trained(tmp_path / "3", "char_lm.py:CharLM", *flags, "dropout", "0", recipe=recipe)
    assert 1 < found[-1]["loss"] < entropy - 0.3

    customers(tmp_path / "train.csv", 2000, seed=1)
    customers(tmp_path / "val.csv", 500, seed=2)
    flags = of("--batch-size", "256", "--micro-batch", "256", "--epochs", "5", "--optim.lr", "0.05")
    flags += of("--data.source", str(tmp_path / "train.csv"), "--data.label-column", "churned")
    flags += of("--data.eval-source", str(tmp_path / "val.csv"), "--data.holdout", "0")
    recipe = str(EXAMPLES / "tabular.toml")
    found = trained(tmp_path / "4", "tabular.py:Tabular", *flags, recipe=recipe)
    assert 0.85 < found[-1]["auroc"] < 1
