"""Where images come from, what is made of them, and the threads that do it."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from raytrain_ddp.data.draws import Draws
from raytrain_ddp.data.images import FolderImages, image_data, open_images
from raytrain_ddp.data.loader import TrainLoader, eval_batches, prefetched
from raytrain_ddp.data.locate import locate
from raytrain_ddp.data.parquet import ParquetImages
from raytrain_ddp.data.plan import Plan
from raytrain_ddp.data.source import ArraySource, Data, MapSource
from raytrain_ddp.errors import DataError
from raytrain_ddp.inputs import AugmentConfig, DataConfig

# One test below says that no such warning may come; all others shall not fail for it.
DEPRECATED = "The image decoding and encoding capabilities of TorchVision"
pytestmark = pytest.mark.filterwarnings(f"ignore:{DEPRECATED}:DeprecationWarning")


def png(seed: int, height: int = 12, width: int = 10) -> bytes:
    """A picture of noise; lossless, so that pixels can be compared."""
    random = np.random.Generator(np.random.Philox(seed))
    content = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(content, "png")
    return content.getvalue()


def write_parquet(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=4, write_page_checksum=True)
    return str(path)


def hugging_face_column(images: list[bytes | None]) -> pa.Array:
    records = [{"bytes": image, "path": None} for image in images]
    return pa.array(records, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


@pytest.fixture(scope="module")
def digits() -> ParquetImages:
    train, _ = locate("digits", None)
    source = open_images(train, DataConfig())
    assert isinstance(source, ParquetImages)
    return source


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ with 5 cats and 4 dogs of unequal size, val/ with 2 and 2."""
    root = tmp_path_factory.mktemp("pets")
    for split, counts in (("train", (5, 4)), ("val", (2, 2))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                path = root / split / name / f"{i}.png"
                path.write_bytes(png(i, height=20 + i, width=17 + 2 * i))
    return root


# ------------------------------------------------------------------ locate


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize("train", ["train-00000-of-00002.parquet", "a/train.parquet", "x.parquet"])
@pytest.mark.parametrize(
    "test",
    [
        *("test-00000-of-00001.parquet", "val.parquet", "validation_0.parquet"),
        *("Test.parquet", "valid/part-0.parquet", "a/eval/train.parquet"),
    ],
)
def test_parquet_files_are_split_by_their_names_or_folders(train: str, test: str, tmp_path: Path):
    source = str(touch(tmp_path, train, test))
    for_training, for_evaluation = locate(source, None)
    assert for_training.paths == (str(tmp_path / train),)
    assert for_evaluation is not None
    assert for_evaluation.paths == (str(tmp_path / test),)
    assert (for_training.split, for_evaluation.split) == ("train", "eval")


def test_the_folder_of_a_data_set_may_have_any_name(tmp_path: Path):
    source = touch(tmp_path / "test", "train-0.parquet", "test-0.parquet")
    train, evaluation = locate(str(source), None)
    assert [Path(path).name for path in train.paths] == ["train-0.parquet"]
    assert evaluation is not None
    assert [Path(path).name for path in evaluation.paths] == ["test-0.parquet"]


def test_a_file_or_a_pattern_of_files_can_be_named(tmp_path: Path):
    touch(tmp_path, "b.parquet", "a.parquet", "test.parquet", "c.txt")
    train, evaluation = locate(str(tmp_path / "*.parquet"), None)
    assert [Path(path).name for path in train.paths] == ["a.parquet", "b.parquet"]
    assert evaluation is not None
    train, evaluation = locate(str(tmp_path / "b.parquet"), None)
    assert (train.paths, evaluation) == ((str(tmp_path / "b.parquet"),), None)
    train, evaluation = locate(str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    assert evaluation is not None
    assert evaluation.paths == (str(tmp_path / "b.parquet"),)


def test_class_folders_are_found_with_and_without_splits(image_folder: Path):
    train, evaluation = locate(str(image_folder), None)
    assert (train.kind, train.paths) == ("folder", (str(image_folder / "train"),))
    assert evaluation is not None
    assert evaluation.paths == (str(image_folder / "val"),)
    train, evaluation = locate(str(image_folder / "train"), None)
    assert (train.paths, evaluation) == ((str(image_folder / "train"),), None)
    train, evaluation = locate(str(image_folder / "train"), str(image_folder / "val"))
    assert evaluation is not None
    assert evaluation.paths == (str(image_folder / "val"),)


def test_fault_17_what_is_not_there_is_named_with_its_field(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "only", "test.parquet")
    for source, eval_source, told in (
        (str(tmp_path / "no"), None, "data.source"),
        (str(tmp_path / "*.parquet"), None, "no file matches"),
        (str(tmp_path / "empty"), None, "holds neither"),
        (str(tmp_path / "only"), None, "for evaluation only"),
        ("digits", str(tmp_path / "no"), "data.eval_source"),
    ):
        with pytest.raises(DataError, match=told) as caught:
            locate(source, eval_source)
        assert (eval_source or source) in str(caught.value)


# ------------------------------------------------------------------ Parquet


def test_the_bundled_digits_are_1437_and_360_images_of_ten_classes(digits: ParquetImages):
    _, evaluation = locate("digits", None)
    assert evaluation is not None
    test = open_images(evaluation, DataConfig())
    assert (digits.blocks.sum(), test.blocks.sum()) == (1437, 360)
    assert digits.class_names == test.class_names == list("0123456789")
    rows = digits.read(np.arange(1437))
    others = test.read(np.arange(360))
    for records in (rows, others):
        assert set(np.bincount([label for _, label in records]) > 0.08 * len(records)) == {True}
    # The 1797 scans are all different but for a few; no image is on both sides of the split.
    assert not {image for image, _ in rows} & {image for image, _ in others}
    batch = image_data(test, DataConfig(), 10, train=False).collate(
        others, Draws(0, 0, np.arange(360))
    )
    assert (batch["image"].shape, batch["image"].dtype) == ((360, 3, 8, 8), torch.uint8)


def test_rows_of_several_files_and_row_groups_are_read_in_the_order_asked_for(tmp_path: Path):
    images = [png(i) for i in range(11)]
    labels = list(range(11))
    one = write_parquet(tmp_path / "1.parquet", image=images[:6], label=labels[:6])
    column = hugging_face_column(images[6:])
    two = write_parquet(
        tmp_path / "2.parquet", image=column, label=pa.array(labels[6:], pa.uint8())
    )
    source = ParquetImages([one, two], "image", "label")
    assert source.blocks.tolist() == [4, 2, 4, 1]
    asked = [10, 0, 5, 6, 5, 3]
    assert source.read(np.array(asked)) == [(images[row], row) for row in asked]
    assert source.class_names == [str(label) for label in range(11)]
    assert one in source.where(5)
    assert two in source.where(6)


def test_class_names_come_from_the_hugging_face_features(tmp_path: Path):
    features = {"label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": [png(0)], "label": [0]}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "x.parquet")
    source = ParquetImages([str(tmp_path / "x.parquet")], "image", "label")
    assert source.class_names == ["cat", "dog", "owl"]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"img": [b""], "label": [0]}, ["no column 'image'", "img", "--data.image-column"]),
        ({"image": [b""], "labels": [0]}, ["no column 'label'", "'labels'", "--data.label-column"]),
        ({"image": ["text"], "label": [0]}, ["'image' is string", "binary"]),
        ({"image": [b""], "label": [0.5]}, ["'label' is double", "integers"]),
        ({"image": [b""], "label": ["cat"]}, ["'label' is string", "integers"]),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, ["0 rows"]),
        ({"image": [b""], "label": pa.array([None], pa.int64())}, []),
    ],
)
def test_fault_21_columns_that_cannot_be_right_are_refused_when_opened(
    columns: dict[str, Any], told: list[str], tmp_path: Path
):
    path = write_parquet(tmp_path / "x.parquet", **columns)
    with pytest.raises(DataError) as caught:
        ParquetImages([path], "image", "label")
    assert [word for word in [path, *told] if word not in str(caught.value)] == []


@pytest.mark.parametrize("column", ["image", "label"])
def test_fault_21_a_null_is_named_with_file_and_row(column: str, tmp_path: Path):
    images: list[bytes | None] = [png(i) for i in range(6)]
    labels: list[int | None] = list(range(6))
    (images if column == "image" else labels)[5] = None
    path = write_parquet(tmp_path / "x.parquet", image=hugging_face_column(images), label=labels)
    source = ParquetImages([path], "image", "label")
    assert len(source.read(np.arange(4))) == 4
    with pytest.raises(DataError, match=rf"row group 1, row 1: {column} is null") as caught:
        source.read(np.array([4]))
    assert path in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 100])
def test_fault_18_a_truncated_file_is_a_data_error(kept: int, tmp_path: Path):
    path = write_parquet(tmp_path / "x.parquet", image=[png(0)], label=[0])
    Path(path).write_bytes(Path(path).read_bytes()[:kept])
    with pytest.raises(DataError, match=r"x\.parquet"):
        ParquetImages([path], "image", "label")


def test_fault_19_a_flipped_bit_in_a_page_is_a_data_error(tmp_path: Path):
    path = write_parquet(tmp_path / "x.parquet", image=[png(0)], label=[0])
    content = bytearray(Path(path).read_bytes())
    content[content.index(png(0)[:8]) + 60] ^= 1
    Path(path).write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet, row group 0"):
        ParquetImages([path], "image", "label").read(np.array([0]))


def test_fault_29_the_fingerprint_changes_with_the_data(tmp_path: Path):
    def fingerprint(labels: list[int]) -> str:
        path = write_parquet(tmp_path / "x.parquet", image=[png(i) for i in labels], label=labels)
        return ParquetImages([path], "image", "label").fingerprint()

    assert fingerprint([0, 1, 2]) == fingerprint([0, 1, 2])
    assert len({fingerprint(labels) for labels in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 3])}) == 3


def test_other_sources_have_fingerprints_of_their_content(image_folder: Path):
    def array(values: list[int]) -> ArraySource:
        return ArraySource({"x": np.array(values)})

    assert array([1, 2]).fingerprint() == array([1, 2]).fingerprint()
    assert array([1, 2]).fingerprint() != array([2, 1]).fingerprint()
    train, val = (FolderImages(str(image_folder / split)) for split in ("train", "val"))
    assert train.fingerprint() != val.fingerprint()
    assert MapSource([1, 2]).fingerprint() != MapSource([1, 2, 3]).fingerprint()


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(DataError, match="'y': 3"):
        ArraySource({"x": np.zeros(2), "y": np.zeros(3)})


# ------------------------------------------------------------------ ImageFolder and batches


def test_an_image_folder_has_its_classes_and_rows(image_folder: Path):
    source = FolderImages(str(image_folder / "train"))
    assert source.class_names == ["cat", "dog"]
    assert int(source.blocks.sum()) == 9
    records = source.read(np.array([8, 0]))
    assert [label for _, label in records] == [1, 0]
    assert records[0][0] == (image_folder / "train/dog/3.png").read_bytes()
    assert source.where(8).endswith("dog/3.png")


def test_a_folder_without_images_is_a_data_error(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "readme.txt").touch()
    for root in (tmp_path, tmp_path / "cat"):
        with pytest.raises(DataError, match=str(tmp_path)):
            FolderImages(str(root))


CHOICES = [
    DataConfig(image_size=16, augment="crop", flip=True),
    DataConfig(image_size=16, augment="shift", flip=True),
    DataConfig(image_size=16, augment="none"),
]


@pytest.mark.parametrize("config", CHOICES, ids=lambda config: config.augment)
@pytest.mark.parametrize("train", [True, False])
def test_a_row_has_the_same_pixels_in_any_batch_order_and_thread(
    config: DataConfig, train: bool, image_folder: Path
):
    data = image_data(FolderImages(str(image_folder / "train")), config, 2, train)

    def collate(rows: list[int], epoch: int = 3) -> torch.Tensor:
        ids = np.array(rows)
        batch = data.collate(data.source.read(ids), Draws(7, epoch, ids))
        assert batch["label"].tolist() == [int(row >= 5) for row in rows]
        return batch["image"]

    together = collate(list(range(9)))
    assert (together.shape, together.dtype) == ((9, 3, 16, 16), torch.uint8)
    order = [4, 8, 0, 3]
    assert torch.equal(collate(order), together[order])
    alone = list(prefetched(range(9), lambda row: collate([row]), threads=3, ahead=2))
    assert torch.equal(torch.cat(alone), together)
    changes = train and config.augment != "none"
    assert torch.equal(collate(list(range(9)), epoch=4), together) is not changes


def test_shift_and_flip_move_pixels_and_change_none():
    images = [png(i, 8, 8) for i in range(40)]
    data = image_data(_Images(images), DataConfig(augment="shift", flip=True), 1, train=True)
    plain = image_data(_Images(images), DataConfig(), 1, train=False)
    rows = np.arange(40)
    moved, still = (
        d.collate(d.source.read(rows), Draws(0, 0, rows))["image"] for d in (data, plain)
    )
    offsets = set()
    for image, original in zip(moved, still, strict=True):
        padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
        matches = [
            (top, left, flipped)
            for top, left, flipped in itertools.product(range(3), range(3), (False, True))
            if torch.equal(
                image.flip(-1) if flipped else image, padded[:, top : top + 8, left : left + 8]
            )
        ]
        assert len(matches) == 1
        offsets.add(matches[0])
    assert len(offsets) > 12  # of the 18 there are


class _Images:
    """Encoded images in memory, all of class 0."""

    def __init__(self, images: list[bytes]) -> None:
        self._images = images
        self.blocks = np.array([len(images)])
        self.class_names = ["0"]

    def read(self, rows: np.ndarray) -> list[tuple[bytes, int]]:
        return [(self._images[row], 0) for row in rows.tolist()]

    def fingerprint(self) -> str:
        return ""

    def where(self, row: int) -> str:
        return f"image {row}"


def test_decoding_uses_no_deprecated_function():
    data = image_data(_Images([png(0)]), DataConfig(), 1, train=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.collate(data.source.read(np.array([0])), Draws(0, 0, np.array([0])))


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([(png(0), 0), (png(1), 2)], r"image 6: label 2 is not in 0 to 1"),
        ([(png(0), -1), (png(1), 0)], r"image 5: label -1"),
        ([(png(0), 0), (b"no image", 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (b"", 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (png(1)[:60], 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (png(1, 9, 9), 0)], r"unequal size.*--data\.image-size"),
    ],
)
def test_fault_20_a_bad_sample_is_named(records: list[tuple[bytes, int]], told: str):
    data = image_data(_Images([]), DataConfig(augment="none"), 2, train=True)
    with pytest.raises(DataError, match=told):
        data.collate(records, Draws(0, 0, np.array([5, 6])))


# ------------------------------------------------------------------ the loader


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetched_keeps_the_order_and_works_ahead_but_not_further(threads: int):
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (item % 3))  # later ones are done earlier
        return item * item

    results = prefetched(iter(range(50)), work, threads, ahead=2)
    first = next(results)
    time.sleep(0.05)
    assert len(begun) <= 1 + threads * 2
    assert [first, *results] == [item * item for item in range(50)]
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetched_raises_the_workers_error_in_its_place_and_ends_its_threads(threads: int):
    def work(item: int) -> int:
        if item == 3:
            raise DataError("row 3")
        return item

    results = prefetched(range(1000), work, threads, ahead=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="row 3"):
        next(results)
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [1, 3])
def test_closing_ends_the_threads_and_begins_nothing_more(threads: int):
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05)

    results = prefetched(range(10**9), work, threads, ahead=4)
    next(results)
    assert loader_threads()
    results.close()
    assert loader_threads() == []
    assert len(begun) <= 1 + 2 * threads  # what ran may end; what waited is not begun
    count = len(begun)
    time.sleep(0.1)
    assert len(begun) == count


def rows_data(rows: int) -> Data:
    source = ArraySource({"row": np.arange(rows)}, rows_per_block=8)

    def collate(records: dict[str, np.ndarray], draws: Draws) -> dict[str, torch.Tensor]:
        assert draws.rows.tolist() == records["row"].tolist()
        time.sleep(0.0003 * (records["row"][0] % 3))
        draw = torch.from_numpy(draws.uniform(1)[:, 0])
        return {"row": torch.from_numpy(records["row"]), "draw": draw}

    return Data(source, collate)


def train_loader(rows: int, size: int, rank: int, threads: int, shuffle: Any) -> TrainLoader:
    plan = Plan(rows, slots=4, micro_batch=6)
    return TrainLoader(
        rows_data(rows), plan, shuffle, 3, 9, size, rank, threads=threads, prefetch=2
    )


def of_all_ranks(
    rows: int, size: int, threads: int, shuffle: Any, start: int, stop: int
) -> Iterator[list[tuple[Any, ...]]]:
    """Each step's slots: (step, slot, samples, rows, draws)."""
    ranks = [
        train_loader(rows, size, rank, threads, shuffle).steps(start, stop) for rank in range(size)
    ]
    for parts in zip(*ranks, strict=True):
        yield [
            (slot.step, slot.index, slot.samples, *(v.tolist() for v in slot.batch.values()))
            for part in parts
            for slot in part
        ]
    assert all(next(rank, None) is None for rank in ranks)


@pytest.mark.parametrize("shuffle", ["full", "block"])
@pytest.mark.parametrize("rows", [107, 3])
def test_the_steps_are_the_same_for_1_2_and_3_ranks_and_0_1_and_3_threads(rows: int, shuffle: str):
    steps = 2 * Plan(rows, 4, 6).steps_per_epoch
    expected = list(of_all_ranks(rows, 1, 0, shuffle, 0, steps))
    for epoch in (0, 1):
        half = expected[epoch * steps // 2 : (epoch + 1) * steps // 2]
        seen = [row for step in half for slot in step if slot[2] for row in slot[3]]
        assert sorted(seen) == list(range(rows))
    assert expected[: steps // 2] != expected[steps // 2 :]
    for size, threads in ((1, 1), (2, 0), (3, 3), (3, 1)):
        assert list(of_all_ranks(rows, size, threads, shuffle, 0, steps)) == expected
        later = list(of_all_ranks(rows, size, threads, shuffle, steps - 1, steps))
        assert later == expected[steps - 1 :]  # any step can be the first
    assert loader_threads() == []


def test_an_empty_slot_has_a_batch_of_the_right_kind():
    slots = next(train_loader(3, 1, 0, 0, "full").steps(0, 1))
    assert [slot.samples for slot in slots] == [0, 1, 1, 1]
    assert slots[0].batch["row"].shape == (1,)


def test_closing_the_steps_ends_the_threads():
    steps = train_loader(107, 1, 0, 3, "full").steps(0, 10**6)
    next(steps)
    assert loader_threads()
    steps.close()
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [0, 2])
def test_eval_batches_are_the_chunks_in_stored_order_the_last_one_shorter(threads: int):
    chunks = [batch["row"].tolist() for batch in eval_batches(rows_data(20), 8, range(3), threads)]
    assert chunks == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    (middle,) = eval_batches(rows_data(20), 8, [1], threads)
    assert middle["row"].tolist() == chunks[1]
    assert list(eval_batches(rows_data(20), 8, [], threads)) == []
