"""Broken data of every kind: each is named in one line with its file, before or at its first use.

Each run is the command `fit --local`: the same checks run before Ray is started.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from processes import Group

CLASSES = ("ape", "bat")
PER_CLASS = 12


def jpeg(seed: int, side: int = 24) -> bytes:
    random = np.random.Generator(np.random.Philox(seed))
    coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8))
    content = io.BytesIO()
    coarse.resize((side, side), Image.BICUBIC).save(content, "jpeg", quality=90)
    return content.getvalue()


def folder(root: Path) -> Path:
    """train/ and val/ with two classes of 12 JPEGs."""
    for split in ("train", "val"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for i in range(PER_CLASS):
                (root / split / name / f"{i:02}.jpg").write_bytes(jpeg(i))
    return root


def records() -> dict[str, list[Any]]:
    images = [{"bytes": jpeg(i), "path": f"{i}.jpg"} for i in range(24)]
    return {"image": images, "label": [i % 2 for i in range(24)]}


def parquet(root: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    columns: dict[str, Any] = records()
    change(columns)
    pq.write_table(
        pa.table(columns),
        root / "train.parquet",
        row_group_size=8,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    return root


def a_list(name: str, line: str, at: int = 9) -> Callable[[Path], object]:
    """A list with one line replaced; its images are outside the folder."""

    def make(root: Path) -> None:
        pictures = folder(root.parent / "pictures") / "train"
        names = [f"{path.parent.name}/{path.name}" for path in sorted(pictures.glob("*/*"))]
        lines = ["image,label", *(f"../pictures/train/{n},{n[:3]}" for n in names)]
        lines[at + 1] = line
        (root / name).write_text("\n".join(lines) + "\n")

    return make


def a_list_of_records(root: Path) -> None:
    lines = []
    for row, (image, label) in enumerate(zip(*records().values(), strict=True)):
        (root.parent / f"{row}.jpg").write_bytes(image["bytes"])
        lines.append(json.dumps({"image": f"../{row}.jpg", "label": label}) + "\n")
    (root / "list.jsonl").write_text("".join(lines))


def a_tar(root: Path, name: str = "", content: bytes = b"") -> Path:
    """The records of `parquet` as WebDataset has them, one member replaced."""
    with tarfile.open(root / "train.tar", "w") as file:
        for row, (image, label) in enumerate(zip(*records().values(), strict=True)):
            members = {f"{row:02}.jpg": image["bytes"], f"{row:02}.cls": str(label).encode()}
            for member, stored in members.items():
                given = content if member == name else stored
                reported = tarfile.TarInfo(member)
                reported.size = len(given)
                file.addfile(reported, io.BytesIO(given))
    return root


def arrow(root: Path) -> Path:
    """The records of `parquet` as `save_to_disk` writes them."""
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(records()).save_to_disk(root)
    return root


def cut_arrow(root: Path) -> None:
    path = arrow(root) / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:9000])


def cut_tar(root: Path) -> None:
    path = a_tar(root) / "train.tar"
    path.write_bytes(path.read_bytes()[:9000])


@dataclass(frozen=True)
class Broken:
    """How to create it, the expected message, and whether it is reported without torch."""

    make: Callable[[Path], object]
    reported: tuple[str, ...]
    at_once: bool = False


def enormous() -> bytes:
    """A small file that claims 28,000 x 28,000 pixels."""
    content = bytearray(jpeg(0))
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = (28_000).to_bytes(2, "big") * 2
    return bytes(content)


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda root: (folder(root) / name).write_bytes(content)


def set_label(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda columns: columns["label"].__setitem__(9, value)


def set_image(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda columns: columns["image"].__setitem__(9, value)


def flip_a_bit(root: Path) -> None:
    path = parquet(root) / "train.parquet"
    content = bytearray(path.read_bytes())
    content[content.index(jpeg(9)) + 40] ^= 4
    path.write_bytes(content)


def cut(root: Path, keep: float) -> None:
    path = parquet(root) / "train.parquet"
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def with_names(root: Path, names: list[str]) -> None:
    table = pa.table(records())
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), root / "train.parquet")


def of_dataset(root: Path) -> None:
    """dataset.json names two files; one of them is gone."""
    parquet(root)
    size = (root / "train.parquet").stat().st_size
    files = [
        {"path": name, "split": "train", "rows": 24, "bytes": size, "sha256": "0" * 64}
        for name in ("train.parquet", "train-2.parquet")
    ]
    head = {"format": "raytrain_ddp", "version": 1, "class_names": list(CLASSES)}
    (root / "dataset.json").write_text(json.dumps({**head, "files": files}))


def unequal(root: Path) -> None:
    (folder(root) / "train/ape/03.jpg").write_bytes(jpeg(3, side=32))


BROKEN = {
    "a text called jpg": Broken(overwrite("train/ape/03.jpg", b"hello"), ("ape/03.jpg",)),
    "an empty file": Broken(overwrite("train/bat/05.jpg", b""), ("bat/05.jpg",)),
    "half a jpeg": Broken(overwrite("train/bat/07.jpg", jpeg(7)[:500]), ("bat/07.jpg",)),
    "a bad image to evaluate": Broken(overwrite("val/bat/01.jpg", jpeg(1)[:500]), ("val/bat/01",)),
    "images of unequal size": Broken(unequal, ("unequal size", "--data.image-size")),
    "a class folder without images": Broken(
        lambda root: (folder(root) / "train/cow").mkdir(), ("train/cow", "without images"), True
    ),
    "no folders and no files": Broken(lambda root: None, ("neither Parquet files nor",), True),
    "evaluation of other classes": Broken(
        lambda root: (folder(root) / "val/bat").rename(root / "val/eel"), ("ape, eel", "ape, bat")
    ),
    "a truncated parquet file": Broken(lambda root: cut(root, 0.7), ("train.parquet",), True),
    "an empty parquet file": Broken(lambda root: cut(root, 0.0), ("train.parquet",), True),
    "a flipped bit": Broken(flip_a_bit, ("train.parquet", "row group 1")),
    "no rows": Broken(
        lambda root: parquet(
            root,
            lambda c: c.update(image=pa.array([], pa.binary()), label=pa.array([], pa.int64())),
        ),
        ("0 rows",),
        True,
    ),
    "another name of the images": Broken(
        lambda root: parquet(root, lambda c: c.update(img=c.pop("image"))),
        ("'image'", "'img'", "--data.image-column"),
        True,
    ),
    "labels that are lists": Broken(
        lambda root: parquet(root, lambda c: c.update(label=[["ape"]] * 24)), ("'label'",), True
    ),
    "one class only": Broken(
        lambda root: parquet(root, lambda c: c.update(label=["ape"] * 24)),
        ("only one class, 'ape'",),
        True,
    ),
    "a null among labels that are text": Broken(
        lambda root: parquet(root, lambda c: c.update(label=["ape", "bat", None] * 8)),
        ("train.parquet, row group 0, row 2", "null"),
        True,
    ),
    "a link to nothing": Broken(
        lambda root: (folder(root) / "train/bat/x.jpg").symlink_to("gone"), ("x.jpg", "broken link")
    ),
    "an enormous jpeg": Broken(overwrite("train/bat/05.jpg", enormous()), ("MAX_IMAGE_PIXELS",)),
    "a null label": Broken(
        lambda root: parquet(root, set_label(None)), ("train.parquet, row group 1", "null"), True
    ),
    "a negative label": Broken(
        lambda root: parquet(root, set_label(-1)), ("train.parquet, row group 1", "-1"), True
    ),
    "a label beyond the class names": Broken(
        lambda root: with_names(root, ["ape"]), ("train.parquet, row group 0", "1"), True
    ),
    "a null image": Broken(
        lambda root: parquet(root, set_image(None)), ("train.parquet, row group 1, row 1", "null")
    ),
    "a path to no file": Broken(
        lambda root: parquet(root, set_image({"bytes": None, "path": "gone.jpg"})),
        ("train.parquet, row group 1, row 1", "gone.jpg"),
    ),
    "bytes that are no image": Broken(
        lambda root: parquet(root, set_image({"bytes": b"hello", "path": None})),
        ("train.parquet, row group 1, row 1", "not a readable image"),
    ),
    "a list that names no file": Broken(
        a_list("list.csv", "../pictures/gone.jpg,ape"), ("list.csv, row 9", "gone.jpg: no such")
    ),
    "a list with a line too long": Broken(
        a_list("list.csv", "gone.jpg,ape,bat"), ("list.csv", "Row #11"), True
    ),
    "a list without a label": Broken(
        a_list("list.csv", "gone.jpg,"), ("list.csv, row 9", "empty string"), True
    ),
    "a list without a header": Broken(
        a_list("list.csv", "gone.jpg,ape", -1), ("list.csv", "no column 'image'"), True
    ),
    "a truncated tar file": Broken(cut_tar, ("train.tar", "unexpected end of data"), True),
    "half a jpeg in a tar file": Broken(
        lambda root: a_tar(root, "09.jpg", jpeg(9)[:500]), ("train.tar, 09.jpg: not a readable",)
    ),
    "a tar file without a label": Broken(
        lambda root: a_tar(root, "09.cls"), ("train.tar, 09.jpg: label is an empty",), True
    ),
    "a truncated Arrow file": Broken(
        cut_arrow, ("data-00000-of-00001.arrow", "not a readable Arrow file"), True
    ),
    "a missing shard": Broken(of_dataset, ("train-2.parquet", "dataset.json"), True),
}


def fit(rank: int, size: int, argv: list[str]) -> tuple[int, str]:
    """(exit status, message) of ``fit argv``, in a standing process."""
    assert (rank, size) == (0, 1)
    from raytrain_ddp.errors import RaytrainError
    from raytrain_ddp.fit import main

    sys.stdout = io.StringIO()
    os.environ["XDG_CACHE_HOME"] = str(Path(argv[argv.index("--storage") + 1]).parent / "cache")
    try:
        return main(argv), ""
    except RaytrainError as error:
        return error.exit_status, str(error)
    finally:
        sys.stdout = sys.__stdout__
        del os.environ["XDG_CACHE_HOME"]


def command(root: Path, source: Path, *more: str) -> list[str]:
    small = ["--epochs", "1", "--batch-size", "8", "--micro-batch", "4", "--data.workers", "1"]
    quiet = ["--log.no-tensorboard", "--storage", str(root / "runs")]
    return ["--local", "--data.source", str(source), *small, *quiet, *more]


@pytest.mark.parametrize("kind", BROKEN)
def test_each_kind_of_broken_data_is_named_in_one_line(kind: str, workers: Group, tmp_path: Path):
    source = tmp_path / "data"
    source.mkdir()
    broken = BROKEN[kind]
    broken.make(source)
    status, message = workers(1, fit, command(tmp_path, source))[0]
    assert status == 4, message
    assert "\n" not in message
    assert len(message) < 400
    assert [word for word in broken.reported if word not in message] == []
    assert not (tmp_path / "runs").exists() or not broken.at_once


def test_the_same_data_can_be_trained_on_when_intact(workers: Group, tmp_path: Path):
    (tmp_path / "data").mkdir()
    fine = a_list("list.csv", "../pictures/train/ape/00.jpg,ape")
    for make in (folder, fine):
        source = tmp_path / make.__name__
        source.mkdir()
        make(source)
        name = ["--name", make.__name__]
        assert workers(1, fit, command(tmp_path, source, *name)) == [(0, "")]


def test_the_same_rows_in_files_of_any_format_train_to_the_same_bits(
    workers: Group, tmp_path: Path
):
    logs = []
    for make in (parquet, a_tar, a_list_of_records, arrow):
        source = tmp_path / make.__name__
        source.mkdir()
        make(source)
        more = ["--name", make.__name__, "--data.shuffle", "full", "--augment.flip"]
        assert workers(1, fit, command(tmp_path, source, *more)) == [(0, "")]
        lines = (tmp_path / "runs" / make.__name__ / "metrics.jsonl").read_text().splitlines()
        logs.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert len(logs[0]) > 0
    assert logs == [logs[0]] * 4


@pytest.mark.parametrize(
    "kind", ["half a jpeg", "a null image", "a link to nothing", "a bad image to evaluate"]
)
def test_fault_20_a_bad_image_may_be_skipped(kind: str, workers: Group, tmp_path: Path):
    source = tmp_path / "data"
    source.mkdir()
    BROKEN[kind].make(source)
    argv = command(tmp_path, source, "--data.bad-records", "skip", "--name", "skips")
    assert workers(1, fit, argv) == [(0, "")]
    lines = (tmp_path / "runs/skips/metrics.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    if kind == "a bad image to evaluate":
        assert [r["metrics"]["skipped"] for r in log if r["kind"] == "eval"] == [1]
    else:
        assert [r["skipped"] for r in log if r["kind"] == "train"][-1] == 1
    status, message = workers(
        1, fit, command(tmp_path, source, *argv[-4:-1], "again", "--data.max-bad", "0")
    )[0]
    assert (status, "max_bad = 0" in message) == (4, True)


def test_each_bad_record_is_reported_once_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
    from raytrain_ddp.data.order.sample_rng import Draws
    from raytrain_ddp.data.pixels.image_batches import image_data
    from raytrain_ddp.data.splits import open_splits

    root = folder(tmp_path)
    for name, content in (("00", b"hello"), ("01", b""), ("02", jpeg(2)[:500]), ("03", enormous())):
        (root / "train/ape" / f"{name}.jpg").write_bytes(content)
    config = DataConfig(source=str(root), bad_records="skip", image_size=8, jpeg_scaling=False)
    source = open_splits(config).train
    data = image_data(source, config, AugmentConfig(repeats=2), 2)
    rows = np.repeat(np.arange(8), 2)
    for epoch in range(3):
        batch = data.collate(source.read(rows), Draws(0, epoch, rows, np.arange(16) % 2))
        assert len(batch["label"]) == 8
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(".jpg: ")[0][-2:] for line in lines] == ["00", "01", "02", "03"]
    assert not [line for line in lines if "0x" in line or "\n" in line]


@pytest.mark.parametrize("scaling", [True, False])
def test_fault_20_61_an_enormous_image_is_refused_by_its_header(
    scaling: bool, monkeypatch: pytest.MonkeyPatch
):
    import simplejpeg

    from raytrain_ddp.convert.pixels import shrink_image
    from raytrain_ddp.data.pixels.decoding import open_encoded_image

    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("was decoded"))
    for use in (open_encoded_image, lambda content: shrink_image(content, 8, 90)):
        with pytest.raises(Image.DecompressionBombError, match="28000 x 28000"):
            use(enormous())
    content = io.BytesIO()
    Image.new("L", (1, 1)).save(content, "png")
    large = bytearray(content.getvalue())  # a PNG of as many pixels meets the same bound
    large[16:24] = (28_000).to_bytes(4, "big") * 2
    large[29:33] = zlib.crc32(large[12:29]).to_bytes(4, "big")
    with pytest.raises(Image.DecompressionBombError):
        open_encoded_image(bytes(large))
