"""Detects splits from the names of files and folders as Hugging Face `datasets` does, ignoring
case.

Works on names alone: no file is opened.
Source: https://huggingface.co/docs/hub/datasets-file-names-and-splits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

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
_HIVE = re.compile(r"^(?:splits?|subsets?|set|partition|fold)=", re.IGNORECASE)
_NAMED = re.compile(r"(?:^|/)splits?=", re.IGNORECASE)  # its value is a split, whatever it is
_IN_DATA = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*", re.IGNORECASE)


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
    everything is the config "". Files without a keyword form a split named after the file or its
    folder. If no file has a keyword, all files form the split "".

    Args:
        names: paths below the root, sorted.

    Raises:
        DataError: by their names, the files of a split belong to several data sets.
    """
    in_data = {name: match["split"] for name in names if (match := _IN_DATA.fullmatch(name))}
    if in_data:
        lower = {split: split.lower() for split in in_data.values() if split.lower() in ROLE_OF}
        labels = {name: lower.get(split, split) for name, split in in_data.items()}
        return {"": _with_others(labels, names, ["data"])}
    found = {name: place for name in names if (place := _by_folder(name))}
    if not any(split.role == "train" for _, split in found.values()):
        found |= {n: place for n in names if n not in found and (place := _by_file(n))}
    configs = sorted({config for config, _ in found.values()})
    labels = {}
    for config in configs:
        of_config = {n: split for n, (folder, split) in found.items() if folder == config}
        labels |= _labels(of_config, shown)
    if len({(found[name][0], label) for name, label in labels.items()}) == len(
        set(labels.values())
    ):
        return {"": _with_others(labels, names, configs)}
    return {
        config or ".": _with_others(
            {name: label for name, label in labels.items() if found[name][0] == config},
            [n for n in names if (found[n][0] == config if n in found else _is_below(n, config))],
            [config],
        )
        for config in configs
    }


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


def _with_others(labels: Mapping[str, str], names: Sequence[str], tops: Sequence[str]) -> Splits:
    """Files by split, including files without a keyword."""
    others = [name for name in names if name not in labels]
    own = {name: _own_label(name, tops) for name in others}
    are_splits = all(is_shard(name) or _NAMED.search(name) for name in others)
    if not labels and (len(set(own.values())) < 2 or not are_splits):
        return {"": others}
    taken = set(labels.values())
    splits: dict[str, list[str]] = {}
    for name in names:
        label = labels.get(name) or own[name]
        splits.setdefault(name if name in own and label in taken else label, []).append(name)
    return splits


def _own_label(name: str, tops: Sequence[str]) -> str:
    """The folder below the splits' folder, or else the name without its numbers; ``a`` for
    ``split=a``."""
    top = max((top for top in tops if top and name.startswith(f"{top}/")), key=len, default="")
    rest = name[len(top) + 1 :] if top else name
    folder, inside, _ = rest.partition("/")
    stem = PurePosixPath(rest).stem
    label = folder if inside else _stem(stem).rstrip("-._ 0123456789") or stem
    return _NAMED.sub("", label)


def _is_below(name: str, config: str) -> bool:
    return not config or name.startswith(f"{config}/")


# ------------------------------------------------------------------ shards


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(PurePosixPath(name).stem) is not None


def require_all_shards(names: Sequence[str], shown: str, is_wanted: Callable[[str], bool]) -> None:
    """Raises a DataError if shards such as ``train-00000-of-00003`` are missing or duplicated.

    Args:
        shown: the data source, for the message.
        is_wanted: whether a missing file of this name would have been read.
    """
    groups: dict[tuple[str, str], list[tuple[str, re.Match[str]]]] = {}
    for name in names:
        path = PurePosixPath(name)
        shard = _SHARD.fullmatch(path.stem)
        if shard:
            groups.setdefault((str(path.parent), shard["stem"]), []).append((name, shard))
    for shards in groups.values():
        _require_all(shards, shown, is_wanted)


def _require_all(
    shards: Sequence[tuple[str, re.Match[str]]], shown: str, is_wanted: Callable[[str], bool]
) -> None:
    totals = {int(shard["total"]): name for name, shard in shards}
    if len(totals) > 1:
        raise DataError(
            f"{shown}: found shards with different totals ({', '.join(totals.values())}): "
            "remove the shards of the older version, or specify a glob that matches one version."
        )
    of_number: dict[int, list[str]] = {}
    for name, shard in shards:
        of_number.setdefault(int(shard["number"]), []).append(name)
    (total,) = totals
    first = 1 if total in of_number and 0 not in of_number else 0
    twice = [files for files in of_number.values() if len(files) > 1]
    beyond = [files[0] for number, files in of_number.items() if number >= total + first]
    if twice or beyond:
        files = [name for files in twice for name in files] or beyond
        wrong = "are the same shard" if twice else f"are not among the {total} shards"
        raise DataError(f"{shown}: {first_names(files)} {wrong}: remove files of other versions.")
    name, shard = shards[0]
    rest = shard["rest"] if len({shard["rest"] for _, shard in shards}) == 1 else ""
    path = PurePosixPath(name)
    missing = []
    for number in range(first, total + first):
        if number not in of_number:
            digits = f"{number:0{len(shard['number'])}d}"
            stem = f"{shard['stem']}{shard['dash']}{digits}{shard['of']}{shard['total']}{rest}"
            missing.append(str(path.with_name(stem + path.suffix)))
    missing = [name for name in missing if is_wanted(name)]
    if missing:
        raise DataError(
            f"{shown}: {len(missing)} of {total} shards are missing: {first_names(missing)}. "
            "Download or copy them again."
        )


def _stem(name: str) -> str:
    """A file's name without its extension and ``-00000-of-00003``."""
    shard = _SHARD.fullmatch(name)
    return shard["stem"] if shard else name
