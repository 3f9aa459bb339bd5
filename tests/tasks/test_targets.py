"""Several labels per row, and numbers, compared with torch, torchmetrics, pandas, and a plain
loop."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import timm
import torch
from logs import log_of
from PIL import Image
from processes import Group
from pyarrow import parquet
from safetensors.torch import save_file
from split_checks import folder, lines
from tiny import bits, newest, plain, run_named, tiny_config
from torch.nn import functional
from torchmetrics import MeanAbsoluteError, R2Score
from torchmetrics.classification import MultilabelAveragePrecision, MultilabelF1Score

from raytrain_ddp import fit_locally
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
from raytrain_ddp.config.sections import LossConfig, ModelConfig, OptimConfig, ScheduleConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.splits import open_splits
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.report.mistakes import predict
from raytrain_ddp.report.run_files import read_run
from raytrain_ddp.tasks.criterion import Criterion

LOSSES: dict[str, Any] = {
    "bce": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}
KINDS = {
    "bce": {"target_columns": ("r", "g", "b"), "loss": "bce"},
    "mse": {"target_columns": ("level", "whole"), "loss": "mse"},
}


def channels(rows: int, seed: int) -> dict[str, list[Any]]:
    """Noise with each channel bright or not; the brightness of the first; names in a list."""
    random = np.random.Generator(np.random.Philox(seed))
    bright = random.random((rows, 3)) < 0.5
    level = random.random(rows) * 100
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


def config_of(folder: Path, files: Path, name: str, kind: str, **changes: Any) -> TrainConfig:
    reported = KINDS[kind]
    data = DataConfig(source=str(files), target_columns=reported["target_columns"], workers=1)
    sections: dict[str, Any] = {
        "model": ModelConfig(name="timm:test_resnet"),
        "loss": LossConfig(name=reported["loss"]),  # type: ignore[arg-type]
        "augment": AugmentConfig(crop="none"),
        "batch_size": 16,
        "micro_batch": 4,
        "epochs": 1,
    }
    return tiny_config(folder, name, **{**sections, "data": data, **changes})


# ------------------------------------------------------------------ losses and metrics


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_targets_equals_torchs_for_any_batching(name: str):
    config = TrainConfig(
        loss=LossConfig(name=name), data=DataConfig(target_columns=("a", "b", "c"))  # type: ignore[arg-type]
    )  # fmt: skip
    criterion = Criterion(config, lambda: pytest.fail("counted"))
    outputs = torch.randn(7, 3, requires_grad=True)
    targets = torch.randint(2, (7, 3)).float() if name == "bce" else 3 * torch.randn(7, 3)
    losses = criterion(outputs, targets), LOSSES[name](outputs, targets)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, outputs)[0] for loss in losses))
    parts = [criterion(outputs[a], targets[a]) * len(a) / 7 for a in torch.arange(7).split(3)]
    torch.testing.assert_close(sum(parts), losses[1])
    assert criterion.each(outputs.bfloat16(), targets).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_a_plain_loop_with_the_metrics_of_torchmetrics(
    kind: str, files: Path, tmp_path: Path
):
    """All rows are one batch, so that their order does not matter."""
    torch.manual_seed(0)
    columns = KINDS[kind]["target_columns"]
    model = timm.create_model("test_resnet", num_classes=len(columns))
    save_file(model.state_dict(), tmp_path / "begun.safetensors")
    config = config_of(
        tmp_path,
        files,
        kind,
        kind,
        epochs=3,
        batch_size=56,
        micro_batch=56,
        model=ModelConfig("timm:test_resnet", weights=str(tmp_path / "begun.safetensors")),
        optim=OptimConfig(lr=0.01, weight_decay=0.0, label_smoothing=0.1),  # of classes only
        schedule=ScheduleConfig(name="constant", warmup_epochs=0.0),
    )
    config = replace(config, eval=replace(config.eval, micro_batch=8))
    result = fit_locally(config)
    tables = [pd.read_parquet(files / f"{name}.parquet") for name in ("train", "val")]
    scale = (torch.tensor(config.data.mean), torch.tensor(config.data.std))
    inputs, targets = [], []
    for table in tables:
        pixels = [np.asarray(Image.open(BytesIO(image["bytes"]))) for image in table["image"]]
        images = (torch.from_numpy(np.stack(pixels)) / 255 - scale[0]) / scale[1]
        inputs.append(images.permute(0, 3, 1, 2))
        targets.append(torch.tensor(table[[*columns]].to_numpy(np.float32)).contiguous())
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
    if kind == "bce":
        scores = {"mean_ap": MultilabelAveragePrecision(3), "f1": MultilabelF1Score(3)}
        pair = outputs.sigmoid(), targets[1].long()
    else:
        scores, pair = {"mae": MeanAbsoluteError(), "r2": R2Score()}, (outputs, targets[1])  # type: ignore[dict-item]
    expected = {name: metric(*pair).item() for name, metric in scores.items()}
    expected["loss"] = LOSSES[kind](outputs, targets[1]).item()
    last = [record["metrics"] for record in records if record["kind"] == "eval"][-1]
    assert last == pytest.approx(expected, rel=1e-3)
    assert result.monitor == ("mean_ap" if kind == "bce" else "mae")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_three_workers_has_the_same_bits_and_metrics_as_on_one(
    kind: str, files: Path, tmp_path: Path, workers: Group
):
    found = []
    for size in (1, 3):
        config = config_of(tmp_path, files, f"on-{size}", kind, exact=True)
        assert workers(size, run_named, plain(config)) == [4] * size
        evaluations = [record for record in log_of(config) if record["kind"] == "eval"]
        found.append((bits(config), evaluations))
    assert found[0] == found[1]
    assert len(found[0][1]) == 1


def test_labels_are_learned_counted_and_reported(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = config_of(
        tmp_path, files, "run", "bce", epochs=6, optim=OptimConfig(name="adamw", lr=0.003)
    )
    result = fit_locally(replace(config, data=replace(config.data, target_columns=("tags",))))
    assert result.best["mean_ap"] > 0.9  # of chance: 0.5
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--per-class", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    truth = pd.read_parquet(files / "val.parquet")
    for name in "rgb":
        assert re.search(rf"^ *{name} +{truth[name].sum()} ", table, re.MULTILINE), table
    with pytest.raises(ConfigError, match="is not an image classification"):
        predict(read_run(str(tmp_path / "run")), "cpu", is_running=False)
    state = json.loads(newest(config).read("state.json"))
    assert state["data"]["classes"] == ["b", "g", "r"]


def test_numeric_targets_have_no_class_metrics(files: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="are numbers, which have no classes"):
        Criterion(config_of(tmp_path, files, "run", "mse"), list).counts(2)  # type: ignore[arg-type]


def test_a_single_row_has_no_coefficient_of_determination(files: Path, tmp_path: Path):
    metric = Criterion(config_of(tmp_path, files, "run", "mse"), list).metrics(1)["r2"]  # type: ignore[arg-type]
    metric.update(torch.zeros(1, 1), torch.ones(1, 1))
    assert metric.compute().isnan().all()


# ------------------------------------------------------------------ data


TARGETS = [
    (("r", "g", "b"), True),
    (("binary", "real", "r"), True),
    (("tags",), True),
    (("numbers",), True),
    (("level",), False),
    (("whole", "level"), False),
]


def written(folder: Path, form: str, table: dict[str, list[Any]]) -> Path:
    """Written in one of the formats with columns; lists of images name files next to them."""
    if form == "parquet":
        parquet.write_table(pa.table(table), folder / "rows.parquet", row_group_size=4)
        return folder / "rows.parquet"
    if form == "arrow":
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(table).save_to_disk(folder / "saved")
        return folder / "saved"
    for row, image in enumerate(table["image"]):
        (folder / f"{row}.png").write_bytes(image["bytes"])
    frame = pd.DataFrame({**table, "image": [f"{row}.png" for row in range(len(table["image"]))]})
    path = folder / f"rows.{form}"
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
        if form == "csv" and columns[0] in ("tags", "numbers"):
            continue
        opened = open_splits(
            DataConfig(source=str(source), target_columns=columns), None, binary=binary
        ).train
        if columns[0] in ("tags", "numbers"):
            hot = frame[columns[0]].explode().astype("string").str.get_dummies()
            frame_of = hot.groupby(level=0).max()
            assert opened.class_names == sorted(frame_of.columns)
            expected = frame_of[opened.class_names].to_numpy(np.float32)
        else:
            assert opened.class_names == [*columns]
            expected = frame[[*columns]].to_numpy(np.float32)
        order = np.random.default_rng(0).permutation(np.repeat(np.arange(13), 2))
        records = opened.read(order)
        assert np.array_equal(np.stack([target for _, target in records]), expected[order])
        assert np.array_equal(opened.labels(), expected)
        assert opened.labels().dtype == np.float32
        assert records[0][0] == table["image"][order[0]]["bytes"]


def test_rows_with_targets_are_held_out_and_reported(files: Path):
    config = DataConfig(source=str(files / "train.parquet"), target_columns=("tags",), holdout=0.3)
    labels, numbers = (
        open_splits(replace(config, target_columns=columns), None, binary=binary)
        for columns, binary in ((("tags",), True), (("level",), False))
    )
    assert labels.train.blocks.sum(), labels.eval.blocks.sum() == (39, 17)
    whole = open_splits(replace(config, holdout=0.0), None, binary=True).train.labels()
    parts = np.concatenate([labels.train.labels(), labels.eval.labels()])
    assert np.array_equal(parts.sum(0), whole.sum(0))
    reported = lines(labels)
    assert reported["training set"] == "39 images of 3 labels: b, g, r"
    counts = labels.train.labels().sum(0)
    assert reported["label sizes"].startswith(f"{counts.min():.0f} (label ")
    reported = lines(numbers)
    assert reported["training set"] == "39 images of 1 target: level"
    assert "target sizes" not in reported


@pytest.mark.parametrize(
    ("change", "columns", "loss", "reported"),
    [
        ({"level": [None] + [1.0] * 12}, "level", "mse", r"group 0, row 0: level is null\."),
        ({"level": [1.0] * 12 + [np.nan]}, "level", "l1", "row 0: level is not a number"),
        ({"level": [1e39] * 13}, "level", "mse", "level is too large for float32"),
        ({"binary": [1, 2] * 6 + [0]}, "r binary", "bce", "row 1: binary is 2; 0 and 1 are exp"),
        ({"tags": [["r"], None] + [["g"]] * 11}, "tags", "bce", "tags is null; a row without l"),
        ({"tags": [[]] * 13}, "tags", "bce", "has only empty lists"),
        ({"level": ["x"] * 13}, "level", "mse", "'level' is string; numbers are expected"),
        ({}, "r g", "mse", "column 'r' is bool; numbers are expected with --loss.name mse"),
        ({}, "tags", "huber", "'tags' is list.*For labels: --loss.name bce"),
        ({}, "tags r", "bce", "'tags' is list.*or one column of lists"),
        ({}, "r", "bce", "'r' is one label only: name several columns, or set --data.label-c"),
        ({}, "level whole", "bce", r"level is \d.*; 0 and 1 are expected with --loss.name bce"),
        (
            {},
            "height",
            "mse",
            "no column 'height' among .* Set --data.image-column or --data.target",
        ),
    ],
)
def test_unsuitable_targets_are_refused_in_one_line(
    change: dict[str, Any], columns: str, loss: str, reported: str, tmp_path: Path
):
    table = {**channels(13, seed=3), **change}
    source = written(tmp_path, "parquet", table)
    data = DataConfig(source=str(source), target_columns=tuple(columns.split()))
    with pytest.raises(DataError, match=reported) as caught:
        open_splits(data, None, binary=loss == "bce").summary()
    assert "\n" not in str(caught.value)


def test_a_label_found_only_in_the_evaluation_set_is_named(files: Path, tmp_path: Path):
    table = channels(5, seed=4)
    table["tags"][3] = ["r", "x"]
    other = written(tmp_path, "parquet", table)
    data = DataConfig(
        source=str(files / "train.parquet"), eval_source=str(other), target_columns=("tags",)
    )
    with pytest.raises(
        DataError, match=r"row group 0, row 3: tags: a label 'x' is not one of the 3 cl"
    ):
        open_splits(data, None, binary=True).summary()


def test_folders_and_names_of_targets_are_refused_early(files: Path, tmp_path: Path):
    config = config_of(tmp_path, files, "run", "mse")
    photos = replace(config.data, source=str(folder(tmp_path / "photos", cat=1, dog=1)))
    with pytest.raises(DataError, match=r"data\.source has no columns, but data\.target_columns"):
        check(replace(config, data=photos))
    with pytest.raises(DataError, match=r"data\.classes = .* the names of targets are those of"):
        check(replace(config, data=replace(config.data, classes=("x", "y"))))


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("--loss.name mse", r"loss\.name = 'mse': compares numbers: name their columns with"),
        ("--loss.name focal --data.target-columns a b", r"loss\.name = 'focal': must be bce \(lab"),
        ("--data.target-columns a b", r"loss\.name = 'cross-entropy': must be bce \(labels\), or"),
        ("--loss.name mse --data.target-columns a a", r"target_columns = .*must be different col"),
        (
            "--loss.name bce --data.target-columns a b --loss.class-weights balanced",
            r"loss\.class_weights = 'balanced': must be none with data\.target_columns",
        ),
        (
            "--loss.name l1 --data.target-columns a --augment.mixup 0.2",
            r"augment\.mixup = 0\.2: mixes labels, but loss\.name = l1",
        ),
    ],
)
def test_a_loss_that_does_not_match_the_targets_is_refused(line: str, reported: str):
    with pytest.raises(ConfigError, match=reported):
        parse_fit(line.split())


def test_a_users_task_may_use_columns_and_loss_freely():
    for data, loss in (((), "mse"), (("a", "b"), "cross-entropy")):
        config = TrainConfig(
            task="here:Mine", data=DataConfig(target_columns=data), loss=LossConfig(name=loss)  # type: ignore[arg-type]
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"loss\.name"):  # of the built-in tasks
            Criterion(config, list)  # type: ignore[arg-type]


def test_a_dry_run_lists_the_targets(files: Path, tmp_path: Path):
    mixed = AugmentConfig(crop="none", mixup=0.2)
    reported = dry_run(config_of(tmp_path, files, "run", "bce", augment=mixed))
    assert "56 images of 3 labels: r, g, b" in reported
    assert "21 images of 3 labels" in reported
    numbers = dry_run(config_of(tmp_path, files, "other", "mse"))
    assert "56 images of 2 targets: level, whole" in numbers
