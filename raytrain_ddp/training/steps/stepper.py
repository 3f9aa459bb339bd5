"""One step: forward, backward and update over this worker's slots, and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
from raytrain_ddp.training.optimizer.lr_schedule import steps_to_check
from raytrain_ddp.training.optimizer.several_optimizers import named_optimizers, turns_of
from raytrain_ddp.training.optimizer.task_optimizer import parameters_of, skips_on_device
from raytrain_ddp.training.runtime.world import seed_slot
from raytrain_ddp.training.steps.nonfinite import NonfiniteGuard, StepTrace
from raytrain_ddp.training.steps.replica_check import ReplicaCheck
from raytrain_ddp.training.steps.step_decisions import Cadence
from raytrain_ddp.training.steps.warm_up import WarmUp, warm_up

_FIRST = 100  # steps whose turns are counted for the operations of a step


class Stepper:
    """Takes steps: one turn, or those of several optimizers one after another.

    All ranks make a Stepper, as the model may be wrapped in DDP.

    Args:
        refuse: counts and reports a refused step, or ends the run; all ranks take part.

    Attributes:
        shares: the result of the last step; see `__call__`.
        flops: operations per sample, forward and backward, averaged over the first steps; known
            after `warm_up`.
    """

    def __init__(
        self,
        build: Build,
        membership: Membership,
        clock: Clock,
        refuse: Callable[[StepTrace], None],
    ) -> None:
        config, optimizer, per_epoch = build.config, build.optimizer, build.plan.steps_per_epoch
        self._build, self._state, self._clock = build, build.state, clock
        self._due = turns_of(build.task, optimizer, steps_to_check(config.total_steps(per_epoch)))
        self._turns = {
            name: _Turn(build, membership, clock, refuse, name, each)
            for name, each in named_optimizers(optimizer).items()
        }
        self._logs = Cadence(config, per_epoch).logs
        self.replica_check = ReplicaCheck(config.scaling, build.state, membership)
        self.shares: Tensor | None = None
        self.flops = 0.0
        self._is_changing = False
        self._fixed: list[tuple[str, nn.Parameter, bool]] = []  # whether they are trained

    def warm_up(self) -> None:
        """Warms up the model, unless that was done before; all ranks take part. See `warm_up`."""
        build = self._build
        found = build.warm_ups or {name: each.warm_up() for name, each in self._turns.items()}
        build.warm_ups = found
        # The scaler is initialized by its first use, and a rank without samples never uses it.
        self._state.scaler.scale(torch.zeros((), device=build.world.device))
        for name, turn in self._turns.items():
            turn.adopt(found[name])
        # The gradients of parameters that are trained at the start are summed over all workers.
        sums = build.world.size > 1 or build.config.exact
        for name, parameter in build.model.named_parameters() if "" in self._turns else ():
            if sums or not parameter.requires_grad:
                self._fixed.append((name, parameter, parameter.requires_grad))
        first = [name for step in range(_FIRST) for name in self._due(step)]
        self.flops = sum(found[name].flops for name in first) / _FIRST

    def __call__(self, slots: list[Slot], samples: int, rates: Sequence[float]) -> Tensor:
        """Takes one step; all ranks take part. A non-finite turn counts but changes nothing.

        Args:
            rates: the learning rate of each parameter group of all optimizers.

        Returns the workers' shares of the means over the step's `samples`, of the loss and of the
        scalars with it, shape (ranks, 1 + scalars), on the device: a row per rank if the step is
        logged, else this worker's. The shares of all workers add up. With several optimizers, the
        loss is the sum of their losses.

        Raises:
            DivergedError: this step, or on a GPU the previous one, was not finite (see
                `refuse`), or the weights of the ranks differ (see `ReplicaCheck`).
        """
        state, names = self._state, self._due(self._state.step)
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        gathers = self._logs(state.step + 1)
        shares: dict[str, Tensor] = {}
        refusals: list[Tensor] = []
        for number, name in enumerate(names):
            if number:
                self._clock.mark("optimizer")
            with self._turns[name].alone():
                shares[name], this = self._turns[name](slots, samples, number, gathers)
            self._is_changing = True
            refusals.append(this)
        self._follow(refusals[0] if len(refusals) == 1 else torch.stack(refusals).all())
        self._clock.mark("optimizer")
        self.shares = self._side_by_side(shares)
        state.step += 1
        self._is_changing = False
        for turn in self._turns.values():
            turn.guard.follow()
        self.replica_check.follow()
        return self.shares

    def roll_back(self) -> bool:
        """Restores the state after the last complete step; returns whether it could: not after
        one of several updates, or an error in what follows an update."""
        return not self._is_changing and all(turn.roll_back() for turn in self._turns.values())

    def settle(self) -> None:
        """Waits until it is known whether the last step was finite; all ranks take part.

        Raises:
            DivergedError: it was not, and the config says to stop.
        """
        for turn in self._turns.values():
            turn.guard.settle()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that are logged with the loss; known after `warm_up`. With several
        optimizers: a name for the loss of each, and the names of its scalars."""
        return tuple(each for name, turn in self._turns.items() for each in turn.columns)

    def _side_by_side(self, shares: Mapping[str, Tensor]) -> Tensor:
        """Shares in the order of `scalar_names`; nan for an optimizer that had no turn."""
        if "" in shares:
            return shares[""]
        total = torch.stack([share[:, :1] for share in shares.values()]).sum(0)
        columns = [
            shares.get(name, total.new_full((len(total), len(turn.columns)), math.nan))
            for name, turn in self._turns.items()
        ]
        return torch.cat([total, *columns], dim=1)

    def _follow(self, refused: Tensor) -> None:
        """What follows an update: the task's `after_step`, unless all turns were refused, and the
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


class _Turn:
    """What one optimizer does in a step; it is the only one, unless the task returns several.

    The loss of a slot is weighted by its share of the step's samples, so uneven slots and a short
    last step are exact.

    Args:
        name: the optimizer's name, for the task's loss; "" if it is the only one.
        optimizer: updates its own parameters; those of the others are frozen meanwhile.
    """

    def __init__(
        self,
        build: Build,
        membership: Membership,
        clock: Clock,
        refuse: Callable[[StepTrace], None],
        name: str,
        optimizer: Optimizer,
    ) -> None:
        self._build, self._membership, self._clock = build, membership, clock
        self._state, self._name, self._optimizer = build.state, name, optimizer
        config, world, model = build.config, build.world, build.model
        own = {*map(id, parameters_of(optimizer))} if name else {*map(id, model.parameters())}
        trained = (each for each in model.parameters() if each.requires_grad)
        self._others = [each for each in trained if id(each) not in own]
        # With `after_step`, the host waits for the device anyway.
        self._on_device = skips_on_device(optimizer) and build.task.after_step is None
        self._is_updating = False
        self._net = model
        self.reduction: DdpReduction | ExactReduction
        with self.alone():
            if config.exact:  # sums gradients itself and needs no DDP
                bucket_mib = config.ddp.bucket_cap_mb
                self.reduction = ExactReduction(model, config.slots, world, bucket_mib, clock)
            else:
                self._net = in_ddp(model, config, world)
                compress(self._net, config, build.state.scaler, world)
                is_scaled = build.state.scaler.is_enabled()  # `compress` depends on it, too
                scale = 1.0 if is_scaled else float(world.size)
                self.reduction = DdpReduction(self._net, scale, world)
            self.guard = NonfiniteGuard(build.state, refuse, world.device)

    def warm_up(self) -> WarmUp:
        with self.alone():
            return warm_up(self._build, self._net, self.reduction.require_all, self._name)

    def adopt(self, found: WarmUp) -> None:
        """Applies the findings of a warm-up, even of another turn's over the same model."""
        self._scalars, self._fewest = found.scalar_names, found.fewest
        config, build = self._build.config, self._build
        self._buffers = SlotBuffers(
            build.model,
            build.world,
            changing=found.changing,
            with_loss=build.state.scaler.is_enabled(),
            exact_slots=config.slots if config.exact else 0,
            scalars=len(self._scalars),
        )

    @property
    def columns(self) -> Sequence[str]:
        """Names of what is logged with the loss of the step; known after `adopt`."""
        if not self._name:
            return self._scalars
        return [self._name, *(f"{self._name}/{scalar}" for scalar in self._scalars)]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Freezes the parameters of the other optimizers; afterward, they are trained again."""
        for parameter in self._others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._others:
                parameter.requires_grad_(True)

    def __call__(
        self, slots: list[Slot], samples: int, number: int, gathers: bool
    ) -> tuple[Tensor, Tensor]:
        """Takes the turn; all ranks take part. If it is not finite, it changes nothing.

        The end of the last collective is its commit point: before it, a rank that loses a peer has
        changed nothing that `roll_back` does not restore; after it, the update needs no other rank.

        Args:
            number: index of the turn in its step, from 0; random numbers depend on it.
            gathers: whether each rank gets the shares of all ranks.

        Returns the workers' shares of this turn (see `Stepper.__call__`), and whether the turn was
        refused, shape ().
        """
        state, world = self._state, self._build.world
        place = world.rank, state.step + 1
        first_seed = number * (self._build.config.slots + 1)
        state.optimizer.zero_grad(set_to_none=True)
        self.reduction.begin()
        self._buffers.begin()
        working = self.reduction.working(slots)
        for slot in working:
            self._membership.require_ranks()
            self._pass(slot, samples, first_seed, is_last=slot is working[-1])
        failpoint("train.after_backward", *place)
        self.reduction.finish()
        share, agreed = self._buffers.agree()
        shares = share.unsqueeze(0)
        if gathers and world.size > 1:
            shares = share.new_empty(world.size, len(share))
            all_gather(shares, share)
        self._membership.confirm()
        self._clock.mark("communication" if world.size > 1 else "compute")
        self._is_updating = True
        refused = self._update(agreed, first_seed + self._build.config.slots)
        self._is_updating = False
        return shares, refused

    def roll_back(self) -> bool:
        """Restores what an unfinished turn has changed; returns False if this is impossible: during
        an update, or if an update was refused and not all ranks know of it."""
        if self._is_updating or not self.guard.all_applied():
            return False
        self._buffers.roll_back()
        return True

    def _pass(self, slot: Slot, samples: int, first_seed: int, is_last: bool) -> None:
        """Adds a slot's gradients, loss, and changes of buffers to those of the step."""
        state, world, seed = self._state, self._build.world, self._build.config.seed
        weight = slot.samples / max(1, samples)  # 0 if all were bad records
        seed_slot(world.device, seed, slot.step, first_seed + slot.index)
        self._buffers.rewind()
        # A slot without samples, or with too few for batch norm, runs in evaluation mode, so that
        # it does not change the statistics.
        trains = slot.samples >= self._fewest
        mode = nullcontext() if trains else evaluating(self._net)
        with self.reduction.passing(slot, is_last), mode:
            loss, scalars = self._build.loss(slot.batch, self._net, self._name)
            beside = self._beside(scalars, slot.samples > 0)
            spoilt = failpoint("train.loss", world.rank, state.step + 1)  # 1 except in tests
            shown = loss.detach() * spoilt
            if is_last and world.size > 1:
                self._clock.after_backward(loss)
            weighted = loss * (spoilt * weight * self.reduction.scale)
            with self.guard.watching(slot.index, shown):
                state.scaler.scale(weighted).backward()
        if self.reduction.unused:
            shown = shown * math.nan  # all ranks agree on it, also with fp16
        self._buffers.add(slot.index, weight, torch.stack([shown, *beside]) if beside else shown)

    def _update(self, agreed: Tensor, number: int) -> Tensor:
        """Applies the gradients unless something is not finite; returns whether it is not.

        A fused optimizer skips a refused step on the device. For any other optimizer, the host
        waits for the device and decides.

        Args:
            agreed: see `SlotBuffers.agree`.
            number: follows the numbers of the slots; the random numbers of the optimizer and of
                `after_step` depend on it, and are equal on all ranks.
        """
        state, optimizer, config = self._state, self._optimizer, self._build.config
        lr = float(optimizer.param_groups[0]["lr"])
        norm, refused = self.guard.examine(lr, agreed, self.reduction.unused)
        self._buffers.finish(refused)
        if config.optim.clip_norm:
            parameters = state.model.parameters()
            nn.utils.clip_grads_with_norm_(parameters, config.optim.clip_norm, norm)
        if self._on_device:
            optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
            optimizer.step()
        else:
            seed_slot(self._build.world.device, config.seed, state.step, number)
            if not refused:
                optimizer.step()
        state.scaler.update()
        return refused

    def _beside(self, scalars: dict[str, Tensor], counts: bool) -> list[Tensor]:
        """The scalars, ordered by name; 0 for a slot without samples."""
        if (*scalars,) != self._scalars:
            names = [" ".join(each) or "none" for each in (scalars, self._scalars)]
            hint = f" Now: {names[0]}; before: {names[1]}."
            loss = self._build.task.loss
            raise refused(loss, scalars, "scalars of the same names in each step", hint)
        zero = torch.zeros((), dtype=torch.float64, device=self._build.world.device)
        return [value.to(zero) if counts else zero for value in scalars.values()]
