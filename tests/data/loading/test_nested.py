"""Nested batches: all of their tensors are counted, moved, and compared."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raytrain_ddp.data.loading.loader import LoaderThreads, TrainLoader
from raytrain_ddp.data.loading.nested import bytes_of, digest_of, map_leaves, samples_of, to_device
from raytrain_ddp.data.loading.sources import ArraySource, Batch, Data
from raytrain_ddp.data.order import Draws, Plan
from raytrain_ddp.errors import DataError, TaskError

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Sample:
    image: Tensor
    names: list[str]


class Unlike(UserDict):  # type: ignore[type-arg]
    """Has its own constructor, like BatchEncoding of transformers."""

    def __init__(self, data: dict[str, Tensor], needed: int) -> None:
        super().__init__(data)
        self.needed = needed


def x(rows: int = 4) -> Tensor:
    return torch.arange(rows * 2, dtype=torch.float32).view(rows, 2)


BATCHES: list[Any] = [
    {"x": x(), "y": torch.ones(4)},
    (x(), torch.ones(4)),
    [x(), [torch.ones(4), {"deep": torch.zeros(4, 1)}]],
    Pair(x(), torch.ones(4)),
    Sample(x(), ["a", "b", "c", "d"]),
    OrderedDict(x=x(), ids=["a", "b", "c", "d"], scale=0.5, none=None, raw=b"123"),
    Unlike({"x": x()}, 7),
    MappingProxyType({"x": x()}),
    x(),
    {"x": x(), "array": np.arange(3)},
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_all_tensors_of_a_nested_batch_are_counted_and_moved(batch: Any):
    assert samples_of(batch) == 4
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    seen: list[Any] = []
    map_leaves(seen.append, moved)
    assert {leaf.device.type for leaf in seen if isinstance(leaf, Tensor)} == {"meta"}

    def plus(more: int) -> Any:
        return map_leaves(lambda leaf: leaf + more if isinstance(leaf, Tensor) else leaf, batch)

    assert digest_of(b"", plus(0)) == digest_of(b"", batch) != digest_of(b"", plus(1))
    assert digest_of(b"1", batch) != digest_of(b"", batch)
    assert bytes_of(plus(0)) == bytes_of(batch) >= x().nbytes
    assert getattr(moved, "needed", 7) == 7


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": x(), "y": torch.ones(8)}, "batch['x'] [4, 2], batch['y'] [8]"),
        ((x(), torch.tensor(0.5)), "batch[0] [4, 2], batch[1] []"),
        ([{"boxes": x(3)}, {"boxes": x(2)}], "batch[0]['boxes'] [3, 2], batch[1]"),
        (Pair(x(), [torch.ones(5)]), "batch.image [4, 2], batch.label[0] [5]"),
        (torch.tensor(1.0), "batch []"),
        ({"x": np.ones(4), "id": ["a"]}, "count="),
    ],
)
def test_an_ambiguous_number_of_samples_is_an_error(batch: Any, named: str):
    with pytest.raises(TaskError) as caught:
        samples_of(batch)
    assert named in str(caught.value)


def loader_of(collate: Any, count: Any = None, skip: bool = False, threads: int = 0) -> TrainLoader:
    data = Data(ArraySource({"row": np.arange(24)}), collate, count)
    workers, plan = LoaderThreads(threads), Plan(24, slots=4, micro_batch=3)
    return TrainLoader(data, plan, "none", 3, 9, 1, 0, workers, skip=skip, digests=True)


def test_the_loader_accepts_any_nested_batch():
    def collate(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        kept = [row for row in records["row"].tolist() if row >= 6]  # slot 0 has none
        return Pair(torch.tensor(kept), {"name": [f"row {row}" for row in kept], "scale": 1.5})

    loader = loader_of(collate, skip=True, threads=2)
    slots = [slot for step in loader.steps(0, 2) for slot in step]
    assert [slot.samples for slot in slots] == [0, 3, 3, 3] * 2
    for slot in slots:
        assert type(slot.batch) is Pair
        assert slot.batch.label["name"] == [f"row {row}" for row in slot.batch.image.tolist()]
        assert bool(slot.digest) == bool(slot.samples)
    with pytest.raises(DataError, match="0 samples for 3 records"):
        list(loader_of(collate).steps(0, 2))


def test_samples_are_counted_by_the_data_if_it_can():
    """For example, several crops of a record, or boxes, whose number differs between images."""

    def crops(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        return {"x": torch.from_numpy(np.repeat(records["row"], 8))}

    def boxes(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        return [{"boxes": torch.zeros(row, 4)} for row in records["row"].tolist()]

    with pytest.raises(TaskError, match="24 samples for 3 records"):
        next(loader_of(crops).steps(0, 1))
    slots = next(loader_of(boxes, count=len).steps(0, 1))
    assert [slot.samples for slot in slots] == [3, 3, 3, 3]
    assert slots[1].batch[2]["boxes"].shape == (8, 4)
    for wrong in (lambda batch: 4, lambda batch: 2):
        with pytest.raises(TaskError, match=r"Data\.count"):
            next(loader_of(boxes, count=wrong).steps(0, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_digests_are_frozen():
    """Logs of one version are compared with those of the next."""
    parts = [torch.arange(3.0), torch.arange(5.0)]
    nested = [torch.nested.nested_tensor(parts, layout=k) for k in (torch.strided, torch.jagged)]
    batches = [*nested, torch.eye(3).to_sparse(), {"a": [torch.ones(2), "x"], "b": (1, 2.5, None)}]
    known = ["45668819", "ba1864c5", "d5dbde6d", "841d334c"]
    assert [digest_of(b"s", batch)[:8] for batch in batches] == known
