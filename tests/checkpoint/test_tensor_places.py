"""A file of tensors is read into the memory of existing tensors."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.tensor_places import TensorPlaces
from raytrain_ddp.errors import CheckpointError

LARGE = 2**18  # four bytes each: from here on, existing memory is used


def stored() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(4, LARGE // 4),
        "b": torch.randn(LARGE // 2).double(),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "c": torch.randn(2**10, 2**10).to(torch.bfloat16),
        "d": torch.randn(LARGE + 1),
        "small": torch.randn(LARGE - 1),
    }


def fill(places: TensorPlaces, data: bytes) -> None:
    done = 0
    for view in places.views:
        view[:] = data[done : done + len(view)]
        done += len(view)
    assert done == len(data)


def head_of(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


def test_existing_tensors_are_filled_and_others_are_allocated() -> None:
    tensors = stored()
    data = b"".join(encode_tensors(tensors))
    for seed in range(8):
        names = random.Random(seed).sample(sorted(tensors), seed)
        existing = {name: torch.zeros_like(tensors[name]) for name in names}
        places = TensorPlaces(head_of(data), len(data), existing)
        fill(places, data)
        found = places.tensors()
        assert {*found} == {*tensors}
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            if name in existing and tensor.nbytes >= 4 * LARGE:
                assert found[name].data_ptr() == existing[name].data_ptr()


def test_mismatched_tensors_and_shared_memory_are_unchanged() -> None:
    tensors = stored()
    data = b"".join(encode_tensors(tensors))
    existing = {
        "a": torch.zeros(LARGE + 7)[:LARGE].view(4, -1),  # a part of other memory
        "b": torch.zeros(LARGE // 2, dtype=torch.int64),  # another dtype
        "c": torch.zeros(2**10, 2**10, dtype=torch.bfloat16).t(),  # another layout
        "d": torch.zeros(1, LARGE + 1),  # another shape
    }
    places = TensorPlaces(head_of(data), len(data), existing)
    assert len(places.views) == 1
    fill(places, data)
    assert all(torch.equal(places.tensors()[name], each) for name, each in tensors.items())
    assert not any(each.any() for each in existing.values())


def test_tied_tensors_are_filled_once() -> None:
    one, tied = torch.randn(LARGE), torch.zeros(LARGE)
    data = b"".join(encode_tensors({"a": one, "b": one + 1}))
    places = TensorPlaces(head_of(data), len(data), {"a": tied, "b": tied})
    fill(places, data)
    assert torch.equal(tied, one)
    assert torch.equal(places.tensors()["b"], one + 1)


def test_fault_10_a_damaged_header_fills_nothing_wrong_and_raises_nothing_early() -> None:
    """The hash of the file is known only after it was read."""
    tensors = {"a": torch.ones(LARGE), "b": torch.ones(LARGE)}
    data = b"".join(encode_tensors(tensors))
    head = head_of(data)
    gap = head.replace(b"[1048576, 2097152]", b"[1048575, 2097151]")
    assert gap != head
    damaged = [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\x02" * 60, gap]
    damaged += [
        head[:at] + bytes([b'0.,-}]" x'[at % 9]]) + head[at + 1 :] for at in range(8, len(head))
    ]
    for bad in damaged:
        existing = {name: torch.zeros(LARGE) for name in tensors}
        places = TensorPlaces(bad, len(data), existing)
        assert sum(map(len, places.views)) == len(data)
        with suppress(CheckpointError):  # as if the hash matched
            places.tensors()
    assert sum(map(len, TensorPlaces(head, len(data) - 40, existing).views)) == len(data) - 40
    places = TensorPlaces(head, len(data), existing)
    fill(places, data.replace(b"F32", b"I32"))  # it has changed between two reads
    with pytest.raises(CheckpointError):
        places.tensors()
