"""Where images come from, how they are prepared, and the threads that do it."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.formats.image_folder import EXTENSIONS, FolderImages
from raytrain_ddp.data.iterable_source import IterableSource
from raytrain_ddp.data.loading.loader import (
    TrainLoader,
    eval_batches,
    memory_note,
    shuffle_for,
    window_for,
)
from raytrain_ddp.data.loading.loader_threads import Gate, LoaderThreads, prefetched
from raytrain_ddp.data.loading.nested import samples_of
from raytrain_ddp.data.loading.sources import BadRecord, Data, MapSource
from raytrain_ddp.data.order.epoch_order import EpochOrder, Plan, items_of_rank
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels.decoding import EncodedImage
from raytrain_ddp.data.pixels.image_batches import image_data
from raytrain_ddp.errors import DataError


def png(seed: int, height: int = 12, width: int = 10) -> bytes:
    """A noise image; lossless, so that pixels can be compared."""
    random = np.random.Generator(np.random.Philox(seed))
    content = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(content, "png")
    return content.getvalue()


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


# ------------------------------------------------------------------ other sources


def test_custom_sources_have_fingerprints_of_their_content(image_folder: Path):
    def array(values: list[int]) -> ArraySource:
        return ArraySource({"x": np.array(values)})

    assert array([1, 2]).fingerprint() == array([1, 2]).fingerprint()
    assert array([1, 2]).fingerprint() != array([2, 1]).fingerprint()
    train, val = (FolderImages(str(image_folder / split)) for split in ("train", "val"))
    assert train.fingerprint() != val.fingerprint()
    assert MapSource([1, 2]).fingerprint() != MapSource([1, 2, 3]).fingerprint()


FINGERPRINT = """
import datetime, sys
import numpy as np
from raytrain_ddp import ArraySource
text = np.array([*sys.argv[1:], None, 1.5, ("a", [2]), datetime.date(2026, 1, 2)], object)
parts = {"text": text, "pair": np.array([(text[0], 1)] * 6, [("a", object), ("b", int)])}
if hasattr(np.dtypes, "StringDType"):
    parts["long"] = np.array([30 * text[0]] * 6, np.dtypes.StringDType())
print(*(ArraySource({"x": part}).fingerprint() for part in parts.values()))
"""


def test_arrays_of_objects_have_fingerprints_of_their_content():
    """Their bytes are addresses, which differ between processes."""
    one, same, other = (
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT, *words.split()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
        ).stdout.split()
        for words in ("red blue", "red blue", "redder blue")
    )
    assert one == same
    assert not {*one} & {*other}
    known = "60eb6aff414c0dc3"
    assert ArraySource({"x": np.arange(6).reshape(2, 3).T}).fingerprint().startswith(known)


@pytest.mark.parametrize(
    "value", [lambda: 0, {"a", "b"}, torch.ones(2), ("a", {"b"}), SimpleNamespace(x={"b"})]
)
def test_objects_without_a_fingerprint_are_refused(value: Any):
    source = ArraySource({"x": np.array([value, None], object)})
    with pytest.raises(
        DataError, match=r"'x' is an array of objects .*: .*use MapSource"
    ) as caught:
        source.fingerprint()
    assert "\n" not in str(caught.value)


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


def test_an_image_folder_is_listed_as_by_torchvision(tmp_path: Path):
    for name in ("b/x/2.JPG", "b/10.png", "b/x/y/1.webp", "b/readme.txt", "a/z.jpeg", "a/Z.jpeg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "c").symlink_to(tmp_path / "b")
    source = FolderImages(str(tmp_path))
    theirs = ImageFolder(str(tmp_path))
    assert source.class_names == theirs.classes == ["a", "b", "c"]
    assert source.files == theirs.samples
    assert EXTENSIONS == IMG_EXTENSIONS


def test_a_folder_without_images_is_a_data_error(tmp_path: Path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "readme.txt").touch()
    for root in (tmp_path, tmp_path / "cat"):
        with pytest.raises(DataError, match=str(tmp_path)):
            FolderImages(str(root))


CHOICES = {
    "evaluation": None,
    "random": AugmentConfig(crop="random", flip=True),
    "shift": AugmentConfig(crop="shift", flip=True),
    "none": AugmentConfig(crop="none"),
    "randaugment": AugmentConfig(crop="none", policy="randaugment", jitter=(0.4, 0.4, 0.4, 0.1)),
    "trivial": AugmentConfig(crop="none", policy="trivial"),
    "augmix": AugmentConfig(crop="none", policy="augmix"),
    "erase": AugmentConfig(crop="none", erase=0.5),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_has_the_same_pixels_in_any_batch_order_and_thread(choice: str, image_folder: Path):
    source = FolderImages(str(image_folder / "train"))
    data = image_data(source, DataConfig(image_size=16), CHOICES[choice], 2)

    def collate(rows: list[int], epoch: int = 3) -> list[torch.Tensor]:
        ids = np.array(rows)
        batch = data.collate(data.source.read(ids), Draws(7, epoch, ids))
        assert batch["label"].tolist() == [int(row >= 5) for row in rows]
        return [value for name, value in batch.items() if name != "label"]

    def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    together = collate(list(range(9)))
    assert (together[0].shape, together[0].dtype) == ((9, 3, 16, 16), torch.uint8)
    assert together[0].is_contiguous(memory_format=torch.channels_last)
    order = [4, 8, 0, 3]
    assert equal(collate(order), [value[order] for value in together])
    alone = list(prefetched(range(9), lambda row: collate([row]), LoaderThreads(3, ahead=2)))
    assert equal([torch.cat(parts) for parts in zip(*alone, strict=True)], together)
    same_again = equal(collate(list(range(9)), epoch=4), together)
    assert same_again is (choice in ("evaluation", "none"))


@pytest.mark.parametrize("choice", ["random", "shift", "trivial"])
def test_repeats_of_a_row_are_augmented_separately_and_decoded_once(
    choice: str, image_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    source = FolderImages(str(image_folder / "train"))
    data = image_data(source, DataConfig(image_size=16), CHOICES[choice], 2)
    opened: list[Any] = []
    decode = EncodedImage._pixels
    monkeypatch.setattr(EncodedImage, "_pixels", lambda *a: opened.append(a) or decode(*a))
    rows, repeats = np.array([3, 3, 3, 7, 7, 7]), np.array([0, 1, 2] * 2)
    together = data.collate(source.read(rows), Draws(7, 0, rows, repeats))["image"]
    assert len(opened) == 2  # decoded
    assert len({image.numpy().tobytes() for image in together}) > 4  # of 6; two may coincide
    first = data.collate(source.read(rows[:1]), Draws(7, 0, rows[:1]))["image"]
    assert torch.equal(first, together[:1])  # the first repeat equals the row without repeats
    third = data.collate(source.read(rows[2:3]), Draws(7, 0, rows[2:3], repeats[2:3]))["image"]
    assert torch.equal(third, together[2:3])


def test_shift_moves_pixels_without_changing_values():
    images = [png(i, 8, 8) for i in range(40)]
    augment = AugmentConfig(crop="shift", flip=True)
    data = image_data(_Images(images), DataConfig(), augment, 1)
    plain = image_data(_Images(images), DataConfig(), None, 1)
    rows = np.arange(40)
    moved, still = (d.collate(d.source.read(rows), Draws(0, 0, rows)) for d in (data, plain))
    assert 10 < moved["flip"].sum() < 30  # the device mirrors them
    offsets = set()
    for image, original in zip(moved["image"], still["image"], strict=True):
        padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
        matches = [
            (top, left)
            for top, left in itertools.product(range(3), range(3))
            if torch.equal(image, padded[:, top : top + 8, left : left + 8])
        ]
        assert len(matches) == 1
        offsets.add(matches[0])
    assert len(offsets) == 9


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


@pytest.mark.parametrize(
    ("records", "reported"),
    [
        ([(png(0), 0), (png(1), 2)], r"image 6: label 2 is not in the range 0 to 1"),
        ([(png(0), -1), (png(1), 0)], r"image 5: label -1"),
        ([(png(0), 0), (b"no image", 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (b"", 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (png(1)[:60], 0)], r"image 6: not a readable image"),
        ([(png(0), 0), (png(1, 9, 9), 0)], r"unequal size.*--data\.image-size"),
    ],
)
def test_fault_20_a_bad_sample_is_named(records: list[tuple[bytes, int]], reported: str):
    data = image_data(_Images([]), DataConfig(), AugmentConfig(crop="none"), 2)
    with pytest.raises(DataError, match=reported):
        data.collate(records, Draws(0, 0, np.array([5, 6])))


@pytest.mark.parametrize("augment", [None, AugmentConfig(crop="random", flip=True, erase=0.5)])
def test_fault_20_bad_samples_are_skipped_on_request(augment: AugmentConfig | None):
    config = DataConfig(image_size=8, bad_records="skip")
    data = image_data(_Images([]), config, augment, 4)
    bad = [b"no image", b"", png(1)[:60], BadRecord("null")]
    records = [(png(0), 0), (bad[0], 1), (bad[1], 1), (png(1), 2), (bad[2], 0), (bad[3], 3)]
    rows = np.arange(6)
    batch = data.collate(records, Draws(0, 0, rows))
    assert batch["label"].tolist() == [0, 2]
    assert {len(tensor) for tensor in batch.values()} == {2}
    good = data.collate([records[0], records[3]], Draws(0, 0, rows[[0, 3]]))
    assert all(torch.equal(batch[name], good[name]) for name in good)
    nothing = data.collate(records[1:3], Draws(0, 0, rows[1:3]))
    assert {len(tensor) for tensor in nothing.values()} == {0}


def test_fault_20_a_label_out_of_range_is_never_skipped():
    data = image_data(_Images([]), DataConfig(bad_records="skip"), None, 2)
    with pytest.raises(DataError, match="image 5: label 2 is not in the range 0 to 1"):
        data.collate([(png(0), 2)], Draws(0, 0, np.array([5])))


# ------------------------------------------------------------------ the loader


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetched_keeps_the_order_and_works_ahead_within_its_limit(threads: int):
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (item % 3))  # later ones are done earlier
        return item * item

    results = prefetched(iter(range(50)), work, LoaderThreads(threads, ahead=2))
    first = next(results)
    time.sleep(0.05)
    assert len(begun) <= 1 + threads * 2
    assert [first, *results] == [item * item for item in range(50)]
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_prefetched_raises_a_workers_error_in_order_and_ends_its_threads(threads: int):
    def work(item: int) -> int:
        if item == 3:
            raise DataError("row 3")
        return item

    results = prefetched(range(1000), work, LoaderThreads(threads, ahead=2))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="row 3"):
        next(results)
    assert loader_threads() == []


@pytest.mark.parametrize("threads", [1, 3])
def test_closing_ends_the_threads_and_starts_no_further_item(threads: int):
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.05)

    results = prefetched(range(10**9), work, LoaderThreads(threads, ahead=4))
    next(results)
    assert loader_threads()
    results.close()
    assert loader_threads() == []
    assert len(begun) <= 1 + 2 * threads  # running items may finish; waiting ones are not started
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
        rows_data(rows), plan, shuffle, 3, 9, size, rank, LoaderThreads(threads, ahead=2)
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
    chunks = [
        batch["row"].tolist()
        for batch in eval_batches(rows_data(20), 8, range(3), LoaderThreads(threads))
    ]
    assert chunks == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    (middle,) = eval_batches(rows_data(20), 8, [1], LoaderThreads(threads))
    assert middle["row"].tolist() == chunks[1]
    assert list(eval_batches(rows_data(20), 8, [], LoaderThreads(threads))) == []


def test_bytes_prepared_ahead_are_bounded():
    """Results of 100 bytes, 300 allowed: with one thread, three are prepared, not ten."""
    begun: list[int] = []

    def work(item: int) -> bytes:
        begun.append(item)
        return bytes(100)

    results = prefetched(range(100), work, LoaderThreads(1, ahead=10, ahead_bytes=300), len)
    for taken in range(1, 6):
        next(results)
        time.sleep(0.02)
        assert len(begun) <= taken + 3
    assert len(begun) == 5 + 3
    results.close()


def test_a_thread_is_added_only_while_the_consumer_waits(monkeypatch: pytest.MonkeyPatch):
    """Each result takes a millisecond to consume; the clock is fake."""
    now = 0.0
    monkeypatch.setattr("raytrain_ddp.data.loading.loader_threads.time.monotonic", lambda: now)
    gate = Gate(LoaderThreads(3, begin=1))

    def consume(results: int, wait_s: float) -> int:
        nonlocal now

        class Coming(Future[int]):
            def result(self, timeout: float | None = None) -> int:
                nonlocal now
                now += wait_s
                return 0

        for _ in range(results):
            gate.passed(Coming(), lambda _: 1)
            now += 1e-3
        return gate.active

    assert consume(128, 1e-5) == 1  # 1 % of the time
    assert consume(32, 1e-4) == 2  # 9 %
    assert consume(128, 1e-5) == 2
    assert consume(320, 1e-4) == 3  # and never more than the limit


@pytest.mark.parametrize("begin", [1, None])
def test_the_number_of_active_threads_is_limited(begin: int | None):
    running: set[int] = set()
    most: list[int] = []

    def work(item: int) -> int:
        running.add(item)
        most.append(len(running))
        time.sleep(0.002)
        running.discard(item)
        return item

    results = prefetched(
        range(24), work, LoaderThreads(3, begin=begin)
    )  # too few to look at the wait
    assert list(results) == list(range(24))
    assert max(most) <= (begin or 3)


def test_closing_starts_no_item_that_waits_for_a_thread():
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.1)

    results = prefetched(range(100), work, LoaderThreads(8, begin=1))
    next(results)
    results.close()
    assert len(begun) <= 3  # the first, and those that had started when it arrived


def test_a_batch_that_lost_samples_is_an_error_unless_they_may_be_skipped():
    plan = Plan(24, slots=4, micro_batch=3)
    loader = TrainLoader(bad_rows_data(24, {7}), plan, "none", 3, 9, 1, 0, LoaderThreads(1))
    with pytest.raises(DataError, match="returned 2 samples for 3 records, but"):
        list(loader.steps(0, plan.steps_per_epoch))


class Hinted:
    """Rows in blocks of 4; records which rows are read and hinted."""

    block_bytes = np.full(40, 2**20)

    def __init__(self) -> None:
        self.blocks = np.full(40, 4)
        self.events: list[tuple[str, list[int]]] = []
        self.closed = 0

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        self.events.append(("read", rows.tolist()))
        return {"row": rows}

    def ahead(self, rows: np.ndarray) -> None:
        self.events.append(("ahead", rows.tolist()))

    def close(self) -> None:
        self.closed += 1

    def fingerprint(self) -> str:
        return ""


def test_a_source_is_notified_of_each_row_of_its_own_lanes_before_the_read():
    source = Hinted()
    data = Data(source, lambda records, _: {"row": torch.from_numpy(records["row"])})
    plan = Plan(160, slots=4, micro_batch=5)
    order = EpochOrder(source.blocks, "block", 9, 0, window=3)
    for rank in (0, 1):
        source.events.clear()
        loader = TrainLoader(data, plan, "block", 3, 9, 2, rank, LoaderThreads(0))
        seen = [s.batch["row"].tolist() for step in loader.steps(0, 8) for s in step]
        lanes = [
            row
            for slot in items_of_rank(4, 2, rank)
            for row in order.read(*plan.lane(slot)).tolist()
        ]
        assert sorted(row for rows in seen for row in rows) == sorted(lanes)
        hinted: set[int] = set()
        for kind, rows in source.events:
            if kind == "ahead":
                hinted |= set(rows)
            else:
                assert set(rows) <= hinted
        assert hinted == set(lanes)
    assert source.closed == 2


def test_the_window_follows_from_the_size_of_the_blocks():
    data = Data(Hinted(), lambda records, _: {})
    assert window_for(data, 5) == 5
    assert window_for(data, "auto") == 16
    for mib, blocks in ((4, 16), (8, 8), (10, 6), (60, 1), (1000, 1)):
        data.source.block_bytes = np.full(40, mib * 2**20)  # type: ignore[attr-defined]
        assert window_for(data, "auto") == blocks
    assert window_for(rows_data(20), "auto") == 16


def test_more_row_groups_than_fit_in_memory_are_reported():
    data = Data(Hinted(), lambda records, _: {})
    plan = Plan(160, slots=4, micro_batch=5)

    def note(shuffle: Any, limit_mib: int, size: int = 1) -> str | None:
        loader = TrainLoader(data, plan, shuffle, 3, 9, size, 0, LoaderThreads(0))
        return memory_note(loader, limit_mib * 2**20)

    assert note("block", 18) is None  # 4 lanes x 3 blocks x 1 MiB, and half of it read ahead
    assert note("block", 9, size=2) is None
    reported = note("block", 17)
    assert reported is not None
    assert "12 row groups are in use at a time, which need 18 MiB" in reported
    assert "--data.memory-mib to 18" in reported
    assert "lower --data.shuffle-window" in reported
    assert "--data.shuffle block" in str(note("full", 20))
    assert note("none", 1) is None


def test_repeats_are_adjacent_and_draw_separate_random_numbers():
    plan = Plan(20, slots=4, micro_batch=6, repeats=3)

    def steps(size: int, rank: int) -> Iterator[Any]:
        loader = TrainLoader(rows_data(20), plan, "full", 3, 9, size, rank, LoaderThreads(2))
        return loader.steps(0, 2 * plan.steps_per_epoch)

    alone = [slot for slots in steps(1, 0) for slot in slots]
    both = [slot for pair in zip(steps(2, 0), steps(2, 1), strict=True) for p in pair for slot in p]
    assert len(alone) == len(both) == 2 * 4 * plan.steps_per_epoch
    for one, other in zip(alone, both, strict=True):
        assert torch.equal(one.batch["row"], other.batch["row"])
        assert torch.equal(one.batch["draw"], other.batch["draw"])
    for epoch in (0, 1):
        slots = [s for s in alone if s.step // plan.steps_per_epoch == epoch and s.samples]
        rows = torch.cat([slot.batch["row"] for slot in slots]).tolist()
        assert sorted(rows) == sorted([*range(20)] * 3)
        assert len(set(torch.cat([slot.batch["draw"] for slot in slots]).tolist())) == 60
    first = alone[0].batch["row"].tolist()
    assert first[:3] == [first[0]] * 3


@pytest.mark.parametrize("repeats", [3, 4])
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_spread_repeats_are_in_different_slots_on_any_number_of_workers(repeats: int, shuffle: Any):
    plan = Plan(50, slots=4, micro_batch=3, repeats=repeats, spread=True)
    used = 50 // repeats
    assert plan.steps_per_epoch == 4  # 48 samples, not 50 times as many
    assert sum(plan.samples(step) for step in range(4)) == used * repeats == 48

    def steps(size: int, rank: int, start: int = 0) -> list[Any]:
        loader = TrainLoader(rows_data(50), plan, shuffle, 3, 9, size, rank, LoaderThreads(2))
        return [slot for slots in loader.steps(start, 8) for slot in slots]

    alone = steps(1, 0)
    spread = sorted([*steps(3, 0), *steps(3, 1), *steps(3, 2)], key=lambda s: (s.step, s.index))
    for ours in (spread[20:], steps(1, 0, start=5)):  # from any start step, too
        for one, other in zip(alone[20:], ours, strict=True):
            assert torch.equal(one.batch["row"], other.batch["row"])
            assert torch.equal(one.batch["draw"], other.batch["draw"])
    chosen = []
    for epoch in (0, 1):
        slots = [s for s in alone if s.step // 4 == epoch and s.samples]
        rows = torch.cat([slot.batch["row"] for slot in slots]).tolist()
        assert sorted(Counter(rows).values()) == [repeats] * used
        draws = torch.cat([slot.batch["draw"] for slot in slots]).tolist()
        assert len({*draws}) == len(draws) == used * repeats
        for slot in slots:
            own = slot.batch["row"].tolist()
            assert len({*own}) == len(own)
        chosen.append({*rows})
    assert chosen[0] != chosen[1]


def test_the_first_spread_samples_equal_torchvisions_sampler():
    """references/classification/sampler.py: each index `repetitions` times, distributed one by
    one."""
    slots, repeats, rows = 8, 3, 64
    plan = Plan(rows, slots, micro_batch=4, repeats=repeats, spread=True)
    indices = [index for index in range(rows) for _ in range(repeats)]
    for rank in range(slots):
        theirs = indices[rank::slots][: rows // slots]
        ours = np.concatenate([plan.samples_of(s, rank)[0] for s in range(plan.steps_per_epoch)])
        assert ours.tolist() == theirs[: len(ours)]
        assert len(ours) >= len(theirs) - 1  # 63 samples, not 64: 21 rows three times each


def bad_rows_data(rows: int, bad: set[int]) -> Data:
    """Rows, some of which are skipped."""

    def collate(records: dict[str, np.ndarray], draws: Draws) -> dict[str, torch.Tensor]:
        kept = [row for row in records["row"].tolist() if row not in bad]
        return {"row": torch.tensor(kept, dtype=torch.int64)}

    return Data(ArraySource({"row": np.arange(rows)}), collate)


def test_fault_20_a_slot_counts_the_remaining_samples():
    plan = Plan(24, slots=4, micro_batch=3)
    bad = {0, 1, 2, 3, 4, 5, 11, 12}

    def steps(size: int, rank: int) -> list[Any]:
        data = bad_rows_data(24, bad)
        loader = TrainLoader(data, plan, "none", 3, 9, size, rank, LoaderThreads(1), skip=True)
        return [slot for slots in loader.steps(0, plan.steps_per_epoch) for slot in slots]

    slots = steps(1, 0)
    good = [r for s in slots if s.samples for r in s.batch["row"].tolist()]
    assert sorted(good) == [row for row in range(24) if row not in bad]
    assert sum(slot.planned - slot.samples for slot in slots) == len(bad)
    assert [slot.samples for slot in slots if slot.index == 0] == [0, 0]  # rows 0 to 5
    assert all(samples_of(slot.batch) for slot in slots)  # the filler, if none is left
    halves = steps(2, 0) + steps(2, 1)
    key = lambda slot: (slot.step, slot.index)  # noqa: E731
    assert [(key(s), s.samples) for s in sorted(halves, key=key)] == [
        (key(s), s.samples) for s in slots
    ]


def test_fault_20_data_without_any_good_record_are_refused():
    plan = Plan(24, slots=4, micro_batch=3)
    loader = TrainLoader(
        bad_rows_data(24, set(range(24))), plan, "none", 3, 9, 1, 0, LoaderThreads(0), skip=True
    )
    with pytest.raises(DataError, match="none of the first 24 records"):
        loader.any_batch()


def test_digests_differ_by_rows_and_by_pixels():
    def digests(seed: int, draw: float = 0.0) -> list[str]:
        data = rows_data(20)
        own = Data(
            data.source,
            lambda r, d: {"x": torch.from_numpy(d.uniform(1) + draw), "r": 1.0},
        )
        plan = Plan(20, slots=4, micro_batch=3)
        loader = TrainLoader(own, plan, "full", 3, seed, 1, 0, LoaderThreads(1), digests=True)
        return [slot.digest for slots in loader.steps(0, 2) for slot in slots]

    assert digests(1) == digests(1)
    assert not set(digests(1)) & set(digests(2))
    assert not {d for d in digests(1) if d} & set(digests(1, draw=1e-9))


# ------------------------------------------------------------------ iterable data sets


class Stream:
    """The numbers from 0; counts how many were given."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self._rows):
            self.given += 1
            yield i


class SeekableStream(Stream):
    def skip_to(self, offset: int) -> Iterator[int]:
        for i in range(offset, self._rows):
            self.given += 1
            yield i


def stream_data(stream: Any, rows: int) -> Data:
    source = IterableSource(stream, rows, shared=True)
    return Data(source, lambda records, _: {"row": torch.tensor(records)})


@pytest.mark.parametrize("kind", [Stream, SeekableStream])
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_iterable_is_sharded_by_offset_each_item_once(kind: Any, threads: int):
    plan = Plan(107, slots=4, micro_batch=6)
    per_epoch = plan.steps_per_epoch
    for size in (1, 3):
        seen = []
        for rank in range(size):
            stream = kind(107)
            data = stream_data(stream, 107)
            shuffle = shuffle_for(data, "auto")
            loader = TrainLoader(data, plan, shuffle, 3, 9, size, rank, LoaderThreads(threads))
            slots = [s for step in loader.steps(0, per_epoch) for s in step if s.samples]
            for slot in slots:
                place = plan.span(slot.step, slot.index)
                assert slot.batch["row"].tolist() == list(range(*place))
                seen += slot.batch["row"].tolist()
            if kind is SeekableStream:
                assert stream.given == sum(slot.samples for slot in slots)
            else:  # each lane of a worker skips the items before its own, once
                passed_over = sum(plan.lane(slot)[1] for slot in items_of_rank(4, size, rank))
                assert stream.given == passed_over
        assert sorted(seen) == list(range(107))


def test_an_iterable_resumes_at_the_right_item_and_restarts_each_epoch():
    plan = Plan(20, slots=2, micro_batch=5)
    loader = TrainLoader(stream_data(Stream(20), 20), plan, "none", 3, 9, 1, 0, LoaderThreads(1))
    rows = [[s.batch["row"].tolist() for s in step] for step in loader.steps(1, 4)]
    second = [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]
    assert rows == [second, [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]], second]


def test_an_iterable_shorter_than_its_length_is_named():
    with pytest.raises(DataError, match="Stream ended after 18 items, 20 were expected"):
        IterableSource(Stream(18), 20).read(np.arange(15, 20))
    with pytest.raises(DataError, match=r"Stream has no length: give .* rows="):
        IterableSource(Stream(18))


def test_the_kind_of_shuffle_follows_from_the_data():
    plain = rows_data(20)
    assert [shuffle_for(plain, asked) for asked in ("auto", "full", "block")] == [
        *("full", "full", "block"),
    ]
    plain.source.prefers_blocks = True  # type: ignore[attr-defined]
    assert [shuffle_for(plain, asked) for asked in ("auto", "full", "block")] == [
        *("block", "full", "block"),
    ]
    assert shuffle_for(stream_data(Stream(3), 3), "full") == "none"
