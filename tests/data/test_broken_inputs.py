"""Broken data of every kind: each is named in one line with its file, before or at its first use.

Each run is the command `fit --local`: the same checks run before Ray is started. What is found
before the first step: refused_data.py.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from parquet_files import encoded, write_tar
from PIL import Image
from processes import Group

CLASSES = ("ape", "bat")
PER_CLASS = 12


def jpeg(seed: int, side: int = 24) -> bytes:
    random = np.random.Generator(np.random.Philox(seed))
    coarse = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8))
    return encoded(coarse.resize((side, side), Image.BICUBIC), "jpeg", quality=90)


def enormous() -> bytes:
    """A small file that claims 28,000 x 28,000 pixels."""
    content = bytearray(jpeg(0))
    start = content.index(b"\xff\xc0") + 5
    content[start : start + 4] = (28_000).to_bytes(2, "big") * 2
    return bytes(content)


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


def parquet(root: Path, **image: Any) -> Path:
    """`image`: what row 9 has instead."""
    columns = records()
    columns["image"][9] = {**columns["image"][9], **image}
    file = root / "train.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table(columns), file, row_group_size=8, **options)
    return root


def a_list(root: Path) -> None:
    lines = []
    for row, (image, label) in enumerate(zip(*records().values(), strict=True)):
        (root.parent / f"{row}.jpg").write_bytes(image["bytes"])
        lines.append(json.dumps({"image": f"../{row}.jpg", "label": label}) + "\n")
    (root / "list.jsonl").write_text("".join(lines))


def a_tar(root: Path) -> None:
    """The records of `parquet` as WebDataset has them."""
    members = []
    for row, (image, label) in enumerate(zip(*records().values(), strict=True)):
        members += [(f"{row:02}.jpg", image["bytes"]), (f"{row:02}.cls", str(label).encode())]
    write_tar(root / "train.tar", members)


def arrow(root: Path) -> None:
    """The records of `parquet` as `save_to_disk` writes them."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(records()).save_to_disk(root)


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda root: (folder(root) / name).write_bytes(content)


def flip_a_bit(root: Path) -> None:
    path = parquet(root) / "train.parquet"
    content = bytearray(path.read_bytes())
    content[content.index(jpeg(9)) + 40] ^= 4
    path.write_bytes(content)


ROW_9 = "train.parquet, row group 1, row 1"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    # name: (how to make it, what is named)
    "an empty file": (overwrite("train/bat/05.jpg", b""), "bat/05.jpg"),
    "half a jpeg": (overwrite("train/bat/07.jpg", jpeg(7)[:500]), "bat/07.jpg"),
    "an enormous jpeg": (overwrite("train/bat/05.jpg", enormous()), "bat/05.jpg"),
    "a bad image to evaluate": (overwrite("val/bat/01.jpg", jpeg(1)[:500]), "val/bat/01"),
    "images of unequal size": (overwrite("train/ape/03.jpg", jpeg(3, 32)), "--data.image-size"),
    "a link to nothing": (
        lambda root: (folder(root) / "train/bat/x.jpg").symlink_to("gone"),
        "bat/x.jpg",
    ),
    "evaluation of other classes": (
        lambda root: (folder(root) / "val/bat").rename(root / "val/eel"),
        "eel",
    ),
    "a flipped bit": (flip_a_bit, "train.parquet, row group 1"),
    "a path to no file": (partial(parquet, bytes=None, path="gone.jpg"), ROW_9),
    "bytes that are no image": (partial(parquet, bytes=b"hello"), ROW_9),
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


def made(make: Callable[[Path], object], source: Path) -> Path:
    source.mkdir()
    make(source)
    return source


@pytest.mark.parametrize("kind", BROKEN)
def test_each_kind_of_broken_data_is_named_in_one_line(kind: str, workers: Group, tmp_path: Path):
    make, named = BROKEN[kind]
    status, message = workers(1, fit, command(tmp_path, made(make, tmp_path / "data")))[0]
    assert status == 4, message
    assert named in message
    assert "\n" not in message
    assert len(message) < 400


def test_the_same_rows_in_files_of_any_format_train_to_the_same_bits(
    workers: Group, tmp_path: Path
):
    logs = []
    for make in (parquet, a_tar, a_list, arrow):
        source = made(make, tmp_path / make.__name__)
        more = ["--name", make.__name__, "--data.shuffle", "full", "--augment.flip"]
        assert workers(1, fit, command(tmp_path, source, *more)) == [(0, "")]
        lines = (tmp_path / "runs" / make.__name__ / "metrics.jsonl").read_text().splitlines()
        logs.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert len(logs[0]) > 0
    assert logs == [logs[0]] * 4


@pytest.mark.parametrize("kind", ["half a jpeg", "a path to no file", "a bad image to evaluate"])
def test_fault_20_a_bad_image_may_be_skipped(kind: str, workers: Group, tmp_path: Path):
    source = made(BROKEN[kind][0], tmp_path / "data")
    argv = command(tmp_path, source, "--data.bad-records", "skip", "--name", "skips")
    assert workers(1, fit, argv) == [(0, "")]
    lines = (tmp_path / "runs/skips/metrics.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    if kind == "a bad image to evaluate":
        assert [r["metrics"]["skipped"] for r in log if r["kind"] == "eval"] == [1]
    else:
        assert [r["skipped"] for r in log if r["kind"] == "train"][-1] == 1
    more = ["--data.bad-records", "skip", "--name", "again", "--data.max-bad", "0"]
    status, message = workers(1, fit, command(tmp_path, source, *more))[0]
    assert (status, "max_bad" in message) == (4, True)


def test_fault_20_61_an_enormous_image_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch):
    from raytrain_ddp.data.pixels.decoding import open_encoded_image
    from raytrain_ddp.tools.convert.shard_writer import shrink_image

    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("was decoded"))
    for use in (open_encoded_image, lambda content: shrink_image(content, 8, 90)):
        with pytest.raises(Image.DecompressionBombError):
            use(enormous())
