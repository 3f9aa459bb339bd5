"""The command `predict`: its output, its inputs, and what happens after a kill."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from s3 import s3_server
from test_loaded_model import plain
from tiny import TinyTask, tiny_config

import raytrain_ddp.tools.predict.__main__ as command
from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PreflightError,
    RaytrainError,
    RunLockedError,
    TaskError,
)
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.tools.predict.output_parts import OutputParts

DIGITS = Path(command.__file__).parents[1] / "data/digits/test-00000-of-00001.parquet"


def predict(*argv: str | Path) -> int:
    return command.main([*map(str, argv), "--device", "cpu"])


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


# ------------------------------------------------------------------ what is written


def test_predictions_of_the_evaluation_data_match_the_metrics_of_evaluate(
    digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    shown = capsys.readouterr().out
    assert f"class is the label in {right.sum()} of 360 ({right.mean():.6f})" in shown


def test_probabilities_equal_a_plain_loop_over_the_same_batches_bitwise(
    digits: str, tmp_path: Path
):
    """With other batches, kernels may round differently."""
    out, other = tmp_path / "p.parquet", tmp_path / "o.parquet"
    predict(digits, DIGITS, "--out", out, "--probabilities")
    predict(digits, DIGITS, "--out", other, "--probabilities", "--batch-size", "7")
    stored = pq.read_table(DIGITS)["image"].to_pylist()
    images = torch.stack(
        [
            torch.from_numpy(np.array(Image.open(BytesIO(one["bytes"])).convert("RGB")))
            for one in stored
        ]
    ).permute(0, 3, 1, 2)
    data = TrainConfig().data
    mean, std = ((torch.tensor(v) * 255).view(3, 1, 1) for v in (data.mean, data.std))
    model = plain(digits, DigitsCNN(classes=10))
    with torch.inference_mode():
        wanted = [
            model((part.contiguous().float() - mean) / std).softmax(1) for part in images.split(64)
        ]
    found = [np.stack(pd.read_parquet(path)["probabilities"]) for path in (out, other)]
    assert np.array_equal(found[0], torch.cat(wanted).numpy())
    np.testing.assert_allclose(found[0], found[1], atol=2e-6)


def test_all_output_formats_have_the_same_values(digits: str, tmp_path: Path):
    flags = ("--top", "2", "--probabilities", "--layer", "head")
    for end in ("parquet", "csv", "jsonl"):
        predict(digits, "--out", tmp_path / f"p.{end}", *flags)
    table = pd.read_parquet(tmp_path / "p.parquet")
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    flat = pd.read_csv(tmp_path / "p.csv", dtype={"class": str, "label": str, "class_2": str})
    assert [*table.columns] == [*lines[0]]
    for name in ("row", "label", "class", "probability", "class_2", "probability_2"):
        assert [line[name] for line in lines] == flat[name].tolist()
        kind = table[name].dtype
        assert table[name].tolist() == flat[name].astype(kind).tolist()
    for column, one in (("probabilities", "probability"), ("embedding", "embedding")):
        stacked = np.stack(table[column])
        assert np.array_equal(stacked, np.array([line[column] for line in lines], np.float32))
        names = [f"{one}:{place}" for place in range(10)]
        assert np.array_equal(stacked, flat[names].to_numpy(np.float32))
    about = pq.read_schema(tmp_path / "p.parquet").metadata
    assert about[b"checkpoint"].decode().startswith(digits)


def test_a_table_given_together_with_images_is_not_silently_ignored(
    photos: tuple[str, Path], tmp_path: Path
):
    run, folder = photos
    (tmp_path / "list.csv").write_text("image\n")
    with pytest.raises(ConfigError, match=r"list.csv is a table, and others are images"):
        predict(run, folder, tmp_path / "list.csv", "--out", tmp_path / "p.csv")


def test_broken_images_are_rows_with_an_error(
    photos: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, folder = photos
    shutil.copytree(folder, tmp_path / "in")
    (tmp_path / "in/dark/3.jpg").write_bytes(b"no image")
    (tmp_path / "in/dark/4.jpg").write_bytes((folder / "dark/4.jpg").read_bytes()[:300])
    (tmp_path / "in/dark/lost.jpg").symlink_to("nowhere")
    (tmp_path / "in/notes.txt").write_text("x")
    assert predict(run, tmp_path / "in", "--out", tmp_path / "p.parquet") == 0
    shown = capsys.readouterr()
    assert "not used: 1 .txt (not images), such as" in shown.err
    assert "19 images" in shown.out
    assert "  3 cannot be read: see the column error" in shown.out
    found = {Path(row["path"]).name: row for row in rows(tmp_path / "p.parquet")[:10]}
    bad = {name: row["error"] for name, row in found.items() if row["error"] is not None}
    assert bad.keys() == {"3.jpg", "4.jpg", "lost.jpg"}
    assert bad["lost.jpg"] == "no such file"
    assert all(row["class"] is None for name, row in found.items() if name in bad)
    assert all(row["class"] in ("dark", "light") for name, row in found.items() if name not in bad)


def test_if_no_image_can_be_read_the_output_file_contains_the_errors(
    photos: tuple[str, Path], tmp_path: Path
):
    (tmp_path / "a.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        predict(photos[0], tmp_path / "a.jpg", "--out", tmp_path / "p.csv")
    assert pd.read_csv(tmp_path / "p.csv")["error"].tolist() == ["cannot identify image file"]


# ------------------------------------------------------------------ inputs


def test_the_same_images_in_any_form_get_the_same_classes(photos: tuple[str, Path], tmp_path: Path):
    run, folder = photos
    paths = sorted(folder.rglob("*.jpg"))
    contents = [path.read_bytes() for path in paths]
    files = [{"bytes": content, "path": None} for content in contents]
    for number, part in enumerate((files[:10], files[10:])):
        table = pa.table({"image": part, "other": [0.5] * len(part)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    listed = pd.DataFrame({"photo": [str(path) for path in paths]})
    listed.to_csv(tmp_path / "list.csv", index=False)
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number, path in enumerate(paths):
            tar.add(path, f"{number:03d}.jpg")
    forms: dict[str, Sequence[str | Path]] = {
        "folder": [folder],
        "uri": [f"file://{folder}"],
        "glob": [folder / "*" / "*.jpg"],
        "files": paths,
        "parquet": [tmp_path / "*.parquet"],
        "list": [tmp_path / "list.csv", "--image-column", "photo"],
        "tar": [tmp_path / "s.tar"],
    }
    found = {}
    for name, words in forms.items():
        predict(run, *words, "--out", tmp_path / f"{name}.jsonl")
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    for name, lines in found.items():
        assert [(r["class"], r["probability"]) for r in lines] == [
            (r["class"], r["probability"]) for r in found["folder"]
        ], name
    for name in ("folder", "glob", "files", "list"):
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
    labels = [path.parent.name for path in paths]
    source = tmp_path / "pictures"
    if form == "folder":
        shutil.copytree(photos[1], source)
    else:
        source.mkdir()
    for number, half in enumerate((slice(0, 10), slice(10, None))):
        names = [str(path) for path in paths[half]]
        given = pa.table({"image": names, "label": labels[half]})
        if form == "list":
            given.to_pandas().to_csv(source / f"{number}.csv", index=False)
        elif form == "parquet":
            contents = [{"bytes": path.read_bytes(), "path": None} for path in paths[half]]
            pq.write_table(given.set_column(0, "image", [contents]), source / f"{number}.parquet")
    data = DataConfig(source=str(source), holdout=0.4, image_size=16)
    config = TrainConfig(
        name="r", storage=str(tmp_path), steps=1, batch_size=4, micro_batch=4, data=data
    )
    fit_locally(config)
    run, found = tmp_path / "r", {}
    for name, words in {"own": [], "all": [source]}.items():
        predict(run, *words, "--out", tmp_path / f"{name}.jsonl")
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        found[name] = [json.loads(line) for line in lines]
    keys = ["path"] if form == "folder" else ["file", "row"]
    every = {tuple(r[key] for key in keys): r for r in found["all"]}
    assert len(every) == len(paths)
    assert len(found["own"]) == 7
    for row in found["own"]:
        same = every[tuple(row[key] for key in keys)]
        assert row["probability"] == pytest.approx(same["probability"], rel=1e-5)
        if form != "parquet":
            assert row["path"] == same["path"]
            assert Path(row["path"]).parent.name == row["label"]


def test_predictions_can_be_made_for_a_folder_in_a_store(photos: tuple[str, Path], tmp_path: Path):
    import fsspec

    run, folder = photos
    store = fsspec.filesystem("memory")
    for name in ("0.jpg", "1.jpg"):
        store.pipe(f"/bucket/in/{name}", (folder / "dark" / name).read_bytes())
    predict(run, "memory://bucket/in", "--out", tmp_path / "p.parquet")
    predict(run, folder / "dark" / "[01].jpg", "--out", tmp_path / "q.parquet")
    ours, theirs = rows(tmp_path / "p.parquet"), rows(tmp_path / "q.parquet")
    assert [row["probability"] for row in ours] == [row["probability"] for row in theirs]
    assert [row["path"].rpartition("/")[2] for row in ours] == ["0.jpg", "1.jpg"]


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


class Predicting(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        logits = model(batch["x"])
        return {"best": logits.argmax(1), "logits": logits, "text": ["a"] * len(logits)}


def test_a_users_task_predicts_its_evaluation_data(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=Predicting))
    predict(tmp_path / "own", "--out", tmp_path / "p.parquet")
    found = pd.read_parquet(tmp_path / "p.parquet")
    assert [*found.columns] == ["row", "best", "logits", "text", "error"]
    assert found["row"].tolist() == [*range(53)]
    assert (np.stack(found["logits"]).argmax(1) == found["best"]).all()
    with pytest.raises(ConfigError, match="its own evaluation data only"):
        predict(tmp_path / "own", "x.jpg", "--out", tmp_path / "q.parquet")
    with pytest.raises(ConfigError, match="--top has no effect"):
        predict(tmp_path / "own", "--top", "2", "--out", tmp_path / "q.parquet")


class Mixed(TinyTask):
    """Its outputs differ in type and length between batches."""

    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        logits = model(batch["x"])
        count = len(logits)
        text: list[str | None] = [None] * count if count < 20 else ["a"] * count
        lists = [[1.0] * (1 + count % 3)] * count
        return {"text": text, "number": [1.5 if count < 20 else 2] * count, "lists": lists}


def test_outputs_with_several_types_become_columns_of_one_type(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=Mixed))
    predict(tmp_path / "own", "--out", tmp_path / "p.parquet", "--batch-size", "20")
    found = pq.read_table(tmp_path / "p.parquet")
    assert found["text"].to_pylist() == ["a"] * 40 + [None] * 13
    assert found["number"].to_pylist() == [2.0] * 40 + [1.5] * 13
    assert [len(row) for row in found["lists"].to_pylist()] == [3] * 40 + [2] * 13
    with pytest.raises(TaskError, match=r"'lists' differ in length.*parquet"):
        predict(tmp_path / "own", "--out", tmp_path / "p.csv", "--batch-size", "20")


class Nested(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"boxes": [[{"x": 1.5}]] * len(batch["x"]), "n": [1] * len(batch["x"])}


def test_nested_values_are_refused_as_csv_columns(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=Nested))
    predict(tmp_path / "own", "--out", tmp_path / "p.jsonl")
    assert '"boxes": [{"x": 1.5}]' in (tmp_path / "p.jsonl").read_text()
    with pytest.raises(TaskError, match=r"'boxes' are list<.*parquet or \.jsonl"):
        predict(tmp_path / "own", "--out", tmp_path / "p.CSV")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "p.jsonl"]


class NotFinite(TinyTask):
    def predict(self, model: Any, batch: Any) -> dict[str, Any]:
        return {
            "é": [math.nan, *[1.5] * (len(batch["x"]) - 1)],
            "all": [[math.inf]] * len(batch["x"]),
        }


def test_json_lines_are_strict_json_with_null_for_values_that_are_not_finite(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=NotFinite))
    predict(tmp_path / "own", "--out", tmp_path / "p.jsonl")
    text = (tmp_path / "p.jsonl").read_text(encoding="utf-8")
    assert text.splitlines()[0] == '{"row": 0, "é": null, "all": [null], "error": null}'
    assert '{"row": 1, "é": 1.5,' in text


def test_a_uri_of_a_file_is_decoded(photos: tuple[str, Path], tmp_path: Path):
    run, folder = photos
    (tmp_path / "a b.jpg").write_bytes((folder / "dark/4.jpg").read_bytes())
    predict(run, (tmp_path / "a b.jpg").as_uri(), "--out", tmp_path / "p.jsonl")
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    assert json.loads(line)["path"].endswith("a b.jpg")


def test_folders_are_read_through_links_and_tables_in_them_are_named(
    photos: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, folder = photos
    (tmp_path / "in").mkdir()
    (tmp_path / "in/more").symlink_to(folder)
    (tmp_path / "in/table.csv").write_text("image\n")
    predict(run, tmp_path / "in", "--out", tmp_path / "p.parquet")
    assert len(rows(tmp_path / "p.parquet")) == len([*folder.glob("*/*.jpg")])
    assert "1 .csv (tables next to the images)" in capsys.readouterr().err
    (tmp_path / "in/up").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"the link .*in/up points to a folder above it"):
        predict(run, tmp_path / "in", "--out", tmp_path / "q.parquet")


def test_a_named_pipe_in_a_folder_is_a_bad_image_and_does_not_block(
    photos: tuple[str, Path], tmp_path: Path
):
    run, folder = photos
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jpg").write_bytes((folder / "dark/4.jpg").read_bytes())
    os.mkfifo(tmp_path / "in/b.jpg")
    for word in ("in", "in/*.jpg"):
        predict(run, tmp_path / word, "--out", tmp_path / "p.parquet", "--overwrite")
        image, pipe = rows(tmp_path / "p.parquet")
        assert image["error"] is None
        assert pipe["error"] == "a named pipe, socket or device, not a file"
    with ThreadPoolExecutor(1) as writer:  # a named pipe given explicitly is read
        writer.submit((tmp_path / "in/b.jpg").write_bytes, (tmp_path / "in/a.jpg").read_bytes())
        predict(run, (tmp_path / "in/b.jpg").as_uri(), "--out", tmp_path / "q.parquet")
    assert rows(tmp_path / "q.parquet")[0]["error"] is None


@pytest.mark.parametrize("end", ["parquet", "csv", "jsonl"])
def test_a_path_need_not_be_utf_8(end: str, photos: tuple[str, Path], tmp_path: Path):
    run, folder = photos
    name = os.fsencode(tmp_path) + b"/caf\xe9.jpg"
    with open(name, "wb") as file:
        file.write((folder / "dark/4.jpg").read_bytes())
    predict(run, os.fsdecode(name), "--out", tmp_path / f"p.{end}")
    assert b"caf?.jpg" in (tmp_path / f"p.{end}").read_bytes()


def test_the_first_rows_of_a_csv_file_may_all_be_bad(
    photos: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "_ROWS_PER_PART", 4)
    run, folder = photos
    (tmp_path / "in").mkdir()
    for number in range(9):
        (tmp_path / f"in/a{number}.jpg").touch()
    shutil.copy(folder / "dark/4.jpg", tmp_path / "in/b.jpg")
    predict(run, tmp_path / "in", "--out", tmp_path / "p.csv", "--layer", "fc")
    found = pd.read_csv(tmp_path / "p.csv")
    assert found["embedding:0"].isna().tolist() == [True] * 9 + [False]


def test_a_task_without_predict_is_refused_with_what_to_add(tmp_path: Path):
    fit_locally(tiny_config(tmp_path, "own", epochs=1, task=TinyTask))
    with pytest.raises(ConfigError, match=r"TinyTask has no predict\(model, batch\)"):
        predict(tmp_path / "own", "--out", tmp_path / "p.parquet")


# ------------------------------------------------------------------ stops


@pytest.mark.parametrize("end", ["parquet", "csv", "jsonl"])
def test_after_a_kill_the_same_command_continues_with_the_same_bytes(
    end: str, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "_ROWS_PER_PART", 64)
    whole, out = tmp_path / f"whole.{end}", tmp_path / f"p.{end}"
    predict(digits, "--out", whole)
    write, written = OutputParts.write, list[int]()

    def killed(self: OutputParts, part: int, table: Any) -> None:
        if len(written) == 2:
            (self.folder / "tmp-left").write_bytes(b"half a part")
            raise KeyboardInterrupt
        written.append(part)
        write(self, part, table)

    monkeypatch.setattr(OutputParts, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        predict(digits, "--out", out)
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"other predictions were started here .*top 2, was 1"):
        predict(digits, "--out", out, "--top", "2")

    def noted(self: OutputParts, part: int, table: Any) -> None:
        written.append(part)
        write(self, part, table)

    monkeypatch.setattr(OutputParts, "write", noted)
    predict(digits, "--out", out)
    assert written == [0, 1, 2, 3, 4, 5]
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"p.{end}", f"whole.{end}"]


def test_damage_to_a_started_output_is_named(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, folder = tmp_path / "p.csv", tmp_path / ".p.csv.predicting"
    with monkeypatch.context() as patched:
        patched.setattr(OutputParts, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            predict(digits, "--out", out)
    part = folder / "part-00000000.parquet"
    part.write_bytes(b"")
    with pytest.raises(DataError, match=r"part-00000000.parquet: damaged: .* 0 bytes: delete it"):
        predict(digits, "--out", out)
    for text in ("", "[]"):
        (folder / "plan.json").write_text(text)
        with pytest.raises(DataError, match=r"plan.json: is damaged: no JSON object\. To begin"):
            predict(digits, "--out", out)
    assert predict(digits, "--out", out, "--overwrite") == 0


def test_a_full_disk_is_named_and_nothing_is_lost(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("raytrain_ddp.tools.predict.output_parts.pq.write_table", full)
        with pytest.raises(PreflightError, match="cannot be written: No space left on device"):
            predict(digits, "--out", tmp_path / "p.csv")
    assert predict(digits, "--out", tmp_path / "p.csv") == 0


def test_a_concurrent_write_to_the_same_file_is_refused(digits: str, tmp_path: Path):
    refused = pytest.raises(RunLockedError, match="another process is writing it")
    with OutputParts(tmp_path / "p.csv").held(), refused:
        predict(digits, "--out", tmp_path / "p.csv")


def test_a_file_is_replaced_only_on_request(digits: str, tmp_path: Path):
    (tmp_path / "p.csv").write_text("mine")
    with pytest.raises(ConfigError, match="exists already: give another name, or --overwrite"):
        predict(digits, "--out", tmp_path / "p.csv")
    predict(digits, "--out", tmp_path / "p.csv", "--overwrite")
    assert len(pd.read_csv(tmp_path / "p.csv")) == 360


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("argv", "error", "message"),
    [
        ((), ConfigError, "--out is missing"),
        (("--out", "p.xls"), ConfigError, "ends with .parquet, .csv or .jsonl"),
        (("--out", "nowhere/p.csv"), ConfigError, "there is no folder"),
        (("--out", "p.csv", "--top", "11"), ConfigError, "the run has 10 classes"),
        (("--out", "p.csv", "--top", "0"), ConfigError, "--top"),
        (("--out", "p.csv", "--layer", "hed"), ConfigError, "no such layer. Did you mean 'head'"),
        (("--out", "p\udcff.csv"), ConfigError, "must be UTF-8"),
        (("nothing", "--out", "p.csv"), DataError, "nothing: no such file or folder"),
        (("file://box/a.jpg", "--out", "p.csv"), ConfigError, "names a host: write file:///a.jpg"),
        (
            ("a.jpg", "--image-column", "x", "--out", "p.csv"),
            ConfigError,
            "has no effect, as INPUT",
        ),
        (("clip.mp4", "--out", "p.csv"), DataError, "is a video, no images. Extract its frames"),
        (("texts", "--out", "p.csv"), DataError, "contains no images and no tables"),
        (("t.parquet", "--out", "p.csv"), DataError, "no column 'image' .* --image-column"),
    ],
)
def test_invalid_input_is_reported_in_one_line(
    argv: Sequence[str],
    error: type[RaytrainError],
    message: str,
    digits: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"x")
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("x")
    pq.write_table(pa.table({"x": [1]}), "t.parquet")
    with pytest.raises(error, match=message):
        predict(digits, *argv)
    assert not (tmp_path / "p.csv").exists()


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        predict(tmp_path, "--out", tmp_path / "p.csv")
