"""One optimizer's turn in a step: forward, backward and update over this worker's slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import refused
from raytrain_ddp.training.gradients.buffer_sync import SlotBuffers
from raytrain_ddp.training.gradients.reduction import DdpReduction, ExactReduction
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.optimizer.optimizer_state import skips_on_device
from raytrain_ddp.training.runtime.seeding import seed_slot
from raytrain_ddp.training.runtime.torch_compat import all_gather
from raytrain_ddp.training.session import Session, WarmUp
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.nonfinite import NonfiniteGuard
from raytrain_ddp.training.steps.warm_up import Forward, warm_up

Alone = Callable[[], AbstractContextManager[None]]


class Turn:
    """What one optimizer does in a step; the only one, unless a task returns several.

    The loss of a slot is weighted by its share of the step's samples, so uneven slots and a short
    last step are exact.

    Args:
        optimizer: steps over the parameters that are trained now, whose gradients `net` sums.
        alone: the context in which only these are trained; also of calls and warm-ups.
        name: of the optimizer, for the task's loss; "" if it is the only one.

    Attributes:
        scalar_names: of the scalars that the task logs with the loss; set by `adopt`.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        state: TrainState,
        net: nn.Module,
        session: Session,
        guard: NonfiniteGuard,
        clock: Clock,
        optimizer: Optimizer,
        alone: Alone,
        name: str,
    ) -> None:
        self.guard, self.alone, world = guard, alone, session.world
        self._config, self._task, self._state, self._net = config, task, state, net
        self._forward = Forward(config, task, state.model, net, world, name)
        self._clock, self._optimizer = clock, optimizer
        self._world, self._confirm = world, session.confirm
        self._require_ranks = session.require_ranks
        is_scaled = state.scaler.is_enabled()  # `compress` depends on it, too
        self._reduction: DdpReduction | ExactReduction
        if config.exact:
            bucket_mib = config.ddp.bucket_cap_mb
            self._reduction = ExactReduction(state.model, config.slots, world, bucket_mib, clock)
        else:
            self._reduction = DdpReduction(net, 1.0 if is_scaled else float(world.size), world)
        slots = config.slots if config.exact else 0
        self._make_buffers = partial(SlotBuffers, state.model, world, is_scaled, slots)
        self._buffers = self._make_buffers()
        self._clip = config.optim.clip_norm
        followed = getattr(task, "after_step", None) is not None  # the host waits for it anyway
        on_host = followed or not skips_on_device(optimizer)
        self._apply = self._apply_on_host if on_host else self._apply_on_device
        self._is_updating = False

    def __call__(
        self, slots: list[Slot], samples: int, rates: Sequence[float], number: int, gathers: bool
    ) -> tuple[Tensor, Tensor]:
        """Takes the turn; all ranks take part. One that is not finite changes nothing.

        The end of the last collective is its commit point: before it, a rank that loses a peer has
        changed nothing that `roll_back` does not restore; after it, the update needs no other rank.

        Args:
            rates: the learning rate of each parameter group.
            number: of the turn in its step, from 0; random numbers depend on it.
            gathers: all ranks get the shares of all.

        Returns the workers' shares of this turn, see `Stepper.__call__`; and whether it was
        refused, shape ().
        """
        state, device = self._state, self._world.device
        place = self._world.rank, state.step + 1
        first = number * (self._config.slots + 1)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.optimizer.zero_grad(set_to_none=True)
        self._reduction.begin()
        self._buffers.begin()
        working = self._reduction.working(slots)
        for slot in working:
            self._require_ranks()
            weight = slot.samples / max(1, samples)  # 0 if all were bad records
            seed_slot(device, self._config.seed, slot.step, first + slot.index)
            self._buffers.rewind()
            is_last = slot is working[-1]
            counts = slot.samples >= self._fewest
            with self._reduction.passing(slot, is_last), self._training(counts):
                loss, scalars = self._forward(slot.batch)
                beside = self._beside(scalars, slot.samples > 0)
                spoilt = failpoint("train.loss", *place)  # 1 except in tests
                shown = loss.detach() * spoilt
                if is_last and self._world.size > 1:
                    self._clock.after_backward(loss)
                weighted = loss * (spoilt * weight * self._reduction.scale)
                with self.guard.watching(slot.index, shown):
                    state.scaler.scale(weighted).backward()
            if self._reduction.unused:
                shown = shown * math.nan  # all ranks agree on it, also with fp16
            losses = torch.stack([shown, *beside]) if beside else shown
            self._buffers.add(slot.index, weight, losses)
        failpoint("train.after_backward", *place)
        self._reduction.finish()
        share, agreed = self._buffers.agree()
        shares = share.unsqueeze(0)
        if gathers and self._world.size > 1:
            shares = share.new_empty(self._world.size, len(share))
            all_gather(shares, share)
        self._confirm()
        self._clock.mark("communication" if self._world.size > 1 else "compute")
        self._is_updating = True
        refused = self._update(rates[0], agreed, first)
        self._is_updating = False
        return shares, refused

    def roll_back(self) -> bool:
        """Restores what a turn that did not end has changed; returns False if it cannot: during an
        update, or if one was refused and not all ranks know of it."""
        if self._is_updating or not self.guard.all_applied():
            return False
        self._buffers.roll_back()
        return True

    def _update(self, lr: float, agreed: Tensor, first: int) -> Tensor:
        """Applies the gradients unless something is not finite, without waiting for the device."""
        state = self._state
        norm, refused = self.guard.examine(lr, agreed, self._reduction.unused)
        self._buffers.finish(refused)
        if self._clip:
            nn.utils.clip_grads_with_norm_(state.model.parameters(), self._clip, norm)
        self._apply(refused, first)
        state.scaler.update()
        return refused

    def _beside(self, scalars: dict[str, Tensor], counts: bool) -> list[Tensor]:
        """The scalars in the order of their names; 0 for a slot without samples."""
        if (*scalars,) != self.scalar_names:
            names = [" ".join(each) or "none" for each in (scalars, self.scalar_names)]
            hint = f" Now: {names[0]}; before: {names[1]}."
            raise refused(self._task.loss, scalars, "scalars of the same names in each step", hint)
        zero = torch.zeros((), dtype=torch.float64, device=self._world.device)
        return [value.to(zero) if counts else zero for value in scalars.values()]

    def _apply_on_device(self, refused: Tensor, first: int) -> None:
        """A fused optimizer skips a refused step without the host."""
        self._optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
        self._optimizer.step()

    def _apply_on_host(self, refused: Tensor, first: int) -> None:
        """The host waits for the device and decides. Random numbers of the optimizer and of
        `after_step` are equal on all ranks."""
        config = self._config
        seed_slot(self._world.device, config.seed, self._state.step, first + config.slots)
        if not refused:
            self._optimizer.step()

    def warm_up(self, batch: Batch, samples: int, smallest: Batch, single: Batch | None) -> WarmUp:
        """See `warm_up`; all ranks take part."""
        require = partial(self._reduction.require_all, self._state.model)
        return warm_up(self._forward, require, batch, samples, smallest, single)

    def adopt(self, found: WarmUp) -> None:
        """Applies what a warm-up has found, also that of a former turn over the same model."""
        # The scaler is initialized by its first use, and a rank without samples never uses it.
        self._state.scaler.scale(torch.zeros((), device=self._world.device))
        self.scalar_names, self._fewest = found.scalar_names, found.fewest
        self._buffers = self._make_buffers(found.changing, len(found.scalar_names))

    def _training(self, counts: bool) -> AbstractContextManager[None]:
        """A slot without samples, or with too few for batch norm, runs in evaluation mode, so that
        it does not change the statistics."""
        return nullcontext() if counts else evaluating(self._net)


@contextmanager
def frozen_meanwhile(others: Iterable[nn.Parameter]) -> Iterator[None]:
    """These parameters are frozen; afterward, they are trained."""
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
