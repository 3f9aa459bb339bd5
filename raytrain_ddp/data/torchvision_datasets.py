"""torchvision's classification data sets by name."""

from __future__ import annotations

import fcntl
import operator
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_ddp.data.discovery.split_names import ROLE_OF
from raytrain_ddp.data.formats.labels import Labels, names_of, normalized, numbers_in
from raytrain_ddp.data.loading.sources import ImageSource
from raytrain_ddp.data.order import Rows, runs_of
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean

_EVAL_SPLITS = ("val", "valid", "validation", "test")  # in order of preference
_LABELS = ("targets", "labels", "_labels", "y", "_samples")  # may have those of all rows
_LOOKED_AT = 5  # labels to compare with those of the items


class TorchvisionImages(ImageSource):
    """A torchvision classification data set by name, downloaded by the first process that needs it.

    Args:
        train: the training part, not the evaluation part.
        classes: class names, which must include those of the set. Default: those of the set.
        whole: use a set without parts as a whole.
        split: torchvision's name of the part. Default: the usual names.

    Raises:
        ConfigError: there is no such set, or it has no parts.
        DataError: it has no split with that name, it cannot be downloaded or opened, or its targets
            are not classes.
    """

    uses_root = True

    def __init__(
        self,
        name: str,
        root: Path,
        train: bool,
        classes: Sequence[str] | None = None,
        whole: bool = False,
        split: str = "",
    ) -> None:
        made_by = torchvision_class(name)
        choices = _choices(made_by, name, train, whole, split)
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:  # workers of one node share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._dataset, chosen = _make(made_by, name, root, choices, split)
        self.split = str(chosen.get("split", "train" if chosen.get("train", train) else "test"))
        self._name = f"torchvision:{name} {self.split}"
        try:
            operator.index(self._dataset[0][1])
        except (TypeError, IndexError, ValueError):
            raise DataError(f"{self.where(0)}: not an image and the number of a class.") from None
        own = _distinct([str(name) for name in getattr(self._dataset, "classes", ())])
        if not own:
            own = [str(n) for n in range(int(names_of(self._targets())[-1]) + 1)]
        self.class_names = own if classes is None else list(classes)
        numbers_in(self.class_names, own, self._name)
        self._numbers = Labels(self.class_names, own)
        self.blocks = runs_of(len(self._dataset), 256)

    def read(self, rows: Rows) -> list[tuple[Any, int]]:
        records = ((row, *self._dataset[row]) for row in rows.tolist())
        return [(image, self._number(row, label)) for row, image, label in records]

    def labels(self) -> Rows:
        """The class number of each row, shape (rows,); reads images only for a few sets."""
        numbers = [self._number(row, label) for row, label in enumerate(self._targets())]
        return np.array(numbers, np.int64)

    def _number(self, row: int, label: Any) -> int:
        number = self._numbers.number(int(label))
        if isinstance(number, str):
            raise DataError(f"{self.where(row)}: label {number}.")
        return number

    def _targets(self) -> list[int]:
        """The labels of the set's items, from the first attribute that has those of some items."""
        rows = [*{*np.linspace(0, len(self._dataset) - 1, _LOOKED_AT, dtype=int).tolist()}]
        some = [int(self._dataset[row][1]) for row in rows]
        for name in _LABELS:
            found = getattr(self._dataset, name, ())
            with suppress(TypeError, ValueError, IndexError, KeyError):
                labels = [int(each[-1] if name == "_samples" else each) for each in found]
                if len(labels) == len(self._dataset) and [labels[row] for row in rows] == some:
                    return labels
        return [int(self._dataset[row][1]) for row in range(len(self._dataset))]

    def fingerprint(self) -> str:
        return sha256(f"{self._name} {len(self._dataset)}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


def torchvision_class(name: str) -> type[Any]:
    """Returns the class of a data set. Raises ConfigError if torchvision has none of that name."""
    from torchvision import datasets

    known = [known for known in datasets.__all__ if isclass(getattr(datasets, known))]
    if name not in known:
        raise ConfigError(f"torchvision has no data set {name!r}.{did_you_mean(name, known)}")
    made: type[Any] = getattr(datasets, name)
    return made


def _distinct(names: list[str]) -> list[str]:
    """The names, with the class number appended if several classes share a name, such as crane in
    ImageNet."""
    count = Counter(map(normalized, names))
    return [
        f"{name} ({number})" if count[name] > 1 else name
        for number, name in enumerate(map(normalized, names))
    ]


def _choices(
    made_by: type[Any], name: str, train: bool, whole: bool, asked: str
) -> list[dict[str, Any]]:
    """The arguments to try, in turn, for one part of a set."""
    accepted = _arguments(made_by)
    download = {"download": True} if "download" in accepted else {}
    if "split" in accepted and "train" not in accepted:
        names = (asked,) if asked else ("train",) if train else _EVAL_SPLITS
        return [{"split": split, **download} for split in names]
    role = ROLE_OF.get(asked.lower()) if asked else ("train" if train else "test")
    if asked and (role not in ("train", "test") or "train" not in accepted):
        has = "train and test" if "train" in accepted else "no known splits"
        raise DataError(f"torchvision:{name} has no split {asked!r}: it has {has}.")
    if "train" in accepted:
        return [{"train": role == "train", **download}]
    return [download] if whole and "root" in accepted else []


def _arguments(made_by: type[Any]) -> set[str]:
    """The constructor's arguments; those of its parents, too, if it passes arguments on."""
    made = [signature(vars(p)["__init__"]) for p in made_by.__mro__ if "__init__" in vars(p)]
    names: set[str] = set()
    for parameters in (each.parameters for each in made):
        names |= set(parameters)
        if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters.values()):
            break
    return names


def _make(
    made_by: type[Any], name: str, root: Path, choices: list[dict[str, Any]], asked: str
) -> tuple[Any, dict[str, Any]]:
    """The data set, and the arguments it was made with."""
    for arguments in choices:
        try:
            return made_by(str(root), **arguments), arguments
        except ValueError as error:  # it has no split with that name
            if asked and "split" in arguments:
                reason = str(error).rstrip(".")
                raise DataError(f"torchvision:{name} has no split {asked!r}: {reason}.") from None
        except TypeError:
            break  # it needs more arguments: not a classification data set
        except (RuntimeError, OSError, ImportError) as error:
            raise DataError(f"torchvision:{name} cannot be loaded: {error}") from error
    raise ConfigError(
        f"torchvision:{name} has no known train and test parts: hold out a part of it "
        "(--data.holdout 0.1 of fit), or specify a folder of its images."
    )
