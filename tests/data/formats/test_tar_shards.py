"""WebDataset tar files, compared with what webdataset reads, and broken ones."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_files import png, write_tar
from split_checks import labels_of, splits_of

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order import EpochOrder, Shuffle
from raytrain_ddp.errors import DataError

tariterators = pytest.importorskip("webdataset").tariterators

Member = tuple[str, bytes]
LINK, SYMLINK = tarfile.LNKTYPE, tarfile.SYMTYPE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raytrain_ddp" / "tar-index"


def tar(
    path: Path, members: Iterable[Member | tarfile.TarInfo], form: int = tarfile.GNU_FORMAT
) -> Path:
    return write_tar(path, members, format=form)


def samples(rows: Iterable[int]) -> Iterable[Member]:
    """Like the Hub's imagenet-1k-wds: an image, its class, and metadata."""
    for row in rows:
        yield f"{row:05d}.cls", str(row % 3).encode()
        yield f"{row:05d}.jpg", png(row)
        yield f"{row:05d}.json", json.dumps({"label": row % 3, "name": f"class {row % 3}"}).encode()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def by_webdataset(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        members = tariterators.tar_file_iterator(file)  # type: ignore[arg-type]
        return list(tariterators.group_by_keys({**member, "__url__": ""} for member in members))


def theirs(paths: list[Path], image: str, label: str) -> list[tuple[bytes, Any]]:
    """Encoded images and decoded labels, in webdataset's order."""
    found = [sample for path in paths for sample in by_webdataset(path)]
    return [
        (sample[image], json.loads(sample[label]) if label == "json" else sample[label].decode())
        for sample in found
    ]


def all_rows(source: Any) -> list[tuple[bytes, str]]:
    rows = source.read(np.arange(source.blocks.sum()))
    return [(image, source.class_names[label]) for image, label in rows]


# ------------------------------------------------------------------ what is read

ODD_NAMES = [
    (f"{'long/' * 40}0.PNG", png(0)),
    (f"{'long/' * 40}0.Cls", b"4\n"),
    ("dir.with.dots/a.png", png(1)),
    ("dir.with.dots/a.cls", b"7"),
    ("dir.with.dots/b.cls", b"4"),
    ("dir.with.dots/b.webp", png(2)),
    ("__meta__", b"{}"),
    ("no-suffix", b"-"),
    ("é ü.cls", b"7"),
    ("é ü.jpeg", png(3)),
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_files_have_the_rows_that_webdataset_reads(form: int, tmp_path: Path):
    paths = [
        tar(tmp_path / f"data/x-train-{n}.tar", samples(range(n * 40, n * 40 + 30 + n)), form)
        for n in range(3)
    ]
    tar(tmp_path / "data/x-validation-0.tar", samples(range(12)), form)
    opened = splits_of(tmp_path / "data")
    assert all_rows(opened.train) == theirs(paths, "jpg", "cls")
    assert opened.class_names == ["0", "1", "2"]
    assert opened.train.labels().tolist() == labels_of(opened.train)
    assert opened.train.where(31).endswith("x-train-1.tar, 00041.jpg")
    assert opened.eval is not None
    assert int(opened.eval.blocks.sum()) == 12
    named = splits_of(tmp_path / "data", label_column="name")
    expected = [(image, reported["name"]) for image, reported in theirs(paths, "jpg", "json")]
    assert all_rows(named.train) == expected
    odd = tar(tmp_path / "odd.tar", ODD_NAMES, tarfile.GNU_FORMAT)
    keys = [sample["__key__"] for sample in by_webdataset(odd)]
    source = splits_of(odd).train
    assert all_rows(source) == [(png(n), label) for n, label in enumerate("4747")]
    assert [source.where(row).partition(", ")[2].rpartition(".")[0] for row in range(4)] == keys


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_any_row_is_read_in_any_order_and_each_once(shuffle: Shuffle, tmp_path: Path):
    for n in range(2):
        tar(tmp_path / f"data/{n}.tar", samples(range(n * 300, n * 300 + 300)))
    source = splits_of(tmp_path / "data", memory_mib=1).train
    assert source.blocks.tolist() == [256, 44] * 2
    for epoch in range(2):
        order = EpochOrder(source.blocks, shuffle, 0, epoch, 2).at(np.arange(600))
        source.ahead(order)
        assert sorted(order.tolist()) == [*range(600)]
        for start in (0, 200, 400):  # as after a stop
            rows = order[start : start + 200]
            assert source.read(rows) == [(png(row), row % 3) for row in rows.tolist()]
    source.close()


def test_the_index_is_built_once_and_rebuilt_when_the_file_changes(tmp_path: Path, cache: Path):
    path = tar(tmp_path / "x.tar", samples(range(5)))
    first = splits_of(path).train
    expected = all_rows(first)
    (index,) = cache.glob("*.arrow")
    written, content = index.stat().st_mtime_ns, index.read_bytes()
    assert all_rows(splits_of(path).train) == expected
    assert index.stat().st_mtime_ns == written
    damage(index, -40)  # a damaged index is rebuilt
    assert all_rows(splits_of(path).train) == expected
    assert index.read_bytes() == content
    assert splits_of(path, label_column="name").class_names[0] == "class 0"
    os.utime(path, ns=(1, 1))
    assert splits_of(path).train.fingerprint() == first.fingerprint()  # at any path and time
    changed = splits_of(path).train
    tar(path, samples(range(1, 6)))
    with pytest.raises(DataError, match=r"x\.tar, row group 0"):
        changed.read(np.arange(5))
    assert splits_of(path).train.fingerprint() != first.fingerprint()


def test_a_sample_without_an_image_is_a_bad_record(tmp_path: Path):
    path = tar(tmp_path / "x.tar", [*samples(range(2)), ("x.cls", b"1"), *samples([3])])
    source = splits_of(path).train
    records = source.read(np.arange(4))
    assert [isinstance(image, BadRecord) for image, _ in records] == [False, False, True, False]
    assert source.where(2).endswith("x.tar, x")


TWO = [("a.png", png(1)), ("a.cls", b"0"), ("b.png", png(2)), ("b.cls", b"1")]


def test_members_that_are_no_data_are_counted_in_one_note(tmp_path: Path):
    for member in (
        special("c.png", SYMLINK, "a.png"),
        special("b.png", LINK, "a.png"),
        special("c.png", tarfile.CHRTYPE),
        special("label.x", b"V"),
        ("._a.png", b"x"),
        ("__MACOSX/a.png", b"x"),
        ("x/.000.png", b"x"),
        ("README", b"x"),
    ):
        opened = splits_of(tar(tmp_path / "x.tar", [*TWO, member]))
        assert all_rows(opened.train) == [(png(1), "0"), (png(2), "1")]
        name = member.name if isinstance(member, tarfile.TarInfo) else member[0]
        notes = [note for note in opened.notes if "not used" in note]
        assert [name in note for note in notes] == [True], name
    for folder in (".NET", "x/.cache/y", "."):  # hidden folders are data
        opened = splits_of(tar(tmp_path / "x.tar", [(f"{folder}/{name}", c) for name, c in TWO]))
        assert all_rows(opened.train) == [(png(1), "0"), (png(2), "1")]
        assert not [note for note in opened.notes if "not used" in note]


# ------------------------------------------------------------------ what is refused


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: tar(path, [(n, content if n == name else c) for n, c in samples(range(6))])


BROKEN: Mapping[str, tuple[Callable[[Path], object], str]] = {  # what is named besides the file
    "cut within an image": (lambda path: cut(path, 2000), ""),
    "cut between members": (lambda path: cut(path, 1024), "byte 1024, after 00000"),
    "a damaged header": (lambda path: damage(path, 1030), "byte 1024, after 00000"),
    "no tar file": (lambda path: path.write_bytes(b"hello" * 300), ""),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "no members": (lambda path: tar(path, []), "0 rows"),
    "a member twice": (lambda path: tar(path, [*samples([1]), *samples([1])]), "00001.cls"),
    "no label": (lambda path: tar(path, [*samples([1]), ("2.jpg", b"x")]), "2: no label"),
    "another member": (lambda path: tar(path, [("2.jpg", b"x"), ("2.txt", b"1")]), "-column txt"),
    "an empty label": (replaced("00002.cls", b" "), "00002.jpg: label"),
    "a negative label": (replaced("00002.cls", b"-1"), "00002.jpg: label '-1'"),
    "a label that is not text": (replaced("00002.cls", b"\xff\xfe"), "00002.cls"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tar_file_is_named_with_its_member(kind: str, tmp_path: Path):
    path = tar(tmp_path / "x.tar", samples(range(6)))
    make, named = BROKEN[kind]
    make(path)
    with pytest.raises(DataError) as caught:
        splits_of(path)
    assert named in str(caught.value)
    assert "x.tar" in str(caught.value)
    assert "\n" not in str(caught.value)
