"""One step: the turns of its optimizers, and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of
from raytrain_ddp.training.gradients.gradient_compression import compress
from raytrain_ddp.training.gradients.reduction import ddp_options, model_tensors
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.optimizer.lr_schedule import steps_to_check
from raytrain_ddp.training.optimizer.optimizer_state import parameters_of
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers, turns_of
from raytrain_ddp.training.session import Session, WarmUp
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.nonfinite import StepTrace, make_guard
from raytrain_ddp.training.steps.replica_check import ReplicaCheck
from raytrain_ddp.training.steps.step_decisions import Cadence
from raytrain_ddp.training.steps.turn import Alone, Turn, frozen_meanwhile

_FIRST = 100  # steps whose turns are counted for the operations of a step


class Stepper:
    """Takes steps: one turn, or those of several optimizers one after another.

    Args:
        turns: by name.
        due: the names of the turns in a step, from 0.
        logs: whether a step, from 1, is logged: all ranks then get the losses of all.
        fixes_trained: whether parameters trained at the start must stay trained, because their
            gradients are summed over all workers.

    Attributes:
        shares: the result of the last step; see `__call__`.
    """

    def __init__(
        self,
        task: Task,
        state: TrainState,
        turns: Mapping[str, Turn],
        due: Callable[[int], Sequence[str]],
        logs: Callable[[int], bool],
        clock: Clock,
        replica_check: ReplicaCheck,
        fixes_trained: bool,
    ) -> None:
        self.replica_check, self._logs = replica_check, logs
        self.shares: Tensor | None = None
        self._is_changing = False
        self._state, self._turns, self._due, self._clock = state, turns, due, clock
        self._groups = dict.fromkeys(turns, slice(None))  # name -> its parameter groups
        self._is_one = not isinstance(state.optimizer, Optimizers)
        if isinstance(state.optimizer, Optimizers):
            first = 0
            for name, optimizer in state.optimizer.named.items():
                self._groups[name] = slice(first, first + len(optimizer.param_groups))
                first += len(optimizer.param_groups)
        self._after_step = getattr(task, "after_step", None)
        self._fixes_trained = fixes_trained
        self._fixed: list[tuple[str, torch.nn.Parameter, bool]] = []

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
                `handle_nonfinite`), or the weights of the ranks differ (see `ReplicaCheck`).
        """
        state = self._state
        gathers = self._logs(state.step + 1)
        shares: dict[str, Tensor] = {}
        refusals: list[Tensor] = []
        for number, name in enumerate(self._due(state.step)):
            turn = self._turns[name]
            if number:
                self._clock.mark("optimizer")
            with turn.alone():
                own_rates = rates[self._groups[name]]
                shares[name], this = turn(slots, samples, own_rates, number, gathers)
            self._is_changing = True
            refusals.append(this)
        self._follow(refusals[0] if self._is_one else torch.stack(refusals).all())
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

    def warm_up(
        self, batch: Batch, samples: int, smallest: Batch, single: Batch | None
    ) -> dict[str, WarmUp]:
        """Warms up each turn; returns what it finds, by name. See `Turn.warm_up`."""
        found = {}
        for name, turn in self._turns.items():
            with turn.alone():
                found[name] = turn.warm_up(batch, samples, smallest, single)
        return found

    def adopt(self, found: Mapping[str, WarmUp]) -> float:
        """Applies what a warm-up has found; returns the operations of a sample: the mean over the
        first steps."""
        for name, turn in self._turns.items():
            turn.adopt(found[name])
        named = self._state.model.named_parameters() if self._is_one else ()
        flags = ((name, parameter, parameter.requires_grad) for name, parameter in named)
        self._fixed = [each for each in flags if self._fixes_trained or not each[2]]
        first = [name for step in range(_FIRST) for name in self._due(step)]
        return sum(found[name].flops for name in first) / _FIRST

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Of the scalars that are logged with the loss; known after `adopt`. With several
        optimizers: the loss of each, and its scalars."""
        if self._is_one:
            return next(iter(self._turns.values())).scalar_names
        return tuple(
            each
            for name, turn in self._turns.items()
            for each in (name, *(f"{name}/{scalar}" for scalar in turn.scalar_names))
        )

    def _side_by_side(self, shares: Mapping[str, Tensor]) -> Tensor:
        """Shares in the order of `scalar_names`; nan for an optimizer that had no turn."""
        if self._is_one:
            (share,) = shares.values()
            return share
        total = torch.stack([share[:, :1] for share in shares.values()]).sum(0)
        columns = [
            shares.get(name, total.new_full((len(total), 1 + len(turn.scalar_names)), math.nan))
            for name, turn in self._turns.items()
        ]
        return torch.cat([total, *columns], dim=1)

    def _follow(self, refused: Tensor) -> None:
        """What follows an update, unless all turns were refused."""
        state = self._state
        if self._after_step is not None and not refused:
            before, rates = model_tensors(state.model).keys(), self._rates()
            with torch.no_grad():
                self._after_step(state.model, state.step + 1)
            added = before ^ model_tensors(state.model).keys()
            if len(rates) == len(now := self._rates()) and rates != now:
                raise TaskError(
                    f"{place_of(self._after_step)}: sets a learning rate, but each step "
                    "overwrites it: define schedule(step) in the task instead."
                )
            if added:
                raise TaskError(
                    f"{place_of(self._after_step)}: adds or removes {min(added)} of the model, "
                    "which a resumed run would lack: make all parameters and buffers in model()."
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


def make_stepper(
    config: TrainConfig,
    task: Task,
    state: TrainState,
    session: Session,
    clock: Clock,
    refuse: Callable[[StepTrace], None],
    steps_per_epoch: int,
) -> Stepper:
    """A turn for each optimizer, all over the same model; all ranks take part.

    Args:
        refuse: called for each refused turn.
    """
    model, world = state.model, session.world
    due = turns_of(task, state.optimizer, steps_to_check(config.total_steps(steps_per_epoch)))
    turns: dict[str, Turn] = {}
    for name, (optimizer, alone) in _stages(state).items():
        with alone():
            net = model  # exact mode sums gradients itself and needs no DDP
            if not config.exact:
                net = session.wrap(model, ddp_options(config))
            compress(net, config, state.scaler, world)
            guard = make_guard(state, refuse, world.device)
            of_loss = name if isinstance(state.optimizer, Optimizers) else ""
            turns[name] = Turn(
                config, task, state, net, session, guard, clock, optimizer, alone, of_loss
            )
    logs = Cadence(config, steps_per_epoch).logs
    replica_check = ReplicaCheck(config.scaling, state, session)
    fixes = world.size > 1 or config.exact
    return Stepper(task, state, turns, due, logs, clock, replica_check, fixes)


def _stages(state: TrainState) -> dict[str, tuple[Optimizer, Alone]]:
    """The turns by name: the optimizer, and the context in which only its part is trained."""
    model, optimizer = state.model, state.optimizer
    if not isinstance(optimizer, Optimizers):
        return {"": (optimizer, nullcontext)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stages: dict[str, tuple[Optimizer, Alone]] = {}
    for name, each in optimizer.named.items():
        own = {*map(id, parameters_of(each))}
        others = [parameter for parameter in trained if id(parameter) not in own]
        stages[name] = each, partial(frozen_meanwhile, others)
    return stages
