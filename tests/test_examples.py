"""The examples do what their first lines state."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import warm_python
from logs import log_of
from PIL import Image
from processes import Group
from tiny import bits, plain, run_named, tiny_config

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.sections import EvalConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def trained(folder: Path, task: str, *flags: str) -> list[dict[str, Any]]:
    """The metrics of each evaluation of a run without Ray."""
    place, name = task.split(":")
    command = [sys.executable, "-m", "raytrain_ddp.fit", "--task", f"{EXAMPLES / place}:{name}"]
    more = ["--local", "--storage", str(folder), "--name", "run", "--data.workers", "1", *flags]
    done = warm_python.run(
        [*command, *more], capture_output=True, text=True, timeout=280, env=ONE_THREAD
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [r["metrics"] for r in map(json.loads, lines) if r["kind"] == "eval"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    """Without empty lines. Those with a recipe are complete tasks for a kind of data."""
    most = 175 if path.stem in ("char_lm", "tabular") else 80
    assert sum(1 for line in path.read_text().splitlines() if line.strip()) <= most


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


def test_the_segmentation_example_finds_squares(tmp_path: Path) -> None:
    squares(tmp_path / "photos" / "train", 48, seed=1)
    squares(tmp_path / "photos" / "val", 9, seed=2)
    options = ["folder", str(tmp_path / "photos"), "classes", "2", "size", "32"]
    training = ["--batch-size", "16", "--epochs", "6", "--optim.lr", "0.05"]
    found = trained(tmp_path, "segmentation.py:Segmentation", *training, "--task-options", *options)
    assert found[-1]["mean_iou"] > 0.6  # 0.38 if everything is predicted as background


def test_the_segmentation_example_has_the_same_mean_iou_on_three_workers_as_on_one(
    tmp_path: Path, workers: Group
) -> None:
    """And the same weights, with `exact`; the sizes of both sets are multiples of nothing."""
    squares(tmp_path / "photos" / "train", 19, seed=1)
    squares(tmp_path / "photos" / "val", 7, seed=2)
    found = []
    for size in (1, 3):
        config = tiny_config(
            tmp_path,
            f"on-{size}",
            epochs=2,
            batch_size=12,
            micro_batch=3,
            exact=True,
            task=f"{EXAMPLES / 'segmentation.py'}:Segmentation",
            task_options={"folder": str(tmp_path / "photos"), "classes": "2", "size": "32"},
            data=DataConfig(workers=0),
            eval=EvalConfig(micro_batch=2),
        )
        assert workers(size, run_named, plain(config)) == [4] * size
        evaluations = [r["metrics"]["mean_iou"] for r in log_of(config) if r["kind"] == "eval"]
        found.append((evaluations, bits(config)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 2
    assert 0 < found[0][0][-1] < 1


def test_the_friedman_example_approaches_the_noise_level(tmp_path: Path) -> None:
    """A perfect model has an error of noise ** 2 = 0.25; predicting the mean of y has about 24."""
    task = ["--task", f"{EXAMPLES / 'friedman.py'}:Friedman", "--task-options", "noise", "0.5"]
    training = ["--local", "--epochs", "12", "--optim.lr", "0.02", "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *task, *training]
    warm_python.run(command, check=True, capture_output=True, timeout=280, env=ONE_THREAD)
    lines = (tmp_path / "Friedman" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(evaluations) == 12
    assert evaluations[0]["metrics"]["mse"] > 3
    assert 0.25 < evaluations[-1]["metrics"]["mse"] < 1.5


def test_the_char_lm_example_beats_character_frequencies(tmp_path: Path) -> None:
    text = Path(textwrap.__file__).read_text()
    shares = [text.count(character) / len(text) for character in set(text)]
    entropy = -sum(share * math.log(share) for share in shares)  # 3.2 nats, without context
    small = ["length", "32", "width", "64", "depth", "1", "heads", "4", "dropout", "0"]
    task = [str(EXAMPLES / "char-lm.toml"), "--data.source", textwrap.__file__]
    own = ["--task", f"{EXAMPLES / 'char_lm.py'}:CharLM", "--task-options", *small]
    training = ["--optim.lr", "0.01", "--batch-size", "32", "--steps", "40", "--eval.every-steps"]
    more = ["20", "--compute.precision", "fp32", "--local", "--storage", str(tmp_path)]
    command = [sys.executable, "-m", "raytrain_ddp.fit", *task, *own, *training, *more]
    warm_python.run(command, check=True, capture_output=True, timeout=280, env=ONE_THREAD)
    lines = (tmp_path / "char-lm" / "metrics.jsonl").read_text().splitlines()
    evaluations = [r["metrics"]["loss"] for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert len(evaluations) == 2
    assert 1 < evaluations[-1] < entropy - 0.3


def customers(path: Path, rows: int, seed: int) -> float:
    """Returns the area under the curve of the true probabilities, which is the best there is."""
    random = np.random.Generator(np.random.Philox(seed))
    age, plan = random.normal(40, 10, rows), random.choice(["free", "paid"], rows)
    score = (age - 40) / 5 + 2 * (plan == "paid")
    left = random.random(rows) < 1 / (1 + np.exp(-score))
    table = {"age": np.where(random.random(rows) < 0.01, np.nan, age), "plan": plan}
    pd.DataFrame({**table, "churned": left.astype(int)}).to_csv(path, index=False)
    ranks = pd.Series(score).rank()  # Mann and Whitney
    return float((ranks[left].mean() - (left.sum() + 1) / 2) / (~left).sum())


def test_the_table_example_approaches_the_best_possible_auroc(tmp_path: Path) -> None:
    customers(tmp_path / "train.csv", 2000, seed=1)
    best = customers(tmp_path / "val.csv", 500, seed=2)
    files = ["train", str(tmp_path / "train.csv"), "eval", str(tmp_path / "val.csv")]
    training = [
        "--batch-size",
        "256",
        "--micro-batch",
        "256",
        "--epochs",
        "5",
        "--optim.lr",
        "0.05",
    ]
    options = ["--task-options", *files, "target", "churned"]
    found = trained(tmp_path, "churn.py:Churn", *training, *options)
    assert best - 0.05 < found[-1]["auroc"] <= best + 0.01


def test_the_fine_tuning_example_starts_from_a_file_and_resumes_after_a_kill(
    tmp_path: Path,
) -> None:
    """With equal bits, also in the second run, which trains all of the model."""
    import timm  # seconds
    import torch
    from safetensors.torch import save_file

    random = np.random.Generator(np.random.Philox(1))
    for place, name in enumerate(("cats", "dogs")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(40):
            image = random.integers(0, 100, (32, 32, 3), np.uint8)
            image[..., place] += 120
            Image.fromarray(image).save(tmp_path / "photos" / name / f"{number}.jpg")
    torch.manual_seed(0)
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "begun.safetensors")
    command = [sys.executable, str(EXAMPLES / "finetune.py"), str(tmp_path / "photos")]
    command += ["timm:test_resnet", "--weights", str(tmp_path / "begun.safetensors")]
    command += ["--size", "32", "--epochs", "3"]
    ended = []
    for name, failpoint in (("whole", ""), ("killed", "train.before_step:kill@step=3")):
        for point in filter(None, (failpoint, "none")):
            environment = {
                **ONE_THREAD,
                "RAYTRAIN_DDP_FAILPOINTS": "" if point == "none" else point,
            }
            done = warm_python.run(
                [*command, "--storage", str(tmp_path / name)],
                capture_output=True, text=True, timeout=280, env=environment,
            )  # fmt: skip
            assert (done.returncode == 0) == (point == "none"), done.stderr
        assert "best: " in done.stdout
        checkpoints = (tmp_path / name / "finetune" / "checkpoints").glob("step-*")
        ended.append((max(checkpoints) / "model.safetensors").read_bytes())
    assert ended[0] == ended[1]
