"""Several labels per row, and numbers, compared with torch, torchmetrics, pandas, and a plain
loop."""

from __future__ import annotations

import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import timm
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file
from tiny import log_of, tiny_config
from torch.nn import functional
from torchmetrics import MeanAbsoluteError, R2Score
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score

from raytrain_ddp import fit_locally
from raytrain_ddp.config.sections import (
    AugmentConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.errors import DataError
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.tasks.image_classification import Criterion

LOSSES: dict[str, Any] = {
    "bce": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "huber": functional.huber_loss,
}
COLUMNS = {"bce": ("r", "g", "b"), "mse": ("level", "whole")}


def channels(rows: int, seed: int) -> dict[str, list[Any]]:
    """Noise with each channel bright or not; the brightness of the first; names in a list."""
    random = np.random.Generator(np.random.Philox(seed))
    bright, level = random.random((rows, 3)) < 0.5, random.random(rows) * 100
    images = []
    for row in range(rows):
        noise = random.integers(0, 50, (16, 16, 3)) + bright[row] * 100
        encoded = BytesIO()
        picture = (noise + np.array([level[row], 0, 0])).clip(0, 255).astype(np.uint8)
        Image.fromarray(picture).save(encoded, "PNG")
        images.append({"bytes": encoded.getvalue(), "path": None})
    return {
        "image": images,
        "tags": [[n for n, on in zip("rgb", each, strict=True) if on] for each in bright],
        "numbers": [[10 + n for n, on in enumerate(each) if on] for each in bright],
        "level": (level / 100 + bright[:, 0]).tolist(),
        "whole": (level.astype(int) // 10).tolist(),
        **{name: bright[:, place].tolist() for place, name in enumerate("rgb")},
        "binary": bright[:, 1].astype(int).tolist(),
        "real": bright[:, 2].astype(float).tolist(),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.parquet and val.parquet."""
    folder = tmp_path_factory.mktemp("channels")
    for seed, (name, rows) in enumerate((("train", 56), ("val", 21))):
        file = folder / f"{name}.parquet"
        parquet.write_table(pa.table(channels(rows, seed)), file, row_group_size=8)
    return folder


def config_of(folder: Path, files: Path, name: str, loss: Any, **changes: Any) -> TrainConfig:
    """All rows are one batch, so that their order does not matter."""
    sections: dict[str, Any] = {
        "data": DataConfig(source=str(files), target_columns=COLUMNS[loss], workers=1),
        "model": ModelConfig(name="timm:test_resnet"),
        "loss": LossConfig(name=loss),
        "augment": AugmentConfig(crop="none"),
        "batch_size": 56,
        "micro_batch": 56,
        "epochs": 1,
    }
    return tiny_config(folder, name, **{**sections, **changes})


# ------------------------------------------------------------------ losses and metrics


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_targets_equals_torchs_for_any_batching(name: Any):
    data = DataConfig(target_columns=("a", "b", "c"))
    criterion = Criterion(TrainConfig(loss=LossConfig(name=name), data=data), torch.Tensor)
    outputs = torch.randn(7, 3, requires_grad=True)
    targets = torch.randint(2, (7, 3)).float() if name == "bce" else 3 * torch.randn(7, 3)
    losses = criterion(outputs, targets), LOSSES[name](outputs, targets)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, outputs)[0] for loss in losses))
    parts = [criterion(outputs[a], targets[a]) * len(a) / 7 for a in torch.arange(7).split(3)]
    torch.testing.assert_close(sum(parts), losses[1])


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_run_equals_a_plain_loop_with_the_metrics_of_torchmetrics(
    kind: str, files: Path, tmp_path: Path
):
    torch.manual_seed(0)
    columns = [*COLUMNS[kind]]
    model = timm.create_model("test_resnet", num_classes=len(columns))
    save_file(model.state_dict(), tmp_path / "begun.safetensors")
    config = config_of(
        tmp_path,
        files,
        kind,
        kind,
        epochs=3,
        model=ModelConfig("timm:test_resnet", weights=str(tmp_path / "begun.safetensors")),
        optim=OptimConfig(lr=0.01, weight_decay=0.0, label_smoothing=0.1),  # of classes only
        schedule=ScheduleConfig(name="constant", warmup_epochs=0.0),
    )
    config = replace(config, eval=replace(config.eval, micro_batch=8))
    result = fit_locally(config)
    scale = (torch.tensor(config.data.mean), torch.tensor(config.data.std))
    inputs, targets = [], []
    for table in (pd.read_parquet(files / f"{name}.parquet") for name in ("train", "val")):
        pixels = [np.asarray(Image.open(BytesIO(image["bytes"]))) for image in table["image"]]
        images = (torch.from_numpy(np.stack(pixels)) / 255 - scale[0]) / scale[1]
        inputs.append(images.permute(0, 3, 1, 2))
        targets.append(torch.tensor(table[columns].to_numpy(np.float32)).contiguous())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(3):
        loss = LOSSES[kind](model.train()(inputs[0]), targets[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    records = log_of(config)
    ours = [record["loss"] for record in records if record["kind"] == "train"]
    assert ours == pytest.approx(losses, rel=1e-4)
    with torch.inference_mode():
        outputs = model.eval()(inputs[1])
    scores: dict[str, Any] = {"mae": MeanAbsoluteError(), "r2": R2Score()}
    pair = outputs, targets[1]
    if kind == "bce":
        scores = {"mean_ap": MultilabelAveragePrecision(3), "f1": MultilabelF1Score(3)}
        pair = outputs.sigmoid(), targets[1].long()
    expected = {name: metric(*pair).item() for name, metric in scores.items()}
    expected["loss"] = LOSSES[kind](outputs, targets[1]).item()
    last = [record["metrics"] for record in records if record["kind"] == "eval"][-1]
    assert last == pytest.approx(expected, rel=1e-3)
    assert result.monitor == ("mean_ap" if kind == "bce" else "mae")


def test_labels_are_counted_and_reported(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = DataConfig(source=str(files), target_columns=("tags",), workers=1)
    config = config_of(tmp_path, files, "run", "bce", data=data)
    fit_locally(config)
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--per-class", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    truth = pd.read_parquet(files / "val.parquet")
    for name in "rgb":
        assert re.search(rf"^ *{name} +{truth[name].sum()} ", table, re.MULTILINE), table


# ------------------------------------------------------------------ data


TARGETS = [
    (("binary", "real", "r"), True),
    (("tags",), True),
    (("numbers",), True),
    (("whole", "level"), False),
]


def written(folder: Path, form: str, table: dict[str, list[Any]]) -> Path:
    """Written in one of the formats with columns; lists of images name files next to them."""
    path = folder / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(pa.table(table), path, row_group_size=4)
    elif form == "arrow":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(table).save_to_disk(path)
    else:
        names = [f"{row}.png" for row in range(len(table["image"]))]
        for name, image in zip(names, table["image"], strict=True):
            (folder / name).write_bytes(image["bytes"])
        frame = pd.DataFrame({**table, "image": names})
        if form == "csv":
            frame.drop(columns=["tags", "numbers"]).to_csv(path, index=False)
        else:
            frame.to_json(path, orient="records", lines=True)
    return path


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv", "jsonl"])
def test_targets_equal_those_read_by_pandas(form: str, tmp_path: Path):
    table = channels(13, seed=3)
    source, frame = written(tmp_path, form, table), pd.DataFrame(table)
    for columns, binary in TARGETS:
        data = DataConfig(source=str(source), target_columns=columns)
        if form == "csv" and columns[0] in ("tags", "numbers"):
            continue
        opened = open_splits(data, None, binary=binary).train
        if columns[0] in ("tags", "numbers"):
            hot = frame[columns[0]].explode().astype("string").str.get_dummies()
            frame_of = hot.groupby(level=0).max()
            assert opened.class_names == sorted(frame_of.columns)
        else:
            assert opened.class_names == [*columns]
            frame_of = frame
        expected = frame_of[opened.class_names].to_numpy(np.float32)
        order = np.random.default_rng(0).permutation(np.repeat(np.arange(13), 2))
        records = opened.read(order)
        assert np.array_equal(np.stack([target for _, target in records]), expected[order])
        assert np.array_equal(opened.labels(), expected)
        assert records[0][0] == table["image"][order[0]]["bytes"]


@pytest.mark.parametrize(
    ("change", "columns", "loss", "named"),
    [
        ({"level": [None] + [1.0] * 12}, "level", "mse", "row 0: level"),
        ({"binary": [1, 2] * 6 + [0]}, "r binary", "bce", "row 1: binary is 2"),
        ({"tags": [["r"], None] + [["g"]] * 11}, "tags", "bce", "row 1: tags"),
        ({"level": ["x"] * 13}, "level", "mse", "'level'"),
        ({}, "r g", "mse", "'r' is bool.* --loss.name mse"),
        ({}, "tags", "huber", "'tags'.* --loss.name bce"),
        ({}, "level whole", "bce", "level is .*--loss.name bce"),
        ({}, "height", "mse", "'height'"),
    ],
)
def test_unsuitable_targets_are_refused(
    change: dict[str, Any], columns: str, loss: str, named: str, tmp_path: Path
):
    source = written(tmp_path, "parquet", {**channels(13, seed=3), **change})
    data = DataConfig(source=str(source), target_columns=tuple(columns.split()))
    with pytest.raises(DataError, match=named) as caught:
        open_splits(data, None, binary=loss == "bce").summary()
    assert "\n" not in str(caught.value)
