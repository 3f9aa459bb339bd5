"""The parts of a model by name: its head, and the parameters and modules that patterns mean; and
their training and evaluation modes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from raytrain_ddp.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

_HEADS = ("head", "heads", "fc", "classifier")
BACKBONE = "backbone"
"""Stands for all but the head, unless the model has a part of this name."""


def head_of(model: nn.Module) -> list[str]:
    """Names of the parameters of the classification head: of timm's classifier, or else of the last
    module with a weight matrix or kernel of its own; in a part of the model that is called a head,
    if there is one."""
    named = [name for name, _ in model.named_parameters()]
    given = getattr(model, "pretrained_cfg", None)
    heads = given.get("classifier") if isinstance(given, dict) else None
    if not heads:
        modules = {name: module for name, module in model.named_modules() if name}
        heads = [
            name
            for name, module in modules.items()
            if any(p.ndim > 1 for p in module.parameters(recurse=False))
        ]
        called = [name for name in heads if name.partition(".")[0] in _HEADS]
        heads = (called or heads)[-1:]
    prefixes = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    return [name for name in named if name.startswith(prefixes)]


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern as of a shell matches; a module's name also means all in it."""
    below = (pattern, f"{pattern}.*")
    return [name for name in names if any(fnmatchcase(name, each) for each in below)]


def require_matches(field: str, pattern: str, names: Collection[str]) -> list[str]:
    """`matching` names; raises ConfigError if there are none."""
    found = matching(pattern, names)
    if not found:
        parts = sorted({name.split(".")[0] for name in names})
        raise ConfigError(
            f"{field}: {pattern!r} matches no parameter.{did_you_mean(pattern, parts)} The model "
            f"has {', '.join(parts)}; quote patterns, such as 'layer1.*'."
        )
    return found


def freeze(model: nn.Module, patterns: Iterable[str]) -> str:
    """Freezes the parameters that match, and puts modules all of whose parameters are frozen in
    evaluation mode: there, batch norm keeps its statistics, and dropout is off.

    Returns:
        A line that says how many are frozen; "" without patterns.

    Raises:
        ConfigError: a pattern matches no parameter, or all would be frozen.
    """
    named, head = dict(model.named_parameters()), set(head_of(model))
    frozen: set[str] = set()
    for pattern in patterns:
        if pattern == BACKBONE and not matching(pattern, named):
            frozen |= named.keys() - head
        else:
            frozen |= {*require_matches("model.freeze", pattern, named)}
    if not frozen:
        return ""
    if len(frozen) == len(named):
        raise ConfigError(
            f"model.freeze = {' '.join(patterns)}: no parameter is left to train. To train the "
            f"head only: --model.freeze {BACKBONE}."
        )
    for name in frozen:
        named[name].requires_grad_(False)
    for module in model.modules():
        own = [*module.parameters()]
        if own and not any(parameter.requires_grad for parameter in own):
            for part in module.modules():
                part.training = False
    count = sum(named[name].numel() for name in frozen)
    total = sum(parameter.numel() for parameter in named.values())
    tensors = f"{len(frozen)} of {len(named)} tensors"
    return f"Frozen: {count:,} of {total:,} parameters ({tensors})."


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterward, each module is back in its former mode."""
    modes, is_trained = [(module, module.training) for module in model.modules()], model.training
    model.eval()
    try:
        yield
    finally:
        model.train(is_trained)  # a module's own `train` may do more, such as unmerge LoRA weights
        for module, training in modes:
            module.training = training


def begin_training(model: nn.Module) -> None:
    """Sets training mode, except for modules that are in evaluation mode, such as a frozen
    backbone. Calls the model's own `train`, as it may have such a rule itself."""
    resting = [module for module in model.modules() if not module.training]
    model.train()
    for module in resting:
        module.training = False


def nonfinite(model: nn.Module) -> list[str]:
    """Returns the names of weights that are not finite, and of buffers that contain nan (masks hold
    inf). The host waits for the device once.

    A norm reads the weights once, several times as fast as `isfinite` on a CPU.
    """
    import torch

    bad: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if weight.itemsize > 1 and (weight.is_floating_point() or weight.is_complex()):
            wide = torch.float32 if weight.dtype is torch.float16 else None  # up to 65,504
            bad[name] = ~torch.linalg.vector_norm(weight.detach(), dtype=wide).isfinite()
    bad |= {name: buffer.isnan().any() for name, buffer in model.named_buffers()}
    flags = torch.stack([*bad.values()]).tolist() if bad else []
    return [name for name, flag in zip(bad, flags, strict=True) if flag]
