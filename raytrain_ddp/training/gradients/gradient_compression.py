"""How workers exchange gradients: in full, in a shorter type, or as low-rank factors (PowerSGD)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.order.sample_rng import hash64
from raytrain_ddp.training.gradients.buffer_sync import flat
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.runtime.world import World

_GAIN = 2  # send a matrix as factors if they are at least this many times smaller


class Compression:
    """The state that a compression keeps between steps: none, except for PowerSGD."""

    is_own = False  # whether each rank keeps another state

    def finish(self, refused: Tensor) -> None:
        """Ends a step; if `refused`, shape (), restores the state before it."""

    def forget(self) -> None:
        """Restores the state before the first step."""

    def align(self, source: int) -> None:
        """Copies the state that all ranks share from rank `source`. All ranks take part."""

    def gather(self) -> dict[str, Tensor]:
        """The state for a checkpoint: copies on the host of rank 0. All ranks take part."""
        return {}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restores what was gathered, by any number of workers."""


def compress(
    net: nn.Module, config: TrainConfig, scaler: torch.amp.GradScaler, world: World, clock: Clock
) -> Compression:
    """Makes DDP, if `net` is wrapped in it, send gradients as the config says.

    DDP divides by the world size, which is compensated by multiplying the loss (see DdpReduction);
    not for fp16, where a loss of another size overflows at another scale.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    way = config.ddp.compression
    compression: Compression
    is_ddp = isinstance(net, DistributedDataParallel)
    if not is_ddp or (way == "none" and not scaler.is_enabled()):
        return Compression()
    if way == "none":  # fp16: without a hook DDP would divide by the world size
        net.register_comm_hook(None, _summed_bucket)  # type: ignore[operator]
        return Compression()
    if way == "powersgd":
        power = PowerSgd(net, config.ddp.powersgd_rank, config.seed, scaler, world, clock)
        compression, send = power, power.exchange
    else:
        hook_of_torch: Any = getattr(default_hooks, f"{way}_compress_hook")
        compression, send = Compression(), partial(hook_of_torch, None)  # None: all ranks

    # No annotations: DDP checks them by identity and refuses strings. It also refuses the bf16
    # hook's name in a torch without CUDA, where bf16 does work over gloo.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        if scaler.is_enabled():
            bucket.buffer().mul_(world.size)
        return send(bucket)

    net.register_comm_hook(None, hook)  # type: ignore[operator]
    return compression


# No annotations, as for the hook above.
def _summed_bucket(_, bucket):  # type: ignore[no-untyped-def]
    """A DDP hook for sums instead of means; its result has the dtype of the gradients."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda done: done.value()[0])


class PowerSgd(Compression):
    """Sends the gradient of a matrix, (n, m), as two factors, (n, rank) and (m, rank).

    They are found by one power iteration from the right factor of the step before. The residual,
    which they leave out, is added to the worker's next gradient (error feedback). Vogels,
    Karimireddy and Jaggi: PowerSGD, NeurIPS 2019, arXiv:1905.13727. Kernels of convolutions count
    as matrices; vectors, and matrices too small to gain by it, are sent whole.

    Everything is sent when the last bucket is ready, in two all-reduces that every rank starts in
    the same order. torch's own hook starts three per bucket from callbacks; with several buckets
    their order differs between ranks, and gloo aborts.

    The factors follow from the sum over all workers of gradient and residual. So world size does
    not change the math here either, and only the mean of the residuals must be restored.

    Args:
        net: in DistributedDataParallel.
        scaler: gradients have its scale when they are sent; residuals never do.
        clock: the exchange is accounted as communication in the backward pass.
    """

    is_own = True

    def __init__(
        self,
        net: nn.Module,
        rank: int,
        seed: int,
        scaler: torch.amp.GradScaler,
        world: World,
        clock: Clock,
    ) -> None:
        self._seed, self._scaler, self._world = hash64(seed, rank) >> 1, scaler, world
        self._clock = clock
        self._places = {
            id(p): place for place, p in enumerate(p for p in net.parameters() if p.requires_grad)
        }
        self._shapes: dict[int, tuple[int, int, int]] = {}  # index -> (n, m, rank), if factored
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.ndim > 1 and parameter.dtype == torch.float32:
                n, m = _matrix(torch.empty_like(parameter, device="meta")).shape
                least = min(n, m, rank)
                if (n + m) * least * _GAIN < n * m:
                    self._shapes[self._places[id(parameter)]] = n, m, least
        shapes = self._shapes.values()
        self._residual = torch.zeros(sum(n * m for n, m, _ in shapes), device=world.device)
        self._right = torch.zeros(sum(m * r for _, m, r in shapes), device=world.device)
        # The state after the current step, if the step is not refused.
        self._new_residual = torch.empty_like(self._residual)
        self._new_right = torch.empty_like(self._right)
        self._open: list[tuple[Future[Tensor], Tensor]] = []
        self._gradients: dict[int, Tensor] = {}

    def exchange(self, bucket: Any) -> Future[Tensor]:
        """DDP's hook, called for each bucket (dist.GradBucket) in the order of their numbers."""
        device = self._world.device
        future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else [])
        self._open.append((future, bucket.buffer()))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._gradients[self._places[id(parameter)]] = gradient
        if bucket.is_last():
            self._clock.mark("compute")
            self._average([self._gradients[place] for place in range(len(self._places))])
            self._clock.mark("communication")
            for each, buffer in self._open:
                each.set_result(buffer)
            self._open, self._gradients = [], {}
        return future

    def _average(self, gradients: Sequence[Tensor]) -> None:
        """Replaces each gradient by the mean over all workers, as approximated by the factors."""
        size = self._world.size
        matrices = [_matrix(gradients[place]) for place in self._shapes]
        whole = [g for place, g in enumerate(gradients) if place not in self._shapes]
        scale = self._scaler.scale(torch.ones((), device=self._world.device))
        for matrix, residual in zip(matrices, self._matrices(self._residual), strict=True):
            matrix.addcmul_(residual, scale)

        # Orthonormal as well: a right factor of zeros would stay zero forever.
        bases = [_orthonormal(right) for right in self._rights(self._right)]
        lefts = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        sums = _summed([*whole, *lefts])
        for gradient, total in zip(whole, sums, strict=False):
            gradient.copy_(total / size)
        lefts = [_orthonormal(left) for left in sums[len(whole) :]]
        rights = _summed([matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)])

        kept = self._rights(self._new_right), self._matrices(self._new_residual)
        for matrix, left, total, right, rest in zip(matrices, lefts, rights, *kept, strict=True):
            torch.div(total, size, out=right)
            torch.addmm(matrix, left, right.T, alpha=-1, out=rest)
            torch.mm(left, right.T, out=matrix)
        if self._scaler.is_enabled():
            self._new_residual.div_(scale)

    def finish(self, refused: Tensor) -> None:
        if not refused.is_cuda:  # known without waiting, and host memory is slower
            if not refused:
                self._residual, self._new_residual = self._new_residual, self._residual
                self._right, self._new_right = self._new_right, self._right
            return
        torch.where(refused, self._residual, self._new_residual, out=self._residual)
        torch.where(refused, self._right, self._new_right, out=self._right)

    def forget(self) -> None:
        self._residual.zero_()
        random = torch.Generator().manual_seed(self._seed)
        self._right.copy_(torch.randn(self._right.shape, generator=random))

    def align(self, source: int) -> None:
        dist.broadcast(self._right, source)

    def gather(self) -> dict[str, Tensor]:
        mine = self._residual.to("cpu")
        if not self._world.is_main:
            dist.gather(mine)
            return {}
        residuals = torch.empty(self._world.size, len(mine))
        dist.gather(mine, list(residuals))
        return {"residual": residuals, "right": self._right.to("cpu", copy=True)}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        residuals = saved["residual"]
        own = len(residuals) == self._world.size
        self._residual.copy_(residuals[self._world.rank] if own else residuals.mean(0))
        self._right.copy_(saved["right"])

    def _matrices(self, whole: Tensor) -> list[Tensor]:
        return _cut(whole, [(n, m) for n, m, _ in self._shapes.values()])

    def _rights(self, whole: Tensor) -> list[Tensor]:
        return _cut(whole, [(m, rank) for _, m, rank in self._shapes.values()])


def _cut(whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the parts of a vector."""
    pieces = whole.split([math.prod(shape) for shape in shapes])
    return [piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _matrix(gradient: Tensor) -> Tensor:
    """A view of shape (n, m), whatever the order of the dimensions in memory."""
    order = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
    dense = gradient.permute(order)
    return dense.view(dense.shape[0], -1)


def _orthonormal(columns: Tensor) -> Tensor:
    """By Householder reflections. If columns are linearly dependent, as in the gradient of a few
    samples, Gram-Schmidt would amplify their rounding errors to full columns."""
    q: Tensor = torch.linalg.qr(columns).Q
    return q


def _summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over all workers, in one collective."""
    if not tensors:
        return []
    whole = flat(tensors)
    dist.all_reduce(whole)
    parts = _cut(whole, [tensor.shape for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
