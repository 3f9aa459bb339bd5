"""One step: forward, backward and update over this worker's slots, and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.errors import TaskError
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.connections import all_gather
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task_check import place_of, refused
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.buffer_sync import SlotBuffers
from raytrain_ddp.training.gradients.reduction import (
    DdpReduction,
    ExactReduction,
    compress,
    in_ddp,
    model_tensors,
)
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.optimizer.task_optimizer import skips_on_device
from raytrain_ddp.training.runtime.world import seed_slot
from raytrain_ddp.training.steps.nonfinite import NonfiniteGuard, StepTrace
from raytrain_ddp.training.steps.replica_check import ReplicaCheck
from raytrain_ddp.training.steps.step_decisions import Cadence
from raytrain_ddp.training.steps.warm_up import warm_up


class Stepper:
    """Takes steps: forward and backward passes over this worker's slots, and an update.

    The loss of a slot is weighted by its share of the step's samples, so uneven slots and a short
    last step are exact. All ranks make a Stepper, as the model may be wrapped in DDP.

    Args:
        refuse: counts and reports a refused step, or ends the run; all ranks take part.

    Attributes:
        shares: the result of the last step; see `__call__`.
        flops: operations per sample, forward and backward; known after `warm_up`.
        scalar_names: of the scalars that are logged with the loss; known after `warm_up`.
    """

    def __init__(
        self,
        build: Build,
        membership: Membership,
        clock: Clock,
        refuse: Callable[[StepTrace], None],
    ) -> None:
        config, world, model, state = build.config, build.world, build.model, build.state
        self._build, self._membership, self._clock = build, membership, clock
        self._state, self._net = state, model
        # With `after_step`, the host waits for the device anyway.
        self._on_device = skips_on_device(build.optimizer) and build.task.after_step is None
        self._reduction: DdpReduction | ExactReduction
        if config.exact:  # sums gradients itself and needs no DDP
            bucket_mib = config.ddp.bucket_cap_mb
            self._reduction = ExactReduction(model, config.slots, world, bucket_mib, clock)
        else:
            self._net = in_ddp(model, config, world)
            compress(self._net, config, state.scaler, world)
            # `compress` depends on it, too.
            scale = 1.0 if state.scaler.is_enabled() else float(world.size)
            self._reduction = DdpReduction(self._net, scale, world)
        self._guard = NonfiniteGuard(state, refuse, world.device)
        self._logs = Cadence(config, build.plan.steps_per_epoch).logs
        self.replica_check = ReplicaCheck(config.scaling, state, membership)
        self.shares: Tensor | None = None
        self._is_changing = False
        self._fixed: list[tuple[str, nn.Parameter, bool]] = []  # whether they are trained

    def warm_up(self) -> None:
        """Warms up the model, unless that was done before; all ranks take part. See `warm_up`."""
        build, config = self._build, self._build.config
        found = build.warmed_up or warm_up(build, self._net, self._reduction.require_all)
        build.warmed_up = found
        self.scalar_names, self._fewest, self.flops = found.scalar_names, found.fewest, found.flops
        self._buffers = SlotBuffers(
            build.model,
            build.world,
            changing=found.changing,
            with_loss=self._state.scaler.is_enabled(),
            exact_slots=config.slots if config.exact else 0,
            scalars=len(found.scalar_names),
        )
        # The scaler is initialized by its first use, and a rank without samples never uses it.
        self._state.scaler.scale(torch.zeros((), device=build.world.device))
        # The gradients of parameters that are trained at the start are summed over all workers.
        sums = build.world.size > 1 or config.exact
        for name, parameter in build.model.named_parameters():
            if sums or not parameter.requires_grad:
                self._fixed.append((name, parameter, parameter.requires_grad))

    def __call__(self, slots: list[Slot], samples: int, rates: Sequence[float]) -> Tensor:
        """Takes one step; all ranks take part. A non-finite step counts but changes nothing.

        The end of the last collective is its commit point: before it, a rank that loses a peer has
        changed nothing that `roll_back` does not restore; after it, the update needs no other rank.

        Args:
            rates: the learning rate of each parameter group.

        Returns the workers' shares of the means over the step's `samples`, of the loss and of the
        scalars with it, shape (ranks, 1 + scalars), on the device: a row per rank if the step is
        logged, else this worker's. The shares of all workers add up.

        Raises:
            DivergedError: this step, or on a GPU the previous one, was not finite (see
                `refuse`), or the weights of the ranks differ (see `ReplicaCheck`).
        """
        state, world = self._state, self._build.world
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.optimizer.zero_grad(set_to_none=True)
        self._reduction.begin()
        self._buffers.begin()
        working = self._reduction.working(slots)
        for slot in working:
            self._membership.require_ranks()
            self._pass(slot, samples, is_last=slot is working[-1])
        failpoint("train.after_backward", world.rank, state.step + 1)
        self._reduction.finish()
        share, agreed = self._buffers.agree()
        shares = share.unsqueeze(0)
        if world.size > 1 and self._logs(state.step + 1):
            shares = share.new_empty(world.size, len(share))
            all_gather(shares, share)
        self._membership.confirm()
        self._clock.mark("communication" if world.size > 1 else "compute")
        self._is_changing = True
        self._follow(self._update(agreed))
        self._clock.mark("optimizer")
        self.shares = shares
        state.step += 1
        self._is_changing = False
        self._guard.follow()
        self.replica_check.follow()
        return shares

    def roll_back(self) -> bool:
        """Restores the state after the last complete step; returns whether it could: not during or
        after an update, nor if an update was refused and not all ranks know of it."""
        if self._is_changing or not self._guard.all_applied():
            return False
        self._buffers.roll_back()
        return True

    def settle(self) -> None:
        """Waits until it is known whether the last step was finite; all ranks take part.

        Raises:
            DivergedError: it was not, and the config says to stop.
        """
        self._guard.settle()

    def _pass(self, slot: Slot, samples: int, is_last: bool) -> None:
        """Adds a slot's gradients, loss, and changes of buffers to those of the step."""
        state, world, seed = self._state, self._build.world, self._build.config.seed
        weight = slot.samples / max(1, samples)  # 0 if all were bad records
        seed_slot(world.device, seed, slot.step, slot.index)
        self._buffers.rewind()
        # A slot without samples, or with too few for batch norm, runs in evaluation mode, so that
        # it does not change the statistics.
        trains = slot.samples >= self._fewest
        mode = nullcontext() if trains else evaluating(self._net)
        with self._reduction.passing(slot, is_last), mode:
            loss, scalars = self._build.loss(slot.batch, self._net)
            beside = self._beside(scalars, slot.samples > 0)
            spoilt = failpoint("train.loss", world.rank, state.step + 1)  # 1 except in tests
            shown = loss.detach() * spoilt
            if is_last and world.size > 1:
                self._clock.after_backward(loss)
            weighted = loss * (spoilt * weight * self._reduction.scale)
            with self._guard.watching(slot.index, shown):
                state.scaler.scale(weighted).backward()
        if self._reduction.unused:
            shown = shown * math.nan  # all ranks agree on it, also with fp16
        self._buffers.add(slot.index, weight, torch.stack([shown, *beside]) if beside else shown)

    def _update(self, agreed: Tensor) -> Tensor:
        """Applies the gradients unless something is not finite; returns whether it is not.

        A fused optimizer skips a refused step on the device. For any other optimizer, the host
        waits for the device and decides.

        Args:
            agreed: see `SlotBuffers.agree`.
        """
        state, optimizer, config = self._state, self._state.optimizer, self._build.config
        lr = float(optimizer.param_groups[0]["lr"])
        norm, refused = self._guard.examine(lr, agreed, self._reduction.unused)
        self._buffers.finish(refused)
        if config.optim.clip_norm:
            parameters = state.model.parameters()
            nn.utils.clip_grads_with_norm_(parameters, config.optim.clip_norm, norm)
        if self._on_device:
            optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
            optimizer.step()
        else:
            # Of the optimizer and `after_step`: equal on all ranks, other than those of the slots.
            seed_slot(self._build.world.device, config.seed, state.step, config.slots)
            if not refused:
                optimizer.step()
        state.scaler.update()
        return refused

    def _follow(self, refused: Tensor) -> None:
        """What follows an update: the task's `after_step`, unless it was refused, and the
        average of the weights."""
        state, after_step = self._state, self._build.task.after_step
        if after_step is not None and not refused:
            before, rates = model_tensors(state.model).keys(), self._rates()
            with torch.no_grad():
                after_step(state.model, state.step + 1)
            added, now = before ^ model_tensors(state.model).keys(), self._rates()
            if len(rates) == len(now) and rates != now:
                raise TaskError(
                    f"{place_of(after_step)}: sets a learning rate, but each step overwrites it: "
                    "define schedule(step) in the task instead."
                )
            if added:
                raise TaskError(
                    f"{place_of(after_step)}: adds or removes {min(added)} of the model, which a "
                    "resumed run would lack: make all parameters and buffers in model()."
                )
        for name, parameter, was_trained in self._fixed:
            if parameter.requires_grad != was_trained:
                remedy = "from then on" if was_trained else "until then"
                raise TaskError(
                    f"the task {'freezes' if was_trained else 'unfreezes'} {name} in step "
                    f"{state.step + 1}, but the set of trained parameters is fixed when training "
                    "begins. Keep it trainable in all steps, and let the task's schedule(step) "
                    f"return 0 for its group {remedy}."
                )
        if state.average is not None:
            state.average.follow(refused, state.step + 1)

    def _rates(self) -> list[object]:
        return [group["lr"] for group in self._state.optimizer.param_groups]

    def _beside(self, scalars: dict[str, Tensor], counts: bool) -> list[Tensor]:
        """The scalars, ordered by name; 0 for a slot without samples."""
        if (*scalars,) != self.scalar_names:
            names = [" ".join(each) or "none" for each in (scalars, self.scalar_names)]
            hint = f" Now: {names[0]}; before: {names[1]}."
            loss = self._build.task.loss
            raise refused(loss, scalars, "scalars of the same names in each step", hint)
        zero = torch.zeros((), dtype=torch.float64, device=self._build.world.device)
        return [value.to(zero) if counts else zero for value in scalars.values()]
