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
    train = _to_train_on(source, config.train_split)
    other, chosen = source, None
    if config.eval_split == "none":
        if config.eval_source is not None:
            raise ConfigError(
                "data.eval_split = 'none' conflicts with data.eval_source: remove one of them."
            )
    elif config.eval_source is None:
        chosen = _to_evaluate_on(source, config.eval_split, train)
    else:
        other = _open_other(config.eval_source, config)
        chosen = _to_evaluate_on(other, config.eval_split, None)
    used: set[str | None] = {train, chosen} if other is source else {train}
    kept: list[str] = []
    if more and config.eval_source is None and config.eval_split == "auto":
        for_it = [name for name in source.splits if role_of(name) in ("validation", "test")]
        kept = [name for name in for_it if name not in used]
    notes = [*source.notes, *_unused(source, used | {*kept}, other, chosen)]
    if other is not source:
        notes += [*other.notes, *_unused(other, {chosen}, other, chosen)]
    found = Found(
        _located(source, train, "train"),
        None if chosen is None else _located(other, chosen, "eval"),
        "" if chosen is None else _named(other, chosen),
    )
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
    chosen = _to_evaluate_on(source, config.eval_split, None)
    assert chosen is not None
    return _located(source, chosen, "eval")


def role_of(split: str) -> Role | None:
    """The role of a split with this name; None: unknown."""
    return ROLE_OF.get(split.lower())


def _open_other(source: str, config: DataConfig) -> DataSet:
    """The evaluation source, with the same config if it has that config."""
    try:
        return open_data_set(source, "data.eval_source", config)
    except NoSuchConfigError:
        return open_data_set(source, "data.eval_source", replace(config, config="auto"))


def _to_train_on(source: DataSet, asked: str) -> str:
    """The name of the split."""
    if asked != "auto":
        return _of_name(source, asked, "train")
    if source.kind == "torchvision":
        return ""
    found = [name for name in source.splits if role_of(name) == "train"]
    if len(found) == 1 or "" in source.splits:
        return found[0] if found else ""
    if found:
        raise DataError(
            f"{source.shown} has several splits to train on: {first_names(found)}. Name one with "
            "--data.train-split."
        )
    why = [f"{name}: {why}" for name, why in source.unusable.items() if role_of(name) == "train"]
    problem = f"{source.shown} has no split to train on{''.join(f' ({w})' for w in why)}"
    names = [*source.splits]
    remedy = ""
    if names:
        problem += f", only {first_names(names)}"
        remedy = f" To train on one of them, name it, such as with --data.train-split {names[0]}."
    raise DataError(f"{problem}.{remedy}{_if_classes(source, 'train')}")


def _to_evaluate_on(source: DataSet, asked: str, train: str | None) -> str | None:
    """The name of the split.

    Args:
        train: the split that the run is trained on; None: the source is for evaluation only.
    """
    if asked != "auto":
        return _of_name(source, asked, "eval")
    if source.kind == "torchvision":
        return ""
    roles: tuple[Role, ...] = ("validation", "test")
    for role in roles if train is not None else (*roles, "train"):
        found = [name for name in source.splits if role_of(name) == role and name != train]
        if len(found) > 1:
            raise DataError(
                f"{source.shown} has several splits to evaluate on: {first_names(found)}. Name one "
                "with --data.eval-split."
            )
        if found:
            return found[0]
    if train is not None:
        return None
    if len(source.splits) == 1:
        return next(iter(source.splits))
    raise DataError(
        f"{source.shown} has no split to evaluate on, only {first_names([*source.splits])}. Name "
        f"one with --data.eval-split.{_if_classes(source, 'eval')}"
    )


def _if_classes(source: DataSet, use: Use) -> str:
    """Says what to do if class folders have names of splits."""
    if source.kind != "folder":
        return ""
    names = first_names(sorted({*source.splits, *source.unusable}), _NAMES_SHOWN)
    return f" If {names} are classes, give the folder above them, and --data.{use}-split {WHOLE}"


def _of_name(source: DataSet, asked: str, use: Use) -> str:
    """The split with that name, or the only one with a synonymous name (val, validation)."""
    flag = f"data.{use}_split = {quoted(asked)}"
    if source.kind == "torchvision":
        return asked
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


def _named(source: DataSet, split: str) -> str:
    """Where a split comes from, for messages."""
    return f"the {split} split of {source.field}" if split else source.field


def _unused(
    source: DataSet, used: set[str | None], evaluated: DataSet, on: str | None
) -> Iterator[str]:
    """A sentence for each existing split that is not used."""
    if on is None or evaluated is not source:
        instead = "" if on is None else ": the run is evaluated on data.eval_source"
    else:
        instead = f": the run is evaluated on {on or 'everything else'}"
    of = "" if evaluated is source and source.field == "data.source" else f" of {source.field}"
    for name, files in source.splits.items():
        is_other_half = source.field != "data.source" and role_of(name) == "train"
        if name not in used and not is_other_half:
            why = instead if role_of(name) in ("validation", "test") else ""
            noun = "folder" if source.kind == "folder" else "file"
            count = f"{len(files)} {noun}{'s' * (len(files) > 1)}"
            yield f"the {name} split{of} ({count}) is not used{why}"
    for name, why in source.unusable.items():
        yield f"{name}{of} is not used: {why}"
