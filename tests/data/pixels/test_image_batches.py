"""Batches of images: the pixels of a row wherever it is read, and bad records."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from parquet_files import noise, png

from raytrain_ddp.config.sections import AugmentConfig, DataConfig
from raytrain_ddp.data.loading.loader import LoaderThreads, prefetched
from raytrain_ddp.data.loading.sources import BadRecord, ImageSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.image_batches import image_data
from raytrain_ddp.data.splits import FolderImages
from raytrain_ddp.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five cats and four dogs of unequal size."""
    root = tmp_path_factory.mktemp("pets")
    for name, count in (("cat", 5), ("dog", 4)):
        (root / name).mkdir()
        for i in range(count):
            (root / name / f"{i}.jpg").write_bytes(noise(i, 20 + i, 17 + 2 * i, "jpeg"))
    return str(root)


CHOICES = {
    "evaluation": None,
    "random": AugmentConfig(crop="random", flip=True),
    "shift": AugmentConfig(crop="shift", flip=True),
    "none": AugmentConfig(crop="none"),
    "randaugment": AugmentConfig(crop="none", policy="randaugment", jitter=(0.4, 0.4, 0.4, 0.1)),
    "trivial": AugmentConfig(crop="none", policy="trivial"),
    "erase": AugmentConfig(crop="none", erase=0.5),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_has_the_same_pixels_in_any_batch_order_and_thread(choice: str, folder: str):
    source = FolderImages(folder)
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
    choice: str, folder: str, monkeypatch: pytest.MonkeyPatch
):
    source = FolderImages(folder)
    data = image_data(source, DataConfig(image_size=16), CHOICES[choice], 2)
    decoded: list[Any] = []
    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(
        simplejpeg, "decode_jpeg", lambda *a, **k: decoded.append(a) or decode(*a, **k)
    )
    rows, repeats = np.array([3, 3, 3, 7, 7, 7]), np.array([0, 1, 2] * 2)
    together = data.collate(source.read(rows), Draws(7, 0, rows, repeats))["image"]
    assert len(decoded) == 2
    assert len({image.numpy().tobytes() for image in together}) > 4  # of 6; two may coincide
    first = data.collate(source.read(rows[:1]), Draws(7, 0, rows[:1]))["image"]
    third = data.collate(source.read(rows[2:3]), Draws(7, 0, rows[2:3], repeats[2:3]))["image"]
    for alone, place in ((first, 0), (third, 2)):
        difference = (alone[0].int() - together[place].int()).abs()
        assert difference.max() == 0


def test_shift_moves_pixels_without_changing_values():
    images = Encoded([noise(i, 8, 8) for i in range(40)])
    data = image_data(images, DataConfig(), AugmentConfig(crop="shift", flip=True), 1)
    plain = image_data(images, DataConfig(), None, 1)
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


# ------------------------------------------------------------------ bad records


class Encoded(ImageSource):
    """Encoded images in memory, all of class 0."""

    def __init__(self, images: list[bytes]) -> None:
        self._images = images
        self.blocks = np.array([len(images)])
        self.class_names = ["0"]

    def read(self, rows: np.ndarray) -> list[tuple[bytes, int]]:
        return [(self._images[row], 0) for row in rows.tolist()]

    def fingerprint(self) -> str:
        return ""

    def labels(self) -> Any:
        raise NotImplementedError

    def where(self, row: int) -> str:
        return f"image {row}"


@pytest.mark.parametrize("augment", [None, AugmentConfig(crop="random", flip=True, erase=0.5)])
def test_fault_20_bad_samples_are_skipped_on_request(augment: AugmentConfig | None):
    config = DataConfig(image_size=8, bad_records="skip")
    data = image_data(Encoded([]), config, augment, 4)
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
    with pytest.raises(DataError, match="image 5: label 4"):  # a wrong label is never skipped
        data.collate([(png(0), 4)], Draws(0, 0, np.array([5])))


def test_each_bad_record_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    contents = (b"hello", b"", noise(2, 24, 24, "jpeg")[:300], png(3))
    for name, content in zip(("00", "01", "02", "03"), contents, strict=True):
        (tmp_path / "ape").mkdir(exist_ok=True)
        (tmp_path / "ape" / f"{name}.jpg").write_bytes(content)
    config = DataConfig(bad_records="skip", image_size=8, jpeg_scaling=False)
    source = FolderImages(str(tmp_path))
    data = image_data(source, config, AugmentConfig(repeats=2), 2)
    rows = np.repeat(np.arange(4), 2)
    for epoch in range(3):
        batch = data.collate(source.read(rows), Draws(0, epoch, rows, np.arange(8) % 2))
        assert len(batch["label"]) == 2
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(".jpg: ")[0][-2:] for line in lines] == ["00", "01", "02"]
    assert not [line for line in lines if "0x" in line or "\n" in line]
