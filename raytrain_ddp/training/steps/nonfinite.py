"""Detects a step with a non-finite loss or gradient, on all ranks in that step, and skips it.

It needs no collective of its own: a non-finite value on one rank makes a gradient non-finite
before gradients are summed over all ranks, and the norm of that sum, which clipping needs anyway,
shows it. The optimizer skips the update on the device; the host learns of it later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_ddp.training.state.train_state import TrainState

Fetch = Callable[[Tensor], Callable[[], bool]]


@dataclass(frozen=True)
class StepTrace:
    """What a step keeps until the host knows whether it was finite; tensors on the device.

    Args:
        step: from 1.
        losses: slot -> loss of shape (), of this worker's slots.
        forward: non-finite if a loss or a buffer is; shape ().
        names: of the parameters that have a gradient.
        norms: of their gradients, shape (parameters,).
        norm: of the whole gradient, shape ().
        sentinel: name of the parameter whose gradient carries the non-finite losses and buffers.
    """

    step: int
    lr: float
    losses: dict[int, Tensor]
    forward: Tensor
    names: list[str]
    norms: Tensor
    norm: Tensor
    sentinel: str


class NonfiniteGuard:
    """Decides in each step whether its update may be applied.

    Args:
        on_refused: called for each refused step, in order, on all ranks; it may end the run.
        fetch: starts the copy of a flag, shape (), to the host; the returned function waits for it.
        lag: how many steps later to wait for it. On a GPU 1, so that the host is a step ahead and
            the GPU is never idle.
    """

    def __init__(
        self, state: TrainState, on_refused: Callable[[StepTrace], None], fetch: Fetch, lag: int
    ) -> None:
        self._state, self._on_refused, self._fetch, self._lag = state, on_refused, fetch, lag
        named = state.model.named_parameters()
        self._trained = [(name, p) for name, p in named if p.requires_grad]
        # The smallest non-empty one; if several, the last: nearest to the loss. (In a step
        # that leaves it unused, as ddp.find_unused_parameters allows, only gradients are examined.)
        self._name, self._sentinel = min(
            reversed(self._trained), key=lambda item: item[1].numel() or math.inf
        )
        self._losses: dict[int, Tensor] = {}
        self._open: deque[tuple[StepTrace, Callable[[], bool]]] = deque()

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

    def examine(self, lr: float, forward: Tensor) -> tuple[Tensor, Tensor]:
        """Examines gradients that are equal on all ranks, and unscales those of fp16.

        Args:
            forward: equal on all ranks; non-finite if the result of the forward passes is. For
                fp16 it includes the loss; otherwise the loss shows in the gradient anyway.

        Returns:
            The norm of the whole gradient, and whether the step is refused; both of shape ().
        """
        scaler = self._state.scaler
        if self._sentinel.grad is not None:
            self._sentinel.grad.add_(forward * 0)
        scaler.unscale_(self._state.optimizer)
        there = [(name, p.grad) for name, p in self._trained if p.grad is not None]
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in there]))
        norm = torch.linalg.vector_norm(norms)
        # A norm above 2e19 overflows, as the second moments of AdamW would.
        refused = ~norm.isfinite()
        counted = refused
        if scaler.is_enabled():  # above a scale of 1, the scale may have caused the overflow
            small = scaler.scale(torch.ones_like(norm)) < 1
            counted = refused & (small | ~forward.isfinite())
        names = [name for name, _ in there]
        step = self._state.step + 1
        trace = StepTrace(step, lr, self._losses, forward, names, norms, norm, self._name)
        self._open.append((trace, self._fetch(counted)))
        self._losses = {}
        return norm, refused

    def all_applied(self) -> bool:
        """Whether the steps that are not judged yet were all applied; waits for the device."""
        return not any(refused() for _, refused in self._open)

    def follow(self) -> None:
        """Judges the steps that are `lag` or more behind; all ranks take part."""
        self._settle(self._lag)

    def settle(self) -> None:
        """Judges all steps; the host waits for the device. All ranks take part."""
        self._settle(0)

    def _settle(self, lag: int) -> None:
        while len(self._open) > lag:
            trace, refused = self._open[0]
            if refused():
                self._on_refused(trace)
            self._open.popleft()


def make_guard(
    state: TrainState, on_refused: Callable[[StepTrace], None], device: torch.device
) -> NonfiniteGuard:
    """The guard for a device."""
    if device.type == "cuda":
        return NonfiniteGuard(state, on_refused, through_pinned_memory, lag=1)
    return NonfiniteGuard(state, on_refused, lambda flag: lambda: bool(flag), lag=0)


def through_pinned_memory(flag: Tensor) -> Callable[[], bool]:
    """Copies a flag from a GPU; only the returned function waits, for this flag alone."""
    copy = torch.empty((), dtype=flag.dtype, pin_memory=True)
    copy.copy_(flag, non_blocking=True)
    done = torch.cuda.Event(blocking=True)  # frees the CPU for the loader's threads
    done.record()

    def read() -> bool:
        done.synchronize()
        return bool(copy)

    return read
