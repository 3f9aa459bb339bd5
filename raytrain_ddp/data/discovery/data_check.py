"""Finds and checks a run's training and evaluation data before anything starts, without torch.

discovery.py finds the splits of a source; this module chooses which ones to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.data.discovery.discovery import DataSet, Kind, open_data_set
from raytrain_ddp.data.discovery.split_names import (
    ROLE_OF,
    WHOLE,
    NoSuchConfigError,
    Role,
)
from raytrain_ddp.errors import ConfigError, DataError, first_names, quoted

Use = Literal["train", "eval"]
_TO: Mapping[Use, str] = {"train": "train", "eval": "evaluate"}
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Located:
    """Where one split is: Parquet files (paths or URIs), an ImageFolder's root, or the name of a
    torchvision data set.

    Args:
        split: what it is used for.
        name: the split's name from its files or folder; "" if it has none.
        class_names: class names of each label column that README.md declares.
    """

    kind: Kind
    paths: tuple[str, ...]
    split: Use
    name: str = ""
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The data of a run; deterministic on every machine and in every call.

    Args:
        eval: None if there is no evaluation split.
        eval_from: where the evaluation split comes from, such as "the validation split of
            data.source"; "" without one.
        notes: sentences about existing data that is not used.
        more: other validation and test splits of the source, if asked for.
    """

    train: Located
    eval: Located | None = None
    eval_from: str = ""
    notes: tuple[str, ...] = ()
    more: tuple[Located, ...] = ()


def locate(config: DataConfig, more: bool = False) -> Found:
    """Finds the training split and the evaluation split.

    Args:
        more: also the other validation and test splits, unless that to evaluate on is given.

    Raises:
        DataError: there is nothing, nothing readable as images, or an incomplete data set; or it is
            ambiguous which part of it to use.
        ConfigError: flags contradict each other, or the scheme of a URI is unknown.
        PreflightError: an object store cannot be reached.
    """
    source = open_data_set(config.source, "data.source", config)
    train = _chosen(source, config.train_split, "train") or ""
    other, chosen = source, None
    if config.eval_split == "none":
        if config.eval_source is not None:
            raise ConfigError(
                "data.eval_split = 'none' conflicts with data.eval_source: remove one of them."
            )
    elif config.eval_source is None:
        chosen = _chosen(source, config.eval_split, "eval", train)
    else:
        other = _open_other(config.eval_source, config)
        chosen = _chosen(other, config.eval_split, "eval")
    used: set[str | None] = {train, chosen} if other is source else {train}
    kept: list[str] = []
    if more and config.eval_source is None and config.eval_split == "auto":
        for_it = [name for name in source.splits if role_of(name) in ("validation", "test")]
        kept = [name for name in for_it if name not in used]
    notes = [*source.notes, *_unused(source, used | {*kept}, False)]
    if other is not source:
        notes += [*other.notes, *_unused(other, {chosen}, True)]
    found = Found(_located(source, train, "train"))
    if chosen is not None:
        name = f"the {chosen} split of {other.field}" if chosen else other.field
        found = replace(found, eval=_located(other, chosen, "eval"), eval_from=name)
    if found.eval == replace(found.train, split="eval") and (train or source.splits):
        notes.append("the run is evaluated on its training data")
    sentences = tuple(f"{note}." for note in dict.fromkeys(notes))
    others = tuple(_located(source, name, "eval") for name in kept)
    return replace(found, notes=sentences, more=others)


def locate_evaluation(config: DataConfig) -> Located:
    """Finds the split of `eval_source` to evaluate on; the training data need not be there.

    Raises:
        DataError, ConfigError, PreflightError: like `locate`.
    """
    assert config.eval_source is not None
    source = _open_other(config.eval_source, config)
    return _located(source, _chosen(source, config.eval_split, "eval") or "", "eval")


def role_of(split: str) -> Role | None:
    """The role of a split with this name; None: unknown."""
    return ROLE_OF.get(split.lower())


def _open_other(source: str, config: DataConfig) -> DataSet:
    """The evaluation source, with the same config if it has that config."""
    try:
        return open_data_set(source, "data.eval_source", config)
    except NoSuchConfigError:
        return open_data_set(source, "data.eval_source", replace(config, config="auto"))


def _chosen(source: DataSet, asked: str, use: Use, train: str | None = None) -> str | None:
    """The name of the split to use; None: the source has none to evaluate on.

    Args:
        train: the split that the run is trained on; None: the source is for one use only.
    """
    if source.kind == "torchvision":
        return "" if asked == "auto" else asked
    if asked != "auto":
        return _of_name(source, asked, use)
    roles: tuple[Role, ...] = ("train",)
    if use == "eval":
        roles = ("validation", "test") if train is not None else ("validation", "test", "train")
    for role in roles:
        found = [name for name in source.splits if role_of(name) == role and name != train]
        if len(found) > 1:
            raise DataError(
                f"{source.shown} has several splits to {_TO[use]} on: {first_names(found)}. Name "
                f"one with --data.{use}-split."
            )
        if found:
            return found[0]
    if train is not None:
        return None
    names = [*source.splits]
    if "" in names or (use == "eval" and len(names) == 1):
        return names[0]
    why = [f"{name}: {why}" for name, why in source.unusable.items() if role_of(name) in roles]
    problem = f"{source.shown} has no split to {_TO[use]} on{''.join(f' ({w})' for w in why)}"
    remedy = ""
    if names:
        problem += f", only {first_names(names)}"
        remedy = f" Name one of them, such as with --data.{use}-split {names[0]}."
    if source.kind == "folder":
        known = first_names(sorted({*source.splits, *source.unusable}), _NAMES_SHOWN)
        remedy += (
            f" If {known} are classes, give the folder above them, and --data.{use}-split {WHOLE}"
        )
    raise DataError(f"{problem}.{remedy}")


def _of_name(source: DataSet, asked: str, use: Use) -> str:
    """The split with that name, or the only one with a synonymous name (val, validation)."""
    flag = f"data.{use}_split = {quoted(asked)}"
    same = [name for name in source.splits if name.casefold() == asked.casefold()]
    matching = [
        name for name in source.splits if role_of(asked) and role_of(name) == role_of(asked)
    ]
    for found in (same, matching):
        if len(found) == 1:
            return found[0]
    if "" in source.splits:
        if role_of(asked) == "train":
            return ""
        raise DataError(f"{flag}: {source.shown} has no named splits.")
    for name, why in source.unusable.items():
        if name.casefold() == asked.casefold():
            raise DataError(f"{flag}: {source.shown} cannot be used: {why}.")
    raise DataError(
        f"{flag}: {source.shown} has no such split, only {first_names([*source.splits])}."
    )


def _located(source: DataSet, name: str, split: Use) -> Located:
    return Located(source.kind, source.paths(name), split, name, source.class_names)


def _unused(source: DataSet, used: set[str | None], is_other: bool) -> Iterator[str]:
    """A sentence for each existing split that is not used.

    Args:
        is_other: it is not the source of the training data.
    """
    of = f" of {source.field}" if is_other else ""
    for name, files in source.splits.items():
        if name not in used and not (is_other and role_of(name) == "train"):
            noun = "folder" if source.kind == "folder" else "file"
            yield f"the {name} split{of} ({len(files)} {noun}{'s' * (len(files) > 1)}) is not used"
    for name, why in source.unusable.items():
        yield f"{name}{of} is not used: {why}"
