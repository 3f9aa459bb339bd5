"""Conversion of folders, Parquet, tar files and torchvision sets to shards, and how it fails."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
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

from raytrain_ddp.errors import RaytrainError, status_of
from raytrain_ddp.tools.convert.__main__ import main
from raytrain_ddp.tools.convert.shard_writer import shrink_image

CLASSES = ("ant", "bee", "cow")
TRAIN, VAL = 60, 12
SMALL = ("--shard-mib", "0.03125")  # small enough that sixty images make several shards


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


def decoded(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders below train/ and val/, with images of several sizes."""
    root = tmp_path_factory.mktemp("animals")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            path = root / split / CLASSES[number % 3] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(number, 40 + number % 5, 52), quality=90))
    return root


def convert(source: object, dest: Path, *flags: object) -> dict[str, Any]:
    """Returns the content of dataset.json."""
    given = [str(flag) for flag in flags]
    threads = [] if "--address" in given else ["--workers", "2"]
    assert main([str(source), str(dest), *threads, *given]) == 0
    content: dict[str, Any] = json.loads((dest / "dataset.json").read_text())
    return content


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder converted with `SMALL`."""
    dest = tmp_path_factory.mktemp("converted") / "animals"
    convert(folder, dest, *SMALL)
    return dest


def rows_of(dest: Path, split: str = "train") -> list[dict[str, Any]]:
    files = sorted(dest.glob(f"{split}-*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(dest: Path) -> list[Path]:
    """The records of complete shards that a stopped conversion left."""
    return sorted(dest.parent.glob(f".{dest.name}.converting/*.parquet.json"))


# ------------------------------------------------------------------ what is written


def test_each_image_is_written_once_with_its_bytes_label_and_path(folder: Path, converted: Path):
    dataset = json.loads((converted / "dataset.json").read_text())
    count = len(list(converted.glob("train-*")))
    assert count > 2
    names = [f"train-{n:05d}-of-{count:05d}.parquet" for n in range(count)]
    names.append("val-00000-of-00001.parquet")
    assert [file["path"] for file in dataset["files"]] == names
    assert {path.name for path in converted.iterdir()} == {"dataset.json", *names}
    assert [path.name for path in converted.parent.iterdir()] == [converted.name]
    for file in dataset["files"]:
        content = (converted / file["path"]).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert (file["bytes"], file["sha256"]) == (len(content), digest)
    assert dataset["rows"] == {"train": TRAIN, "val": VAL}
    for split, count in dataset["rows"].items():
        rows = rows_of(converted, split)
        assert len({row["image"]["path"] for row in rows}) == len(rows) == count
        for row in rows:
            path = Path(row["image"]["path"])
            assert row["image"]["bytes"] == (folder / split / path).read_bytes()
            assert CLASSES[row["label"]] == path.parent.name


def test_hugging_face_datasets_opens_it_with_the_same_features_and_pixels(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    files = {split: str(converted / f"{split}-*.parquet") for split in ("train", "val")}
    opened = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))
    train = opened["train"]
    assert isinstance(train.features["image"], datasets.Image)
    assert train.features["label"] == datasets.ClassLabel(names=list(CLASSES))
    assert (len(train), len(opened["val"])) == (TRAIN, VAL)
    rows = rows_of(converted)
    for number in (0, 17, TRAIN - 1):
        original = (folder / "train" / rows[number]["image"]["path"]).read_bytes()
        assert np.array_equal(np.asarray(train[number]["image"]), decoded(original))
        assert train[number]["label"] == rows[number]["label"]
    # What `datasets` saves is a source, too; it keeps only the last part of a path.
    opened.save_to_disk(str(tmp_path / "saved"), num_shards={"train": 2, "val": 1})
    convert(tmp_path / "saved", tmp_path / "out", "--no-shuffle", *SMALL)
    for row, before in zip(rows_of(tmp_path / "out"), rows, strict=True):
        name = Path(before["image"]["path"]).name
        assert row == {**before, "image": {**before["image"], "path": name}}


def test_row_groups_are_bounded_pages_have_checksums_and_images_no_statistics(tmp_path: Path):
    (tmp_path / "large" / "x").mkdir(parents=True)
    for number in range(30):  # 300 KB each: 27 fit into 8 MiB
        picture(number, 316, 317).save(tmp_path / "large" / "x" / f"{number}.png", compress_level=0)
    for source, sizes in ((tmp_path / "large", [27, 3]), ("digits", [256] * 5 + [157])):
        convert(source, tmp_path / "out")
        metadata = pq.read_metadata(tmp_path / "out" / "train-00000-of-00001.parquet")
        groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
        assert [group.num_rows for group in groups] == sizes
        image, path, label = (groups[0].column(n) for n in range(3))
        assert {column.compression for column in (image, path, label)} == {"UNCOMPRESSED"}
        assert not image.has_dictionary_page
        assert not image.is_stats_set
        assert label.statistics.has_min_max
        shutil.rmtree(tmp_path / "out")


def test_rows_are_shuffled_by_the_seed_or_not_at_all(folder: Path, tmp_path: Path):
    orders = {}
    for name, flags in {"stored": ["--no-shuffle"], "a": [], "b": ["--seed", "1"]}.items():
        convert(folder / "train", tmp_path / name, *flags)
        orders[name] = [row["image"]["path"] for row in rows_of(tmp_path / name)]
    stored, first, other = orders.values()
    assert sorted(first) == sorted(other) == stored == sorted(stored)
    assert len({tuple(order) for order in orders.values()}) == 3
    assert sum(a[:3] == b[:3] for a, b in itertools.pairwise(first)) < TRAIN // 2


def test_the_output_bytes_do_not_depend_on_the_number_of_threads(
    folder: Path, converted: Path, tmp_path: Path
):
    convert(folder, tmp_path / "one", "--workers", "1", *SMALL)
    assert contents(tmp_path / "one") == contents(converted)


# ------------------------------------------------------------------ resized images


def test_larger_images_are_resized_to_the_given_shorter_side():
    cases = [((100, 60), (53, 32)), ((60, 100), (32, 53)), ((64, 64), (32, 32))]
    for size, expected in [*cases, ((400, 500), (32, 40))]:
        image = Image.open(io.BytesIO(shrink_image(encoded(picture(0, *size)), 32, 90)))
        assert (image.height, image.width) == expected
        assert (image.format, image.mode) == ("JPEG", "RGB")
    content = encoded(picture(0, 30, 40))
    assert shrink_image(content, 30, 50) == content  # small enough
    assert shrink_image(content, 29, 50) != content


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_other_images_become_rgb_jpeg(mode: str):
    image = picture(0, 60, 80)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) // 2)
    else:
        image = image.convert(mode)
    content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    for short, size in ((24, (32, 24)), (1000, (80, 60))):
        small = Image.open(io.BytesIO(shrink_image(content, short, 95)))
        assert (small.format, small.mode, small.size) == ("JPEG", "RGB", size)
        expected = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        if mode not in ("P", "1"):  # whose dithering is lost
            assert np.abs(np.asarray(small).astype(int) - np.asarray(expected)).mean() < 12


def test_only_the_exif_orientation_survives_resizing(folder: Path, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    small = Image.open(io.BytesIO(shrink_image(encoded(picture(0, 60, 80), exif=exif), 30, 90)))
    assert dict(small.getexif()) == {0x0112: 6}
    assert (small.height, small.width) == (30, 40)  # as stored; turning is the loader's choice
    convert(folder, tmp_path / "out", "--resize-short", "16", "--quality", "80", *SMALL)
    images = [decoded(row["image"]["bytes"]) for row in rows_of(tmp_path / "out")]
    assert {min(image.shape[:2]) for image in images} == {16}


# ------------------------------------------------------------------ other sources


def test_a_list_of_images_is_converted_like_its_folder(folder: Path, tmp_path: Path):
    root = folder / "train"
    paths = sorted(str(path.relative_to(root)) for path in root.glob("*/*.jpg"))
    bad = ["ant/gone.jpg,ant", ",ant", "bee,bee", "/dev/null,cow"]  # rows without an image
    lines = ["image,label", *(f"{path},{path[:3]}" for path in paths), *bad]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    flags = ("--root", root, "--eval-source", folder / "val", "--bad-records", "skip", *SMALL)
    dataset = convert(tmp_path / "list.csv", tmp_path / "out", *flags)
    assert dataset["rows"] == {"train": TRAIN, "test": VAL}
    wheres = [f"list.csv, row {TRAIN + n}" for n in range(len(bad))]
    assert [Path(record["where"]).name for record in dataset["skipped"]] == wheres
    convert(folder, tmp_path / "same", *SMALL)
    key = lambda row: row["image"]["path"]  # noqa: E731
    assert sorted(rows_of(tmp_path / "out"), key=key) == sorted(rows_of(tmp_path / "same"), key=key)


def test_tar_files_are_converted_with_the_names_of_their_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = {f"{n:03d}.jpg": encoded(picture(n), quality=90) for n in range(TRAIN)}
    (tmp_path / "tars").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "tars" / f"train-{number}.tar", "w") as file:
            for name in [*images][number::2]:
                label = CLASSES[int(name[:3]) % 3].encode()
                for member, content in ((name, images[name]), (f"{name[:3]}.cls", label)):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
    dataset = convert(tmp_path / "tars", tmp_path / "out", *SMALL)
    assert dataset["class_names"] == list(CLASSES)
    rows = {row["image"]["path"]: row for row in rows_of(tmp_path / "out")}
    assert {name: row["image"]["bytes"] for name, row in rows.items()} == images
    assert all(row["label"] == int(name[:3]) % 3 for name, row in rows.items())


def test_parquet_is_converted_row_by_row_with_paths_and_names(converted: Path, tmp_path: Path):
    convert(converted, tmp_path / "again", "--seed", "7")
    for split in ("train", "val"):
        rows, before = rows_of(tmp_path / "again", split), rows_of(converted, split)
        assert rows != before
        key = lambda row: row["image"]["path"]  # noqa: E731
        assert sorted(rows, key=key) == sorted(before, key=key)
    convert(converted / "train-*.parquet", tmp_path / "glob", "--no-shuffle")
    assert rows_of(tmp_path / "glob") == rows_of(converted)
    assert not list((tmp_path / "glob").glob("val*"))


def test_binary_columns_nulls_empty_groups_and_images_beside_the_file(tmp_path: Path):
    images = [encoded(picture(n), "PNG") for n in range(4)]
    table = pa.table({"jpg": [images[0], None, *images[1:3]], "cls": [0, 1, 1, 2]})
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 2), table.slice(2, 2)):
            writer.write_table(part)
    columns = ("--data.image-column", "jpg", "--label-column", "cls", "--no-shuffle")
    with pytest.raises(RaytrainError, match=r"x\.parquet, row group 1, row 1"):
        convert(tmp_path / "x.parquet", tmp_path / "out", *columns)
    flags = (*columns, "--bad-records", "skip")
    dataset = convert(tmp_path / "x.parquet", tmp_path / "out", *flags)
    assert dataset["class_names"] == ["0", "1", "2"]
    assert [record["where"][-18:] for record in dataset["skipped"]] == [" row group 1, row 1"[1:]]
    rows = rows_of(tmp_path / "out")
    assert [row["image"] for row in rows] == [{"bytes": i, "path": None} for i in images[:3]]
    assert [row["label"] for row in rows] == [0, 1, 2]

    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "0.png").write_bytes(images[0])
    column = pa.array([{"bytes": None, "path": "0.png"}, {"bytes": images[1], "path": "1.png"}])
    pq.write_table(pa.table({"image": column, "label": [0, 1]}), tmp_path / "beside" / "y.parquet")
    convert(tmp_path / "beside", tmp_path / "whole", "--no-shuffle")
    stored = [(row["image"]["bytes"], row["image"]["path"]) for row in rows_of(tmp_path / "whole")]
    assert stored == [(images[0], "0.png"), (images[1], "1.png")]


def test_splits_are_converted_by_name_and_omitted_ones_are_reported(tmp_path: Path, capsys: Any):
    names = ("train", "extra", "validation", "test", "test2")
    (tmp_path / "in" / "data").mkdir(parents=True)
    table = pa.table({"image": [encoded(picture(n)) for n in range(5)], "label": [0, 1, 0, 1, 0]})
    for rows, name in enumerate(names[:4], start=2):
        path = tmp_path / "in" / f"data/{name}-00000-of-00001.parquet"
        pq.write_table(table.slice(0, rows), path)
    dataset = convert(tmp_path / "in", tmp_path / "all")
    assert dataset["rows"] == {"train": 2, "validation": 4, "test": 5}
    assert "note: the extra split (1 file) is not used." in capsys.readouterr().out
    flags = ("--train-split", "extra", "--eval-split", "test", "--root", "x")
    dataset = convert(tmp_path / "in", tmp_path / "some", *flags)
    assert dataset["rows"] == {"train": 3, "test": 5}
    printed = capsys.readouterr().out
    assert printed.count("note: the ") == 2
    assert "note: --root is not used for the training set" in printed
    train, evaluation = located(str(tmp_path / "some"))
    assert evaluation is not None
    assert (train.name, evaluation.name) == ("train", "test")


def test_a_torchvision_set_is_stored_as_png(tmp_path: Path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.Generator(np.random.Philox(0))
    for prefix, count in (("t10k", 8), ("train", 30)):
        pixels = random.integers(0, 256, (count, 28, 28), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">II", 2049, count)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    flags = ("--root", tmp_path, "--no-shuffle")
    dataset = convert("torchvision:MNIST", tmp_path / "out", *flags)
    assert dataset["rows"] == {"train": 30, "test": 8}
    assert dataset["class_names"][1] == "1 - one"
    rows = rows_of(tmp_path / "out")
    assert [row["label"] for row in rows] == [n % 10 for n in range(30)]
    images = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows]
    assert {(image.format, image.mode) for image in images} == {("PNG", "L")}
    assert np.array_equal(np.stack([np.asarray(image) for image in images]), pixels)


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


def test_fault_20_an_undecodable_image_is_named_or_skipped_and_listed(
    folder: Path, damaged: Path, tmp_path: Path
):
    for flags in ((), ("--resize-short", "20")):
        with pytest.raises(RaytrainError, match=r"damaged/\w+/\d+\.jpg: not a.*skip"):
            convert(damaged, tmp_path / "out", *flags)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / ".out.converting", ignore_errors=True)
    # A conversion that stopped at a bad image continues with skip.
    in_order = ("--no-shuffle", "--workers", "1", *SMALL)
    with pytest.raises(RaytrainError):
        convert(damaged, tmp_path / "two", *in_order)
    assert kept(tmp_path / "two")
    for name in ("one", "two"):
        dataset = convert(damaged, tmp_path / name, "--bad-records", "skip", *in_order)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    bad = [str(path) for n, path in enumerate(sorted(damaged.glob("*/*"))) if n in (20, 30, 50)]
    assert [record["where"] for record in dataset["skipped"]] == bad
    assert all(record["why"] for record in dataset["skipped"])
    assert dataset["rows"] == {"train": TRAIN - 3}
    assert len(rows_of(tmp_path / "two")) == TRAIN - 3
    # Not checked, they are copied as they are.
    convert(folder / "train", tmp_path / "all", "--eval-source", damaged, "--no-check")
    assert len(rows_of(tmp_path / "all", "test")) == TRAIN


# ------------------------------------------------------------------ stopped and continued


class Stopped(BaseException):
    """Stands in for a power cut in this process."""


def moving(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Lets as many files get their names; then always raises the error."""
    moves = itertools.count()
    replace = os.replace

    def move(old: Any, new: Any) -> None:
        if next(moves) >= after:
            raise error
        replace(old, new)

    monkeypatch.setattr(os, "replace", move)


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_a_conversion_stopped_at_any_write_continues_to_the_same_bytes(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    source, dest, stops = folder if kind == "folder" else converted, tmp_path / "animals", 0
    flags = ("--workers", "1", *SMALL)
    while True:
        with monkeypatch.context() as patch:  # an attempt gets three files further
            moving(patch, 3, Stopped())
            try:
                convert(source, dest, *flags)
                break
            except Stopped:
                stops += 1
        assert not dest.exists()
        assert [path.name for path in tmp_path.iterdir()] == [".animals.converting"]
    assert stops > 2
    convert(source, tmp_path / "whole", *flags)
    assert contents(dest) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["animals", "whole"]


def test_a_killed_conversion_continues_at_the_first_missing_shard(tmp_path: Path):
    big = tmp_path / "big" / "x"
    big.mkdir(parents=True)
    for number in range(24):  # 8 MB in all
        picture(number, 340, 340).save(big / f"{number}.png", compress_level=0)
    flags = (str(big.parent), "out", "--shard-mib", "1", "--workers", "1")
    command = [sys.executable, "-m", "raytrain_ddp.tools.convert", *flags]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not kept(tmp_path / "out") and process.poll() is None:
            time.sleep(0.005)
        process.kill()
    assert not (tmp_path / "out").exists()
    shards = [record.parent / "result" / record.stem for record in kept(tmp_path / "out")]
    before = {path.name: path.stat().st_mtime_ns for path in shards}
    assert 0 < len(before) < 8
    answer = run_cli("convert", *flags, cwd=tmp_path)
    assert answer.status == 0, answer.err
    for name, time_ns in before.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == time_ns
    convert(big.parent, tmp_path / "whole", *flags[2:])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("complete", [False, True])
def test_other_input_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
):
    source, dest = tmp_path / "src", tmp_path / "out"
    shutil.copytree(folder, source)
    with monkeypatch.context() as patch, suppress(Stopped):
        moving(patch, 1000 if complete else 4, Stopped())
        convert(source, dest, *SMALL)
    assert dest.exists() == complete
    for flags, reported in (
        (("--seed", "1"), "arguments seed 1, was 0"),
        (("--resize-short", "20"), "arguments resize_short 20, was 0"),
        ((), "content train changed"),
    ):
        if not flags:
            (source / "train" / "ant" / "000.jpg").write_bytes(encoded(picture(1)))
        with pytest.raises(RaytrainError, match=reported) as caught:
            convert(source, dest, *SMALL, *flags)
        assert status_of(caught.value) == 2


def test_a_complete_data_set_is_recognized_without_its_source(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out", *SMALL)
    before = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out", *SMALL)
    assert contents(tmp_path / "out") == before


def test_a_full_disk_is_reported_and_completed_work_is_kept(
    folder: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        moving(patch, 6, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(RaytrainError, match=r"No space left.*the same command") as caught:
            convert(folder, tmp_path / "out", *SMALL)
    assert status_of(caught.value) == 3
    assert kept(tmp_path / "out")
    convert(folder, tmp_path / "out", *SMALL)
    assert contents(tmp_path / "out") == contents(converted)


# ------------------------------------------------------------------ refusals


def write_parquet(path: Path, labels: list[int]) -> None:
    images = pa.array([encoded(picture(0))] * len(labels), pa.binary())
    pq.write_table(pa.table({"image": images, "label": pa.array(labels, pa.int64())}), path)


def make_sources(root: Path) -> None:
    (root / "full").mkdir()
    (root / "full" / "notes.txt").touch()
    (root / "empty" / "cat").mkdir(parents=True)
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("to be or not to be")
    for path in ("one/a/0.jpg", "classes/train/a/0.jpg", "classes/val/c/0.jpg"):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_bytes(encoded(picture(0)))
    write_parquet(root / "none.parquet", [])
    (root / "labels").mkdir()
    write_parquet(root / "labels" / "train.parquet", [0, 1])
    write_parquet(root / "labels" / "test.parquet", [0, 2])
    (root / ".plan.converting").mkdir()
    (root / ".plan.converting" / "plan.json").write_text("[]")
    (root / ".plan.converting" / "train.arrow").touch()


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        ("one full", 2, r"has other files \(notes\.txt\)"),
        ("one none.parquet", 2, "is a file"),
        ("one one/parquet", 2, "is inside SRC"),
        ("one /proc", 2, "a mount point"),
        ("one s3://bucket/x", 2, "s3://bucket/x"),
        ("one c\udcff", 2, "must be UTF-8"),
        ("one none.parquet/x", 3, "cannot be written"),
        ("one out --quality 50", 2, "--quality"),
        ("one out --workers 2 --address auto", 2, "--workers"),
        ("one plan", 4, r"plan\.json: is damaged.*delete .*\.plan\.converting"),
        ("empty out", 4, "empty"),
        ("none.parquet out", 4, r"none\.parquet: 0 rows"),
        ("text out", 4, "images"),
        ("classes out", 4, "'c' is not a class"),
        ("labels out", 4, r"test\.parquet, row group 0, row 1: label 2"),
        ("labels out --train-split no", 4, "has no such split"),
    ],
)
def test_fault_21_and_22_wrong_input_is_refused(
    arguments: str, status: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".plan.converting" / "lock").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RaytrainError, match=named) as caught:
        main(arguments.split(" "))
    assert status_of(caught.value) == status
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------ damage, the command, Ray


def test_fault_17_and_18_a_complete_data_set_with_damaged_files_is_refused(
    converted: Path, folder: Path, tmp_path: Path
):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    shard = sorted(copy.glob("train-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(RaytrainError, match=shard.name):  # truncated
        convert(folder, copy, *SMALL)
    shard.unlink()
    with pytest.raises(RaytrainError, match=shard.name) as caught:
        convert(folder, copy, *SMALL)
    assert status_of(caught.value) == 4
    for text in ("{", "[]", '{"format": "raytrain_ddp", "version": 1}'):
        (copy / "dataset.json").write_text(text)
        with pytest.raises(RaytrainError, match=r"dataset\.json.* is damaged"):
            convert(folder, copy, *SMALL)


def test_the_command_converts_and_recognizes_a_data_set(folder: Path, tmp_path: Path):
    arguments = (str(folder), "out", "--workers", "1")
    answer = run_cli("convert", *arguments, cwd=tmp_path)
    assert answer.status == 0, answer.err
    assert "out: 60 train and 12 val images of 3 classes in 2 files" in answer.out
    assert "--data.source out" in answer.out
    assert "train: writing 60 of 60 images" in answer.err
    assert not {"torch", "ray"} & set(answer.heavy)
    answer = run_cli("convert", *arguments, cwd=tmp_path)
    assert (answer.status, "is complete already" in answer.out) == (0, True)
    answer = run_cli("convert", "--help", cwd=tmp_path)
    assert not answer.heavy


@pytest.mark.ray
@pytest.mark.usefixtures("unchanged_process")
@pytest.mark.filterwarnings("ignore")
def test_a_conversion_on_ray_has_the_same_bytes(
    folder: Path, converted: Path, damaged: Path, tmp_path: Path
):
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        convert(folder, tmp_path / "out", "--address", "auto", *SMALL)
        with pytest.raises(RaytrainError, match="not a readable image"):
            convert(damaged, tmp_path / "bad", "--address", "auto", *SMALL)
    finally:
        ray.shutdown()
    assert contents(tmp_path / "out") == contents(converted)
