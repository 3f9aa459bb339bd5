"""Detects splits from keywords in the names of files and folders, ignoring case; no file is opened.

The keywords are those of Hugging Face `datasets`:
https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from raytrain_ddp.data.discovery.file_listing import FileListing
from raytrain_ddp.errors import DataError, first_names

Role = Literal["train", "validation", "test"]
Splits = Mapping[str, Sequence[str]]  # name -> files

KEYWORDS: Mapping[Role, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
ROLE_OF: Mapping[str, Role] = {word: role for role, words in KEYWORDS.items() for word in words}

WHOLE = "."  # as a split's name: the data set's folder, in which all folders are classes
_SEPARATORS = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(
    r"(?P<stem>.*?)(?P<dash>[-_.]?)(?P<number>\d{1,6})(?P<of>[-_]of[-_])(?P<total>\d{1,6})"
    r"(?P<rest>(?!\d).*)",
    re.IGNORECASE,
)
_FLAT = (
    "it contains images without class folders: if a list has their labels, specify that explicitly"
)
_HIVE = re.compile(r"^(?:splits?|subsets?|set|partition|fold)=", re.IGNORECASE)


class NoSuchConfigError(DataError):
    """There is no config with the requested name."""


@dataclass(frozen=True)
class SplitName:
    """The split that a name refers to.

    Args:
        word: the keyword, in lower case, such as "val".
        before, after: the words around it, in lower case, without numbers.
    """

    role: Role
    word: str
    before: str
    after: str

    @property
    def is_exact(self) -> bool:
        return not self.before and not self.after

    def __str__(self) -> str:
        return "-".join(part for part in (self.before, self.word, self.after) if part)


def split_name(name: str) -> SplitName | None:
    """Parses the name of a folder, or of a file without its extension; None: no keyword, or
    keywords of several splits. In Hive's ``split=train``, the value counts."""
    words = [word for word in _SEPARATORS.split(_HIVE.sub("", _stem(name).lower())) if word]
    known = [n for n, word in enumerate(words) if word in ROLE_OF]
    if len({ROLE_OF[words[n]] for n in known}) != 1:
        return None
    at = known[-1]
    before, after = "-".join(words[:at]), "-".join(words[at + 1 :])
    return SplitName(ROLE_OF[words[at]], words[at], before, after)


# ------------------------------------------------------------------ files


def splits_of_files(names: Sequence[str], shown: str, is_glob: bool) -> Splits:
    """Groups files by split, according to the names of files and folders. Files without a keyword
    form splits named after the file or its folder. If no file has a keyword, all files form the
    split "".

    Args:
        names: paths below the root, sorted.
        is_glob: the files were selected by a glob, so different folders belong together.

    Raises:
        DataError: by their names, the files of a split belong to several data sets.
    """
    found = {name: place for name in names if (place := _by_folder(name))}
    if not any(split.role == "train" for _, split in found.values()):
        found |= {n: place for n in names if n not in found and (place := _by_file(n))}
    if not found:
        return {"": names}
    folders = sorted({folder for folder, _ in found.values()})
    labels: dict[str, str] = {}
    for folder in folders:
        labels |= _labels(
            {name: split for name, (at, split) in found.items() if at == folder}, shown
        )
    keywords = {*labels.values()}
    if not is_glob and len({(found[name][0], labels[name]) for name in labels}) > len(keywords):
        raise _several(shown, [folder or "." for folder in folders])
    others = {name: _own_label(name, folders) for name in names if name not in labels}
    labels |= {name: label for name, label in others.items() if label not in keywords}
    splits: dict[str, list[str]] = {}
    for name in filter(labels.__contains__, names):
        splits.setdefault(labels[name], []).append(name)
    return splits


def _several(shown: str, folders: Sequence[str]) -> DataError:
    return DataError(
        f"{shown} contains several data sets, each with its own splits: {first_names(folders)}. "
        f"Specify the folder of one, or files by a glob. If these are classes, move the splits "
        f"above them (train/{_name(folders[-1])})."
    )


def _by_folder(name: str) -> tuple[str, SplitName] | None:
    """The config and split from the innermost folder whose name has a keyword."""
    folders = name.split("/")[:-1]
    for depth in reversed(range(len(folders))):
        split = split_name(folders[depth])
        if split is not None:
            return "/".join(folders[:depth]), split
    return None


def _by_file(name: str) -> tuple[str, SplitName] | None:
    folder, _, file = name.rpartition("/")
    split = split_name(PurePosixPath(file).stem)
    return (folder, split) if split else None


def _labels(splits: Mapping[str, SplitName], shown: str) -> dict[str, str]:
    """The split of each file. ``train_a`` and ``train_b`` are parts of train, but ``train_extra``
    next to ``train`` is a split of its own."""
    exact = {split.role for split in splits.values() if split.is_exact}
    for role in set(KEYWORDS) - exact:
        sets = sorted({split.before for split in splits.values() if split.role == role})
        if len(sets) > 1:
            raise DataError(
                f"{shown}: the file names of the {role} split belong to several data sets "
                f"({', '.join(map(repr, sets))}): specify a glob that matches one of them."
            )
    return {
        name: str(split) if split.role in exact and not split.is_exact else split.word
        for name, split in splits.items()
    }


def _own_label(name: str, tops: Iterable[str]) -> str:
    """The folder below the splits' folder, or else the file's name without its numbers."""
    top = max((top for top in tops if name.startswith(f"{top}/")), key=len, default="")
    folder, inside, _ = name.removeprefix(f"{top}/").partition("/")
    stem = PurePosixPath(folder).stem
    return folder if inside else _stem(stem).rstrip("-._ 0123456789") or stem


# ------------------------------------------------------------------ shards


def require_all_shards(
    names: Sequence[str], shown: str, wanted: Callable[[Sequence[str]], Sequence[str]]
) -> None:
    """Raises a DataError if shards such as ``train-00000-of-00003`` are missing, or if there are
    shards of several versions.

    Args:
        shown: the data source, for the message.
        wanted: returns the files that would be read if those of these names existed, too.
    """
    sets: dict[tuple[PurePosixPath, str], dict[str, re.Match[str]]] = {}
    for name in names:
        path = PurePosixPath(name)
        if shard := _SHARD.fullmatch(path.stem):
            sets.setdefault((path.parent, shard["stem"]), {})[name] = shard
    for (folder, _), shards in sets.items():
        [*paths], [shard, *others] = shards, shards.values()
        numbers, total = [int(each["number"]) for each in shards.values()], int(shard["total"])
        first = 1 if total in numbers and 0 not in numbers else 0
        is_one_set = all(int(each["total"]) == total for each in others)
        if not is_one_set or len({*numbers}) < len(numbers) or max(numbers) >= total + first:
            raise DataError(
                f"{shown}: {first_names(paths)} are not one set of shards: remove files of other "
                "versions, or specify a glob that matches one version."
            )
        if len(numbers) == total:
            continue
        rest = shard["rest"] if all(each["rest"] == shard["rest"] for each in others) else ""
        rest += PurePosixPath(paths[0]).suffix
        begin, end = shard.span("number")
        before, after = shard.string[:begin], shard.string[end : shard.start("rest")]
        digits = (f"{number:0{end - begin}d}" for number in range(first, total + first))
        absent = [str(folder / f"{before}{each}{after}{rest}") for each in digits]
        read = {*wanted(absent)}
        if missing := [each for each in absent if each not in shards and each in read]:
            raise DataError(
                f"{shown}: {len(missing)} of {total} shards are missing: {first_names(missing)}. "
                "Download or copy them again."
            )


def _stem(name: str) -> str:
    """A file's name without its extension and ``-00000-of-00003``."""
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name


# ------------------------------------------------------------------ class folders


Below = Mapping[str, Sequence[str]]  # folder -> the folders in it that contain images


def _folders_in(listing: FileListing, full: bool = True) -> Below:
    """The folders in each folder that contain images at any depth, or those that contain none."""
    below: dict[str, list[str]] = {}
    of_images = {str(up) for name in listing.images for up in PurePosixPath(name).parents}
    for name in listing.folders:
        if (name in of_images) is full:
            below.setdefault(str(PurePosixPath(name).parent), []).append(name)
    return below


def class_folder_splits(
    listing: FileListing, asked: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The folders whose subfolders are the classes, relative to the listing's root, by split (an
    unnamed one is ""); and why other splits cannot be used.

    They may be several levels deeper if there is nothing else. Folders are splits if their names
    are like ``train`` or ``val2017``, or come in pairs such as ``my_train`` and ``my_test``.

    Args:
        asked: split names from the config, which may be arbitrary.

    Raises:
        DataError: splits and classes cannot be distinguished.
    """
    below = _folders_in(listing)
    holders = [f for f in below if _splits_among(below[f], asked if f == WHOLE else (), below)]
    outer = [f for f in holders if not any(_is_in(f, other) for other in holders if other != f)]
    if not outer:
        return {"": WHOLE}, {}
    if len(outer) > 1:
        raise _several(listing.shown, sorted(outer))
    top = outer[0]
    above = {*map(str, PurePosixPath(top).parents)}
    beside = {str(PurePosixPath(name).parent) for name in listing.images} - above
    if others := sorted(name for name in beside if not _is_in(name, top)):
        raise DataError(
            f"{listing.shown}: {top} contains splits, but there are also images in "
            f"{first_names(others)}: specify the folder {top} itself if it is the data set. If "
            f"all are classes, set --data.train-split {WHOLE}"
        )
    splits = _splits_among(below[top], asked, below)
    [*folders] = splits.values()
    inside = below.get(folders[0], ()) if len(folders) == 1 else ()
    if inside and len(nested := _splits_among(inside, (), below)) == len(inside):
        top, splits = folders[0], nested  # train/train and train/val
    others = [_name(name) for name in below[top] if name not in splits.values()]
    unusable = dict.fromkeys(others, "its name is not the name of a split")
    empty = [split_name(_name(name)) for name in _folders_in(listing, False).get(top, ())]
    unusable |= {split.word: "it contains no images" for split in empty if split and split.is_exact}
    unusable |= {label: _FLAT for label, folder in splits.items() if folder not in below}
    used = {label: folder for label, folder in splits.items() if folder in below}
    return {label: _unwrapped(folder, below) for label, folder in used.items()}, unusable


def _is_in(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _unwrapped(folder: str, below: Below) -> str:
    """``seg_train/seg_train`` for ``seg_train``: an archive unpacked into a folder of its name."""
    inside = below[folder]
    is_same = len(inside) == 1 and _name(inside[0]).casefold() == _name(folder).casefold()
    return _unwrapped(inside[0], below) if is_same and inside[0] in below else folder


def refuse_split_names_as_classes(listing: FileListing, split: str, folder: str) -> None:
    """Raises a DataError if class folders have the names of splits."""
    names = [_name(name) for name in _folders_in(listing).get(folder, ())]
    odd = [name for name in names if (found := split_name(name)) and found.is_exact]
    if odd:
        raise DataError(
            f"{listing.shown}: some class folders of {split or folder} have the names of splits "
            f"({first_names(odd)}). If they are splits, specify a folder that contains only "
            f"splits; if they are classes, confirm it with "
            f"--data.train-split{f' {split}' if split else ''}."
        )


def _splits_among(folders: Sequence[str], asked: Collection[str], below: Below) -> dict[str, str]:
    """The folders that are splits, by split name."""
    names = {f: split for f in folders if (split := split_name(_name(f)))}
    known = {folder: split for folder, split in names.items() if split.is_exact}
    if not known:  # my_train and my_test
        pairs: dict[tuple[str, str], set[Role]] = {}
        for split in names.values():
            pairs.setdefault((split.before, split.after), set()).add(split.role)
        paired = {words for words, roles in pairs.items() if {"train"} < roles}
        known = {f: split for f, split in names.items() if (split.before, split.after) in paired}
    roles = {split.role for split in known.values()}
    if "train" in roles:  # then no sibling is a class: test_set
        known |= {f: split for f, split in names.items() if split.role not in roles}
    words = [split.word for split in known.values()]
    found = {
        split.word if words.count(split.word) == 1 else _name(folder): folder
        for folder, split in known.items()
    }
    wanted = {name.casefold() for name in asked} - {label.casefold() for label in found}
    if any(_name(folder).casefold() in wanted and folder in below for folder in folders):
        found |= {_name(folder): folder for folder in folders if folder not in found.values()}
    return found


def _name(path: str) -> str:
    return PurePosixPath(path).name
