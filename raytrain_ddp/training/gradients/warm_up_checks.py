"""What the warm-up pass finds: a loss, or a model, that several workers could not train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_ddp.errors import ConfigError

TOO_SMALL = "more than 1 value per channel"  # for batch norm, says torch


def require_gradients(model: nn.Module, where: str, more: str) -> None:
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        names = ", ".join(unused[:3]) + (" and more" if unused[3:] else "")
        how = f"freeze parameters that are not trained (requires_grad_(False)), {more}."
        raise ConfigError(f"{where}: the loss does not depend on {names}: {how}")


@contextmanager
def counting_calls(net: nn.Module) -> Iterator[list[None]]:
    """An entry for each call of a wrapped model. (One that is not wrapped may be compiled.)"""
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


def remedy_of(text: str) -> str | None:
    """The config-level remedy for an error of torch's, if there is one."""
    if TOO_SMALL in text:
        return (
            "the last step of an epoch has a micro-batch of one sample, too few for this model's "
            "batch norm: use another --micro-batch or --batch-size."
        )
    if text.startswith("'DistributedDataParallel' object has no attribute"):
        name = text.rpartition("attribute ")[2].strip("'")
        return (
            f"the task's loss uses model.{name}, but with several workers model is wrapped in DDP "
            "and can only be called. Move this into the model's forward, or use --exact, which "
            "does not wrap the model."
        )
    return None
