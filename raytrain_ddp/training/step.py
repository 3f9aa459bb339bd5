"""One optimizer step over this worker's slots."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.data.loader import Slot, samples_of
from raytrain_ddp.data.source import Batch
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.tasks.check import require_loss
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.clock import Clock
from raytrain_ddp.training.guard import Guard
from raytrain_ddp.training.likeness import Likeness
from raytrain_ddp.training.reduction import (
    DdpReduction,
    ExactReduction,
    ExactSum,
    PlainSum,
    Reduction,
    Sum,
)
from raytrain_ddp.training.state import (
    KeptBuffers,
    Place,
    TrainState,
    buffers_of,
    evaluating,
    has_mean,
)
from raytrain_ddp.training.timing import counting_flops
from raytrain_ddp.training.world import World, seed_slot

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Forward, backward and update.

    The loss of a slot counts by its share of the step's samples, so uneven deals and a short last
    step are exact.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        state: TrainState,
        net: nn.Module,
        world: World,
        guard: Guard,
        clock: Clock,
        likeness: Likeness,
    ) -> None:
        self.likeness = likeness
        self._config, self._task, self._state, self._net = config, task, state, net
        self._world, self._guard, self._clock = world, guard, clock
        is_scaled = state.scaler.is_enabled()  # by which `compress` goes, too
        self._reduction: Reduction = DdpReduction(net, 1.0 if is_scaled else float(world.size))
        if config.exact:
            bucket_mib = config.ddp.bucket_cap_mb
            self._reduction = ExactReduction(state.model, config.slots, world, bucket_mib, clock)
        slots = config.slots if config.exact else 0
        self._buffers = SlotBuffers(state.model, world, is_scaled, slots)
        self._clip = config.optim.clip_norm

    def __call__(self, slots: list[Slot], samples: int, lr: float) -> Tensor:
        """Takes one step; all ranks take part. One that is not finite counts and changes nothing.

        Returns this worker's share of the mean loss over the step's `samples`, shape (), on the
        device: the shares of all workers add up to it.

        Raises:
            DivergedError: this step was not finite, or on a GPU the one before; see `judge`. Or the
                ranks have not the same weights; see `Likeness`.
        """
        state, device = self._state, self._world.device
        place = self._world.rank, state.step + 1
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.zero_grad(set_to_none=True)
        self._reduction.begin()
        self._buffers.begin()
        working = self._reduction.working(slots)
        for slot in working:
            weight = slot.samples / max(1, samples)  # none, if all were bad records
            seed_slot(device, self._config.seed, slot.step, slot.index)
            self._buffers.rewind()
            is_last = slot is working[-1]
            with self._reduction.passing(slot, is_last), self._training(bool(slot.samples)):
                loss = self._forward(slot.batch, self._net)
                spoilt = failpoint("train.loss", *place)  # 1, but in a test
                shown = loss.detach() * spoilt
                self._guard.watch(slot.index, shown)
                if is_last and self._world.size > 1:
                    self._clock.after_backward(loss)
                state.scaler.scale(loss * (spoilt * weight * self._reduction.scale)).backward()
            self._buffers.add(slot.index, weight, shown)
        failpoint("train.after_backward", *place)
        self._reduction.finish()
        loss_share, agreed = self._buffers.agree()
        self._clock.mark("communication" if self._world.size > 1 else "compute")
        self._update(lr, agreed)
        self._clock.mark("optimizer")
        state.step += 1
        self._guard.follow()
        self.likeness.follow()
        return loss_share

    def settle(self) -> None:
        """Waits until the last step is known to be finite; all ranks take part.

        Raises:
            DivergedError: it was not, and the config says to stop.
        """
        self._guard.settle()

    def _update(self, lr: float, agreed: Tensor) -> None:
        """Applies the gradients, unless something is not finite: with no wait for the device."""
        state = self._state
        norm, refused = self._guard.examine(lr, agreed)
        self._buffers.finish(refused)
        state.compression.finish(refused)
        if self._clip:
            nn.utils.clip_grads_with_norm_(state.model.parameters(), self._clip, norm)
        state.optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
        state.optimizer.step()
        state.scaler.update()

    def warm_up(self, batch: Batch, smallest: Batch) -> float:
        """Two passes that leave no trace; all ranks take part.

        Finds what cannot work, too: kernels, and a `smallest` micro-batch too small for batch norm.

        DDP lays its gradient buckets anew after the first backward pass, and so sums in another
        order from then on. Done before a state is loaded, a resumed run sums as an uninterrupted
        one.

        Returns the floating-point operations of a sample, forward and backward; 0 if not known.
        """
        buffers = KeptBuffers(self._state.model)
        try:
            with counting_flops(self._config.compute.compile) as counter:
                self._pass(batch)
            self._pass(batch)
            # Its scale is made by the first use, and a rank without samples has none.
            self._state.scaler.scale(torch.zeros((), device=self._world.device))
            with torch.no_grad():
                self._forward(smallest, self._state.model)
        except (RuntimeError, ValueError) as error:
            remedy = _remedy(str(error))
            if remedy is None:
                raise
            raise ConfigError(remedy) from error
        buffers.restore()
        self._state.compression.forget()
        return counter.get_total_flops() / samples_of(batch)

    def _pass(self, batch: Batch) -> None:
        self._forward(batch, self._net).backward()
        self._reduction.require_all(self._state.model)
        self._state.optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: Batch, model: nn.Module) -> Tensor:
        return forward(self._config, self._task, model, batch, self._world)

    def _training(self, counts: bool) -> AbstractContextManager[None]:
        """A slot without samples joins in evaluation mode, so that it leaves no statistics."""
        return nullcontext() if counts else evaluating(self._net)


def forward(
    config: TrainConfig, task: Task, model: nn.Module, batch: Batch, world: World
) -> Tensor:
    """The task's loss of a batch, shape (), in the config's precision.

    Raises:
        TaskError: it is no such loss.
    """
    dtype = _DTYPES[config.compute.precision]
    with torch.autocast(world.device.type, dtype, enabled=dtype is not torch.float32):
        loss = task.loss(model, to_device(batch, world.device))
    return require_loss(task, loss, needs_gradient=torch.is_grad_enabled())


class SlotBuffers:
    """Buffers (batch-norm statistics) as a function of all slots, not of one worker's; and losses.

    Each slot starts from the buffers at the begin of the step; their changes are averaged over all
    slots by samples. DDP's own way, rank 0's buffers for all, would tie them to the deal.

    Args:
        with_loss: the ranks agree on the loss, too, also where there are no buffers.
        exact_slots: the number of slots, if sums shall have the same bits on any number of workers.
    """

    def __init__(
        self, model: nn.Module, world: World, with_loss: bool = False, exact_slots: int = 0
    ) -> None:
        by_type: dict[torch.dtype, list[Place]] = {}
        for place in buffers_of(model):
            by_type.setdefault(place.tensor().dtype, []).append(place)
        self._groups = [by_type[dtype] for dtype in by_type if has_mean(dtype)]
        self._lengths = [sum(place.tensor().numel() for place in g) for g in self._groups]
        self._world, self._is_exact = world, bool(exact_slots)
        self._agrees = with_loss or self._is_exact or bool(self._groups)
        length = sum(self._lengths) + 1
        self._sum: Sum = PlainSum(length, world)
        if exact_slots:
            self._sum = ExactSum(exact_slots, length, world)

    def begin(self) -> None:
        self._start = [_flat(group) for group in self._groups]
        self._change: list[Tensor] = []
        self._own_loss = torch.zeros((), dtype=torch.float64, device=self._world.device)
        self._sum.begin()

    def rewind(self) -> None:
        for group, start in zip(self._groups, self._start, strict=True):
            _spread(start, group)

    def add(self, slot: int, weight: float, loss: Tensor) -> None:
        """What a slot has done to the buffers, and its loss, shape ()."""
        parts = []
        for group, start in zip(self._groups, self._start, strict=True):
            now = _flat(group)
            if start.is_floating_point():  # equal is no change: inf - inf, in a mask, would be nan
                parts.append(torch.where(now == start, 0, now - start).double())
            else:  # in 64 bits, as uint8 has no negative changes
                parts.append((now.long() - start.long()).double())
        share = loss.double()
        self._own_loss += share * weight
        if self._agrees:
            self._sum.add(slot, torch.cat([*parts, share.view(1)]) * weight)

    def agree(self) -> tuple[Tensor, Tensor]:
        """All ranks take part.

        Returns:
            This worker's share of the mean loss, float64, shape (): the shares of all add up to it.
            The sum of all changes and shares, shape (): finite if each of them is. It is 0 where
            nothing is agreed on, as there are no buffers.
        """
        if not self._agrees:
            return self._own_loss, torch.zeros_like(self._own_loss)
        total = self._sum.finish()
        *self._change, loss = total.split([*self._lengths, 1])
        if self._is_exact:  # one share is all of it, so that its sum has the same bits, too
            self._own_loss = loss.sum() if self._world.is_main else torch.zeros_like(loss.sum())
        return self._own_loss, total.sum()

    def finish(self, refused: Tensor) -> None:
        """The buffers after the step; those before it, where `refused`, shape (), is true."""
        for group, start, change in zip(self._groups, self._start, self._change, strict=True):
            applied = torch.where(refused, 0, change)
            if start.is_floating_point():
                _spread((start + applied).to(start.dtype), group)
            else:  # float64 has no room for all of 64 bits, but for changes
                _spread(start.long() + applied.round().long(), group)


def _remedy(text: str) -> str | None:
    """The config's own remedy for an error that torch tells in its own words."""
    if "deterministic implementation" in text:
        return (
            f"{text.splitlines()[0]} Give up bitwise resume with --compute.no-deterministic, or "
            "take another model."
        )
    if "more than 1 value per channel" in text:
        return (
            "the last step of an epoch has a micro-batch of one sample, too few for this model's "
            "batch norm: take another --micro-batch or --batch-size."
        )
    return None


def to_device(batch: Batch, device: torch.device) -> Mapping[str, Tensor]:
    """The batch on `device`; from page-locked memory the copy runs beside other work."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _flat(places: list[Place]) -> Tensor:
    return torch.cat([place.tensor().reshape(-1) for place in places])


def _spread(values: Tensor, places: list[Place]) -> None:
    """Writes a flat vector into the buffers, in one kernel on a GPU."""
    buffers = [place.tensor() for place in places]
    pieces = values.split([buffer.numel() for buffer in buffers])
    torch._foreach_copy_(buffers, [p.view_as(b) for p, b in zip(pieces, buffers, strict=True)])
