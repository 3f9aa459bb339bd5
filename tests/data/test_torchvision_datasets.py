"""torchvision's data sets by name: how a split is requested, and what is unusable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets

from raytrain_ddp.data.torchvision_datasets import TorchvisionImages
from raytrain_ddp.errors import ConfigError, DataError


class Fake:
    """A data set with one item, whose image is the arguments of the constructor."""

    classes = ("cat", "dog")
    target: Any = 1

    def _make(self, **arguments: Any) -> None:
        self.reported = arguments

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> Any:
        return self.reported, self.target


class ByTrain(Fake):
    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        self._make(train=train, download=download)


class Passing(ByTrain):
    """Like QMNIST."""

    def __init__(self, root: str, what: str | None = None, **more: Any) -> None:
        super().__init__(root, **more)


class BySplit(Fake):
    splits = ("train", "val", "test")

    def __init__(self, root: str, split: str = "train", download: bool = False) -> None:
        if split not in self.splits:
            raise ValueError(f"Unknown value {split!r} for argument split")
        self._make(split=split, download=download)


class WithVal(BySplit):
    splits = ("train", "val")


class WithValid(BySplit):
    splits = ("train", "valid")


class OfLetters(BySplit):
    """Like EMNIST, whose splits are not training or test splits."""

    splits = ("letters",)


class NotDownloaded(Fake):
    """Like ImageNet."""

    def __init__(self, root: str, split: str = "train", **more: Any) -> None:
        assert not more
        if split == "test":
            raise ValueError("Unknown value")
        self._make(split=split)


class Whole(Fake):
    """Like EuroSAT."""

    def __init__(self, root: str, download: bool = False) -> None:
        raise AssertionError("is not to be made")


class WantsMore(Fake):
    def __init__(self, root: str, annotations: str, train: bool = True) -> None:
        self._make()


class Gone(Fake):
    def __init__(self, root: str, train: bool = True) -> None:
        raise RuntimeError("Dataset not found.")


class Boxes(ByTrain):
    """Like Kitti."""

    target = ({"box": 1},)


class Unlabelled(ByTrain):
    target = None


def opened(
    fake: type[Any],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: bool = True,
    split: str = "",
) -> Any:
    name = fake.__name__
    monkeypatch.setattr(datasets, name, fake, raising=False)
    monkeypatch.setattr(datasets, "__all__", (*datasets.__all__, name))
    return TorchvisionImages(name, root, train, split=split)


@pytest.mark.parametrize(
    ("fake", "train", "reported"),
    [
        (ByTrain, True, {"train": True, "download": True}),
        (ByTrain, False, {"train": False, "download": True}),
        (Passing, False, {"train": False, "download": True}),
        (BySplit, True, {"split": "train", "download": True}),
        (BySplit, False, {"split": "val", "download": True}),
        (WithVal, False, {"split": "val", "download": True}),
        (WithValid, False, {"split": "valid", "download": True}),
        (NotDownloaded, True, {"split": "train"}),
        (NotDownloaded, False, {"split": "val"}),
    ],
)
def test_a_split_is_requested_with_the_data_sets_own_argument(
    fake: type[Any],
    train: bool,
    reported: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    images = opened(fake, tmp_path / "root", monkeypatch, train)
    assert images.read(np.array([0])) == [(reported, 1)]
    assert images.class_names == ["cat", "dog"]


@pytest.mark.parametrize(
    ("fake", "split", "reported"),
    [
        (BySplit, "test", {"split": "test", "download": True}),
        (BySplit, "val", {"split": "val", "download": True}),
        (ByTrain, "Train", {"train": True, "download": True}),
        (ByTrain, "testing", {"train": False, "download": True}),
    ],
)
def test_a_named_split_is_requested(
    fake: type[Any],
    split: str,
    reported: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for train in (True, False):
        images = opened(fake, tmp_path / "root", monkeypatch, train, split)
        assert images.read(np.array([0])) == [(reported, 1)]
        assert images.split == reported.get("split", "train" if reported.get("train") else "test")


@pytest.mark.parametrize(
    ("fake", "reported"),
    [
        (BySplit, "Unknown value 'extra' for argument split"),
        (ByTrain, "it has train and test"),
        (Whole, "it has no known splits"),
    ],
)
def test_a_split_that_a_set_lacks_is_refused(
    fake: type[Any], reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DataError, match=f"{fake.__name__} has no split 'extra': {reported}"):
        opened(fake, tmp_path / "root", monkeypatch, split="extra")


@pytest.mark.parametrize("fake", [Whole, WantsMore, OfLetters])
def test_a_set_without_splits_is_refused_in_one_line(
    fake: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for train in (True, False):
        with pytest.raises(ConfigError, match=f"^torchvision:{fake.__name__} has no") as caught:
            opened(fake, tmp_path, monkeypatch, train)
        assert "a folder" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["FakeData", "EuroSAT", "Caltech101", "VOCDetection", "LSUN"])
def test_torchvision_sets_without_splits_are_refused_before_a_download(name: str, tmp_path: Path):
    for train in (True, False):
        said = f"torchvision:{name} has no known train and test parts"
        with pytest.raises(ConfigError, match=said):
            TorchvisionImages(name, tmp_path / "root", train)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["CIFAR11", "wrap_dataset_for_transforms_v2", "folder"])
def test_a_name_that_is_not_a_data_set_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"torchvision has no data set '{name}'"):
        TorchvisionImages(name, tmp_path, True)


@pytest.mark.parametrize(
    ("fake", "reported"),
    [
        (Gone, "torchvision:Gone cannot be loaded: Dataset not found"),
        (Boxes, "torchvision:Boxes train, row 0: not an image and the number of a class"),
        (Unlabelled, "torchvision:Unlabelled train, row 0: not an image"),
    ],
)
def test_fault_21_a_set_without_classes_or_images_is_a_data_error(
    fake: type[Any], reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DataError, match=reported):
        opened(fake, tmp_path, monkeypatch)
