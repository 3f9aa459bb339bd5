"""Nested batches: all of their tensors are counted, moved, and compared."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.loading.loader import Slot, TrainLoader
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.loading.nested import (
    bytes_of,
    digest_of,
    map_leaves,
    pinned,
    samples_of,
    to_device,
)
from raytrain_ddp.data.loading.sources import Batch, Data
from raytrain_ddp.data.order.epoch_order import Plan
from raytrain_ddp.data.order.sample_rng import Draws
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
    seen: list[Tensor] = []
    map_tensors(lambda tensor: seen.append(tensor) or tensor, moved)  # type: ignore[func-returns-value]
    assert seen
    assert {tensor.device.type for tensor in seen} == {"meta"}
    same = map_tensors(lambda tensor: tensor + 0, batch)
    assert digest_of(b"", same) == digest_of(b"", batch)
    other = map_tensors(lambda tensor: tensor + 1, batch)
    assert digest_of(b"", other) != digest_of(b"", batch)
    assert bytes_of(batch) >= x().nbytes
    assert bytes_of(same) == bytes_of(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def odd_leaves(factor: float = 1.0) -> dict[str, Any]:
    lengths = [torch.full((n, 2), factor) for n in (3, 1, 2, 2)]
    return {
        "packed": pack_sequence(lengths, enforce_sorted=False),
        "coo": (torch.eye(4) * factor).to_sparse_coo(),
        "csr": (torch.eye(4) * factor).to_sparse_csr(),
        "jagged": torch.nested.nested_tensor(lengths, layout=torch.jagged),
    }


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested"
)
def test_packed_sparse_and_nested_tensors_are_leaves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pytest.fail(str(tensor.layout)))
    batch = odd_leaves()
    assert [samples_of(leaf) for leaf in batch.values()] == [4] * 4
    assert samples_of(batch) == 4
    moved = to_device(batch, torch.device("cpu"))
    assert [type(leaf) for leaf in moved.values()] == [type(leaf) for leaf in batch.values()]
    assert digest_of(b"", pinned(moved)) == digest_of(b"", batch)
    for name, leaf in odd_leaves(2.0).items():
        assert digest_of(b"", leaf) != digest_of(b"", batch[name])
        assert bytes_of(leaf) >= 4 * 4
    assert bytes_of(batch["packed"]) == 8 * 2 * 4 + 3 * 8 + 2 * 4 * 8  # rows, steps, orders
    other = torch.nested.nested_tensor(
        [torch.ones(n, 2) for n in (1, 3, 2, 2)], layout=torch.jagged
    )
    assert digest_of(b"", other) != digest_of(b"", batch["jagged"])
    assert samples_of(torch.nested.nested_tensor([torch.ones(n) for n in (1, 3)])) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_digests_differ_for_nested_tensors_of_different_lengths():
    def strided(*lengths: int) -> Tensor:
        return torch.nested.nested_tensor([torch.ones(n, 2) for n in lengths])

    def narrowed(*lengths: int) -> Tensor:
        starts, ends = torch.zeros(2, dtype=torch.int64), torch.tensor(lengths)
        return torch.nested.narrow(torch.ones(2, 5, 3), 1, starts, ends, layout=torch.jagged)

    for make in (strided, narrowed):
        assert digest_of(b"", make(3, 1)) == digest_of(b"", make(3, 1))
        assert digest_of(b"", make(3, 1)) != digest_of(b"", make(1, 3))


def test_conjugated_and_negated_views_have_the_digests_of_their_values():
    value = torch.tensor([1 + 2j, 3 - 4j])
    for view in (value.conj(), value.conj().imag, x()._neg_view(), value.to_sparse().conj()):
        assert digest_of(b"", view) == digest_of(b"", view.clone().resolve_conj().resolve_neg())
    assert digest_of(b"", value.conj()) != digest_of(b"", value)


def test_arrays_of_objects_have_digests_of_their_content():
    def named(*names: str) -> np.ndarray:
        return np.array([["".join(name), None, 2.5] for name in names], object)

    assert digest_of(b"", named("ab", "c")) == digest_of(b"", named("ab", "c"))
    others = [named("ab", "d"), named("ab", "c").T, named("ab", "c").tolist()]
    assert digest_of(b"", named("ab", "c")) not in [digest_of(b"", each) for each in others]


def test_values_that_are_not_tensors_are_kept_and_count_in_the_digest():
    def batch(name: str, number: float, row: int) -> Any:
        return {"x": x(), "name": [name], "number": number, "rows": np.array([row])}

    base = batch("a", 1.0, 1)
    moved = to_device(base, torch.device("cpu"))
    assert (moved["name"], moved["number"], moved["rows"].tolist()) == (["a"], 1.0, [1])
    hashes = [digest_of(b"", b) for b in (base, batch("b", 1, 1), batch("a", 2, 1))]
    hashes += [digest_of(b"", batch("a", 1.0, 2)), digest_of(b"1", base)]
    assert len(set(hashes)) == len(hashes)
    assert Unlike({"x": x()}, 7).needed == to_device(Unlike({"x": x()}, 7), "cpu").needed


@pytest.mark.parametrize(
    ("batch", "reported"),
    [
        ({"x": x(), "y": torch.ones(8)}, r"differ: batch\['x'\] \[4, 2\], batch\['y'\] \[8\]\."),
        ({"y": torch.ones(8), "x": x()}, r"differ: batch\['y'\] \[8\], batch\['x'\] \[4, 2\]\."),
        ((x(), torch.tensor(0.5)), r"differ: batch\[0\] \[4, 2\], batch\[1\] \[\]\. .* number"),
        ([{"boxes": x(3)}, {"boxes": x(2)}], r"batch\[0\]\['boxes'\] \[3, 2\], batch\[1\]"),
        (Pair(x(), [torch.ones(5)]), r"batch\.image \[4, 2\], batch\.label\[0\] \[5\]"),
        (torch.tensor(1.0), r"differ: batch \[\]\."),
        ({"x": np.ones(4), "id": ["a"]}, r"tensors \(it contains ndarray, str\): .* count=..."),
    ],
)
def test_an_ambiguous_number_of_samples_is_an_error(batch: Any, reported: str):
    with pytest.raises(TaskError, match=reported):
        samples_of(batch)


def loader_of(collate: Any, count: Any = None, skip: bool = False, threads: int = 0) -> TrainLoader:
    data = Data(ArraySource({"row": np.arange(24)}), collate, count)
    plan = Plan(24, slots=4, micro_batch=3)
    return TrainLoader(
        data, plan, "none", 3, 9, 1, 0, LoaderThreads(threads), skip=skip, digests=True
    )


@pytest.mark.parametrize("threads", [0, 2])
def test_the_loader_accepts_any_nested_batch(threads: int):
    def collate(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        kept = [row for row in records["row"].tolist() if row >= 6]  # slot 0 has none
        return Pair(torch.tensor(kept), {"name": [f"row {row}" for row in kept], "scale": 1.5})

    loader = loader_of(collate, skip=True, threads=threads)
    slots: list[Slot] = [slot for step in loader.steps(0, 2) for slot in step]
    assert [slot.samples for slot in slots] == [0, 3, 3, 3] * 2
    for slot in slots:
        assert type(slot.batch) is Pair
        assert slot.batch.label["name"] == [f"row {row}" for row in slot.batch.image.tolist()]
        assert bool(slot.digest) == bool(slot.samples)
    with pytest.raises(DataError, match="returned 0 samples for 3 records"):
        list(loader_of(collate).steps(0, 2))


def test_more_samples_than_records_are_refused():
    """For example, a collate function that stacks several crops of each record: all weights would
    be wrong."""

    def crops(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        return {"x": torch.from_numpy(np.repeat(records["row"], 8))}

    with pytest.raises(TaskError, match=r"24 samples for 3 records.* count="):
        next(loader_of(crops).steps(0, 1))


def test_with_a_count_function_a_batch_may_be_anything():
    """For example, detection boxes, whose number differs between images."""

    def collate(records: dict[str, np.ndarray], draws: Draws) -> Batch:
        return [{"boxes": torch.zeros(row, 4)} for row in records["row"].tolist()]

    slots = next(loader_of(collate, count=len).steps(0, 1))
    assert [slot.samples for slot in slots] == [3, 3, 3, 3]
    assert slots[1].batch[2]["boxes"].shape == (8, 4)


def test_arrays_and_items_are_collated_by_default():
    batch = Data(ArraySource({"row": np.arange(24)})).batch(Draws(0, 0, np.array([3, 1])))
    assert batch["row"].tolist() == [3, 1]
