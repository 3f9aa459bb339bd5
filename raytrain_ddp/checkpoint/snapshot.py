"""Serializes training state without pickle: device -> host copy -> safetensors and JSON.

structure, tensors = flatten_state(state)      references only
copies = snapshot.take(tensors)                the only part that blocks training
files = encode(Snapshot(..., copies, ...))     encoded bytes, in chunks, in the background
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread, main_thread
from typing import Any

import torch
from torch import Tensor

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import LOG_FILE
from raytrain_ddp.checkpoint.streams import Content
from raytrain_ddp.errors import CheckpointError
from raytrain_ddp.events import LogRecord
from raytrain_ddp.records import to_record

# The dtype names of the safetensors format, https://github.com/huggingface/safetensors#format
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_MUCH_BYTES, _PAGE_BYTES = 2**25, 4096
_PIECE = 500  # log records per chunk
RESERVED_NAME = "__metadata__"  # in a safetensors header


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: host copies that later steps do not change.

    Args:
        manifest: the manifest, without its list of files.
        tensors: file stem -> name -> tensor.
        documents: file name -> JSON-serializable value.
        log: all records so far.
        last: whether the run ends normally with this checkpoint.
    """

    manifest: Manifest
    tensors: Mapping[str, Mapping[str, Tensor]]
    documents: Mapping[str, Any]
    log: Sequence[LogRecord] = ()
    last: bool = False


class HostSnapshot:
    """Copies of device tensors in host memory that is allocated once and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._reserving: Thread | None = None
        self.is_reserved = False

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates the memory for `take`, if it is much, in a thread: the first pages of a GB
        may take seconds. Further calls do nothing."""
        if self.is_reserved:
            return
        self.is_reserved = True
        if sum(each.nbytes for each in tensors.values()) >= _MUCH_BYTES:
            # Not a daemon: one that is in torch at Python's end aborts the process.
            self._reserving = Thread(target=self._allocate, args=(tensors,), name="reserving")
            self._reserving.start()

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies all tensors; after it returns, the sources may change, even if they share memory.

        **The copies are valid until the next call**, which overwrites them: finish encoding first.
        Copies of CUDA tensors are in pinned memory; the host waits once for the current stream of
        each device.
        """
        if self._reserving is not None:
            self._reserving.join()
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def _allocate(self, tensors: Mapping[str, Tensor]) -> None:
        with suppress(RuntimeError, MemoryError):  # `take` raises it
            for name, tensor in tensors.items():
                if not main_thread().is_alive():  # Python waits for this thread
                    return
                self._buffers[name] = buffer = self._buffer(name, tensor)
                if tensor.nbytes >= _PAGE_BYTES and not tensor.is_cuda:
                    raw = torch.as_strided(buffer, (buffer.numel(),), (1,)).view(torch.uint8)
                    raw.numpy()[::_PAGE_BYTES] = 0

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if (
            old is not None
            and old.shape == tensor.shape
            and old.dtype == tensor.dtype
            and old.is_pinned() == tensor.is_cuda
        ):
            return old
        return torch.empty_like(
            tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
        )


@dataclass(frozen=True)
class TensorFile:
    """A file in the safetensors format that is never in memory as a whole.

    Iterating over it, any number of times, yields its bytes in order: views of the tensors' own
    memory, which must not change in the meantime.
    """

    head: bytes
    tensors: Sequence[Tensor]

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.head)
        for tensor in self.tensors:
            # A copy only if the layout differs (channels_last), one tensor at a time.
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def loss_of(metrics: Mapping[str, float]) -> float:
    """The metric "loss" of the evaluation; inf if it is missing or nan."""
    loss = metrics.get("loss", math.inf)
    return math.inf if loss is None or math.isnan(loss) else loss


def encode(snapshot: Snapshot) -> dict[str, Content]:
    """The files of a checkpoint except its manifest. Tensors are views of the snapshot.

    Each file can be written only once.
    """
    files: dict[str, Content] = {
        f"{stem}.safetensors": encode_tensors(t) for stem, t in snapshot.tensors.items()
    }
    for name, value in snapshot.documents.items():
        files[name] = json.dumps(value).encode()
    files[LOG_FILE] = _encode_log(snapshot.log)
    return files


def _encode_log(log: Sequence[LogRecord]) -> Iterator[bytes]:
    """The bytes of `json.dumps`, in chunks: each call holds the GIL until it returns, and the log
    grows throughout the run."""
    yield b"["
    for start in range(0, len(log), _PIECE):
        piece = json.dumps([to_record(each) for each in log[start : start + _PIECE]])
        yield (", " if start else "").encode() + piece[1:-1].encode()
    yield b"]"


def unstorable(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The tensors that `encode_tensors` would refuse: name -> their kind."""
    kinds = {n: t.dtype if isinstance(t, Tensor) else type(t).__name__ for n, t in tensors.items()}
    return {n: str(k) for n, k in kinds.items() if k not in _DTYPE_NAMES or n == RESERVED_NAME}


def encode_tensors(tensors: Mapping[str, Tensor]) -> TensorFile:
    """Encodes CPU tensors as one file in the safetensors format, each in contiguous layout.

    `safetensors.torch.save` makes a second copy and holds the GIL for 5 s per GB (measured), while
    training stands still.

    Raises:
        CheckpointError: the format does not support a dtype, or a name is ``__metadata__``.
    """
    for name, kind in unstorable(tensors).items():
        raise CheckpointError(f"Tensor {name!r} of {kind} cannot be stored in a checkpoint.")
    header: dict[str, Any] = {}
    size_bytes = 0
    # Widest first, as safetensors does, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        end = size_bytes + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [size_bytes, end],
        }
        size_bytes = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return TensorFile(head, [each.detach() for _, each in ordered])


def flatten_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits a nested state into its tensors, by name, and its structure, made of JSON values.

    Takes dicts (any JSON scalar as key, so also an optimizer's int keys), lists, tuples, tensors
    and JSON scalars. The tensors are not copied; names are paths such as ``model/fc.weight``.

    Raises:
        CheckpointError: the state contains anything else; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    structure = _flatten(state, "", tensors)
    return tensors, structure


def unflatten_state(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """The inverse of `flatten_state`, including tuples, key types, key order and strides.

    Raises:
        CheckpointError: the structure is not from `flatten_state`, or a tensor is missing.
    """
    try:
        return _unflatten(structure, tensors)
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The state does not fit its tensors: {type(error).__name__}: {error}"
        ) from None


# In the structure each container is an object with one of the keys "dict", "list", "tuple" and
# "tensor", so no content of the state can be mistaken for one.


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = path
        while name in tensors or name == RESERVED_NAME:  # {"a/b": x, "a": {"b": y}}
            name += "~"
        tensors[name] = value.detach()
        # Fused optimizers need momentum in the same memory layout as the weights (channels_last).
        sizes, strides = value.shape, value.stride()
        order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1))
        in_order = order == list(range(value.dim()))
        return {"tensor": name} if in_order else {"tensor": name, "order": order}
    if isinstance(value, dict):
        for key in value:
            if not (key is None or isinstance(key, (bool, int, float, str))):
                raise CheckpointError(f"State {path or '/'}: the key {key!r} is not a JSON scalar.")
        items = [[key, _flatten(item, _under(path, key), tensors)] for key, item in value.items()]
        # A module's state_dict carries the versions of its modules as an attribute.
        versions = getattr(value, "_metadata", None)
        if versions is None:
            return {"dict": items}
        return {"dict": items, "metadata": _flatten(dict(versions), path, tensors)}
    if type(value) in (list, tuple):
        items = [_flatten(item, _under(path, i), tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    raise CheckpointError(
        f"State {path or '/'}: {type(value).__name__} is neither a tensor nor a JSON value: "
        "leave it out, or turn it into numbers, text or tensors."
    )


def _under(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _unflatten(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    match node:
        case {"tensor": name}:
            return _laid_out(tensors[name], node["order"]) if "order" in node else tensors[name]
        case {"dict": items, "metadata": versions}:
            state = OrderedDict((key, _unflatten(item, tensors)) for key, item in items)
            state._metadata = _unflatten(versions, tensors)  # type: ignore[attr-defined]
            return state
        case {"dict": items}:
            return {key: _unflatten(item, tensors) for key, item in items}
        case {"list": items}:
            return [_unflatten(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_unflatten(item, tensors) for item in items)
    raise ValueError(f"unknown node {str(node)[:100]!r}")


def _laid_out(tensor: Tensor, order: list[int]) -> Tensor:
    """The same values, stored densely with the dimensions in `order`, outermost first."""
    shape = [tensor.shape[dim] for dim in order]
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return torch.empty(shape, dtype=tensor.dtype).permute(inverse).copy_(tensor)
