"""Lists of images (CSV, TSV, JSON lines, Parquet files of paths), compared with pandas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
from parquet_files import png
from split_checks import labels_of, splits_of

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.errors import DataError

ROWS = 7
Write = Callable[[pd.DataFrame, Path], None]
Read = Callable[[Path], pd.DataFrame]

FORMS: Mapping[str, tuple[Write, Read]] = {
    "list.csv": (lambda f, p: f.to_csv(p, index=False), pd.read_csv),
    "list.CSV": (lambda f, p: f.to_csv(p, index=False, encoding="utf-8-sig"), pd.read_csv),
    "list.csv.gz": (lambda f, p: f.to_csv(p, index=False), pd.read_csv),
    "list.tsv": (
        lambda f, p: f.to_csv(p, index=False, sep="\t"),
        lambda p: pd.read_csv(p, sep="\t"),
    ),
    "list.jsonl": (
        lambda f, p: f.to_json(p, orient="records", lines=True),
        lambda p: pd.read_json(p, lines=True, dtype=False),
    ),
    "list.parquet": (lambda f, p: f.to_parquet(p), pd.read_parquet),
}
LABELS: Mapping[str, list[Any]] = {
    "integers": [3, 0, 1, 1, 3, 0, 1],
    "names": ["cat", "ant", "cat", "NA", "é, ü", 'a "quoted" one', "line\nbreak"],
    "booleans": [True, False, True, True, False, True, False],
}


def pictures(root: Path, rows: int = ROWS) -> list[str]:
    """Writes pictures in a subfolder; returns their paths."""
    (root / "pics").mkdir(parents=True, exist_ok=True)
    for row in range(rows):
        (root / "pics" / f"{row}.png").write_bytes(png(row))
    return [f"pics/{row}.png" for row in range(rows)]


def listed(path: Path, images: list[Any], labels: list[Any], **more: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame({"id": range(len(images)), "image": images, "label": labels, **more})
    FORMS[f"list{path.name[path.name.index('.') :]}"][0](frame, path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_list_has_the_rows_that_pandas_reads(form: str, tmp_path: Path):
    for kind, labels in LABELS.items():
        path = listed(tmp_path / form, pictures(tmp_path), labels)
        opened = splits_of(path)
        theirs = FORMS[form][1](path)
        if kind == "names":
            theirs["label"] = theirs["label"].fillna("NA")  # pandas' own idea of missing values
        names = opened.class_names
        assert names == [str(label) for label in sorted(theirs["label"].unique())]
        order = np.random.default_rng(0).permutation(np.repeat(np.arange(ROWS), 2))
        for row, (image, label) in zip(order, opened.train.read(order), strict=True):
            assert image == (tmp_path / theirs["image"][row]).read_bytes()
            assert names[label] == str(theirs["label"][row])
        assert opened.train.labels().tolist() == labels_of(opened.train)
        assert "row 5" in opened.train.where(5)


def test_numbers_with_fractions_are_classes_with_a_note(tmp_path: Path):
    images = pictures(tmp_path)
    for labels, is_noted in (([0.5, 1.0, 2.25] * 3, True), (["0.5", "b", "1"] * 3, False)):
        opened = splits_of(listed(tmp_path / "list.csv", images, labels[:ROWS]))
        assert len(opened.class_names) == 3
        assert any("target_columns" in note for note in opened.notes) == is_noted


@pytest.mark.parametrize("form", FORMS)
def test_the_columns_and_the_folder_of_the_images_are_named_by_flags(form: str, tmp_path: Path):
    images = pictures(tmp_path / "elsewhere")
    names = ["ape", "bat"] * 4
    path = listed(tmp_path / form, [0] * ROWS, [0] * ROWS, file_name=images, kind=names[:ROWS])
    columns = {"image_column": "file_name", "label_column": "kind"}
    opened = splits_of(path, root=str(tmp_path / "elsewhere"), **columns)
    assert opened.class_names == ["ape", "bat"]
    assert [image for image, _ in opened.train.read(np.arange(ROWS))] == list(map(png, range(ROWS)))
    with pytest.raises(DataError, match=r"row 0: .*pics/0\.png.*--data\.root"):
        splits_of(path, **columns)
    with pytest.raises(DataError, match=r"'image_name' .*file_name"):
        splits_of(path, image_column="image_name")
    with pytest.raises(DataError, match=path.name):  # 0 is not a path
        splits_of(path)


def test_paths_may_be_absolute_or_in_a_store(tmp_path: Path):
    images = pictures(tmp_path / "here")
    absolute = [str(tmp_path / "here" / name) for name in images]
    path = listed(tmp_path / "list.csv", absolute, [*range(ROWS)])
    assert splits_of(path).train.read(np.arange(ROWS))[6] == (png(6), 6)
    memory = fsspec.filesystem("memory")
    for row, name in enumerate(images):
        memory.pipe(f"/stored/{name}", png(row))
    memory.pipe("/stored/list.csv", b"image,label\npics/0.png,a\npics/1.png,b\n../x.png,b\n")
    local = listed(tmp_path / "names.tsv", images, [*range(ROWS)])
    opened = splits_of(local, root="memory://stored")
    assert [image for image, _ in opened.train.read(np.arange(ROWS))] == list(map(png, range(ROWS)))
    first, second, third = splits_of("memory://stored/list.csv").train.read(np.arange(3))
    assert (first, second) == ((png(0), 0), (png(1), 1))
    assert isinstance(third[0], BadRecord)  # it is outside the folder


def test_a_missing_or_unnamed_image_or_a_device_is_a_bad_record(tmp_path: Path):
    images: list[Any] = pictures(tmp_path)
    images[2], images[4], images[5] = "gone.png", None, os.devnull
    for name in ("list.csv", "list.jsonl", "list.parquet"):
        path = listed(tmp_path / name, images, LABELS["integers"])
        records = splits_of(path, bad_records="skip").train.read(np.arange(ROWS))
        assert [row for row in range(ROWS) if isinstance(records[row][0], BadRecord)] == [2, 4, 5]
    for name in ("list.csv", "list.parquet"):
        (tmp_path / "lists" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "lists" / name).symlink_to(os.devnull)
        with pytest.raises(DataError, match=name):
            splits_of(tmp_path / "lists")
        (tmp_path / "lists" / name).unlink()


def test_images_that_are_listed_twice_are_reported(tmp_path: Path):
    images = pictures(tmp_path)
    train = listed(tmp_path / "a.csv", [*images[:6], images[0]], LABELS["integers"])
    evaluation = listed(tmp_path / "b.csv", images[5:], [0, 1])
    notes = splits_of(train, eval_source=str(evaluation)).summary().notes
    assert [note for note in notes if note.startswith("1 row ")]
    assert [note for note in notes if note.startswith("1 image ") and "both" in note]
    held = splits_of(listed(tmp_path / "c.csv", images * 2, LABELS["integers"] * 2), holdout=0.4)
    paths = [held.train.paths(), held.eval.paths()]  # type: ignore[attr-defined,union-attr]
    assert sorted([*paths[0], *paths[1]]) == sorted(f"{tmp_path}/{path}" for path in images * 2)
    both = f"{len({*paths[0]} & {*paths[1]})} images "
    assert [note for note in held.summary().notes if note.startswith(both)]


BROKEN: Mapping[str, tuple[bytes, str]] = {  # what is named besides the file
    "ragged.csv": (b"image,label\npics/0.png,a\npics/1.png,b,c\n", "#3"),
    "header.csv": (b"image,label\n", "0 rows"),
    "latin.csv": (b"image,label\npics/\xe9.png,a\n", "0xe9"),
    "open.csv": (b'image,label\na.png,a\nb.png,"b\nc.png,c\n', "row 1"),
    "cut.csv.gz": (b"\x1f\x8b\x08\x00cut", ""),
    "cut.jsonl": (b'{"image":"pics/0.png","label":1}\n{"image":"x","la\n', "row 1"),
    "mixed.jsonl": (b'{"image":"a","label":1}\n{"image":"b","label":"x"}\n', "'label'"),
    "late.jsonl": (b'{"image":"a","label":"x"}\n' * 7 + b'{"image":"b","label":5}\n', "'label'"),
    "null.ndjson": (
        b'{"image":"a","label":null}\n' + b'{"image":"a","label":1}\n' * 3 + b'{"label":"x"}\n',
        "'label'",
    ),
}


def test_a_list_that_cannot_be_read_is_named_with_its_line(tmp_path: Path):
    pictures(tmp_path, 2)
    for name, (content, named) in BROKEN.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            splits_of(tmp_path / name)
        assert name in str(caught.value)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("mark", ["\n", "\r\n", "\r"])
def test_lines_may_end_in_any_way_and_begin_with_a_byte_order_mark(mark: str, tmp_path: Path):
    """Other columns may hold anything."""
    pictures(tmp_path, 2)
    rows = {"csv": ["image,label,w", "pics/0.png,é,1", "pics/1.png,b,x"]}
    rows["TSV"] = [line.replace(",", "\t") for line in rows["csv"]]
    rows["ndjson"] = [
        '{"image": "pics/0.png", "label": "é", "w": 1}',
        '{"image": "pics/1.png","label":"b", "w": [{"a": 1}]}',
    ]
    for end, lines in rows.items():
        for encoding in ("utf-8", "utf-8-sig"):
            path = tmp_path / f"list.{end}"
            path.write_bytes((mark.join(lines) + mark).encode(encoding))
            assert splits_of(path).train.read(np.arange(2)) == [(png(0), 1), (png(1), 0)]
