"""A file of tensors is read into the memory of existing tensors."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from raytrain_ddp.checkpoint import tensor_places
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.tensor_places import TensorPlaces, view_tensors
from raytrain_ddp.errors import CheckpointError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_places, "_LEAST_BYTES", 8)


def stored() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).double(),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "c": torch.randn(4, 4).to(torch.bfloat16),
        "d": torch.randn(6),
    }


def fill(places: TensorPlaces, data: bytes) -> None:
    done = 0
    for view in places.views:
        view[:] = data[done : done + len(view)]
        done += len(view)
    assert done == len(data)


def head_of(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("seed", range(20))
def test_existing_tensors_are_filled_and_others_are_allocated(seed: int) -> None:
    tensors = stored()
    data = b"".join(encode_tensors(tensors))
    names = random.Random(seed).sample(sorted(tensors), seed % 7)
    existing = {name: torch.zeros_like(tensors[name]) for name in names}
    places = TensorPlaces(head_of(data), len(data), existing)
    fill(places, data)
    found = places.tensors()
    assert {*found} == {*tensors}
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        if name in existing and tensor.nbytes >= 8:
            assert found[name].data_ptr() == existing[name].data_ptr()


def test_mismatched_tensors_and_shared_memory_are_unchanged() -> None:
    tensors = stored()
    data = b"".join(encode_tensors(tensors))
    shared = torch.zeros(15 + 7)
    existing = {
        "a": shared[:15].view(3, 5),  # a part of other memory
        "b": torch.zeros(7),  # another dtype
        "c": torch.zeros(4, 4, dtype=torch.bfloat16).t(),  # another layout
        "d": torch.zeros(5),  # another shape
    }
    existing["c"] = torch.zeros(8, 4, dtype=torch.bfloat16)[::2]
    places = TensorPlaces(head_of(data), len(data), existing)
    assert len(places.views) == 1
    fill(places, data)
    assert all(torch.equal(places.tensors()[name], each) for name, each in tensors.items())
    assert not any(each.any() for each in existing.values())


def test_tied_tensors_are_filled_once() -> None:
    one, tied = torch.randn(8), torch.zeros(8)
    data = b"".join(encode_tensors({"a": one, "b": one + 1}))
    places = TensorPlaces(head_of(data), len(data), {"a": tied, "b": tied})
    fill(places, data)
    assert torch.equal(tied, one)
    assert torch.equal(places.tensors()["b"], one + 1)


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\x02" * 60])
def test_a_damaged_header_fills_no_existing_tensor(head: bytes) -> None:
    existing = {"a": torch.zeros(3, 5)}
    places = TensorPlaces(head, 100, existing)
    assert [len(view) for view in places.views] == [100]


def test_overlapping_or_out_of_bounds_ranges_are_not_filled() -> None:
    tensors = {"a": torch.ones(8), "b": torch.ones(8)}
    data = b"".join(encode_tensors(tensors))
    head = head_of(data).replace(b"[32, 64]", b"[16, 48]")
    existing = {name: torch.zeros(8) for name in tensors}
    assert sum(map(len, TensorPlaces(head, len(data), existing).views)) == len(data)
    assert sum(map(len, TensorPlaces(head, len(data) - 40, existing).views)) == len(data) - 40


def test_a_file_that_changes_between_two_reads_is_refused() -> None:
    data = b"".join(encode_tensors({"a": torch.ones(8)}))
    places = TensorPlaces(head_of(data), len(data), {"a": torch.zeros(8)})
    fill(places, data.replace(b"F32", b"I32"))
    with pytest.raises(CheckpointError, match="changed"):
        places.tensors()


def changed_heads(data: bytes) -> list[bytes]:
    """The possible outcomes if one character of the header changes."""
    head, others = head_of(data), b'0.,-}]" x'
    return [
        head[:at] + bytes([other]) + head[at + 1 :]
        for at in range(8, len(head))
        for other in others
    ]


def test_fault_10_a_damaged_header_raises_nothing_before_the_hash_is_known() -> None:
    tensors = stored()
    data = b"".join(encode_tensors(tensors))
    for head in changed_heads(data):
        existing = {name: torch.zeros_like(each) for name, each in tensors.items()}
        places = TensorPlaces(head, len(data), existing)
        fill(places, head + data[len(head) :])
        with suppress(CheckpointError):  # as if the hash matched
            places.tensors()


@pytest.mark.parametrize("offsets", ["[32.0, 64]", "[3, 32, 64]", "[31, 63]", "[16, 48]", "[64]"])
def test_offsets_that_are_not_integers_or_leave_gaps_are_refused(offsets: str) -> None:
    data = b"".join(encode_tensors({"a": torch.ones(8), "b": torch.ones(8)}))
    text = head_of(data)[8:].replace(b"[32, 64]", offsets.encode())
    head = len(text).to_bytes(8, "little") + text
    with pytest.raises(CheckpointError, match="Not a complete"):
        view_tensors(memoryview(bytearray(head + data[-64:])))
