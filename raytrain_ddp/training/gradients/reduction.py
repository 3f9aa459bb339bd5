"""Sums the gradients of all slots into those of the step."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.errors import ConfigError, TaskError, first_names
from raytrain_ddp.training.gradients.tree_sum import TreeSum
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.runtime.world import World, broadcast, broadcast_tensor, from_all_ranks


class DdpReduction:
    """Sums over a worker's slots in the gradients, and over workers by DDP during the last backward
    pass. DDP divides by the world size; `scale` compensates that unless a hook does (see
    `compress`).

    DDP waits forever for a rank whose loss does not depend on all parameters. Such a rank therefore
    completes the reduction: with zeros if its loss depends on none of them, as if it had no
    samples; otherwise with NaN, so that all ranks refuse the step and learn why.

    Attributes:
        scale: the loss is multiplied by it, besides its share of the step, before the backward
            pass.
        unused: names of the parameters to which this rank gave NaN in the last backward pass.
    """

    unused: Sequence[str] = ()

    def __init__(self, net: nn.Module, scale: float, world: World) -> None:
        self._net, self.scale, self._world = net, scale, world
        self._reduced: dict[int, tuple[str, nn.Parameter]] = {}  # by id
        self._found = found = set[int]()  # ids of those that have a gradient in this pass
        if isinstance(net, DistributedDataParallel):
            for name, parameter in net.module.named_parameters():
                if parameter.requires_grad:
                    self._reduced[id(parameter)] = name, parameter
                    parameter.register_post_accumulate_grad_hook(lambda p: found.add(id(p)))

    def require_all(self, _: nn.Module) -> None:
        """Ends the backward pass of a warm-up; all ranks take part. Raises ConfigError if a
        parameter that needs a gradient has none."""
        if isinstance(self._net, DistributedDataParallel):
            if self._net.static_graph:  # it ignores what its first passes do not use
                found = self._found
                self._reduced = {key: each for key, each in self._reduced.items() if key in found}
            require_used(self._complete(was_called=True), self._world)

    def begin(self) -> None:
        """Begins a step; there are no gradients yet."""

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        """This worker's slots that pass through the model, in order."""
        # All ranks make a backward pass; one without samples has no effect.
        return [slot for slot in slots if slot.samples] or list(slots[:1])

    @contextmanager
    def passing(self, slot: Slot | None, is_last: bool) -> Iterator[None]:
        """Wraps a slot's forward and backward pass; all ranks take part in the last one. Without a
        slot, this rank only takes part."""
        if not isinstance(self._net, DistributedDataParallel):
            yield
        elif not is_last:
            with self._net.no_sync():
                yield
        else:
            self._found.clear()
            with counting_calls(self._net) as calls:
                yield
            self.unused = self._complete(bool(calls))

    def _complete(self, was_called: bool) -> list[str]:
        """Completes DDP's reduction on all ranks; returns the names of the parameters without a
        gradient here, unless none has one."""
        lacking = [each for key, each in self._reduced.items() if key not in self._found]
        net, is_none = self._net, len(lacking) == len(self._reduced)
        self._found.clear()
        if not was_called and not is_none:
            raise TaskError(
                "the task's loss calls the model itself in this step, not the one that it "
                "receives, so gradients are not summed over the workers: call model(...)."
            )
        if not lacking or (net.find_unused_parameters and not is_none):  # DDP itself completes it
            return []
        names, parameters = [name for name, _ in lacking], [each for _, each in lacking]
        if is_none:  # the loss may not even have called the model, which prepares the reduction
            parameters = parameters[:1] if net.find_unused_parameters else parameters
            model, net.module = net.module, nn.Identity()
            try:
                net(parameters[0].sum())
            finally:
                net.module = model
        value = 0.0 if is_none else math.nan
        torch.autograd.backward(parameters, [torch.full_like(p, value) for p in parameters])
        return [] if is_none else names

    def finish(self) -> None:
        """Makes the gradients the sum over all slots; all ranks take part. They are 0 if no loss
        depends on the model, as in exact mode."""
        trained = (each for each in self._net.parameters() if each.requires_grad)
        if all(each.grad is None for each in trained):  # usually, the first one has a gradient
            for each in self._net.parameters():
                if each.requires_grad:
                    each.grad = torch.zeros_like(each)


@contextmanager
def counting_calls(net: nn.Module) -> Iterator[list[None]]:
    """Yields a list with an entry for each call of a wrapped model. (One that is not wrapped may be
    compiled.)"""
    calls: list[None] = []
    if not isinstance(net, DistributedDataParallel):
        yield calls
        return
    forward: Callable[..., Any] = net.forward

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(None)
        return forward(*args, **kwargs)

    net.forward = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del net.forward


def require_used(unused: Sequence[str], world: World, step: int = 0) -> None:
    """Raises the same ConfigError on all ranks, which all take part, if the loss of one does not
    depend on all parameters.

    Args:
        unused: names of those on which this rank's loss does not depend.
        step: from 1; 0: before the first one.
    """
    found = {rank: names for rank, names in enumerate(from_all_ranks(unused, world)) if names}
    for rank, names in found.items():
        raise _unused(names, f" of rank {world.of_run(rank)} in step {step}" if step else "")


def _unused(names: Sequence[str], where: str = "") -> ConfigError:
    return ConfigError(
        f"the loss{where} does not depend on {first_names(names, 3)}: freeze parameters that are "
        "not trained (requires_grad_(False)), or, if weight decay may change them, set "
        "--ddp.find-unused-parameters true."
    )


class ExactReduction:
    """Sums gradients as DdpReduction does, but in the order of a tree over all slots.

    The bits of the sums are the same for any number of workers.

    Gradients are exchanged in buckets during the last backward pass: each as soon as its gradients
    are complete and the previous bucket has been sent, so that all ranks use the same order.

    Args:
        model: not wrapped; its gradients become views of one vector per bucket.
        bucket_mib: the size at which a bucket is full; a bucket has parameters of one dtype.
        clock: notified when only communication remains.
    """

    scale = 1.0
    unused: Sequence[str] = ()

    def __init__(
        self, model: nn.Module, slots: int, world: World, bucket_mib: float, clock: Clock
    ) -> None:
        self._clock = clock
        self._buckets = [
            _Bucket(parameters, slots, world) for parameters in _divide(model, bucket_mib * 2**20)
        ]

    @staticmethod
    def require_all(model: nn.Module) -> None:
        """Raises ConfigError if a parameter that needs a gradient has none after a backward
        pass."""
        named = model.named_parameters()
        if unused := [name for name, p in named if p.requires_grad and p.grad is None]:
            raise _unused(unused)

    def begin(self) -> None:
        self._started = 0  # number of buckets being exchanged
        for bucket in self._buckets:
            bucket.sum.begin()

    def working(self, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if slot.samples]

    @contextmanager
    def passing(self, slot: Slot, is_last: bool) -> Iterator[None]:
        for bucket in self._buckets:
            bucket.open()
        hooks = self._watch(slot) if is_last else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self._buckets[self._started :]:
            bucket.close(slot)

    def _watch(self, slot: Slot) -> list[RemovableHandle]:
        """Registers hooks that start the buckets in the slot's backward pass. Permanent hooks would
        keep the parameters alive, and the parameters the hooks."""
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._count, slot, place))
            for place, bucket in enumerate(self._buckets)
            for parameter in bucket.parameters
        ]

    def _count(self, slot: Slot, place: int, parameter: Tensor) -> None:
        """Called when the gradient of a parameter is complete."""
        if place < self._started:
            raise ConfigError(
                "exact = true: a backward pass adds to a gradient twice, as torch.utils.checkpoint "
                "does with use_reentrant=True: set use_reentrant=False."
            )
        self._buckets[place].missing.discard(id(parameter))
        for bucket in self._buckets[self._started :]:
            if bucket.missing:
                break
            bucket.close(slot)
            bucket.sum.start()
            self._started += 1

    def finish(self) -> None:
        self._clock.mark("compute")  # also on a worker that has no samples
        for bucket in self._buckets[self._started :]:
            bucket.sum.start()
        for bucket in self._buckets:
            bucket.sum.share()
        for bucket in self._buckets:
            bucket.lay(bucket.sum.finish())


class _Bucket:
    """Parameters whose gradients are summed together.

    Attributes:
        missing: ids of the parameters without a gradient yet in the current pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], slots: int, world: World) -> None:
        self.parameters = parameters
        # In memory order, or compacted if the parameter is a view with gaps.
        self._strides = [torch.empty_like(each, device="meta").stride() for each in parameters]
        length = sum(parameter.numel() for parameter in parameters)
        self.sum = TreeSum(slots, length, parameters[0].dtype, world)

    def open(self) -> None:
        """Called before a slot's gradients arrive."""
        self._flat = self.sum.take()
        self.lay(self._flat)
        self.missing = {id(parameter) for parameter in self.parameters}

    def close(self, slot: Slot) -> None:
        """Called when all of the slot's gradients have arrived."""
        self.sum.add(slot.index, self._flat)

    def lay(self, flat: Tensor) -> None:
        """Makes the gradients views of a vector."""
        start = 0
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            parameter.grad = flat.as_strided(parameter.size(), strides, start)
            start += parameter.numel()


def _divide(model: nn.Module, size_bytes: float) -> list[list[nn.Parameter]]:
    """Divides parameters into buckets, in the likely order of a backward pass: the reverse of
    their registration."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    filled: Counter[torch.dtype] = Counter()  # bytes
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append(parameter)
        filled[dtype] += parameter.nbytes
        if filled[dtype] >= size_bytes:
            full.append(filling.pop(dtype))
            del filled[dtype]
    return [*full, *filling.values()]


def require_same_model(model: nn.Module, world: World) -> None:
    """Compares names, shapes and dtypes of parameters and buffers; all ranks take part.

    Raises:
        ConfigError: this rank's model differs from rank 0's.
    """
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in model_tensors(model).items()]
    if broadcast(shapes, world) != shapes:
        mine, first = world.of_run(world.rank), world.of_run(0)
        raise ConfigError(f"the model of rank {mine} has different parameters than rank {first}'s.")


def broadcast_model(model: nn.Module, world: World, is_loaded: bool) -> None:
    """Copies rank 0's parameters and buffers to all ranks, as DDP would do; all take part.

    Args:
        is_loaded: from a checkpoint; only what it does not contain is copied.
    """
    if world.size == 1:
        return
    loaded = model.state_dict().keys() if is_loaded else ()
    for name, tensor in model_tensors(model).items():
        if name not in loaded:
            broadcast_tensor(tensor)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that `state_dict` omits as well."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def in_ddp(model: nn.Module, config: TrainConfig, world: World) -> nn.Module:
    """Wraps the model in DistributedDataParallel, except for a single worker. `broadcast_model`
    synchronizes the weights, and SlotBuffers the buffers."""
    if world.size == 1:
        return model
    ddp = config.ddp
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=ddp.bucket_cap_mb,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        static_graph=ddp.static_graph,
        find_unused_parameters=ddp.find_unused_parameters,
        init_sync=False,
        **_no_buffer_sync(),
    )


def _no_buffer_sync() -> dict[str, Any]:
    """DDP's switch was renamed in torch 2.15; the old name causes a warning there."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    new = "forward_sync_buffers"
    return {new if new in parameters else "broadcast_buffers": False}


def compress(
    net: nn.Module, config: TrainConfig, scaler: torch.amp.GradScaler, world: World
) -> None:
    """Makes DDP, if `net` is wrapped in it, send gradients as the config says.

    DDP divides by the world size. Multiplying the loss compensates for this (see DdpReduction), but
    not with fp16, where a loss of a different magnitude would overflow at a different scale.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    way = config.ddp.compression
    is_ddp = isinstance(net, DistributedDataParallel)
    if not is_ddp or (way == "none" and not scaler.is_enabled()):
        return
    if way == "none":  # fp16: without a hook DDP would divide by the world size
        net.register_comm_hook(None, _summed_bucket)  # type: ignore[operator]
        return
    hook_of_torch: Any = getattr(default_hooks, f"{way}_compress_hook")
    send = partial(hook_of_torch, None)  # None: all ranks

    # No annotations: DDP checks them by identity and refuses strings. It also refuses the bf16
    # hook by name in a torch build without CUDA, although bf16 does work over gloo there.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if scaler.is_enabled():
            bucket.buffer().mul_(world.size)
        return send(bucket)

    net.register_comm_hook(None, hook)  # type: ignore[operator]


# No annotations, for the same reason as for the hook above.
def _summed_bucket(_, bucket):  # type: ignore[no-untyped-def]
    """A DDP hook for sums instead of means; its result has the dtype of the gradients."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])
