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
from raytrain_ddp.errors import DataError, first_names, quoted

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


def role_in(name: str) -> Role | None:
    """Returns the role of a file's split, by the names of its folders, or else by its own name."""
    found = _by_folder(name) or _by_file(name)
    return found[1].role if found else None


def configs_of(names: Sequence[str], shown: str) -> Mapping[str, Splits]:
    """Groups files by config and split, both taken from the names of files and folders.

    If several folders contain the same splits, each is a config ("." is the root); otherwise,
    everything is the config "", and files without a keyword form splits named after the file or its
    folder. If no file has a keyword, all files form the split "", but several sets of shards are
    splits of these names.

    Args:
        names: paths below the root, sorted.

    Raises:
        DataError: by their names, the files of a split belong to several data sets.
    """
    found = {name: place for name in names if (place := _by_folder(name))}
    if not any(split.role == "train" for _, split in found.values()):
        found |= {n: place for n in names if n not in found and (place := _by_file(n))}
    if not found:
        sets = {name: _own_label(name, ()) for name in names}
        is_one = len({*sets.values()}) < 2 or not all(
            _SHARD.fullmatch(PurePosixPath(n).stem) for n in names
        )
        return {"": {"": names} if is_one else _grouped(names, sets)}
    labels: dict[str, str] = {}
    configs = sorted({config for config, _ in found.values()})
    for config in configs:
        of_config = {n: split for n, (folder, split) in found.items() if folder == config}
        labels |= _labels(of_config, shown)
    keywords = {*labels.values()}
    if len({(found[name][0], label) for name, label in labels.items()}) > len(keywords):
        return {
            config or ".": _grouped(
                [n for n in names if n in found and found[n][0] == config], labels
            )
            for config in configs
        }
    others = {name: _own_label(name, configs) for name in names if name not in labels}
    labels |= {name: label for name, label in others.items() if label not in keywords}
    return {"": _grouped([name for name in names if name in labels], labels)}


def _grouped(names: Sequence[str], labels: Mapping[str, str]) -> Splits:
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(labels[name], []).append(name)
    return splits


def merged(configs: Mapping[str, Splits]) -> Splits:
    """The splits of all configs together."""
    splits: dict[str, list[str]] = {}
    for config in configs.values():
        for name, files in config.items():
            splits.setdefault(name, []).extend(files)
    return {name: sorted(files) for name, files in splits.items()}


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
        wanted: returns the names of missing files that would have been read.
    """
    groups: dict[tuple[str, str], list[tuple[str, re.Match[str]]]] = {}
    for name in names:
        path = PurePosixPath(name)
        if shard := _SHARD.fullmatch(path.stem):
            groups.setdefault((str(path.parent), shard["stem"]), []).append((name, shard))
    for shards in groups.values():
        files, found = [name for name, _ in shards], [shard for _, shard in shards]
        total, numbers = int(found[0]["total"]), [int(shard["number"]) for shard in found]
        first = 1 if total in numbers and 0 not in numbers else 0
        if (
            len({int(shard["total"]) for shard in found}) > 1
            or len({*numbers}) < len(numbers)
            or max(numbers) >= total + first
        ):
            raise DataError(
                f"{shown}: {first_names(files)} are not one set of shards: remove files of other "
                "versions, or specify a glob that matches one version."
            )
        rest = found[0]["rest"] if len({shard["rest"] for shard in found}) == 1 else ""
        absent = [
            _numbered(files[0], found[0], number, rest)
            for number in range(first, total + first)
            if number not in numbers
        ]
        missing = wanted(absent) if absent else ()
        if missing:
            raise DataError(
                f"{shown}: {len(missing)} of {total} shards are missing: {first_names(missing)}. "
                "Download or copy them again."
            )


def _numbered(name: str, shard: re.Match[str], number: int, rest: str) -> str:
    """The name of another shard of the same set."""
    digits = f"{number:0{len(shard['number'])}d}"
    stem = f"{shard['stem']}{shard['dash']}{digits}{shard['of']}{shard['total']}{rest}"
    path = PurePosixPath(name)
    return str(path.with_name(stem + path.suffix))


def _stem(name: str) -> str:
    """A file's name without its extension and ``-00000-of-00003``."""
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name


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
