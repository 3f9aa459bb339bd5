"""Detects a step with a non-finite loss or gradient, on all ranks in that step, and skips it.

It needs no collective of its own: a non-finite value on one rank makes a gradient non-finite
before gradients are summed over all ranks, and the norm of that sum, which clipping needs anyway,
shows it. The optimizer skips the update on the device; the host learns of it later, reports it, and
writes the file that helps to reproduce it.
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.config.recipe import publishable
from raytrain_ddp.errors import DivergedError, RaytrainError, first_names
from raytrain_ddp.events import Note
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.reduction import require_used
from raytrain_ddp.training.runtime.world import broadcast, from_all_ranks, slot_seed
from raytrain_ddp.training.state.train_state import TrainState

_MAX_NAMES = 10
REMEDY = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm"


class StepTrace(NamedTuple):
    """Data about a step, until the host knows whether it was finite; tensors are on the device.

    Args:
        step: the number of the step, from 1.
        losses: slot -> loss of shape (), of this worker's slots.
        forward: non-finite if a loss or a buffer is; shape ().
        norms: the norms of the gradients of the parameters `names`, shape (parameters,).
        norm: the norm of the whole gradient, shape ().
        sentinel: name of the parameter whose gradient carries the non-finite losses and buffers.
        unused: see `DdpReduction.unused`.
        is_refused: returns whether the step counts as refused; waits for the device.
    """

    step: int
    lr: float
    losses: dict[int, Tensor]
    forward: Tensor
    names: list[str]
    norms: Tensor
    norm: Tensor
    sentinel: str
    unused: Sequence[str]
    is_refused: Callable[[], bool]


class _SlotLoss(NamedTuple):
    rank: int
    slot: int
    loss: float


class NonfiniteGuard:
    """Decides in each step whether its update may be applied.

    Args:
        refuse: called for each refused step, in order, on all ranks; it may end the run. On a
            GPU it is called a step later, so that the host stays a step ahead and the GPU is never
            idle.
    """

    def __init__(
        self, state: TrainState, refuse: Callable[[StepTrace], None], device: torch.device
    ) -> None:
        self._state, self._refuse, self._on_gpu = state, refuse, device.type == "cuda"
        named = state.model.named_parameters()
        self._trained = [(name, p) for name, p in named if p.requires_grad]
        # The smallest non-empty one; if several, the last: nearest to the loss. (In a step
        # that leaves it unused, as ddp.find_unused_parameters allows, only gradients are examined.)
        self._name, self._sentinel = min(
            reversed(self._trained), key=lambda item: item[1].numel() or math.inf
        )
        self._losses: dict[int, Tensor] = {}
        self._open: deque[StepTrace] = deque()

    @contextmanager
    def watching(self, slot: int, loss: Tensor) -> Iterator[None]:
        """Context of the backward pass of a slot's loss, shape ().

        The gradient alone does not suffice: cross entropy, for example, can be infinite with a
        finite gradient.
        """
        self._losses[slot] = loss
        taint = loss * 0  # nan if the loss is not finite
        if not self._sentinel.requires_grad:  # the task has frozen it since
            yield
            return
        hook = self._sentinel.register_hook(lambda gradient: gradient + taint)
        try:
            yield
        finally:
            hook.remove()

    def examine(self, lr: float, forward: Tensor, unused: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Examines gradients that are equal on all ranks, and unscales those of fp16.

        Args:
            forward: equal on all ranks; non-finite if the result of the forward passes is. For
                fp16 it includes the loss; otherwise the loss shows in the gradient anyway.
            unused: see `DdpReduction.unused`.

        Returns:
            The norm of the whole gradient, and whether the step is refused; both of shape ().
        """
        scaler = self._state.scaler
        if self._sentinel.grad is not None:
            self._sentinel.grad.add_(forward * 0)
        scaler.unscale_(self._state.optimizer)
        there = {name: p.grad for name, p in self._trained if p.grad is not None}
        norms = torch.stack(torch._foreach_norm([*there.values()]))
        norm = torch.linalg.vector_norm(norms)
        # A norm above 2e19 overflows, as the second moments of AdamW would.
        refused = ~norm.isfinite()
        counted = refused
        if scaler.is_enabled():  # above a scale of 1, the scale may have caused the overflow
            small = scaler.scale(torch.ones_like(norm)) < 1
            counted = refused & (small | ~forward.isfinite())
        read = _through_pinned_memory(counted) if self._on_gpu else lambda: bool(counted)
        self._open.append(
            StepTrace(
                step=self._state.step + 1,
                lr=lr,
                losses=self._losses,
                forward=forward,
                names=[*there],
                norms=norms,
                norm=norm,
                sentinel=self._name,
                unused=unused,
                is_refused=read,
            )
        )
        self._losses = {}
        return norm, refused

    def all_applied(self) -> bool:
        """Whether the steps that are not judged yet were all applied; waits for the device."""
        return not any(trace.is_refused() for trace in self._open)

    def follow(self) -> None:
        """Judges the steps of which the host may know by now; all ranks take part."""
        self.settle(lag=1 if self._on_gpu else 0)

    def settle(self, lag: int = 0) -> None:
        """Judges all steps, but for the last `lag` ones; the host waits for the device. All ranks
        take part."""
        while len(self._open) > lag:
            if self._open[0].is_refused():
                self._refuse(self._open[0])
            self._open.popleft()


def _through_pinned_memory(flag: Tensor) -> Callable[[], bool]:
    """Copies a flag from a GPU; only the returned function waits, for this flag alone."""
    copy = torch.empty((), dtype=flag.dtype, pin_memory=True)
    copy.copy_(flag, non_blocking=True)
    done = torch.cuda.Event(blocking=True)  # frees the CPU for the loader's threads
    done.record()

    def read() -> bool:
        done.synchronize()
        return bool(copy)

    return read


def handle_nonfinite(build: Build, log: Log, checkpoints: Checkpoints, trace: StepTrace) -> None:
    """Counts and reports a refused step, or ends the run; all ranks take part.

    Raises:
        ConfigError: the loss of a rank did not depend on all parameters.
        DivergedError: no such step, or no further one, is allowed. It names step, slots and
            ranks, and the file in the run's folder with the details.
    """
    config, world, state = build.config, build.world, build.state
    require_used(trace.unused, world, trace.step)
    rank = world.of_run(world.rank)
    mine = [_SlotLoss(rank, slot, loss.item()) for slot, loss in trace.losses.items()]
    every = chain.from_iterable(from_all_ranks(mine, world))
    losses = sorted(every, key=lambda each: each.slot)
    names = _nonfinite_gradients(trace, losses)
    what = _description(trace, losses, names)
    state.nonfinite += 1
    most = config.optim.max_nonfinite
    if config.optim.nonfinite == "skip" and state.nonfinite <= most:
        text = f"{what}. Its update is skipped ({state.nonfinite} of at most {most})."
        log.tell(Note(text[0].upper() + text[1:]))
        return
    file = f"diverged-step-{trace.step:08d}.json"
    if world.is_main:
        newest = None
        with suppress(RaytrainError, OSError):  # the run ends with its own error
            checkpoints.drain()  # the one that is being written counts, too
            newest = next(map(str, checkpoints.store.names()), None)
        document = _document(build, trace, losses)
        log.keep(file, {**document, "parameters": names[:_MAX_NAMES], "checkpoint": newest})
    broadcast(None, world)  # the first rank to raise may cause the others to be killed
    if config.optim.nonfinite == "skip":
        what += f", and {most} such steps (optim.max_nonfinite) were skipped before"
    first = "no update preceded it: check them, the model and the loss"
    raise DivergedError(
        f"{what}. Committed checkpoints are kept, and {file} in the run's folder names these "
        f"samples; {REMEDY if trace.step > 1 else first}, or skip such steps with "
        "--optim.nonfinite skip."
    )


def _nonfinite_gradients(trace: StepTrace, losses: Sequence[_SlotLoss]) -> list[str]:
    """Parameters whose gradient norm is not finite, except a sentinel that carries another
    cause."""
    norms = zip(trace.names, trace.norms.tolist(), strict=True)
    names = [name for name, norm in norms if not math.isfinite(norm)]
    spoken_for = not trace.forward.isfinite() or not all(math.isfinite(x.loss) for x in losses)
    return [] if names == [trace.sentinel] and spoken_for else names


def _description(trace: StepTrace, losses: Sequence[_SlotLoss], names: list[str]) -> str:
    at = f"at step {trace.step} (learning rate {trace.lr:.3g})"
    lost = [each for each in losses if not math.isfinite(each.loss)]
    if lost:
        where = first_names([f"slot {each.slot} (rank {each.rank})" for each in lost], 3)
        return f"the loss of {where} is {lost[0].loss} {at}"
    if not names and not trace.forward.isfinite():
        return f"a buffer, such as batch norm's variance, would not be finite {at}"
    by = f", by {first_names(names, 3)}" if names else ""
    return f"the norm of the gradient is {trace.norm.item()} {at}{by}"


def _document(build: Build, trace: StepTrace, losses: Sequence[_SlotLoss]) -> dict[str, Any]:
    """Everything that a step is a function of, besides the config: JSON, with nan and inf as
    text."""
    config, plan, step = build.config, build.plan, trace.step - 1
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    order = build.loader.order(epoch)
    place = f"{publishable(config).storage}/{config.name}"
    again = f"python -m raytrain_ddp.fit {shlex.quote(f'{place}/{CONFIG_FILE}')}"
    return {
        "step": trace.step,
        "epoch": epoch,
        "learning_rate": trace.lr,
        "seed": config.seed,
        "world_size": build.world.size,
        "gradient_norm": _number(trace.norm.item()),
        "slots": [
            {
                "rank": rank,
                "slot": slot,
                "loss": _number(loss),
                "seed": slot_seed(config.seed, step, slot),
                "rows": order.at(np.unique(plan.samples_of(step_of_epoch, slot)[0])).tolist(),
            }
            for rank, slot, loss in losses
        ],
        "command": "the same command again" if "://" in place else again,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
