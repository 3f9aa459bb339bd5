"""torchvision's data sets by name: how a split is requested, and what is unusable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from split_checks import labels_of, splits_of
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


class BySplit(Fake):
    splits = ("train", "val", "test")

    def __init__(self, root: str, split: str = "train", download: bool = False) -> None:
        if split not in self.splits:
            raise ValueError(f"Unknown value {split!r} for argument split")
        self._make(split=split, download=download)


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


class WantsMore(Fake):
    def __init__(self, root: str, annotations: str, train: bool = True) -> None:
        self._make()


class Boxes(ByTrain):
    """Like Kitti."""

    target = ({"box": 1},)


class Unlabeled(ByTrain):
    target = None


class Whole:
    """Like EuroSAT: twenty rows without parts."""

    classes = ("cat", "dog")

    def __init__(self, root: str, download: bool = False) -> None:
        self.targets = [0, 1] * 10

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return f"picture {row}", self.targets[row]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    of = (ByTrain, BySplit, OfLetters, NotDownloaded, WantsMore, Boxes, Unlabeled, Whole)
    for fake in of:
        monkeypatch.setattr(datasets, fake.__name__, fake, raising=False)
    monkeypatch.setattr(datasets, "__all__", (*datasets.__all__, *(each.__name__ for each in of)))


def opened(fake: type[Any], root: Path, train: bool = True, split: str = "") -> Any:
    return TorchvisionImages(fake.__name__, root, train, split=split)


@pytest.mark.parametrize(
    ("fake", "train", "split", "requested"),
    [
        (ByTrain, True, "", {"train": True, "download": True}),
        (ByTrain, False, "", {"train": False, "download": True}),
        (BySplit, True, "", {"split": "train", "download": True}),
        (BySplit, False, "", {"split": "val", "download": True}),
        (NotDownloaded, True, "", {"split": "train"}),
        (NotDownloaded, False, "", {"split": "val"}),
        (BySplit, True, "test", {"split": "test", "download": True}),
        (ByTrain, True, "testing", {"train": False, "download": True}),
    ],
)
def test_a_split_is_requested_with_the_data_sets_own_argument(
    fake: type[Any], train: bool, split: str, requested: dict[str, Any], tmp_path: Path
):
    images = opened(fake, tmp_path / "root", train, split)
    assert images.read(np.array([0])) == [(requested, 1)]
    assert images.class_names == ["cat", "dog"]
    assert images.split == requested.get("split", "train" if requested.get("train") else "test")


def test_what_a_set_lacks_is_refused_before_a_download(tmp_path: Path):
    for fake in (BySplit, ByTrain, Whole):
        with pytest.raises(DataError, match=f"{fake.__name__} .*'extra'"):
            opened(fake, tmp_path / "root", split="extra")
    sets = ["FakeData", "EuroSAT", "Caltech101", "VOCDetection", "WantsMore", "OfLetters", "Whole"]
    for name in sets:
        for train in (True, False):
            with pytest.raises(ConfigError, match=f"torchvision:{name} "):
                TorchvisionImages(name, tmp_path / "root", train)
    for name in ("CIFAR11", "wrap_dataset_for_transforms_v2", "folder"):
        with pytest.raises(ConfigError, match=f"'{name}'"):
            TorchvisionImages(name, tmp_path / "root", True)
    assert [path.name for path in tmp_path.glob("root/*") if path.name[0] != "."] == []


@pytest.mark.parametrize("fake", [Boxes, Unlabeled])
def test_fault_21_a_set_without_classes_or_images_is_a_data_error(fake: type[Any], tmp_path: Path):
    with pytest.raises(DataError, match=f"torchvision:{fake.__name__} "):
        opened(fake, tmp_path)


def test_a_set_without_splits_can_be_used_with_a_holdout(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--data\.holdout"):
        splits_of("torchvision:Whole", root=str(tmp_path))
    splits = splits_of("torchvision:Whole", root=str(tmp_path), holdout=0.2)
    assert splits.eval is not None
    assert sorted(labels_of(splits.eval)) == [0, 0, 1, 1]
    images = [
        image
        for part in (splits.train, splits.eval)
        for image, _ in part.read(np.arange(part.blocks.sum()))
    ]
    assert sorted(images) == sorted(f"picture {row}" for row in range(20))
