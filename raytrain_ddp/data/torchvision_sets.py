"""torchvision's classification data sets by name."""

from __future__ import annotations

import fcntl
import operator
from hashlib import sha256
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any

from raytrain_ddp.data.draws import Rows
from raytrain_ddp.data.plan import runs_of
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean

_EVAL_SPLITS = ("test", "val", "valid", "validation")


class TorchvisionImages:
    """A torchvision classification data set by name, downloaded by the first who needs it.

    Raises:
        ConfigError: there is no such set, or it has no parts to train and to evaluate on.
        DataError: it cannot be downloaded or opened, or its targets are no classes.
    """

    def __init__(self, name: str, root: Path, train: bool) -> None:
        from torchvision import datasets

        known = [known for known in datasets.__all__ if isclass(getattr(datasets, known))]
        if name not in known:
            raise ConfigError(f"torchvision has no data set {name!r}.{did_you_mean(name, known)}")
        made_by = getattr(datasets, name)
        choices = _choices(made_by, name, train)
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:  # workers of one node share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._dataset = _make(made_by, name, root, choices)
        self._name = f"torchvision:{name} {'train' if train else 'test'}"
        try:
            operator.index(self._dataset[0][1])
        except (TypeError, IndexError, ValueError):
            raise DataError(f"{self.where(0)}: not an image and the number of a class.") from None
        self.class_names = [str(c) for c in getattr(self._dataset, "classes", ())]
        if not self.class_names:
            labels = {int(self._dataset[i][1]) for i in range(len(self._dataset))}
            self.class_names = [str(label) for label in range(max(labels) + 1)]
        self.blocks = runs_of(len(self._dataset), 256)

    def read(self, rows: Rows) -> list[tuple[Any, int]]:
        return [self._dataset[row] for row in rows.tolist()]

    def fingerprint(self) -> str:
        return sha256(f"{self._name} {len(self._dataset)}".encode()).hexdigest()

    def where(self, row: int) -> str:
        return f"{self._name}, row {row}"


def _choices(made_by: type[Any], name: str, train: bool) -> list[dict[str, Any]]:
    """The arguments to try, in turn, for one part of a set."""
    accepted = _arguments(made_by)
    download = {"download": True} if "download" in accepted else {}
    if "train" in accepted:
        return [{"train": train, **download}]
    if "split" in accepted:
        return [{"split": part, **download} for part in (("train",) if train else _EVAL_SPLITS)]
    raise _without_parts(name)


def _arguments(made_by: type[Any]) -> set[str]:
    """Those of the constructor; if it passes others on, also those of its parent's."""
    names: set[str] = set()
    for parent in made_by.__mro__:
        if "__init__" in vars(parent):
            parameters = signature(vars(parent)["__init__"]).parameters
            names |= set(parameters)
            if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters.values()):
                break
    return names


def _make(made_by: type[Any], name: str, root: Path, choices: list[dict[str, Any]]) -> Any:
    for arguments in choices:
        try:
            return made_by(str(root), **arguments)
        except ValueError:
            continue  # it has no split of that name
        except TypeError:
            break  # it needs more arguments: no classification set
        except (RuntimeError, OSError, ImportError) as error:
            raise DataError(f"torchvision:{name} cannot be had: {error}") from error
    raise _without_parts(name)


def _without_parts(name: str) -> ConfigError:
    return ConfigError(
        f"torchvision:{name} has no train and test parts that are known here: give a folder of its "
        "images, or a task of your own."
    )
