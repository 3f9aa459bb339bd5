"""Finds splits of images in class folders from the names of the folders above the classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from raytrain_ddp.data.discovery.file_listing import FileListing
from raytrain_ddp.data.discovery.split_names import (
    WHOLE,
    NoSuchConfigError,
    SplitName,
    split_name,
)
from raytrain_ddp.errors import DataError, first_names, quoted


class _Tree:
    """The folders that contain images, at any depth."""

    def __init__(self, listing: FileListing) -> None:
        self.direct = {str(PurePosixPath(name).parent) for name in listing.images}
        self.full = {str(above) for name in listing.images for above in PurePosixPath(name).parents}
        self._below: dict[str, list[str]] = {}
        for name in listing.folders:
            self._below.setdefault(str(PurePosixPath(name).parent), []).append(name)

    def below(self, folder: str) -> list[str]:
        return [name for name in self._below.get(folder, []) if name in self.full]

    def empty(self, folder: str) -> list[str]:
        return [name for name in self._below.get(folder, []) if name not in self.full]


def class_folder_splits(
    listing: FileListing, config: str, asked: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The folders whose subfolders are the classes, relative to the listing's root, by split (an
    unnamed one is ""); and why other splits cannot be used.

    They may be several levels deeper if there is nothing else. Folders are splits if their names
    are like ``train`` or ``val2017``, or come in pairs such as ``my_train`` and ``my_test``.

    Args:
        config: which of several folders with splits to use; "auto": there must be only one.
        asked: split names from the config, which may be arbitrary.

    Raises:
        NoSuchConfigError: there is no config with the requested name.
        DataError: splits and classes cannot be distinguished.
    """
    tree, top, picked = _Tree(listing), ".", config == "auto"
    while True:
        subs = tree.below(top)
        splits = _splits_among(subs, asked, tree)
        inner = [name for name in subs if not splits and _holds_splits(name, tree)]
        if not picked and not splits and inner:
            chosen = [n for n in inner if config.casefold() in (n.casefold(), _name(n).casefold())]
            if not chosen:
                has = f"only {first_names(inner)}"
                raise NoSuchConfigError(f"{listing.shown} has no config {quoted(config)}, {has}.")
            top, picked = chosen[0], True
        elif len(inner) > 1:
            raise DataError(
                f"{listing.shown} contains several data sets, each with its own splits: "
                f"{first_names(inner)}. Name one with --data.config. If these are classes, move "
                f"the splits above them (train/{_name(inner[0])})."
            )
        elif inner and len(subs) > 1:
            beside = [name for name in subs if name not in inner]
            raise DataError(
                f"{listing.shown}: {inner[0]} contains splits, but there are also images in "
                f"{first_names(beside)}: specify the folder {inner[0]} itself if it is the data "
                f"set. If all are classes, set --data.train-split {WHOLE}"
            )
        elif inner:
            top = inner[0]
        elif nested := _nested(splits, tree):
            top = nested
        else:
            break
    if not picked:
        raise NoSuchConfigError(
            f"{listing.shown} has no config {quoted(config)}: remove --data.config."
        )
    return _usable(top, splits, subs, tree)


def refuse_split_names_as_classes(listing: FileListing, split: str, folder: str) -> None:
    """Raises a DataError if class folders have the names of splits."""
    names = [_name(name) for name in _Tree(listing).below(folder)]
    odd = [name for name in names if (found := split_name(name)) and found.is_exact]
    if odd:
        raise DataError(
            f"{listing.shown}: some class folders of {split or folder} have the names of splits "
            f"({first_names(odd)}). If they are splits, specify a folder that contains only "
            f"splits; if they are classes, confirm it with "
            f"--data.train-split{f' {split}' if split else ''}."
        )


def whole_folder(listing: FileListing, images: Collection[str]) -> str | None:
    """The folder whose class folders contain exactly these images; None: there is none."""
    classes = [PurePosixPath(name).parent for name in images]
    parents = {path.parent for path in classes}
    if len(parents) != 1 or PurePosixPath() in classes:
        return None
    (parent,) = parents
    below = {n for n in listing.images if PurePosixPath(n).parent.is_relative_to(parent)}
    return str(parent) if below == {*images} else None


def _usable(
    top: str, splits: Mapping[str, str], subs: Collection[str], tree: _Tree
) -> tuple[dict[str, str], dict[str, str]]:
    if not splits:
        return {"": top}, {}
    others = [_name(name) for name in subs if name not in splits.values()]
    unusable = dict.fromkeys(others, "its name is not the name of a split")
    for label, folder in splits.items():
        if not tree.below(folder):
            unusable[label] = "it contains images without class folders"
    for name in tree.empty(top):
        split = split_name(_name(name))
        if split and split.is_exact:
            unusable[split.word] = "it contains no images"
    return {label: f for label, f in splits.items() if tree.below(f)}, unusable


def _splits_among(folders: Collection[str], asked: Collection[str], tree: _Tree) -> dict[str, str]:
    """The folders that are splits, by split name."""
    names = {folder: split_name(_name(folder)) for folder in folders}
    known = {folder: split for folder, split in names.items() if split and split.is_exact}
    if not known:
        known = {
            folder: split for folder, split in names.items() if split and _paired(split, names)
        }
    roles = {split.role for split in known.values()}
    if "train" in roles:  # then no sibling is a class: test_set
        known |= {f: split for f, split in names.items() if split and split.role not in roles}
    words = [split.word for split in known.values()]
    found = {
        split.word if words.count(split.word) == 1 else _name(folder): folder
        for folder, split in known.items()
    }
    wanted = {name.casefold() for name in asked} - {label.casefold() for label in found}
    if any(_name(folder).casefold() in wanted and tree.below(folder) for folder in folders):
        found |= {_name(folder): folder for folder in folders if folder not in found.values()}
    return {label: _unwrapped(folder, tree) for label, folder in found.items()}


def _holds_splits(folder: str, tree: _Tree) -> bool:
    inside = tree.below(folder)
    return bool(_splits_among(inside, (), tree)) or any(_holds_splits(n, tree) for n in inside)


def _paired(split: SplitName, names: Mapping[str, SplitName | None]) -> bool:
    """Whether the same name exists for training and for another split: my_train, my_test."""
    roles = {
        other.role
        for other in names.values()
        if other and (other.before, other.after) == (split.before, split.after)
    }
    return "train" in roles and len(roles) > 1


def _unwrapped(folder: str, tree: _Tree) -> str:
    """``seg_train/seg_train`` for ``seg_train``: an archive unpacked into a folder of the same
    name."""
    while True:
        inside = tree.below(folder)
        same = len(inside) == 1 and _name(inside[0]).casefold() == _name(folder).casefold()
        if not same or folder in tree.direct or not tree.below(inside[0]):
            return folder
        folder = inside[0]


def _nested(splits: Mapping[str, str], tree: _Tree) -> str | None:
    """The folder of the only split, if it contains nothing but splits: train/train, train/val."""
    if len(splits) != 1:
        return None
    (folder,) = splits.values()
    inside = tree.below(folder)
    return folder if inside and len(_splits_among(inside, (), tree)) == len(inside) else None


def _name(path: str) -> str:
    return PurePosixPath(path).name
