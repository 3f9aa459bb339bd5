"""torchvision's classification data sets by name."""

from __future__ import annotations

import fcntl
from hashlib import sha256
from pathlib import Path
from typing import Any

from raytrain_ddp.data.draws import Rows
from raytrain_ddp.data.plan import runs_of
from raytrain_ddp.errors import ConfigError, DataError, did_you_mean


class TorchvisionImages:
    """A torchvision classification data set by name, downloaded by the first who needs it."""

    def __init__(self, name: str, root: Path, train: bool) -> None:
        from torchvision import datasets

        if name not in datasets.__all__:
            raise ConfigError(
                f"torchvision has no data set {name!r}.{did_you_mean(name, datasets.__all__)}"
            )
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:  # workers of one node share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._dataset = _make(getattr(datasets, name), root, train)
        self._name = f"torchvision:{name} {'train' if train else 'test'}"
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


def _make(dataset: Any, root: Path, train: bool) -> Any:
    """torchvision's sets say which part by `train=` or by `split=`."""
    try:
        try:
            return dataset(str(root), train=train, download=True)
        except TypeError:
            return dataset(str(root), split="train" if train else "test", download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"torchvision:{dataset.__name__} cannot be had: {error}") from error
