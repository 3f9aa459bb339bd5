"""The command `predict`: its output, its inputs, and what happens after a kill."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import sys
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import warm_python
from PIL import Image
from s3 import s3_server
from test_loaded_model import plain
from tiny import TinyTask, tiny_config

import raytrain_ddp.tools.predict.__main__ as command
from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.sections import DataConfig, LogConfig
from raytrain_ddp.errors import (
    ConfigError,
    DataError,
    PreflightError,
    RunLockedError,
    TaskError,
)
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.tools.staging import Staging

DIGITS = Path(command.__file__).parents[2] / "data/digits/test-00000-of-00001.parquet"
TASKS = Path(__file__).with_name("dying_task.py")
FORMATS = ("parquet", "csv")


def predict(*argv: str | Path) -> int:
    return command.main([*map(str, argv), "--device", "cpu"])


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def stored(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Images as a column of Parquet has them."""
    return [{"bytes": path.read_bytes(), "path": None} for path in paths]


# ------------------------------------------------------------------ what is written


def test_predictions_of_the_evaluation_data_match_the_metrics_of_evaluate(
    digits: str, tmp_path: Path
):
    out, figures = tmp_path / "p.parquet", tmp_path / "e.json"
    assert predict(digits, "--out", out, "--top", "5", "--probabilities") == 0
    assert evaluate([digits, "--device", "cpu", "--out", str(figures)]) == 0
    counted = json.loads(figures.read_text())["metrics"]
    found = pd.read_parquet(out)
    right = found["class"] == found["label"]
    assert float(np.float32(right.sum()) / np.float32(len(found))) == counted["top1"]
    among = [right, *(found[f"class_{place}"] == found["label"] for place in range(2, 6))]
    assert float(np.float32(np.any(among, 0).sum()) / np.float32(360)) == counted["top5"]
    pairs = zip(found["probabilities"], found["label"], strict=True)
    truth = [row[int(label)] for row, label in pairs]
    assert -np.log(truth).mean() == pytest.approx(counted["loss"], rel=1e-5)


def test_probabilities_equal_a_plain_loop_over_the_same_batches_bitwise(
    digits: str, tmp_path: Path
):
    """With other batches, kernels may round differently."""
    out, other = tmp_path / "p.parquet", tmp_path / "o.parquet"
    predict(digits, DIGITS, "--out", out, "--probabilities")
    predict(digits, DIGITS, "--out", other, "--probabilities", "--batch-size", "7")
    encoded = [BytesIO(one["bytes"]) for one in pq.read_table(DIGITS)["image"].to_pylist()]
    arrays = [np.array(Image.open(each).convert("RGB")) for each in encoded]
    images = torch.stack([*map(torch.from_numpy, arrays)]).permute(0, 3, 1, 2)
    data = TrainConfig().data
    mean, std = ((torch.tensor(v) * 255).view(3, 1, 1) for v in (data.mean, data.std))
    model = plain(digits, DigitsCNN(classes=10))
    with torch.inference_mode():
        parts = [(part.contiguous().float() - mean) / std for part in images.split(64)]
        wanted = torch.cat([model(part).softmax(1) for part in parts])
    found = [np.stack(pd.read_parquet(path)["probabilities"]) for path in (out, other)]
    assert np.array_equal(found[0], wanted.numpy())
    np.testing.assert_allclose(found[0], found[1], atol=2e-6)


def test_both_output_formats_have_the_same_values(digits: str, tmp_path: Path):
    for end in FORMATS:
        predict(digits, "--out", tmp_path / f"p.{end}", "--top", "2", "--probabilities")
    table = pd.read_parquet(tmp_path / "p.parquet")
    text = {"class": str, "label": str, "class_2": str}
    csv = pd.read_csv(tmp_path / "p.csv", dtype=text)
    for name in (*text, "row", "probability", "probability_2"):
        assert (table[name] == csv[name].astype(table[name].dtype)).all()
    names = [f"probability:{place}" for place in range(10)]
    assert np.array_equal(np.stack(table["probabilities"]), csv[names].to_numpy(np.float32))
    about = pq.read_schema(tmp_path / "p.parquet").metadata
    assert about[b"checkpoint"].decode().startswith(digits)


def test_broken_images_are_rows_with_an_error(
    photos: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, folder = photos
    shutil.copytree(folder, tmp_path / "in")
    (tmp_path / "in/dark/3.jpg").write_bytes(b"no image")
    (tmp_path / "in/dark/4.jpg").write_bytes((folder / "dark/4.jpg").read_bytes()[:300])
    (tmp_path / "in/dark/lost.jpg").symlink_to("nowhere")
    os.mkfifo(tmp_path / "in/dark/pipe.jpg")  # does not block
    (tmp_path / "in/notes.txt").write_text("x")
    assert predict(run, tmp_path / "in", "--out", tmp_path / "p.parquet") == 0
    shown = capsys.readouterr()
    assert "not used: 1 .txt (not images), such as" in shown.err
    assert "20 images" in shown.out
    assert "  4 cannot be read: see the column error" in shown.out
    found = {Path(row["path"]).name: row for row in rows(tmp_path / "p.parquet")[:11]}
    bad = {name for name, row in found.items() if row["error"] is not None}
    assert bad == {"3.jpg", "4.jpg", "lost.jpg", "pipe.jpg"}
    assert {name for name, row in found.items() if row["class"] is None} == bad


def test_if_no_image_can_be_read_the_output_file_contains_the_errors(
    photos: tuple[str, Path], tmp_path: Path
):
    (tmp_path / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        predict(photos[0], tmp_path / "a.jpg", "--out", tmp_path / "p.csv")
    assert pd.read_csv(tmp_path / "p.csv")["error"].tolist() == ["cannot identify image file"]


# ------------------------------------------------------------------ inputs


def test_the_same_images_in_any_form_get_the_same_classes(photos: tuple[str, Path], tmp_path: Path):
    import fsspec

    run, folder = photos
    paths = sorted(folder.rglob("*.jpg"))
    for number, part in enumerate((paths[:10], paths[10:])):
        table = pa.table({"image": stored(part), "other": [0.5] * len(part)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    listed = pd.DataFrame({"photo": [str(path) for path in paths]})
    listed.to_csv(tmp_path / "list.csv", index=False)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/more").symlink_to(folder)
    store = fsspec.filesystem("memory")
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number, path in enumerate(paths):
            tar.add(path, f"{number:03d}.jpg")
            store.pipe(f"/bucket/in/{number:03d}.jpg", path.read_bytes())
    forms: dict[str, Sequence[str | Path]] = {
        "folder": [folder],
        "uri": [f"file://{folder}"],
        "glob": [folder / "*" / "*.jpg"],
        "files": paths,
        "twice": [folder, folder / "dark"],
        "list": [tmp_path / "list.csv", "--image-column", "photo"],
        "linked": [tmp_path / "linked"],
        "parquet": [tmp_path / "[01].parquet"],
        "tar": [tmp_path / "s.tar"],
        "store": ["memory://bucket/in"],
    }
    found = {}
    for name, words in forms.items():
        predict(run, *words, "--out", tmp_path / f"{name}.parquet")
        found[name] = rows(tmp_path / f"{name}.parquet")
        said = [[(r["class"], r["probability"]) for r in found[each]] for each in ("folder", name)]
        assert said[0] == said[1], name
    for name in ("folder", "glob", "files", "twice", "list"):
        assert [row["path"] for row in found[name]] == [*map(str, paths)]
    assert [(Path(r["file"]).name, r["row"]) for r in found["parquet"][9:11]] == [
        ("0.parquet", 9),
        ("1.parquet", 0),
    ]


@pytest.mark.parametrize("form", ["folder", "parquet", "list"])
def test_held_out_rows_have_the_names_of_the_full_data(
    form: str, photos: tuple[str, Path], tmp_path: Path
):
    paths = sorted(photos[1].rglob("*.jpg"))
    source = photos[1] if form == "folder" else tmp_path / "pictures"
    source.mkdir(exist_ok=True)
    for number, half in enumerate((paths[:10], paths[10:])):
        labels = [path.parent.name for path in half]
        if form == "list":
            listed = pd.DataFrame({"image": [*map(str, half)], "label": labels})
            listed.to_csv(source / f"{number}.csv", index=False)
        elif form == "parquet":
            table = pa.table({"image": stored(half), "label": labels})
            pq.write_table(table, source / f"{number}.parquet")
    data = DataConfig(source=str(source), holdout=0.4, image_size=16)
    config = TrainConfig(
        name="r", storage=str(tmp_path), steps=1, batch_size=4, micro_batch=4, data=data
    )
    fit_locally(config)
    for name, words in {"own": [], "all": [source]}.items():
        predict(tmp_path / "r", *words, "--out", tmp_path / f"{name}.parquet")
    keys = ["path"] if form == "folder" else ["file", "row"]
    every = {tuple(row[key] for key in keys): row for row in rows(tmp_path / "all.parquet")}
    own = rows(tmp_path / "own.parquet")
    assert (len(every), len(own)) == (len(paths), 7)
    for row in own:
        same = every[tuple(row[key] for key in keys)]
        assert row["probability"] == pytest.approx(same["probability"], rel=1e-5)
        if form != "parquet":
            assert row["path"] == same["path"]
            assert Path(row["path"]).parent.name == row["label"]


def test_a_run_in_a_store_is_found_with_the_options_of_its_uri(
    photos: tuple[str, Path], tmp_path: Path
):
    run, folder = photos
    predict(run, folder / "dark", "--out", tmp_path / "local.csv")
    with s3_server() as s3:
        s3.put_folder(Path(run), "runs/photos")
        predict(s3.uri("runs/photos"), folder / "dark", "--out", tmp_path / "store.csv")
        (checkpoint,) = {path.name for path in Path(run, "checkpoints").glob("step-*-a*")}
        one = s3.uri(f"runs/photos/checkpoints/{checkpoint}")
        predict(one, folder / "dark", "--out", tmp_path / "one.csv")
    local = (tmp_path / "local.csv").read_bytes()
    assert local == (tmp_path / "store.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()


def test_the_first_rows_may_all_be_bad_and_paths_need_not_be_utf_8(
    photos: tuple[str, Path], tmp_path: Path
):
    (tmp_path / "in").mkdir()
    for number in range(9):
        (tmp_path / f"in/a{number}.jpg").touch()
    name = os.fsdecode(os.fsencode(tmp_path) + b"/in/caf\xe9.jpg")
    shutil.copy(photos[1] / "dark/4.jpg", name)
    for end in FORMATS:
        out = tmp_path / f"p.{end}"
        predict(photos[0], tmp_path / "in", "--out", out, *(["--layer", "fc"] * (end != "csv")))
        assert rb"caf\udce9.jpg" in out.read_bytes()
    found = pd.read_parquet(tmp_path / "p.parquet")
    assert found["embedding"].isna().tolist() == [True] * 9 + [False]


# ------------------------------------------------------------------ tasks


class Mixed(TinyTask):
    """Its outputs differ in type and length between batches."""

    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        logits = model(batch["x"])
        count = len(logits)
        return {
            "best": logits.argmax(1),
            "logits": logits,
            "text": ([None] if count < 20 else ["a"]) * count,
            "number": [math.nan, *[1.5 if count < 20 else 2] * (count - 1)],
            "é": [[1.0] * (1 + count % 3)] * count,
        }


def test_a_users_task_predicts_its_evaluation_data(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=Mixed))
    predict(tmp_path / "own", "--out", tmp_path / "p.parquet", "--batch-size", "20")
    found = pd.read_parquet(tmp_path / "p.parquet")
    assert [*found.columns] == ["row", "best", "logits", "text", "number", "é", "error"]
    assert found["row"].tolist() == [*range(53)]
    assert (np.stack(found["logits"]).argmax(1) == found["best"]).all()
    assert found["text"].fillna("").tolist() == ["a"] * 40 + [""] * 13
    assert found["number"][1:20].tolist() == [2.0] * 19
    assert [len(row) for row in found["é"]] == [3] * 40 + [2] * 13
    with pytest.raises(ConfigError, match="its own evaluation data only"):
        predict(tmp_path / "own", "x.jpg", "--out", tmp_path / "q.csv")
    with pytest.raises(ConfigError, match="--top 2 has no effect"):
        predict(tmp_path / "own", "--top", "2", "--out", tmp_path / "q.csv")


class Nested(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"boxes": [[{"x": 1.5}]] * len(batch["x"])}


class Clashing(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"row": [1] * len(batch["x"])}


class Short(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"n": [1]}


@pytest.mark.parametrize(
    ("task", "error", "named"),
    [
        (Nested, ConfigError, r"'boxes' has lists: use \.parquet"),
        (Clashing, TaskError, "duplicate"),
        (Short, TaskError, r"Short\.predict.* That is the value of 'n'"),
        (TinyTask, ConfigError, r"TinyTask has no predict\(model, batch\)"),
    ],
)
def test_outputs_that_cannot_be_columns_are_named(
    task: type, error: type[Exception], named: str, tmp_path: Path
):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=task))
    with pytest.raises(error, match=named):
        predict(tmp_path / "own", "--out", tmp_path / "p.CSV")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


# ------------------------------------------------------------------ stops


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """A run whose predictions die in batch 300 while the file exists, images for three parts and a
    half, and the file."""
    folder = tmp_path_factory.mktemp("many")
    pq.write_table(pa.concat_tables([pq.read_table(DIGITS)] * 20), folder / "many.parquet")
    config = TrainConfig(
        name="run",
        storage=str(folder),
        steps=1,
        log=LogConfig(tensorboard=False),
        task=f"{TASKS}:DiesOnce",
        task_options={"bomb": str(folder / "bomb"), "last": "300"},
    )
    fit_locally(config)
    torch.use_deterministic_algorithms(False)
    return str(folder / "run"), folder / "many.parquet", folder / "bomb"


@pytest.mark.parametrize("end", FORMATS)
def test_after_a_kill_the_same_command_continues_with_the_same_bytes(
    end: str, many: tuple[str, Path, Path], tmp_path: Path
):
    run, images, bomb = many
    out, hidden = tmp_path / f"p.{end}", tmp_path / f".p.{end}.predicting"
    flags = ("--device", "cpu", "--probabilities", "--out", str(out))
    predict(run, images, *flags[2:-1], tmp_path / f"whole.{end}")
    bomb.touch()
    argv = [sys.executable, "-m", "raytrain_ddp", "predict", run, str(images), *flags]
    killed = warm_python.run(argv, cwd=tmp_path, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert not bomb.exists()
    assert not out.exists()
    parts = sorted(hidden.glob("part-*"))
    assert len(parts) == 2
    with pytest.raises(ConfigError, match="top 2, was 1"):
        predict(run, images, *flags, "--top", "2")
    before = [part.stat().st_mtime_ns for part in parts]
    with Staging(out, "predicting", "p").held():
        with pytest.raises(RunLockedError):
            predict(run, images, *flags)
        assert [part.stat().st_mtime_ns for part in parts] == before
    predict(run, images, *flags)
    assert out.read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert not hidden.exists()


def test_a_full_disk_is_named_and_nothing_is_lost(many: tuple[str, Path, Path], tmp_path: Path):
    run, images, _ = many
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(PreflightError, match=r"cannot be written: .* is kept in"):
            predict(run, images, "--out", tmp_path / "p.csv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert predict(run, images, "--out", tmp_path / "p.csv") == 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("command_line", "error", "named"),
    [
        ("", ConfigError, "--out"),
        ("--out p.xls", ConfigError, "p.xls: .* .csv"),
        ("--out nowhere/p.csv", ConfigError, "no folder"),
        ("--out texts.csv", ConfigError, "is a folder"),
        ("--out mine.csv", ConfigError, "exists already"),
        ("--out p\udcff.csv", ConfigError, "UTF-8"),
        ("--out p.csv --top 11", ConfigError, "10 classes"),
        ("--out p.csv --top 0", ConfigError, "--top"),
        ("--out p.csv --layer hed", ConfigError, "'head'"),
        ("--out p.csv --workers 2", ConfigError, "--workers .*--address"),
        ("--out p.csv --image-column x", ConfigError, "--image-column .*INPUT"),
        ("--out p.csv --layer head", ConfigError, "'embedding' has lists"),
        ("nothing --out p.csv", DataError, "nothing: no such file"),
        ("file://box/a.jpg --out p.csv", ConfigError, "file:///a.jpg"),
        ("a.jpg --image-column x --out p.csv", ConfigError, "--image-column"),
        ("texts.csv --out p.csv", DataError, "contains no images"),
        ("up --out p.csv", DataError, "up/up points to a folder above it"),
        ("t.parquet --out p.csv", DataError, "no column 'image' .* --image-column"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    command_line: str,
    error: type[Exception],
    named: str,
    digits: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    for folder in ("texts.csv", "up"):
        (tmp_path / folder).mkdir()
    for file in ("a.jpg", "mine.csv", "texts.csv/a.txt"):
        (tmp_path / file).write_bytes(b"x")
    (tmp_path / "up/up").symlink_to(tmp_path)
    pq.write_table(pa.table({"x": [1]}), "t.parquet")
    with pytest.raises(error, match=named):
        predict(digits, *command_line.split())
    assert not (tmp_path / "p.csv").exists()


def test_a_file_is_replaced_only_on_request(digits: str, tmp_path: Path):
    (tmp_path / "p.csv").write_text("mine")
    predict(digits, "--out", tmp_path / "p.csv", "--overwrite")
    assert len(pd.read_csv(tmp_path / "p.csv")) == 360
    with pytest.raises(ConfigError, match="no run there"):
        predict(tmp_path, "--out", tmp_path / "q.csv")
