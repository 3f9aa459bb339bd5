"""Digests of task objects of one class, so that each fold of a cross-validation has its own run."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from tiny import TinyTask, tiny_config
from torch import nn
from torch.utils.data import Subset

from raytrain_ddp import ArraySource, TrainConfig, fit_locally
from raytrain_ddp.errors import ConfigError

pd = pytest.importorskip("pandas")
if importlib.util.find_spec("ml_dtypes"):  # registers bfloat16 with NumPy, as ONNX does
    import ml_dtypes  # noqa: F401


class Place:
    def __init__(self, k: int) -> None:
        self.k, self.own = k, self


@dataclass(slots=True)
class Slotted:
    k: int


def held_by(k: int) -> dict[str, Any]:
    """How fold `k` of a cross-validation may differ from the others."""
    rows = np.arange(20) % 5 == k
    return {
        "number": k,
        "array": np.arange(20)[rows],
        "tensor": torch.arange(20)[rows],
        "subset": Subset(range(20), [k]),  # type: ignore[arg-type]
        "source": ArraySource({"x": np.arange(20)[rows]}),
        "path": Path("folds") / str(k),
        "frame": pd.DataFrame({"x": np.arange(20)[rows]}),
        "objects": np.array([{"k": k}, Place(k)], dtype=object),
        "keys": {Fold: k, local_fold: 1, Place(3): 2},
        "bf16": torch.tensor([float(k)], dtype=torch.bfloat16),
        "values": deque([range(k), slice(k)]),
        "decimal": [Decimal(k), bytearray([3])],
        "slots": Slotted(k),
    }


class Fold(TinyTask):
    def __init__(self, k: int, kind: str = "number") -> None:
        super().__init__(TrainConfig(), rows=64 + k)
        self.held, self.net, self.lock = held_by(k)[kind], nn.Linear(2, 2), threading.Lock()


def local_fold(k: int) -> type[TinyTask]:
    class Local(TinyTask):
        def __init__(self, config: TrainConfig) -> None:
            super().__init__(config, rows=k)

    return Local


def local_property(k: int) -> type[TinyTask]:
    class Local(TinyTask):
        width = k

        @property
        def fold(self) -> int:
            return k

    return Local


class ModuleTask(nn.Module, TinyTask):  # type: ignore[misc]
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.layer = k, nn.Linear(2, 2)


MADE: list[Callable[[int], Any]] = [
    *(partial(Fold, kind=kind) for kind in held_by(0)),
    lambda k: lambda: Fold(k),
    lambda k: lambda config, k=k: Fold(k),
    lambda k: partial(Fold, k),
    lambda k: Fold(k).model,
    lambda k: (lambda: Fold(0), lambda: Fold(1))[k],
    *(local_fold, local_property, ModuleTask),
]


def test_tasks_with_different_contents_have_different_digests():
    for number, made in enumerate(MADE):
        names = [TrainConfig(task=made(k)).task for k in (0, 1, 0)]
        assert names[0] == names[2] != names[1], number


def names() -> list[str]:
    return [TrainConfig(task=Fold(3, kind)).task for kind in held_by(0)]


def test_an_objects_digest_is_the_same_in_another_process_and_after_training():
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import test_task_state as t; print(*t.names())"
    )
    command = [sys.executable, "-c", code]
    done = warm_python.run(command, cwd=Path(__file__).parent, check=True)
    assert done.stdout.split() == names()
    task = Fold(1)
    first = TrainConfig(task=task)
    task.held = task.step = 5  # type: ignore[attr-defined]
    assert TrainConfig(task=task).task == first.task


def test_each_fold_of_a_cross_validation_is_a_separate_run(tmp_path: Path):
    config = replace(tiny_config(tmp_path, "cv"), steps=1, name=None)

    def fold(k: int, **fields: Any) -> str:
        return Path(fit_locally(replace(config, task=Fold(k), **fields)).path).name

    assert [fold(k) for k in (0, 1, 0)] == ["Fold", "Fold-2", "Fold"]
    with pytest.raises(ConfigError, match="task"):
        fold(1, name="Fold")
