"""Conversion of folders, Parquet, and torchvision sets to shards, and how it fails."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import located
from PIL import Image
from processes import run_cli

from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.errors import (
    ConfigError,
    DataError,
    PreflightError,
    RaytrainError,
    RunLockedError,
)
from raytrain_ddp.tools.convert import destination as stage_module
from raytrain_ddp.tools.convert.__main__ import fit_command, main
from raytrain_ddp.tools.convert.conversion import Converted, convert
from raytrain_ddp.tools.convert.destination import Stage, read_dataset_file, verify
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.convert.pixels import PixelCounts, decode_image, encode_png, shrink_image
from raytrain_ddp.tools.convert.shard_writer import Tell, write_shard
from raytrain_ddp.tools.convert.task_runners import ProcessPool
from raytrain_ddp.tools.display.work_meter import shown

CLASSES = ("ant", "bee", "cow")
TRAIN, VAL = 60, 12


def picture(seed: int, height: int = 40, width: int = 52) -> Image.Image:
    """Noise and a gradient: about 2 KB as a JPEG."""
    random = np.random.Generator(np.random.Philox(seed))
    noise = random.integers(0, 60, (height, width, 3))
    slope = np.linspace(0, 150, width)[None, :, None] + 20 * (seed % 3)
    return Image.fromarray((noise + slope).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders below train/ and val/, with images of several sizes."""
    root = tmp_path_factory.mktemp("animals")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            name = CLASSES[number % 3]
            path = root / split / name / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(number, 40 + number % 5, 52), quality=90))
    return root


def silent(title: str, images: int) -> Tell:
    return lambda images, size: None


def run_convert(source: Any, dest: Path, workers: int = 1, **options: Any) -> Converted:
    with ProcessPool(workers) as run:
        return convert(str(source), str(dest), ConvertConfig(**options), run, silent)


# Small enough that sixty images make several shards and row groups.
SMALL = {"shard_mib": 1 / 32, "rows_per_group": 7}


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder converted with `SMALL`."""
    dest = tmp_path_factory.mktemp("converted") / "animals"
    assert not run_convert(folder, dest, **SMALL).found
    return dest


def rows_of(dest: Path, split: str) -> list[dict[str, Any]]:
    files = sorted(dest.glob(f"{split}-*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hidden(dest: Path) -> Path:
    return Stage(dest).folder


# ------------------------------------------------------------------ what is written


def test_each_image_is_written_once_with_its_bytes_label_and_path(folder: Path, converted: Path):
    for split, count in (("train", TRAIN), ("val", VAL)):
        rows = rows_of(converted, split)
        assert len({row["image"]["path"] for row in rows}) == len(rows) == count
        for row in rows:
            path = Path(row["image"]["path"])
            assert row["image"]["bytes"] == (folder / split / path).read_bytes()
            assert CLASSES[row["label"]] == path.parent.name


def test_files_are_named_by_split_and_number_and_listed_with_hashes(converted: Path):
    dataset = read_dataset_file(converted)
    count = len(list(converted.glob("train-*")))
    assert count > 2
    expected = [f"train-{n:05d}-of-{count:05d}.parquet" for n in range(count)]
    assert [file["path"] for file in dataset["files"]] == [
        *expected,
        "val-00000-of-00001.parquet",
    ]
    for file in dataset["files"]:
        content = (converted / file["path"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
    assert {path.name for path in converted.iterdir()} == {
        "dataset.json",
        *(file["path"] for file in dataset["files"]),
    }
    assert dataset["rows"] == {"train": TRAIN, "val": VAL}
    assert dataset["class_names"] == list(CLASSES)
    assert not hidden(converted).exists()


def test_hugging_face_datasets_opens_it_with_the_same_features_and_pixels(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    files = {split: str(converted / f"{split}-*.parquet") for split in ("train", "val")}
    opened = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))
    train = opened["train"]
    assert isinstance(train.features["image"], datasets.Image)
    assert train.features["label"] == datasets.ClassLabel(names=list(CLASSES))
    assert (len(train), len(opened["val"])) == (TRAIN, VAL)
    rows = rows_of(converted, "train")
    for number in (0, 17, TRAIN - 1):
        with Image.open(folder / "train" / rows[number]["image"]["path"]) as image:
            expected = np.asarray(image.convert("RGB"))
        assert np.array_equal(np.asarray(train[number]["image"]), expected)
        assert train[number]["label"] == rows[number]["label"]


def test_fit_reads_the_same_images_from_the_converted_data(folder: Path, converted: Path):
    train, evaluation = located(str(converted), None)
    assert evaluation is not None
    source = ShardImages(train.paths, DataConfig())
    assert source.class_names == list(CLASSES)
    assert int(source.blocks.sum()) == TRAIN
    records = source.read(np.arange(TRAIN))
    stored = {path.read_bytes(): path.parent.name for path in folder.glob("train/*/*")}
    assert {image: CLASSES[label] for image, label in records} == stored
    assert int(ShardImages(evaluation.paths, DataConfig()).blocks.sum()) == VAL


def test_unused_flags_and_skipped_records_are_printed(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--label-column", "y", "--root", "x", "--bad-records", "skip", "--workers", "1"]
    assert main([str(damaged), str(tmp_path / "out"), *flags]) == 0
    printed = capsys.readouterr().out
    for flag in ("--label-column", "--root"):
        assert f"note: {flag} is not used for the training set" in printed
    assert f"out: {TRAIN - 3} train images" in printed
    assert f"training set (before skipping): {TRAIN} images" in printed


def test_a_list_of_images_is_converted_like_its_folder(folder: Path, tmp_path: Path):
    paths = sorted((folder / "train").glob("*/*.jpg"))
    rows = [f"{path.relative_to(folder / 'train')},{path.parent.name}" for path in paths]
    (tmp_path / "list.csv").write_text("\n".join(["image,label", *rows, "ant/gone.jpg,ant"]))
    options = {"root": str(folder / "train"), "eval_source": str(folder / "val"), **SMALL}
    with pytest.raises(DataError, match=r"list\.csv, row 60: .*no such file"):
        run_convert(tmp_path / "list.csv", tmp_path / "out", **options)
    done = run_convert(tmp_path / "list.csv", tmp_path / "out", bad_records="skip", **options)
    assert len(done.dataset["skipped"]) == 1
    written = {row["image"]["path"]: row for row in rows_of(tmp_path / "out", "train")}
    assert len(written) == TRAIN
    for path in paths:
        row = written[str(path.relative_to(folder / "train"))]
        assert row["image"]["bytes"] == path.read_bytes()
        assert CLASSES[row["label"]] == path.parent.name
    assert done.dataset["rows"] == {"train": TRAIN, "test": VAL}


def test_output_of_save_to_disk_is_converted(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    files = {split: str(converted / f"{split}-*.parquet") for split in ("train", "val")}
    opened = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))
    opened.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 2, "val": 1})
    run_convert(tmp_path / "saved", tmp_path / "out", workers=2, shuffle=False, **SMALL)
    for split in ("train", "val"):
        written, expected = rows_of(tmp_path / "out", split), rows_of(converted, split)
        assert [row["label"] for row in written] == [row["label"] for row in expected]
        for row, before in zip(written, expected, strict=True):
            assert row["image"]["bytes"] == before["image"]["bytes"]
            assert row["image"]["path"] == Path(before["image"]["path"]).name  # `datasets` cuts it


def test_tar_files_are_converted_with_the_names_of_their_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents = {f"{n:03d}.jpg": encoded(picture(n), quality=90) for n in range(TRAIN)}
    (tmp_path / "tars").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "tars" / f"train-{number}.tar", "w") as file:
            for name in [*contents][number::2]:
                for member, content in (
                    (name, contents[name]),
                    (f"{name[:3]}.cls", CLASSES[int(name[:3]) % 3].encode()),
                ):
                    reported = tarfile.TarInfo(member)
                    reported.size = len(content)
                    file.addfile(reported, io.BytesIO(content))
    done = run_convert(tmp_path / "tars", tmp_path / "out", workers=2, **SMALL)
    assert done.dataset["class_names"] == list(CLASSES)
    rows = {row["image"]["path"]: row for row in rows_of(tmp_path / "out", "train")}
    assert {name: row["image"]["bytes"] for name, row in rows.items()} == contents
    assert all(row["label"] == int(name[:3]) % 3 for name, row in rows.items())


def test_row_groups_are_bounded_pages_have_checksums_and_images_no_statistics(
    folder: Path, tmp_path: Path, converted: Path
):
    file = pq.ParquetFile(next(converted.glob("train-*")))
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    assert [group.num_rows for group in groups[:-1]] == [7] * (len(groups) - 1)
    for group in groups:
        image, path, label = (group.column(n) for n in range(3))
        assert {column.compression for column in (image, path, label)} == {"UNCOMPRESSED"}
        assert not image.has_dictionary_page
        assert not image.is_stats_set
        assert label.statistics.has_min_max
        assert label.statistics.null_count == 0

    (tmp_path / "large" / "x").mkdir(parents=True)
    for number in range(9):  # 300 KB each: three fit into 1 MiB
        noise = np.random.Generator(np.random.Philox(number)).integers(0, 256, (316, 317, 3))
        image = Image.fromarray(noise.astype(np.uint8))
        image.save(tmp_path / "large" / "x" / f"{number}.png")
    run_convert(tmp_path / "large", tmp_path / "out", row_group_mib=1)
    metadata = pq.read_metadata(tmp_path / "out" / "train-00000-of-00001.parquet")
    assert [metadata.row_group(n).num_rows for n in range(3)] == [3, 3, 3]


def test_rows_are_shuffled_by_the_seed_or_not_at_all(folder: Path, tmp_path: Path):
    def order(name: str, **options: Any) -> list[str]:
        run_convert(folder / "train", tmp_path / name, **options)
        return [row["image"]["path"] for row in rows_of(tmp_path / name, "train")]

    stored = order("stored", shuffle=False)
    assert stored == sorted(stored)
    first, again, other = order("a"), order("b"), order("c", seed=1)
    assert first == again
    assert len({tuple(first), tuple(other), tuple(stored)}) == 3
    assert sorted(first) == sorted(other) == stored
    labels = [CLASSES.index(Path(path).parent.name) for path in first]
    assert sum(a == b for a, b in itertools.pairwise(labels)) < TRAIN // 2


def test_the_output_bytes_do_not_depend_on_the_number_of_processes(
    folder: Path, converted: Path, tmp_path: Path
):
    run_convert(folder, tmp_path / "three", workers=3, **SMALL)
    assert contents(tmp_path / "three") == contents(converted)


def test_mean_and_std_are_those_of_all_pixels(folder: Path, converted: Path, tmp_path: Path):
    def pixels(rows: list[dict[str, Any]]) -> np.ndarray:
        images = [decode_image(row["image"]["bytes"]).reshape(-1, 3) for row in rows]
        return np.concatenate(images) / 255

    dataset = read_dataset_file(converted)
    everything = pixels(rows_of(converted, "train"))
    assert dataset["mean"] == pytest.approx(everything.mean(axis=0), abs=1e-12)
    assert dataset["std"] == pytest.approx(everything.std(axis=0), abs=1e-12)
    assert dataset["sampled"] == {"images": TRAIN, "height": [40, 44], "width": [52, 52]}

    run_convert(folder, tmp_path / "some", stats_images=5)
    dataset = read_dataset_file(tmp_path / "some")
    rows = rows_of(tmp_path / "some", "train")
    some = pixels([rows[n] for n in (0, 12, 24, 36, 48)])
    assert dataset["sampled"]["images"] == 5
    assert dataset["mean"] == pytest.approx(some.mean(axis=0), abs=1e-12)
    assert dataset["std"] == pytest.approx(some.std(axis=0), abs=1e-12)


def test_pixel_statistics_can_be_merged_in_any_order():
    parts = [PixelCounts.of(np.asarray(picture(n, 20 + n, 30))) for n in range(5)]
    forward, backward = PixelCounts.none(), PixelCounts.none()
    for part, other in zip(parts, reversed(parts), strict=True):
        forward, backward = forward.plus(part), backward.plus(other)
    assert forward.mean_std() == backward.mean_std()
    assert (forward.height, forward.images) == ((20, 24), 5)
    assert PixelCounts.from_dict(json.loads(json.dumps(forward.to_dict()))).mean_std() == (
        backward.mean_std()
    )


def test_fit_accepts_the_printed_command(converted: Path):
    dataset = read_dataset_file(converted)
    command = fit_command("a b", dataset).replace("'a b'", "a_b").split()
    assert command[:3] == ["python", "-m", "raytrain_ddp.fit"]
    data = parse_fit(command[3:]).config.data
    assert data.source == "a_b"
    assert data.mean == pytest.approx(dataset["mean"], abs=1e-4)
    assert data.std == pytest.approx(dataset["std"], abs=1e-4)
    assert data.image_size == 224  # the images differ in size


# ------------------------------------------------------------------ resized images


def test_larger_images_are_resized_to_the_given_shorter_side():
    for size, expected in [((100, 60), (53, 32)), ((60, 100), (32, 53)), ((64, 64), (32, 32))]:
        image = Image.open(io.BytesIO(shrink_image(encoded(picture(0, *size)), 32, 90)))
        assert (image.height, image.width) == expected
        assert (image.format, image.mode) == ("JPEG", "RGB")
    wide = Image.open(io.BytesIO(shrink_image(encoded(picture(0, 400, 500)), 32, 90)))
    assert (wide.height, wide.width) == (32, 40)


def test_a_resized_image_looks_like_the_original():
    original = picture(0, 300, 400).resize((80, 60), Image.Resampling.BOX)
    small = decode_image(shrink_image(encoded(original.resize((400, 300)), quality=98), 60, 98))
    assert np.abs(small.astype(int) - np.asarray(original)).mean() < 4


def test_an_rgb_jpeg_that_is_small_enough_keeps_its_bytes():
    content = encoded(picture(0, 30, 40))
    assert shrink_image(content, 30, 50) == content
    assert shrink_image(content, 29, 50) != content


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
@pytest.mark.parametrize("short", [24, 1000])
def test_other_images_become_rgb_jpeg(mode: str, short: int):
    image = picture(0, 60, 80)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) // 2)
    else:
        image = image.convert(mode)
    small = Image.open(
        io.BytesIO(shrink_image(encoded(image, "TIFF" if mode == "CMYK" else "PNG"), short, 95))
    )
    assert (small.format, small.mode) == ("JPEG", "RGB")
    assert (small.height, small.width) == ((24, 32) if short == 24 else (60, 80))
    expected = image.convert("RGB").resize((small.width, small.height), Image.Resampling.BICUBIC)
    if mode not in ("P", "1"):  # whose dithering is lost
        difference = np.asarray(small).astype(int) - np.asarray(expected)
        assert np.abs(difference).mean() < 12


def test_only_the_exif_orientation_survives_resizing():
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    small = Image.open(io.BytesIO(shrink_image(encoded(picture(0, 60, 80), exif=exif), 30, 90)))
    assert dict(small.getexif()) == {0x0112: 6}
    assert (small.height, small.width) == (30, 40)  # as stored; turning is the loader's choice


def test_convert_resizes_and_counts_the_pixels_that_are_stored(folder: Path, tmp_path: Path):
    run_convert(folder, tmp_path / "small", resize_short=16, quality=80, **SMALL)
    rows = rows_of(tmp_path / "small", "train")
    images = [decode_image(row["image"]["bytes"]) for row in rows]
    assert {min(image.shape[:2]) for image in images} == {16}
    pixels = np.concatenate([image.reshape(-1, 3) for image in images]) / 255
    dataset = read_dataset_file(tmp_path / "small")
    assert dataset["mean"] == pytest.approx(pixels.mean(axis=0), abs=1e-12)
    assert dataset["arguments"]["resize_short"] == 16


# ------------------------------------------------------------------ other sources


def test_parquet_is_converted_row_by_row_with_paths_and_names(converted: Path, tmp_path: Path):
    done = run_convert(converted, tmp_path / "again", seed=7)
    assert done.dataset["class_names"] == list(CLASSES)
    for split in ("train", "val"):
        rows, before = rows_of(tmp_path / "again", split), rows_of(converted, split)
        assert rows != before
        key = lambda row: row["image"]["path"]  # noqa: E731
        assert sorted(rows, key=key) == sorted(before, key=key)
    run_convert(str(converted / "train-*.parquet"), tmp_path / "glob", shuffle=False)
    assert rows_of(tmp_path / "glob", "train") == rows_of(converted, "train")
    assert not list((tmp_path / "glob").glob("val*"))


def test_binary_columns_with_other_names_and_missing_bytes_are_supported(tmp_path: Path):
    images = [encoded(picture(n), "PNG") for n in range(4)]
    pq.write_table(pa.table({"jpg": images, "cls": [0, 1, 1, 2]}), tmp_path / "x.parquet")
    done = run_convert(
        tmp_path / "x.parquet",
        tmp_path / "out",
        image_column="jpg",
        label_column="cls",
        shuffle=False,
    )
    assert done.dataset["class_names"] == ["0", "1", "2"]
    rows = rows_of(tmp_path / "out", "train")
    assert [row["image"] for row in rows] == [{"bytes": image, "path": None} for image in images]
    assert [row["label"] for row in rows] == [0, 1, 1, 2]

    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "0.png").write_bytes(images[0])
    column = pa.array([{"bytes": None, "path": "0.png"}, {"bytes": images[1], "path": "1.png"}])
    pq.write_table(pa.table({"image": column, "label": [0, 1]}), tmp_path / "beside" / "y.parquet")
    run_convert(tmp_path / "beside", tmp_path / "whole", shuffle=False)
    assert [row["image"] for row in rows_of(tmp_path / "whole", "train")] == [
        {"bytes": images[0], "path": "0.png"},
        {"bytes": images[1], "path": "1.png"},
    ]


def test_evaluation_splits_keep_their_names(tmp_path: Path):
    for name in ("train", "validation-00000-of-00001", "test-00000-of-00001"):
        table = pa.table({"image": [encoded(picture(0))], "label": [0]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    done = run_convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert done.dataset["rows"] == {"train": 1, "test": 1, "validation": 1}
    assert done.summary is not None
    assert done.summary.notes == []
    done = run_convert(
        tmp_path / "train.parquet",
        tmp_path.parent / f"{tmp_path.name}-own",
        eval_source=str(tmp_path / "train.parquet"),
    )
    assert done.dataset["rows"] == {"train": 1, "test": 1}


def test_splits_are_converted_by_name_and_omitted_ones_are_reported(tmp_path: Path):
    names = [f"data/{name}-00000-of-00001" for name in ("train", "extra", "validation", "test")]
    (tmp_path / "in" / "data").mkdir(parents=True)
    images = [encoded(picture(number)) for number in range(5)]
    table = pa.table({"image": images, "label": [0, 1, 0, 1, 0]})
    for rows, name in enumerate(names, start=2):
        pq.write_table(table.slice(0, rows), tmp_path / "in" / f"{name}.parquet")
    done = run_convert(tmp_path / "in", tmp_path / "all")
    assert done.dataset["rows"] == {"train": 2, "validation": 4, "test": 5}
    assert done.summary is not None
    assert done.summary.notes == ["the extra split (1 file) is not used."]
    done = run_convert(tmp_path / "in", tmp_path / "some", train_split="extra", eval_split="test")
    assert done.dataset["rows"] == {"train": 3, "test": 5}
    assert done.summary is not None
    assert len(done.summary.notes) == 2
    train, evaluation = located(str(tmp_path / "some"))
    assert evaluation is not None
    assert (train.name, evaluation.name) == ("train", "test")
    with pytest.raises(ConfigError, match="made with other input"):
        run_convert(tmp_path / "in", tmp_path / "some")
    with pytest.raises(DataError, match="has no such split, only extra, test, train"):
        run_convert(tmp_path / "in", tmp_path / "none", train_split="no")


def test_omitted_data_is_reported_as_by_fit(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "src")
    (tmp_path / "src" / "train" / "notes.gif").write_bytes(b"x")
    done = run_convert(tmp_path / "src", tmp_path / "out")
    assert done.summary is not None
    assert any(note.startswith("not used: 1 .gif (not images)") for note in done.summary.notes)


def test_a_changed_source_is_not_reported_as_already_converted(folder: Path, tmp_path: Path):
    source, dest = tmp_path / "src", tmp_path / "out"
    shutil.copytree(folder, source)
    run_convert(source, dest)
    assert run_convert(source, dest).found
    image = next(source.glob("train/*/*"))
    image.write_bytes(image.read_bytes() + b"x")
    with pytest.raises(DataError, match=r"src has changed since .* \(train\)"):
        run_convert(source, dest)
    shutil.rmtree(source)  # as users do after the conversion
    assert run_convert(source, dest).found
    shard = next(dest.glob("train-*.parquet"))
    shard.unlink()
    with pytest.raises(DataError, match=r"parquet is missing: delete .*out, and convert again"):
        run_convert(source, dest)


def test_source_files_rewritten_with_the_same_size_are_noted(folder: Path, tmp_path: Path):
    source, dest = tmp_path / "src", tmp_path / "out"
    shutil.copytree(folder, source)
    run_convert(source, dest)
    assert not run_convert(source, dest).note
    image = next(source.glob("train/*/*"))
    image.write_bytes(image.read_bytes())
    os.utime(image, ns=(0, 0))
    assert "have been written since" in run_convert(source, dest).note


def test_list_rows_without_an_image_file_are_skipped_and_paths_outside_the_root_are_kept(
    tmp_path: Path,
):
    for name in ("root/0.png", "root-extra/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "root/folder").mkdir()
    rows = ["0.png,a", f"{tmp_path}/root-extra/1.png,b", ",b", "folder,a", "/dev/null,b"]
    (tmp_path / "train.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    root = str(tmp_path / "root")
    done = run_convert(
        tmp_path / "train.csv", tmp_path / "out", check=False, root=root, bad_records="skip"
    )
    (file,) = (tmp_path / "out").glob("*.parquet")
    paths = [image["path"] for image in pq.read_table(file)["image"].to_pylist()]
    assert sorted(paths) == sorted(["0.png", f"{tmp_path}/root-extra/1.png"])
    whys = sorted(record["why"] for record in done.dataset["skipped"])
    pipe = "a named pipe, socket or device, not a file"
    assert whys == [pipe, "is a folder", "the image is null"]
    assert "--data.std 1.0 1.0 1.0" in fit_command("x", done.dataset)  # of one color


def test_the_bundled_digits_can_be_converted(tmp_path: Path):
    done = run_convert("digits", tmp_path / "digits", check=False)
    assert done.dataset["rows"] == {"train": 1437, "test": 360}
    flags = fit_command("x", done.dataset)
    assert "image-size" not in flags  # all are 8 x 8


def test_a_torchvision_set_is_stored_as_png(tmp_path: Path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.Generator(np.random.Philox(0))
    for prefix, count in (("train", 30), ("t10k", 8)):
        pixels = random.integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">II", 2049, count)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
        if prefix == "train":
            expected = pixels
    source = "torchvision:MNIST"
    done = run_convert(source, tmp_path / "out", root=str(tmp_path), shuffle=False)
    assert done.dataset["rows"] == {"train": 30, "test": 8}
    assert done.dataset["class_names"][1] == "1 - one"
    rows = rows_of(tmp_path / "out", "train")
    assert [row["label"] for row in rows] == [n % 10 for n in range(30)]
    images = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows]
    assert {(image.format, image.mode) for image in images} == {("PNG", "L")}
    assert np.array_equal(np.stack([np.asarray(image) for image in images]), expected)


def test_splits_with_different_classes_are_refused(tmp_path: Path):
    for split, names in (("train", "ab"), ("val", "ac")):
        for name in names:
            (tmp_path / "src" / split / name).mkdir(parents=True)
            (tmp_path / "src" / split / name / "0.jpg").write_bytes(encoded(picture(0)))
    with pytest.raises(DataError, match=r"val: 'c' is not a class of the run, which has"):
        run_convert(tmp_path / "src", tmp_path / "out")


def test_fault_21_invalid_labels_are_named(tmp_path: Path):
    image = encoded(picture(0))
    for name, labels in (("train", [0, 1]), ("test", [0, 2])):
        pq.write_table(
            pa.table({"image": [image] * 2, "label": labels}), tmp_path / f"{name}.parquet"
        )
    with pytest.raises(DataError, match=r"test\.parquet, row group 0, row 1: label 2"):
        run_convert(tmp_path, tmp_path.parent / "labels-out")
    pq.write_table(pa.table({"image": [image], "label": [-1]}), tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet"):
        run_convert(tmp_path, tmp_path.parent / "labels-out", eval_split="test")
    done = run_convert(tmp_path, tmp_path.parent / "labels-out")  # a test set without labels
    assert done.dataset["rows"] == {"train": 2}
    assert done.summary is not None
    assert any("test.parquet" in note for note in done.summary.notes)


def test_fault_22_a_source_without_images_is_refused_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    pq.write_table(
        pa.table({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}),
        tmp_path / "x.parquet",
    )
    for source in ("empty", "x.parquet", "nothing"):
        with pytest.raises(DataError, match=source.replace(".", r"\.")):
            run_convert(tmp_path / source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "x.parquet"}


@pytest.mark.parametrize("source", ["text", "text/a.txt", "text/*.txt"])
def test_text_is_refused(source: str, tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be")
    with pytest.raises(DataError, match="images"):
        run_convert(tmp_path / source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"text"}


# ------------------------------------------------------------------ bad records


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """Class folders with images, three of which cannot be decoded."""
    root = tmp_path / "damaged"
    for number, path in enumerate(sorted((folder / "train").glob("*/*"))):
        content = path.read_bytes()
        (root / path.parent.name).mkdir(parents=True, exist_ok=True)
        wrong = {20: content[: len(content) // 2], 30: b"no image", 50: b""}
        (root / path.parent.name / path.name).write_bytes(wrong.get(number, content))
    return root


@pytest.mark.parametrize("options", [{}, {"resize_short": 20}, {"check": False, "stats_images": 0}])
def test_fault_20_an_undecodable_image_is_named(damaged: Path, tmp_path: Path, options: Any):
    with pytest.raises(DataError, match=r"damaged/\w+/\d+\.jpg: not a readable image.*skip"):
        run_convert(damaged, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_fault_20_bad_records_are_skipped_and_listed(damaged: Path, tmp_path: Path):
    done = run_convert(damaged, tmp_path / "out", bad_records="skip", **SMALL)
    bad = [str(path) for n, path in enumerate(sorted(damaged.glob("*/*"))) if n in (20, 30, 50)]
    assert sorted(record["where"] for record in done.dataset["skipped"]) == bad
    assert all(record["why"] for record in done.dataset["skipped"])
    assert done.dataset["rows"] == {"train": TRAIN - 3}
    assert len(rows_of(tmp_path / "out", "train")) == TRAIN - 3
    assert verify(tmp_path / "out", 1, silent("", 0)) == done.dataset


def test_a_conversion_stopped_at_a_bad_record_continues_with_skip(damaged: Path, tmp_path: Path):
    with pytest.raises(DataError):
        run_convert(damaged, tmp_path / "two", shuffle=False, **SMALL)
    assert list(hidden(tmp_path / "two").glob("*.part"))
    for name in ("one", "two"):
        run_convert(damaged, tmp_path / name, shuffle=False, bad_records="skip", **SMALL)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_unchecked_images_are_copied_unchanged(damaged: Path, tmp_path: Path):
    options = {"check": False, "stats_images": 1, "seed": 3}
    assert run_convert(damaged, tmp_path / "out", **options).dataset["rows"] == {"train": TRAIN}


def test_empty_row_groups_are_ignored(tmp_path: Path):
    table = pa.table({"image": [encoded(picture(n)) for n in range(4)], "label": [0, 0, 1, 1]})
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema) as writer:
        for rows in (table.slice(0, 0), table.slice(0, 2), table.slice(0, 0), table.slice(2, 2)):
            writer.write_table(rows)
    done = run_convert(tmp_path / "x.parquet", tmp_path / "out")
    assert done.dataset["rows"] == {"train": 4}


def test_nulls_in_parquet_are_bad_records(tmp_path: Path):
    images = [encoded(picture(0)), None, encoded(picture(1))]
    pq.write_table(pa.table({"image": images, "label": [0, 0, 1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet, row group 0, row 1"):
        run_convert(tmp_path / "x.parquet", tmp_path / "out")
    done = run_convert(tmp_path / "x.parquet", tmp_path / "out", bad_records="skip")
    (skipped,) = done.dataset["skipped"]
    assert skipped["where"].endswith("x.parquet, row group 0, row 1")
    assert [row["label"] for row in rows_of(tmp_path / "out", "train")] in ([0, 1], [1, 0])


def test_a_data_set_of_bad_records_only_is_refused(tmp_path: Path):
    (tmp_path / "src" / "cat").mkdir(parents=True)
    (tmp_path / "src" / "cat" / "0.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match="none of its 1 images can be decoded"):
        run_convert(tmp_path / "src", tmp_path / "out", bad_records="skip")


# ------------------------------------------------------------------ stopped and continued


class Stopped(BaseException):
    """Stands in for a power cut in this process."""


def test_a_conversion_stopped_at_any_write_continues_to_the_same_bytes(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dest = tmp_path / "animals"
    replace, moves = os.replace, []

    def stop_at_next_new(old: Any, new: Any) -> None:
        """# Each attempt gets two renames further than the previous one."""
        if len(moves) == 2:
            moves.clear()
            raise Stopped
        moves.append(new)
        replace(old, new)

    monkeypatch.setattr(stage_module.os, "replace", stop_at_next_new)
    stops = 0
    while True:
        try:
            run_convert(folder, dest, **SMALL)
            break
        except Stopped:
            stops += 1
            assert not dest.exists()
            if list(hidden(dest).glob("*.part")):
                assert not list(hidden(dest).glob("*.json"))
    assert stops > 4
    assert contents(dest) == contents(converted)
    assert not hidden(dest).exists()


def test_a_killed_conversion_ends_its_processes_and_can_be_continued(folder: Path, tmp_path: Path):
    dest = tmp_path / "out"
    options = ["--shard-mib", "1", "--row-group-mib", "1", "--workers", "2"]
    big = tmp_path / "big" / "x"
    big.mkdir(parents=True)
    for number in range(24):  # 8 MB in all
        noise = np.random.Generator(np.random.Philox(number)).integers(0, 256, (340, 340, 3))
        Image.fromarray(noise.astype(np.uint8)).save(big / f"{number}.png", compress_level=0)
    command = [
        sys.executable,
        "-m",
        "raytrain_ddp.tools.convert",
        str(big.parent),
        str(dest),
        *options,
    ]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not list(hidden(dest).glob("state/*.parquet.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(process.pid)
    assert not dest.exists()
    names = [path.name.removesuffix(".json") for path in hidden(dest).glob("state/*.parquet.json")]
    kept = {name: (hidden(dest) / f"{name}.part").stat().st_mtime_ns for name in names}
    assert 0 < len(kept) < 8
    answer = run_cli("convert", str(big.parent), str(dest), *options, cwd=tmp_path)
    assert answer.status == 0, answer.err
    assert not {"torch", "ray"} & set(answer.heavy)
    for name, time_ns in kept.items():
        assert (dest / name).stat().st_mtime_ns == time_ns
    answer = run_cli("convert", str(big.parent), str(tmp_path / "whole"), *options, cwd=tmp_path)
    assert answer.status == 0, answer.err
    assert contents(dest) == contents(tmp_path / "whole")


def alive(session: int) -> list[str]:
    """The processes of a session, without zombies."""
    done = subprocess.run(
        ["ps", "-o", "stat=,args=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    return [line for line in done.stdout.splitlines() if not line.startswith("Z")]


def test_an_existing_spool_is_not_rewritten(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_shards(*_: Any) -> Any:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("raytrain_ddp.tools.convert.conversion.write_shard", no_shards)
        with pytest.raises(Stopped):
            run_convert(converted, tmp_path / "out")
    spool = sorted((hidden(tmp_path / "out") / "state" / "spool").iterdir())
    assert spool
    with monkeypatch.context() as patch:
        patch.setattr("raytrain_ddp.tools.convert.spool.write_spool", no_shards)
        with pytest.raises(Stopped):  # of the other split
            run_convert(converted, tmp_path / "out")
    run_convert(converted, tmp_path / "out")
    run_convert(converted, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"seed": 1}, "arguments seed 1, was 0"),
        ({"resize_short": 20}, "arguments resize_short 20, was 0"),
        ({"touch": True}, "content train changed"),
    ],
)
def test_continuing_with_other_input_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reported: str
):
    source = tmp_path / "src" / "ant"
    source.mkdir(parents=True)
    for number in range(40):
        (source / f"{number}.jpg").write_bytes(encoded(picture(number)))
    written = []

    def stop_at_second(*given: Any) -> Any:
        written.append(given)
        if len(written) == 2:
            raise Stopped
        return write_shard(*given)

    with monkeypatch.context() as patch:
        patch.setattr("raytrain_ddp.tools.convert.conversion.write_shard", stop_at_second)
        with pytest.raises(Stopped):
            run_convert(source.parent, tmp_path / "out", **SMALL)
    if change.pop("touch", False):
        (source / "0.jpg").write_bytes(encoded(picture(1)))
    with pytest.raises(ConfigError, match=f"{reported}.*Use the same input, or delete"):
        run_convert(source.parent, tmp_path / "out", **SMALL, **change)


def test_other_input_is_accepted_before_any_work_was_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(PreflightError):
            run_convert(folder, tmp_path / "out")
    done = run_convert(folder, tmp_path / "out", resize_short=16)
    assert done.dataset["arguments"]["resize_short"] == 16


def test_a_complete_data_set_is_recognized_and_unchanged(folder: Path, converted: Path):
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    assert run_convert(folder, converted, **SMALL).found
    with pytest.raises(ConfigError, match=r"complete.*seed 2, was 0"):
        run_convert(folder, converted, **SMALL, seed=2)
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_the_destination_must_be_a_separate_folder(folder: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for dest, reported in [
        (tmp_path / "full", r"has other files \(notes\.txt\)"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "link", "is a file"),
        (folder, "is inside SRC"),
        (tmp_path / "c\udcff", "must be UTF-8"),
        (folder / "train" / "parquet", "is inside SRC"),
        (Path("/proc"), "is a mount point"),
    ]:
        with pytest.raises(ConfigError, match=reported):
            run_convert(folder, dest)
    with ProcessPool(1) as run, pytest.raises(ConfigError, match="must be a folder"):
        convert(str(folder), "s3://bucket/x", ConvertConfig(), run, silent)
    with ProcessPool(1) as run, pytest.raises(ConfigError, match=r"SRC .*must be UTF-8"):
        convert(f"{folder}\udcff", str(tmp_path / "c"), ConvertConfig(), run, silent)
    (tmp_path / "empty").mkdir()
    assert run_convert(folder, tmp_path / "empty").dataset["rows"]["train"] == TRAIN


def test_an_unwritable_destination_is_refused_without_mentioning_kept_work(
    folder: Path, tmp_path: Path
):
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"cannot be written: .*Not a directory.*'\.$"):
        run_convert(folder, tmp_path / "file" / "x")


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_damaged_progress_file_is_named(folder: Path, tmp_path: Path, text: str):
    stage = Stage(tmp_path / "out")
    with stage.held():
        (stage.state / "plan.json").write_text(text)
    with pytest.raises(DataError, match=r"plan\.json: is damaged: .* Delete .*\.out\.converting"):
        run_convert(folder, tmp_path / "out")


def test_a_concurrent_conversion_is_refused(folder: Path, tmp_path: Path):
    with Stage(tmp_path / "out").held(), pytest.raises(RunLockedError, match="another process"):
        run_convert(folder, tmp_path / "out")


def test_too_little_space_is_reported_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(PreflightError, match="KiB is needed, but only 1 KiB is free"):
        run_convert(folder, tmp_path / "out")
    assert not list(hidden(tmp_path / "out").glob("*.part*"))


def test_a_full_disk_is_reported_and_completed_work_is_kept(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = []

    def fail(old: Any, new: Any, replace: Any = os.replace) -> None:
        written.append(new)
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(stage_module.os, "replace", fail)
        with pytest.raises(PreflightError, match=r"No space left on device.*the same command"):
            run_convert(folder, tmp_path / "out", **SMALL)
    assert not list(hidden(tmp_path / "out").glob("state/tmp-*"))
    run_convert(folder, tmp_path / "out", **SMALL)
    assert contents(tmp_path / "out") == contents(converted)


def test_fault_17_a_file_that_disappears_during_the_conversion_is_named(
    folder: Path, tmp_path: Path
):
    def phase(title: str, images: int) -> Tell:
        if title == "train: writing":
            victim.unlink()
        return silent(title, images)

    victim = tmp_path / "src" / "ant" / "1.jpg"
    victim.parent.mkdir(parents=True)
    for number in range(3):
        (victim.parent / f"{number}.jpg").write_bytes(encoded(picture(number)))
    with ProcessPool(1) as run, pytest.raises(DataError, match=r"ant/1\.jpg: cannot be read"):
        convert(str(victim.parents[1]), str(tmp_path / "out"), ConvertConfig(), run, phase)


# ------------------------------------------------------------------ processes


def die(task: int, tell: Tell) -> int:
    tell(1, 10)
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def double(task: int, tell: Tell) -> int:
    tell(1, task)
    if task < 0:
        raise DataError(f"task {task}")
    return 2 * task


def test_a_process_pool_maps_reports_progress_and_fails_like_one_process():
    reported = np.zeros(2, int)

    def tell(images: int, size: int) -> None:
        reported[:] += images, size

    with ProcessPool(2) as run:
        assert sorted(run(double, range(10), tell)) == list(range(0, 20, 2))
        assert reported.tolist() == [10, 45]
        assert list(run(double, [7], tell)) == [14]
        with pytest.raises(DataError, match="task -1"):
            list(run(double, [1, -1, *range(100)], tell))
    with ProcessPool(2) as run, pytest.raises(RaytrainError, match="--workers"):
        list(run(die, range(8), tell))


# ------------------------------------------------------------------ --verify


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the converted data set, to be damaged."""
    (tmp_path / "copy").mkdir()
    for name, content in contents(converted).items():
        (tmp_path / "copy" / name).write_bytes(content)
    return tmp_path / "copy"


def problems(folder: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        verify(folder, 2, silent("", 0))
    return re.split(r"\d problems?: |; ", str(caught.value))[1:]


def test_an_undamaged_data_set_passes_verification(converted: Path):
    reported = []
    dataset = verify(converted, 2, lambda images, size: reported.append(images))
    assert sum(reported) == TRAIN + VAL
    assert dataset == read_dataset_file(converted)


def test_fault_17_missing_and_unknown_files_are_all_listed(copy: Path):
    (copy / "train-00000-of-00004.parquet").unlink(missing_ok=True)
    shards = sorted(copy.glob("train-*"))
    shards[0].rename(copy / "other.parquet")
    shards[1].unlink()
    assert {f"{shards[0].name}: missing", f"{shards[1].name}: missing"} <= set(problems(copy))
    assert "other.parquet: not in dataset.json" in problems(copy)


def test_fault_18_a_truncated_shard_is_named(copy: Path):
    shard = sorted(copy.glob("train-*"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    size, footer = problems(copy)
    assert size == f"{shard.name}: {len(content) - 10} bytes, not {len(content)}"
    assert footer.startswith(f"{shard.name}: footer cannot be read")


def test_fault_19_a_flipped_bit_is_detected_at_any_position(copy: Path):
    shard = sorted(copy.glob("train-*"))[0]
    content = shard.read_bytes()
    group = pq.read_metadata(shard).row_group(1).column(0)
    for place in (group.data_page_offset + group.total_compressed_size - 5, 2, len(content) - 6):
        flipped = bytearray(content)
        flipped[place] ^= 1
        shard.write_bytes(flipped)
        reported = problems(copy)
        assert reported[0] == f"{shard.name}: content differs from what was written (sha256)"
        if place not in (2, len(content) - 6):
            assert reported[1].startswith(f"{shard.name}, row group 1: cannot be read")
    shard.write_bytes(content)
    verify(copy, 1, silent("", 0))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "raytrain_ddp"}'])
def test_a_damaged_dataset_file_is_a_data_error(copy: Path, text: str):
    (copy / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json"):
        verify(copy, 1, silent("", 0))
    (copy / "dataset.json").unlink()
    with pytest.raises(DataError, match="not found"):
        verify(copy, 1, silent("", 0))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda content: content["files"][1].pop("bytes"), r"files\[1\]\.bytes"),
        (lambda content: content["files"][0].update(rows="9"), r"files\[0\]\.rows"),
        (lambda content: content["files"].append("x"), r"files\[\d\]\.path"),
        (lambda content: content["rows"].update(train="9"), r"rows\.train"),
        (lambda content: content.pop("class_names"), "class_names"),
        (lambda content: content.pop("mean"), "mean"),
    ],
)
def test_missing_fields_of_a_dataset_file_are_named(
    copy: Path, change: Callable[[dict[str, Any]], object], named: str
):
    content = json.loads((copy / "dataset.json").read_text())
    change(content)
    (copy / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"dataset\.json: {named} is missing or wrong"):
        main(["--verify", str(copy)])


def test_a_dataset_file_cannot_name_files_outside_its_folder(copy: Path):
    dataset = json.loads((copy / "dataset.json").read_text())
    dataset["files"][0]["path"] = f"../{copy.name}/{dataset['files'][0]['path']}"
    (copy / "dataset.json").write_text(json.dumps(dataset))
    assert any(line.startswith("../") and line.endswith("missing") for line in problems(copy))


# ------------------------------------------------------------------ the command


def test_the_command_converts_recognizes_and_verifies_a_data_set(folder: Path, tmp_path: Path):
    arguments = (str(folder), "out", "--workers", "1")
    answer = run_cli("convert", *arguments, cwd=tmp_path)
    assert answer.status == 0, answer.err
    assert "out: 60 train and 12 val images of 3 classes in 2 files" in answer.out
    assert "python -m raytrain_ddp.fit --data.source out --data.mean 0." in answer.out
    assert "train: writing 60 of 60 images" in answer.err
    assert not {"torch", "ray"} & set(answer.heavy)
    answer = run_cli("convert", *arguments, cwd=tmp_path)
    assert (answer.status, "complete already" in answer.out) == (0, True)
    answer = run_cli("convert", "--verify", "out", cwd=tmp_path)
    assert (answer.status, "all as written" in answer.out) == (0, True)
    shard = tmp_path / "out" / "val-00000-of-00001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    answer = run_cli("convert", "--verify", "out", cwd=tmp_path)
    assert answer.status == 4
    assert answer.err.count("val-00000-of-00001.parquet") == 2


def test_errors_name_the_flags_of_convert(tmp_path: Path):
    (tmp_path / "l.csv").write_text("image\na.jpg\n")
    with pytest.raises(DataError, match=r"Set --image-column or --label-column\."):
        main([str(tmp_path / "l.csv"), str(tmp_path / "out"), "--workers", "1"])


@pytest.mark.parametrize(
    ("arguments", "status", "reported"),
    [
        (("nothing", "out"), 4, "'nothing': no such file or folder"),
        ((), 2, "SRC and DST must be given"),
        (("a", "b", "--verify", "c"), 2, "do not give SRC and DST"),
        (("a", "b", "--quality", "0"), 2, "--quality"),
        (("a", "b", "--quality", "50"), 2, "has no effect without --resize-short"),
        (("a", "b", "--workers", "0"), 2, "--workers"),
        (("--verify", "nothing"), 4, "dataset.json"),
    ],
)
def test_invalid_input_is_refused_in_one_line_with_its_exit_status(
    arguments: tuple[str, ...], status: int, reported: str, tmp_path: Path
):
    answer = run_cli("convert", *arguments, cwd=tmp_path)
    assert (answer.status, answer.err.count("\n")) == (status, 1), answer.err
    assert reported in answer.err
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_heavy(tmp_path: Path):
    code = (
        "import sys\nfrom raytrain_ddp.tools.convert.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'ray', 'numpy', 'pyarrow', 'PIL'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    assert "--resize-short" in done.stdout


def test_progress_lines_end_at_100_percent(capsys: pytest.CaptureFixture[str]):
    with shown() as phase:
        tell = phase("train: writing", 1500)
    tell(500, 0)  # by an earlier process
    for _ in range(1000):
        tell(1, 2**20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: writing 1,500 of 1,500 images, ")
    assert line.endswith("MiB/s")


def test_png_is_lossless():
    image = picture(3)
    assert np.array_equal(decode_image(encode_png(image)), np.asarray(image))


# ------------------------------------------------------------------ on Ray


@pytest.mark.ray
@pytest.mark.usefixtures("unchanged_process")
@pytest.mark.filterwarnings("ignore")
def test_a_conversion_on_ray_has_the_same_bytes(
    folder: Path, converted: Path, damaged: Path, tmp_path: Path
):
    import ray

    from raytrain_ddp.tools.convert.task_runners import on_cluster

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        reported: list[int] = []

        def phase(title: str, images: int) -> Tell:
            return lambda images, size: reported.append(images)

        with on_cluster("auto", None) as run:
            config = ConvertConfig(**SMALL)
            convert(str(folder), str(tmp_path / "out"), config, run, phase)
            assert sum(reported) == TRAIN + VAL
            with pytest.raises(DataError, match="not a readable image"):
                convert(str(damaged), str(tmp_path / "bad"), config, run, phase)
    finally:
        ray.shutdown()
    assert contents(tmp_path / "out") == contents(converted)
