"""State to bytes and back: independent copies, formats without pickle, exact inverses."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.snapshot import (
    HostSnapshot,
    TensorFile,
    encode_tensors,
    flatten_state,
    unflatten_state,
)
from raytrain_ddp.checkpoint.tensor_places import view_tensors
from raytrain_ddp.errors import CheckpointError

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def same_bits(a: Tensor, b: Tensor) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def assert_same(a: Any, b: Any) -> None:
    """Asserts equal structure, container and key types, key order, and bits."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        assert same_bits(a, b)
    elif isinstance(a, dict):
        assert isinstance(b, dict)
        assert [repr(k) for k in a] == [repr(k) for k in b]
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for item_a, item_b in zip(a, b, strict=True):
            assert_same(item_a, item_b)
    else:
        assert type(a) is type(b)
        assert repr(a) == repr(b)


def whole(file: TensorFile) -> bytes:
    return b"".join(file)


def decode(data: bytes | bytearray) -> dict[str, Tensor]:
    return view_tensors(memoryview(bytearray(data)))


def through_bytes(state: Any) -> Any:
    tensors, structure = flatten_state(state)
    data = whole(encode_tensors(HostSnapshot().take(tensors)))
    return unflatten_state(decode(data), json.loads(json.dumps(structure)))


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (1,), (3, 5), (0,), (2, 0, 3), (2, 3, 4, 5)]
    tensors = {
        f"{dtype}/{shape}": (torch.randn(shape) * 3).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    special.view(torch.int32)[0] = 0x7FC0_0123  # a NaN with a payload
    whole = torch.arange(60.0).reshape(3, 4, 5)
    return tensors | {
        "special": special,
        "strided": whole[:, ::2, 1:3],
        "transposed": whole.transpose(0, 2),
        "expanded": torch.ones(1).expand(4, 3),
        "view_a": whole[0],
        "view_b": whole[:2],
        "parameter": nn.Parameter(torch.ones(2)),
        "": torch.ones(1),
        "ünïcode/ \"'\n": torch.ones(1),
    }


def test_take_is_independent_of_its_sources() -> None:
    sources = samples() | {"tied": torch.ones(3)}
    sources["tied too"] = sources["tied"]
    before = {name: tensor.detach().clone() for name, tensor in sources.items()}
    copies = HostSnapshot().take(sources)
    with torch.no_grad():
        for name, tensor in sources.items():
            if name != "expanded":
                tensor.copy_(torch.zeros_like(tensor))
    assert list(copies) == list(before)
    for name, tensor in copies.items():
        assert same_bits(tensor, before[name]), name
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"
    assert copies["tied"].data_ptr() != copies["tied too"].data_ptr()
    snapshot = HostSnapshot()
    for other in (torch.ones(3), torch.ones(1, 3), torch.ones(1, 3).double()):
        assert same_bits(snapshot.take({"a": other})["a"], other)


def test_encode_round_trip_and_format() -> None:
    tensors, file = samples(), encode_tensors(samples())
    data = whole(file)
    assert data == whole(file)  # any number of times
    ours = decode(data)
    theirs = safetensors.torch.load(data)  # checked with the format's own library
    assert set(ours) == set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(ours[name], tensor), name
        assert same_bits(theirs[name], tensor), name
        assert ours[name].is_contiguous()
    assert decode(whole(encode_tensors({}))) == {}


def test_view_accepts_files_from_other_writers() -> None:
    """Their tensors may be at any position, in any order."""
    kinds = {"a": ("U8", [3], [0, 3]), "b": ("F32", [2], [3, 11]), "__metadata__": {}}
    header = {
        name: dict(zip(("dtype", "shape", "data_offsets"), kind, strict=False))
        for name, kind in kinds.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    data = len(text).to_bytes(8, "little") + text + body
    viewed = decode(data)
    assert {name: tensor.tolist() for name, tensor in viewed.items()} == {
        "a": [1, 2, 3],
        "b": [1.5, -2.0],
    }
    offsets = (b"[3, 12]", b"[4, 12]", b"[3.0, 11]", b"[2, 3, 11]", b"[11]", b"[0, 8]")
    gap = data.replace(b"[3, 11]", b"[4, 12]") + b"x"
    damaged = [gap, *(data.replace(b"[3, 11]", other) for other in offsets)]
    for bad in (*(data[:size] for size in range(len(data))), data + b"x", *damaged):
        with pytest.raises(CheckpointError):
            decode(bad)


def test_a_state_is_the_same_after_a_round_trip() -> None:
    one, two, three, four = (torch.full((1,), float(i)) for i in range(4))
    state: dict[Any, Any] = {"a/b": one, "a": {"b": two}, 0: three, "0": four, "__metadata__": one}
    state |= {"tensor": {"tensor": "a/b"}, "dict": [["tensor", "x"]], "list": {"list": []}}
    state |= {None: (), True: [(1, [one])], 2.5: {}, "": {"": two}, -1: 2**70, 1e300: "x\ud800"}
    state |= {
        "order": {"tensor": [torch.ones(2, 3).T], "order": []},
        "numbers": [float("nan"), -0.0, 1, 1.0],
    }
    state |= {"all": [*samples().values()]}
    assert_same(through_bytes(state), state)


def test_state_refuses_what_is_not_json_and_names_its_place() -> None:
    for value in ({1, 2}, b"bytes", object(), 1j, torch.float32, nn.Linear(1, 1)):
        with pytest.raises(CheckpointError, match="a/1"):
            flatten_state({"a": [0, value]})
    with pytest.raises(CheckpointError, match=r"\(1, 2\)"):
        flatten_state({"a": {(1, 2): 3}})
    tensors, structure = flatten_state({"a": torch.ones(1)})
    for found, wrong in (({}, structure), (tensors, {"unknown": 1}), (tensors, {"dict": [1]})):
        with pytest.raises(CheckpointError):
            unflatten_state(found, wrong)


def test_states_of_modules_and_optimizers_are_the_same_after_a_round_trip() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model = model.to(memory_format=torch.channels_last)
    weights, others = [[p for p in model.parameters() if (p.dim() > 1) == k] for k in (True, False)]
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, amsgrad=True),
        torch.optim.AdamW(weights, lr=torch.tensor(0.01), betas=(0.8, 0.99), foreach=False),
        torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}]),
    ):
        model(torch.randn(6, 3, 3, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        before = copy.deepcopy(state)
        restored = through_bytes(state)
        assert_same(restored, before)
        assert vars(restored["model"]) == vars(model.state_dict())  # the versions of its modules
        optimizer.load_state_dict(restored["optimizer"])
        assert_same(optimizer.state_dict(), before["optimizer"])
