"""WebDataset tar files, compared with what webdataset reads, and broken ones."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from parquet_files import png
from split_checks import labels_of, lines, splits_of
from webdataset import tariterators

from raytrain_ddp.data.formats import tar_shard
from raytrain_ddp.data.formats.shard_images import ShardImages
from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order.epoch_order import EpochOrder, Shuffle
from raytrain_ddp.errors import DataError

Member = tuple[str, bytes]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raytrain_ddp" / "tar-index"


def tar(path: Path, members: Iterable[Member], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as file:
        for name, content in members:
            reported = tarfile.TarInfo(name)
            reported.size = len(content)
            file.addfile(reported, io.BytesIO(content))
    return path


def samples(rows: Iterable[int]) -> Iterable[Member]:
    """Like the Hub's imagenet-1k-wds: an image, its class, and metadata."""
    for row in rows:
        yield f"{row:05d}.cls", str(row % 3).encode()
        yield f"{row:05d}.jpg", png(row)
        yield f"{row:05d}.json", json.dumps({"label": row % 3, "name": f"class {row % 3}"}).encode()


def part(source: Any) -> ShardImages:
    """The same rows, read again."""
    assert isinstance(source, ShardImages)
    return source.part(lambda start, stop: np.ones(stop - start, bool))


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


ODD_NAMES = [
    *((f"{'long/' * 40}{row}.PNG", png(row)) for row in (0,)),
    *((f"{'long/' * 40}{row}.Cls", b"4\n") for row in (0,)),
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
    opened = splits_of(tmp_path / "data")
    assert all_rows(opened.train) == theirs(paths, "jpg", "cls")
    assert opened.class_names == ["0", "1", "2"]
    assert opened.train.labels().tolist() == labels_of(opened.train)
    assert opened.train.where(31).endswith("x-train-1.tar, 00041.jpg")
    named = splits_of(tmp_path / "data", label_column="name")
    expected = [(image, reported["name"]) for image, reported in theirs(paths, "jpg", "json")]
    assert all_rows(named.train) == expected
    odd = tar(tmp_path / "odd.tar", ODD_NAMES, tarfile.GNU_FORMAT)
    keys = [sample["__key__"] for sample in by_webdataset(odd)]
    source = splits_of(odd).train
    assert all_rows(source) == [(png(n), label) for n, label in enumerate("4747")]
    assert [source.where(row).partition(", ")[2].rpartition(".")[0] for row in range(4)] == keys


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_any_row_is_read_in_any_order_and_each_once(
    shuffle: Shuffle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tar_shard, "_GROUP_ROWS", 7)
    for n in range(3):
        tar(tmp_path / f"data/{n}.tar", samples(range(n * 30, n * 30 + 30)))
    source = splits_of(tmp_path / "data", memory_mib=1).train
    assert source.blocks.tolist() == [7, 7, 7, 7, 2] * 3
    for epoch in range(2):
        order = EpochOrder(source.blocks, shuffle, 0, epoch, 2).read(0, 90)
        source.ahead(order)
        assert sorted(order.tolist()) == [*range(90)]
        for start in (0, 35, 70):  # as after a stop
            rows = order[start : start + 35]
            assert source.read(rows) == [(png(row), row % 3) for row in rows.tolist()]
    source.close()


def test_large_samples_are_in_groups_of_8_mib(tmp_path: Path):
    sizes = [3, 3, 3, 9, 1, 1, 5, 5]
    members = [
        member
        for row, mib in enumerate(sizes)
        for member in (
            (f"{row}.jpg", bytes([row]) * (mib * 2**20)),
            (f"{row}.cls", b"%d" % (row % 2)),
        )
    ]
    source = splits_of(tar(tmp_path / "x.tar", members)).train
    assert source.blocks.tolist() == [2, 1, 1, 3, 1]
    assert not source.prefers_blocks
    assert [len(image) // 2**20 for image, _ in source.read(np.arange(8))] == sizes


def test_bytes_between_images_count_toward_the_group_size(tmp_path: Path):
    members = [
        member
        for row in range(6)
        for member in (
            (f"{row}.cls", b"%d" % (row % 2)),
            (f"{row}.jpg", bytes([row]) * 100),
            (f"{row}.npy", bytes(3 * 2**20)),
        )
    ]
    source = splits_of(tar(tmp_path / "x.tar", members)).train
    assert source.blocks.tolist() == [3, 3]
    assert [image[0] for image, _ in source.read(np.arange(6))] == [*range(6)]


def test_the_index_is_built_once_and_rebuilt_when_the_file_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[str] = []
    make = tar_shard._made

    def counted(at: Any, *more: Any) -> Any:
        made.append(at.name)
        return make(at, *more)

    monkeypatch.setattr(tar_shard, "_made", counted)
    path = tar(tmp_path / "x.tar", samples(range(5)))
    first = splits_of(path).train
    expected = all_rows(first)
    assert all_rows(splits_of(path).train) == expected
    assert len(made) == 1
    (index,) = cache.glob("*.arrow")
    content = bytearray(index.read_bytes())
    content[-40] ^= 1  # a damaged index is rebuilt
    index.write_bytes(content)
    assert all_rows(splits_of(path).train) == expected
    assert len(made) == 2
    assert splits_of(path, label_column="name").class_names[0] == "class 0"
    assert len(made) == 3
    os.utime(path, ns=(1, 1))
    assert splits_of(path).train.fingerprint() == first.fingerprint()  # at any path and time
    assert len(made) == 4
    tar(path, samples(range(1, 6)))
    with pytest.raises(DataError, match=r"x\.tar, row group 0: cannot be read: it has changed"):
        part(first).read(np.arange(5))
    assert splits_of(path).train.fingerprint() != first.fingerprint()


def test_a_header_damaged_in_place_is_named_when_it_is_read(tmp_path: Path):
    path = tar(tmp_path / "x.tar", samples(range(5)))
    source = splits_of(path).train
    status = path.stat()
    damage(path, 1024 + 20)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    reported = r"x\.tar, row group 0: cannot be read: the header of 00000\.jpg is damaged"
    with pytest.raises(DataError, match=reported):
        source.read(np.arange(2))


def test_an_index_that_cannot_be_saved_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path = tar(tmp_path / "x.tar", samples(range(5)))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(all_rows(splits_of(path).train)) == 5
    assert "is not kept" in caplog.text


def test_splits_are_found_and_unused_files_are_named(tmp_path: Path):
    for split, rows in (("train-0000", 30), ("train-0001", 20), ("validation-00", 12)):
        tar(tmp_path / f"imagenet1k-{split}.tar", samples(range(rows)))
    (tmp_path / "_info.json").write_text("{}")
    (tmp_path / "classes.csv").write_text("a,b\n")
    opened = splits_of(tmp_path)
    reported = lines(opened)
    assert reported["training set"].startswith("50 images of 3 classes")
    assert reported["evaluation"] == "12 images of 3 classes: the validation split of data.source"
    assert "not used: classes.csv; to use one, specify it explicitly." in opened.notes
    assert int(splits_of(tmp_path / "*-train-*.tar").train.blocks.sum()) == 50
    tar(tmp_path / "train-00000-of-00003.tar", samples(range(3)))
    with pytest.raises(DataError, match=r"train-00001-of-00003\.tar"):
        splits_of(tmp_path / "train-*.tar")


def test_a_sample_without_an_image_is_a_bad_record(tmp_path: Path):
    members = [*samples(range(2)), ("x.cls", b"1"), *samples([3])]
    path = tar(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=r"x\.tar, x: not a readable image: the image is null"):
        splits_of(path)
    source = splits_of(path, bad_records="skip").train
    records = source.read(np.arange(4))
    assert [isinstance(image, BadRecord) for image, _ in records] == [False, False, True, False]
    assert source.where(2).endswith("x.tar, x")


def test_one_of_several_images_is_named_by_a_flag(tmp_path: Path):
    members = [
        (f"{row}.{name}", png(row + n))
        for row in (0, 1)
        for n, name in enumerate(("input.png", "seg.png"))
    ]
    members = [
        m
        for row in (0, 1)
        for m in (*members[2 * row : 2 * row + 2], (f"{row}.kind.txt", b"ab"[row : row + 1]))
    ]
    path = tar(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=r"x\.tar, 0: has several images \(input\.png, seg\.png\)"):
        splits_of(path)
    with pytest.raises(DataError, match=r"x\.tar, 0: no label in a member cls or json, only input"):
        splits_of(path, image_column="seg.png")
    source = splits_of(path, image_column="seg.png", label_column="kind.txt").train
    assert all_rows(source) == [(png(1), "a"), (png(2), "b")]


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def tar_of(path: Path, *members: Member | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as file:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                file.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                file.addfile(info, io.BytesIO(member[1]))
    return path


LINK, SYMLINK = tarfile.LNKTYPE, tarfile.SYMTYPE
TWO = [("a.png", png(1)), ("a.cls", b"0"), ("b.png", png(2)), ("b.cls", b"1")]
LINKS: Mapping[str, list[Member | tarfile.TarInfo]] = {
    "hard links": [*TWO, special("c.png", LINK, "a.png"), special("c.cls", LINK, "b.cls")],
    "symlinks": [*TWO, special("d/c.png", SYMLINK, "../a.png"), special("d/c.cls", LINK, "b.cls")],
    "symlinks to what follows": [special("c.png", SYMLINK, "./a.png"), ("c.cls", b"1"), *TWO],
    "a hard link to a symlink": [
        *TWO,
        *(special("s", SYMLINK, "a.png"), special("c.png", LINK, "s"), ("c.cls", b"1")),
    ],
    "a symlink to a symlink": [
        *(special("d/c.png", SYMLINK, "s"), ("d/c.cls", b"1")),
        *(special("d/s", SYMLINK, "../a.png"), *TWO),
    ],
    "files without a suffix": [
        *(("blobs/12", png(1)), special("a.png", SYMLINK, "blobs/12"), *TWO[1:]),
        *(special("c.png", SYMLINK, "blobs/12"), ("c.cls", b"1")),
    ],
    "names that begin with a dot": [
        *((f"./{name}", content) for name, content in TWO),
        *(special("./c.png", LINK, "./a.png"), ("./c.cls", b"1")),
    ],
}


@pytest.mark.parametrize("kind", LINKS)
def test_links_in_a_tar_file_are_followed(kind: str, tmp_path: Path):
    opened = splits_of(tar_of(tmp_path / "x.tar", *LINKS[kind]))
    rows = {opened.train.where(n)[-5:]: row for n, row in enumerate(all_rows(opened.train))}
    assert rows == {"a.png": (png(1), "0"), "b.png": (png(2), "1"), "c.png": (png(1), "1")}
    assert not [note for note in opened.notes if "not used" in note]


LEFT_OUT: Mapping[str, tuple[Any, int]] = {
    "a link to nothing": (special("c.png", SYMLINK, "gone.png"), 1),
    "a link to a folder": (special("c.png", SYMLINK, "."), 1),
    "a link to itself": (special("c.png", SYMLINK, "c.png"), 1),
    "a file packed twice": (special("b.png", LINK, "b.png"), 1),
    "a device": (special("c.png", tarfile.CHRTYPE), 1),
    "a pipe": (special("c.png", tarfile.FIFOTYPE), 1),
    "a folder": (special("c.png", tarfile.DIRTYPE), 0),
    "a volume label": (special("label.x", b"V"), 1),
    "AppleDouble": (("._a.png", b"x"), 1),
    "macOS": (("__MACOSX/a.png", b"x"), 1),
    "a NAS": (("./@eaDir/a.png", b"x"), 1),
    "a hidden file": (("x/.000.png", b"x"), 1),
    "version control": (("CVS/a.png", b"x"), 1),
    "no suffix": (("README", b"x"), 1),
}


@pytest.mark.parametrize("targets", [["gone.png"], ["e.x", "c.png"], ["c.png"], ["/a.png"], ["."]])
def test_a_link_that_leads_to_no_file_is_named_with_its_target(targets: list[str], tmp_path: Path):
    links = [special(*each) for each in zip(("c.png", "e.x"), [SYMLINK] * 2, targets, strict=False)]
    path = tar_of(tmp_path / "x.tar", *TWO, ("c.cls", b"1"), *links)
    with pytest.raises(DataError, match=rf"x\.tar, c\.png -> {targets[0]}: not a readable image"):
        splits_of(path)
    opened = splits_of(path, bad_records="skip")
    assert [note for note in opened.notes if f"c.png -> {targets[0]}" in note]
    assert isinstance(opened.train.read(np.array([2]))[0][0], BadRecord)


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_members_that_are_no_data_are_counted_in_one_note(kind: str, tmp_path: Path):
    member, count = LEFT_OUT[kind]
    opened = splits_of(tar_of(tmp_path / "x.tar", *TWO, member))
    assert all_rows(opened.train) == [(png(1), "0"), (png(2), "1")]
    name = member.name if isinstance(member, tarfile.TarInfo) else member[0]
    notes = [note for note in splits_of(tmp_path / "x.tar").notes if "not used" in note]
    assert [name in note for note in notes] == [True] * count


@pytest.mark.parametrize("folder", [".NET", ".data", "x/.cache/y", "."])
def test_members_in_hidden_folders_are_data(folder: str, tmp_path: Path):
    opened = splits_of(tar(tmp_path / "x.tar", [(f"{folder}/{name}", c) for name, c in TWO]))
    assert all_rows(opened.train) == [(png(1), "0"), (png(2), "1")]
    assert not [note for note in opened.notes if "not used" in note]
    path = tar(tmp_path / "y.tar", [(f"#recycle/{name}", c) for name, c in TWO])
    with pytest.raises(DataError, match=r"0 rows\. Not used: #recycle/a\.png"):
        splits_of(path)


LABELS: Mapping[str, tuple[list[bytes], list[str], list[Any]]] = {
    # name: (members, labels, as the digest of the index has had them from the first version on)
    "white space": ([b"7", b"7 ", b" 8", b"8\n\n"], ["7", "7", "8", "8"], [7, 7, 8, 8]),
    "zeros": ([b"000", b"+1\r\n", b"-0"], ["000", "+1", "-0"], [0, 1, 0]),
    "text": ([b" cat\t", b"1", b"dog\n"], ["cat", "1", "dog"], ["cat", "1", "dog"]),
    "floats": ([b"1.0", b"2"], ["1.0", "2"], ["1.0", "2"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_and_fingerprints_of_tar_files_are_those_of_earlier_versions(
    kind: str, tmp_path: Path
):
    contents, labels, recorded = LABELS[kind]
    members = [
        member
        for row, content in enumerate(contents)
        for member in ((f"{row}.png", png(row)), (f"{row}.cls", content))
    ]
    source = splits_of(tar(tmp_path / "x.tar", members)).train
    assert [label for _, label in all_rows(source)] == labels
    with tarfile.open(tmp_path / "x.tar") as file:
        images = [member for member in file if member.name.endswith("png")]
        size = (tmp_path / "x.tar").stat().st_size
    index = sha256()
    for member, label in zip(images, recorded, strict=True):
        index.update(f"{(member.name, member.offset_data, member.size, label)}\n".encode())
    expected = sha256(f"x.tar {size} {index.hexdigest()}\n".encode())
    assert source.fingerprint() == expected.hexdigest()


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_members_are_refused_with_a_remedy(form: str, tmp_path: Path):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(2**20)
    (tmp_path / "a.cls").write_text("0")
    command = ["tar", "-S", f"--format={form}", "-cf", "x.tar", "a.cls", "a.png"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with pytest.raises(DataError, match=r"x\.tar, a\.png: .*without tar -S"):
        splits_of(tmp_path / "x.tar")


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: tar(path, [(n, content if n == name else c) for n, c in samples(range(6))])


def without(name: str) -> Callable[[Path], object]:
    return lambda path: tar(
        path,
        [(n, c) for n, c in samples(range(6)) if n.partition(".")[0] != name or n[-3:] == "jpg"],
    )


BROKEN: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "cut within an image": (lambda path: cut(path, 2000), "unexpected end of data"),
    "cut between members": (
        lambda path: cut(path, 1024),
        "truncated or damaged at byte 1024, after 00000",
    ),
    "a damaged header": (
        lambda path: damage(path, 1030),
        "truncated or damaged at byte 1024, after 00000",
    ),
    "no tar file": (lambda path: path.write_bytes(b"hello" * 300), "not a readable tar file"),
    "empty": (lambda path: path.write_bytes(b""), "not a readable tar file: empty file"),
    "no members": (lambda path: tar(path, []), "x.tar: 0 rows"),
    "a member twice": (
        lambda path: tar(path, [*samples([1]), *samples([1])]),
        "00001.cls: its sample has two members cls",
    ),
    "no label": (without("00002"), "x.tar, 00002: no label in a member cls or json, only jpg"),
    "an empty label": (replaced("00002.cls", b" "), "x.tar, 00002.jpg: label is an empty string"),
    "a negative label": (
        replaced("00002.cls", b"-1"),
        "x.tar, 00002.jpg: label -1 is not in the range",
    ),
    "a label that is not text": (
        replaced("00002.cls", b"\xff\xfe"),
        "x.tar, 00002.cls: not a label: 'utf-8'",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tar_file_is_named_with_its_member(kind: str, tmp_path: Path):
    path = tar(tmp_path / "x.tar", samples(range(6)))
    make, reported = BROKEN[kind]
    make(path)
    with pytest.raises(DataError) as caught:
        splits_of(path)
    assert reported in str(caught.value)
    assert "x.tar" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        (b"{", "00002.json: not a label"),
        (b"[]", "00002.json: not a label"),
        (b"[" * 100_000, "00002.json: not a label"),
        (b"{}", "00002.json: no value: 'name'"),
    ],
)
def test_json_without_the_label_is_named(content: bytes, reported: str, tmp_path: Path):
    path = tmp_path / "x.tar"
    replaced("00002.json", content)(path)
    assert len(splits_of(path).class_names) == 3  # it is not needed
    with pytest.raises(DataError, match=reported):
        splits_of(path, label_column="name")


def test_compressed_and_remote_tar_files_are_refused_with_a_remedy(tmp_path: Path):
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"compressed, .* decompress it"):
        splits_of(tmp_path)
    fsspec.filesystem("memory").pipe("/tars/x.tar", b"")
    with pytest.raises(DataError, match="from local disks only: download it"):
        splits_of("memory://tars")
