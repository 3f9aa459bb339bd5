"""Where Parquet files are found, and what is read from them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import (
    all_of,
    converted,
    hugging_face,
    located,
    opened,
    png,
    with_class_names,
    write_images,
    write_parquet,
)

from raytrain_ddp.data.loading.sources import BadRecord
from raytrain_ddp.data.order import EpochOrder, Plan
from raytrain_ddp.errors import DataError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


# ------------------------------------------------------------------ where they are


def test_a_file_a_folder_of_any_name_or_a_pattern_can_be_named(tmp_path: Path):
    root = touch(tmp_path / "test", "train-0.parquet", "test-0.parquet", "c.txt")
    for written in (str(root), f"file://{root}"):  # "test" is its name, not its split
        train, evaluation = located(written)
        assert evaluation is not None
        names = [Path(path).name for path in (*train.paths, *evaluation.paths)]
        assert names == ["train-0.parquet", "test-0.parquet"]
        assert (train.split, evaluation.split) == ("train", "eval")
    one, two = (str(root / f"{name}-0.parquet") for name in ("test", "train"))
    assert located(str(root / "t*-0.parquet"), one)[0].paths == (two,)
    assert located(two)[0].paths == (two,)
    train, evaluation = located(two, one)
    assert evaluation is not None
    assert (train.paths, evaluation.paths) == ((two,), (one,))


def test_a_converted_data_set_consists_of_the_listed_files(tmp_path: Path):
    root = converted(tmp_path)
    (root / "surplus.parquet").touch()
    train, evaluation = located(str(root))
    assert train.paths == (str(root / "b.parquet"), str(root / "a.parquet"))
    assert evaluation is not None
    assert evaluation.paths == (str(root / "c.parquet"),)
    (root / "dataset.json").write_text('{"format": "of others"}')
    assert len(located(str(root))[0].paths) == 4


def test_fault_17_and_18_all_missing_and_truncated_files_of_a_converted_set_are_named(
    tmp_path: Path,
):
    root = converted(tmp_path)
    (root / "a.parquet").unlink()
    (root / "c.parquet").write_text("short")
    with pytest.raises(DataError) as caught:
        located(str(root))
    assert "a.parquet" in str(caught.value)
    assert "c.parquet" in str(caught.value)
    assert "b.parquet" not in str(caught.value)
    (tmp_path / "x").write_text("123456789")
    outside = [{"path": "../x", "split": "train", "bytes": 9}]
    for changes in ({"version": 2}, {"files": [{"path": "a.parquet"}]}, {"files": outside}):
        with pytest.raises(DataError, match=r"dataset\.json"):
            located(str(converted(tmp_path / "set", **changes)))
    for text in ("{", "[" * 100_000):
        (tmp_path / "set" / "dataset.json").write_text(text)
        with pytest.raises(DataError, match=r"dataset\.json"):
            located(str(tmp_path / "set"))


# ------------------------------------------------------------------ what is read


def test_rows_of_several_files_and_row_groups_are_read_in_the_order_asked_for(tmp_path: Path):
    images = [png(i) for i in range(11)]
    one = write_parquet(tmp_path / "1.parquet", {"image": images[:6], "label": list(range(6))})
    columns = {"image": hugging_face(images[6:]), "label": pa.array(range(6, 11), pa.uint8())}
    two = write_parquet(tmp_path / "2.parquet", columns)
    source = opened(one, two)
    assert source.blocks.tolist() == [4, 2, 4, 1]
    asked = [10, 0, 5, 6, 5, 3]
    assert source.read(np.array(asked)) == [(images[row], row) for row in asked]
    assert source.class_names == [str(label) for label in range(11)]
    assert source.where(5) == f"{one}, row group 1, row 1"
    assert source.where(6) == f"{two}, row group 0, row 0"


STRUCTS = [
    pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary()), ("more", pa.int8())]),
    pa.struct([("bytes", pa.binary())]),
]


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0", "use_dictionary": False}])
def test_all_kinds_of_columns_have_the_same_images(options: dict[str, Any], tmp_path: Path):
    images = [png(i) for i in range(9)]
    for kind in (*STRUCTS, pa.binary(), pa.large_binary(), pa.binary_view()):
        records = [{"bytes": image} for image in images] if pa.types.is_struct(kind) else images
        columns = {"image": pa.array(records, kind), "label": list(range(9))}
        source = opened(write_parquet(tmp_path / "x.parquet", columns, **options))
        assert all_of(source) == [(image, row) for row, image in enumerate(images)], kind


def test_images_given_only_by_path_are_read_from_their_files(tmp_path: Path):
    for name in ("beside.png", "folder/below.png", "far/away.png"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(name.encode())
    paths = ["beside.png", "folder/below.png", str(tmp_path / "set/far/away.png"), "gone.png", None]
    column = hugging_face([None, None, None, None, None, png(5), png(6)], [*paths, "ignored.png"])
    columns = {"image": column, "label": [0] * 7}
    source = opened(write_parquet(tmp_path / "set" / "x.parquet", columns))
    images = [image for image, _ in all_of(source)]
    assert images[:3] == [b"beside.png", b"folder/below.png", b"far/away.png"]
    assert images[5:] == [png(5), png(6)]
    assert [type(image) for image in images[3:5]] == [BadRecord, BadRecord]
    assert "gone.png" in str(images[3])
    only_paths = pa.array([{"path": "beside.png"}], pa.struct([("path", pa.string())]))
    path = write_parquet(tmp_path / "set" / "y.parquet", {"image": only_paths, "label": [0]})
    assert all_of(opened(path)) == [(b"beside.png", 0)]


# The lanes' blocks just fit in 1 MiB; a thread that is late also needs blocks that the others
# have released.
@pytest.mark.parametrize(("threads", "memory_mib"), [(1, 1), (3, 2)])
def test_row_groups_are_read_once_per_lane(
    threads: int, memory_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, blocks, window, plan = 160, 40, 2, Plan(160, slots=3, micro_batch=5)
    random = np.random.default_rng(0)
    columns = {"image": [random.bytes(30_000) for _ in range(rows)], "label": [0] * rows}
    path = write_parquet(tmp_path / "x.parquet", columns, use_dictionary=False)
    source = opened(path, memory_mib=memory_mib)  # of 4.8
    loads: list[Any] = []
    load = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *a, **k: loads.append(a) or load(*a, **k)
    )
    expected = dict(enumerate(columns["image"]))
    for epoch in range(2):
        order = EpochOrder(source.blocks, "block", 7, epoch, window)
        parts = [
            order.at(np.arange(*plan.span(k, j)))
            for k in range(plan.steps_per_epoch)
            for j in range(3)
        ]
        with ThreadPoolExecutor(threads) as pool:
            futures = []
            for number, part in enumerate(parts):
                for later in parts[number + 1 : number + 4]:
                    source.ahead(later)
                futures.append(pool.submit(source.read, part))
                if number >= threads:
                    futures[number - threads].result()
        seen = np.concatenate(parts).tolist()
        records = [record for future in futures for record in future.result()]
        assert [image for image, _ in records] == [expected[row] for row in seen]
        assert sorted(seen) == list(range(rows))
    source.close()
    # Two lanes share the blocks of a window, which do not stay in 1 MiB until both have read them.
    borders = (plan.slots - 1) * window if memory_mib == 1 else 0
    assert blocks * 2 <= len(loads) <= (blocks + borders) * 2


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("bad", [None, -1, 3])
def test_fault_21_an_out_of_range_label_is_named_before_the_first_step(
    bad: int | None, tmp_path: Path
):
    names = with_class_names(tmp_path / "0.parquet", ["cat", "dog", "owl"], [0])
    columns = {"image": [png(0)] * 8, "label": pa.array([0, 1, 2, 0, 1, 2, bad, 0], pa.int64())}
    path = write_parquet(tmp_path / "x.parquet", columns)
    named = f"{path}, row group 1, row 2: label {'null' if bad is None else bad}"
    source = opened(names, path)
    assert len(source.read(np.arange(1, 5))) == 4
    for use in (source.labels, lambda: source.read(np.array([5]))):  # when they are counted
        with pytest.raises(DataError) as caught:
            use()
        assert named in str(caught.value).replace("label is", "label")


@pytest.mark.parametrize("change", ["vanishes", "is cut off", "is another"])
def test_fault_17_and_18_a_file_that_changes_while_it_is_read_is_a_data_error(
    change: str, tmp_path: Path
):
    path = write_images(tmp_path / "x.parquet", 8)
    source, content = opened(path), Path(path).read_bytes()
    assert source.read(np.array([0]))[0][1] == 0
    if change == "vanishes":
        Path(path).unlink()
    elif change == "is cut off":
        os.truncate(path, 1000)
    else:
        write_images(Path(path), 9, first=100)
    with pytest.raises(DataError, match=r"x\.parquet, row group 1"):
        source.read(np.array([4]))
    Path(path).write_bytes(content)
    assert source.read(np.array([4])) == [(png(4), 4)]


def test_fault_19_every_flipped_bit_in_a_needed_page_is_detected(tmp_path: Path):
    path = write_images(tmp_path / "x.parquet", 8, use_dictionary=False, compression="none")
    expected, source = all_of(opened(path)), opened(path)
    content = Path(path).read_bytes()
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    random = np.random.default_rng(0)

    def flipped(start: int, stop: int) -> list[Any] | str:
        """The result or error of reading with a random bit between the two bytes flipped."""
        damaged = bytearray(content)
        damaged[random.integers(start, stop)] ^= 1 << random.integers(8)
        Path(path).write_bytes(damaged)
        try:
            return opened(path).read(np.arange(8))
        except DataError as error:
            return str(error)

    images = content.index(png(0)), content.index(png(3)) + len(png(3))
    noticed = [flipped(*images) for _ in range(40)]
    assert all("x.parquet, row group 0" in result for result in noticed)
    for name in ("image.bytes", "label"):  # with the pages' headers, which have no checksum
        start = columns[name].data_page_offset
        results = [flipped(start, start + columns[name].total_compressed_size) for _ in range(40)]
        assert all(isinstance(result, str) or result == expected for result in results)
        assert any(isinstance(result, str) for result in results)
    start = columns["image.path"].data_page_offset
    for _ in range(10):
        assert flipped(start, start + columns["image.path"].total_compressed_size) == expected
    Path(path).write_bytes(content)
    assert all_of(source) == expected


def test_fault_29_the_fingerprint_changes_with_the_data_but_not_with_its_location(tmp_path: Path):
    def fingerprint(folder: str, rows: int, first: int = 0) -> str:
        path = write_images(tmp_path / folder / "x.parquet", rows, first)
        return opened(path).fingerprint()

    assert fingerprint("a", 3) == fingerprint("b", 3)
    assert len({fingerprint("a", 3), fingerprint("a", 4), fingerprint("a", 3, first=1)}) == 3
