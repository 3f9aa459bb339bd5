"""Computes what torch asks of an emulated GPU, with the CPU's kernels on the same memory.

`install()` takes the place of all CUDA kernels, in all threads. What torch does around kernels
stays its own: both allocators, streams, events, autograd's threads, autocast, copies, DDP.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

PACKAGE = f"{Path(__file__).parents[2] / 'raytrain_ddp'}{os.sep}"
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
PARENT = f"{Path(__file__).parents[1]}{os.sep}"  # of the tests

# Torch's own: they allocate, describe, or only copy.
_NATIVE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "empty_permuted", "resize_", "set_"),
    *("record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "is_set_to"),
}
# Their CUDA kernels read a number back to know the size of the result.
_WAITS = {
    *("nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "bincount"),
    *("unique_consecutive", "unique_dim_consecutive", "repeat_interleave"),
}
_COMPOSITE = ("convolution", "convolution_backward")  # they call a kernel of the device's choice
_TAKE_CPU_INDICES = {"index", "index_put_", "_index_put_impl_", "index_put"}

runtime: Any = None
sites: list[str] = []
_site_numbers: dict[str, int] = {}
step = 0  # counted by scenarios; 0 before the first
waits: Counter[tuple[str, str, int]] = Counter()  # (kind, place, step): the host waited
races: set[tuple[str, str, str]] = set()  # (kind, place of the access, place of the other)
_lock = Lock()
_generators: dict[tuple[int, int, int], Tensor] = {}


class EmulatedError(RuntimeError):
    """An operation that a real GPU would reject."""


def install() -> None:
    """Installs the emulated kernels; once, before any tensor is on a GPU."""
    global runtime, _keep  # noqa: PLW0603
    torch.backends.cudnn.enabled = False  # its kernels exist on GPUs only, as fused attention's do
    for switch in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)
    runtime = ctypes.CDLL(None)
    runtime.emulated_launch.argtypes = [ctypes.c_void_p]
    runtime.emulated_access.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
    ]
    runtime.emulated_site.argtypes = [ctypes.c_long]
    runtime.emulated_next_race.restype = ctypes.c_char_p
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_waited)
    runtime.emulated_on_wait(callback)
    library = torch.library.Library("aten", "IMPL")
    _keep = callback, library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # until torch 2.13, allow_override does not say so
        for name in torch._C._dispatch_get_all_op_names():
            kernel = _kernel_for(name)
            if kernel is not None:
                library.impl(name, kernel, "CUDA", allow_override=True)


def _kernel_for(name: str) -> Callable[..., Any] | None:
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    space, _, full = name.partition("::")
    short, _, overload = full.partition(".")
    if space != "aten" or short in _NATIVE:
        return None
    if short == "copy_":
        return _copy
    if not has("CUDA") and short not in _COMPOSITE:
        return None
    operation = getattr(getattr(torch.ops.aten, short), overload or "default")
    schema = operation._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view:
        return None
    special = {"native_dropout": _dropout, "_foreach_copy_": _copy_each}
    return special.get(short) or partial(_compute, operation, short)


# ------------------------------------------------------------------ where


def place() -> str:
    """The innermost line outside of torch that led here, in the package relative to it; 'native'
    in threads without Python, such as autograd's and gloo's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(TORCH) and not file.startswith("<"):
            short = file.removeprefix(PACKAGE).rpartition(PARENT)[2]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "native"


def _waited(kind: bytes) -> None:
    try:
        with _lock:
            waits[kind.decode(), place(), step] += 1
    except Exception:
        traceback.print_exc()


def _enter_site() -> None:
    name = place()
    with _lock:
        number = _site_numbers.setdefault(name, len(_site_numbers))
        if number == len(sites):
            sites.append(name)
    runtime.emulated_site(number)


def _collect_races() -> None:
    site, other = ctypes.c_long(), ctypes.c_long()
    while True:
        kind = runtime.emulated_next_race(ctypes.byref(site), ctypes.byref(other))
        if kind is None:
            return
        names = [sites[n.value] if n.value >= 0 else "native" for n in (site, other)]
        races.add((kind.decode(), *names))


# ------------------------------------------------------------------ kernels


def _compute(operation: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Any operation: on CPU tensors that share the memory of those on the device."""
    _enter_site()
    device = _device_of(name, args, kwargs)
    if name in _WAITS:
        with _lock:
            waits[name, place(), step] += 1
    call = _Call(name, device)
    arguments = operation._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    given = [call.down(value, argument) for value, argument in zip(args, arguments, strict=False)]
    named = {key: call.down(value, by_name[key]) for key, value in kwargs.items()}
    if "device" in named:
        named["device"] = torch.device("cpu")
    if "pin_memory" in named:
        named["pin_memory"] = None
    if "generator" in by_name:
        result = _random(operation, device, given, named)
    else:
        result = _special_cases(operation, name, given, named)
    lifted = call.up(result)
    _collect_races()
    return lifted


class _Call:
    """Takes arguments to the host, and results to the device. (No closures: a cycle of references
    would keep the tensors.)"""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._stream = torch._C._cuda_getCurrentRawStream(device.index)
        self._shared: list[tuple[Tensor, Tensor]] = []  # (on the device, on the host)
        self._outputs: dict[int, Tensor] = {}  # to be resized, by the id of that on the host
        runtime.emulated_launch(self._stream)

    def down(self, value: Any, argument: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.down(each, argument) for each in value]
        if not isinstance(value, Tensor):
            return value
        if not value.is_cuda:
            _require_scalar(self._name, value)
            return value
        if argument.is_out and value.numel() == 0:
            alias = torch.empty(0, dtype=value.dtype)
            self._outputs[id(alias)] = value
        else:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            _access(self._stream, value, is_written)
            alias = on_host(value)
        self._shared.append((value, alias))
        return alias

    def up(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([self.up(each) for each in value])
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        for on_device, alias in self._shared:
            if value is alias:
                if id(alias) in self._outputs:
                    on_device.resize_(value.shape)
                    _fill(on_device, value, self._stream)
                return on_device
        fresh = _allocate(value, self._device)
        _fill(fresh, value, self._stream)
        return fresh


def _special_cases(operation: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name in ("_softmax", "_log_softmax") and args[2]:  # half in, float out: on GPUs only
        return operation(args[0].float(), args[1], False, **kwargs)
    is_softmax = name in ("_softmax_backward_data", "_log_softmax_backward_data")
    if is_softmax and args[0].dtype != args[3]:
        return operation(*args[:3], args[0].dtype, **kwargs).to(args[3])
    return operation(*args, **kwargs)


def _device_of(name: str, args: Any, kwargs: Any) -> torch.device:
    """The GPU of an operation; all its tensors must be on it."""
    devices = {t.device for t in _tensors((args, tuple(kwargs.values()))) if t.is_cuda}
    if len(devices) > 1:
        raise EmulatedError(f"{name}: tensors on {sorted(map(str, devices))}")
    if devices:
        return devices.pop()
    asked = kwargs.get("device")
    index = asked.index if asked is not None and asked.index is not None else None
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _require_scalar(name: str, tensor: Tensor) -> None:
    if tensor.dim() == 0:
        return
    if name not in _TAKE_CPU_INDICES:
        raise EmulatedError(f"{name}: a tensor of shape {tuple(tensor.shape)} is on the CPU")
    with _lock:
        waits["pageable", place(), step] += 1


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor that shares the memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _allocate(like: Tensor, device: torch.device) -> Tensor:
    """Uninitialized, as for kernels; not filled for determinism."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled


def _fill(tensor: Tensor, value: Tensor, stream: int) -> None:
    if value.numel():
        _access(stream, tensor, True)
        on_host(tensor).copy_(value)


def _access(stream: int, tensor: Tensor, writes: bool) -> None:
    if tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size()
        runtime.emulated_access(stream, tensor.data_ptr(), size, writes)


# ------------------------------------------------------------------ copies


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between host and device torch copies itself, if layouts and types are equal."""
    _enter_site()
    if target.is_cuda and source.is_cuda and target.device == source.device:
        stream = torch._C._cuda_getCurrentRawStream(target.device.index)
        runtime.emulated_launch(stream)
        _access(stream, source, False)
        _access(stream, target, True)
        on_host(target).copy_(on_host(source))
        _collect_races()
        return target
    like = source.dtype == target.dtype and source.size() == target.size()
    if not (like and source.stride() == target.stride() and _is_dense(target)):
        # As torch does: the other type and layout on the device, through one more buffer.
        if target.is_cuda:
            moved = torch.empty_like(source, device=target.device)
            _native_copy(
                moved, source.contiguous() if not _is_dense(source) else source, non_blocking
            )
            return target.copy_(moved)
        moved = torch.empty_like(target, device=source.device)
        moved.copy_(source)
        _native_copy(target, moved, non_blocking)
        return target
    return _native_copy(target, source, non_blocking)


def _native_copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    torch.ops.aten.copy_.default._op_dk(key, target, source, non_blocking)
    _collect_races()
    return target


def _is_dense(tensor: Tensor) -> bool:
    return (
        torch._C._is_non_overlapping_and_dense(tensor)
        if hasattr(torch._C, "_is_non_overlapping_and_dense")
        else torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )


def _copy_each(targets: list[Tensor], sources: list[Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


# ------------------------------------------------------------------ random numbers


def _random(operation: Any, device: torch.device, args: list[Any], kwargs: Any) -> Any:
    """With a CPU generator that stands for the device's: seeded with it, and moved on with it."""
    names = [argument.name for argument in operation._schema.arguments]
    given = kwargs.pop("generator", None)
    if names.index("generator") < len(args):
        given = args.pop(names.index("generator"))
    of = given or torch.cuda.default_generators[device.index]
    used = stand_in(of)
    result = operation(*args, generator=used, **kwargs)
    moved_on(of, used)
    return result


def stand_in(generator: torch.Generator) -> torch.Generator:
    seed, offset = generator.initial_seed(), generator.get_offset()
    found = torch.Generator().manual_seed(seed + offset)
    state = _generators.get((generator.device.index, seed, offset)) if offset else None
    if state is not None:
        found.set_state(state)
    return found


def moved_on(generator: torch.Generator, used: torch.Generator) -> None:
    offset = generator.get_offset() + 4
    generator.set_offset(offset)
    _generators[generator.device.index, generator.initial_seed(), offset] = used.get_state()
    if len(_generators) > 64:
        del _generators[next(iter(_generators))]


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x).bernoulli_(1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x.mul(kept).mul_(scale), kept.bool()


def report() -> dict[str, Any]:
    """Everything that was counted, as JSON values."""
    _collect_races()
    return {
        "waits": [[*key, count] for key, count in sorted(waits.items())],
        "races": sorted(races),
    }
