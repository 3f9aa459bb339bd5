"""The warm-up of a run, which finds out what a forward and a backward pass change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import ConfigError, TaskError, first_names
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of, refused
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.buffer_sync import BoolBuffers, BufferLocation, SavedBuffers
from raytrain_ddp.training.gradients.reduction import counting_calls
from raytrain_ddp.training.monitoring.step_timing import counting_flops
from raytrain_ddp.training.runtime.world import keeping_generators, seed_slot

_NO_COLLECTIVES = ("wrap_tensor_autograd", "wait_tensor")
_NO_KERNEL = " does not have a deterministic implementation"
_TOO_SMALL = "more than 1 value per channel"  # for batch norm, says torch


class WarmUp(NamedTuple):
    """What the warm-up has found out about the model.

    Args:
        scalar_names: names of the scalars that the task logs with the loss.
        fewest: the fewest samples with which a slot is run in training mode.
        changing: the bool buffers that a forward pass changes.
        flops: floating-point operations per sample, forward and backward; 0 if unknown.
        averaged: other buffers that a pass changes, except statistics of normalization layers.
        collectives: the collectives that the loss calls.
    """

    scalar_names: tuple[str, ...]
    fewest: int
    changing: list[BufferLocation]
    flops: float
    averaged: Sequence[str] = ()
    collectives: Sequence[str] = ()


def warm_up(
    build: Build,
    net: nn.Module,
    require_gradients: Callable[[nn.Module], None],
    most: int | None = None,
) -> WarmUp:
    """Runs a pass without side effects, and a second one for static graphs; all ranks take part if
    the model is wrapped.

    Also detects what cannot work: kernels, or a smallest micro-batch that is too small for batch
    norm. If bad records may leave a slot with a single sample, which batch norm refuses, such a
    slot is run in evaluation mode, for any number of workers.

    Args:
        net: see `Build.loss`.
        require_gradients: called with the model after the backward pass.
        most: the most samples in a batch; None: as many as a slot has.

    DDP rebuilds its gradient buckets before the second forward pass (with a static graph, after
    the second backward pass), which changes the order of its sums. As the first step follows
    that, a resumed run sums in the same order as an uninterrupted one.

    Raises:
        ConfigError, TaskError: the model or the loss could not be trained.
    """
    config, model, loader = build.config, build.model, build.loader
    device, epoch = build.world.device, config.data.grow_epochs  # one with the largest images
    sizes = [
        min(each, most or each) for each in (loader.plan.micro_batch, loader.plan.smallest_slot)
    ]
    batch, smallest = (loader.any_batch(size, epoch) for size in sizes)
    samples = loader.data.samples_of(batch)
    single = loader.any_batch(1, epoch) if loader.skip else None
    buffers, flags = SavedBuffers(model), BoolBuffers(model)
    with naming_remedy():
        with counting_flops(config.compute.compile) as counter, keeping_generators(device):
            seed_slot(device, config.seed, 0, 0)
            collectives = Collectives()
            names, others = _pass(build, net, batch, require_gradients, collectives)
        if config.ddp.static_graph:  # DDP itself calls collectives
            _pass(build, net, batch, require_gradients, nullcontext())
        flipped = flags.changed()
        buffers.restore()
        flags.begin()
        smallest_loss, _ = build.loss(smallest, model)
        require_own(build.task, others, others_of(model, smallest_loss))
        fewest = 1 if single is None else 1 + _is_too_small(build, single)
    flops, changed = counter.get_total_flops() / samples, buffers.changed()
    stored = model.state_dict().keys()
    averaged = [each for each in changed if each in stored]
    flipped = [*dict.fromkeys([*flipped, *flags.changed()])]
    found = WarmUp(names, fewest, flipped, flops, averaged, (*collectives.names,))
    buffers.restore()
    return found


def warm_up_notes(found: WarmUp | None) -> list[str]:
    """A note about buffers that forward passes change, perhaps not as the task intends."""
    if found is None or not found.averaged:
        return []
    return [
        f"forward passes change the buffers {first_names(found.averaged)}: each step applies the "
        "mean change over its slots (the micro-batches). Update what must not be averaged, such as "
        "a queue or a count, in after_step()."
    ]


def _is_too_small(build: Build, single: Batch) -> bool:
    try:
        build.loss(single, build.model)
    except ValueError as error:
        if _TOO_SMALL not in str(error):
            raise
        return True
    return False


def _pass(
    build: Build,
    net: nn.Module,
    batch: Batch,
    require_gradients: Callable[[nn.Module], None],
    watching: AbstractContextManager[object],
) -> tuple[tuple[str, ...], dict[int, nn.Parameter]]:
    """Returns the names of the scalars with the loss, which is computed in the context; and
    parameters that the model lacks, see `others_of`."""
    task, model = build.task, build.model
    with counting_calls(net) as calls, watching:
        loss, scalars = loss_without_backward(build, net, batch)
    if not calls and net is not model:
        raise TaskError(
            f"{place_of(task.loss)}: does not call the model that it receives. Call "
            "model(...): otherwise, gradients are not summed over the workers."
        )
    others = others_of(model, loss)  # before the graph is freed
    loss.backward()
    if all(each.grad is None for each in model.parameters()):
        raise refused(task.loss, loss, "a loss that depends on the model's parameters")
    if not build.config.ddp.find_unused_parameters:
        require_gradients(model)
    model.zero_grad()
    return (*scalars,), others


def loss_without_backward(
    build: Build, net: nn.Module, batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """`Build.loss` of a copy of the batch, shape (), and the scalars with it; parameters have no
    gradients.

    Raises:
        TaskError: the loss calls backward() itself.
    """
    model = build.model
    model.zero_grad()
    with suppress(Exception):  # a batch that cannot be copied is used directly
        batch = deepcopy(batch)
    loss, scalars = build.loss(batch, net)
    if any(each.grad is not None for each in model.parameters()):
        raise TaskError(
            f"{place_of(build.task.loss)}: calls backward() itself. Only return the loss; the "
            "gradients follow."
        )
    return loss, scalars


class Collectives(TorchDispatchMode):
    """Records the collectives that a loss calls."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = dict[str, None]()

    def found(self, name: str) -> None:
        """Called before each collective."""
        self.names[name] = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        space, _, name = str(func).partition(".")
        name = name.partition(".")[0].strip("_")
        if space in ("c10d", "_c10d_functional") and name not in _NO_COLLECTIVES:
            self.found(name)
        return func(*args, **(kwargs or {}))


def require_equal_calls(build: Build) -> None:
    """Raises ConfigError if a loss calls collectives, and some ranks could call them more often
    than others, or in a different order relative to those of exact sums."""
    names = build.warmed_up.collectives if build.warmed_up else ()
    config, size, why = build.config, build.world.size, ""
    if config.exact:
        why, remedy = "--exact sums gradients in between", "Use --no-exact."
    elif config.slots != size:
        why = f"a step has {config.slots} micro-batches for {size} workers"
        remedy = "Set --micro-batch to --batch-size divided by the number of workers."
    if names and why and size > 1:
        raise ConfigError(
            f"{place_of(build.task.loss)}: calls collectives ({', '.join(names)}), but {why}: some "
            f"workers would wait forever. {remedy}"
        )


def others_of(model: nn.Module, loss: Tensor) -> dict[int, nn.Parameter]:
    """Parameters that the loss, shape (), depends on and the model lacks, by id."""
    own = {id(parameter) for parameter in model.parameters()}
    others: dict[int, nn.Parameter] = {}
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaf = node.variable  # type: ignore[attr-defined]
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                others[id(leaf)] = leaf
        left += [before for before, _ in node.next_functions]
    return others


def require_own(
    task: Task, first: Mapping[int, nn.Parameter], second: Mapping[int, nn.Parameter]
) -> None:
    """Raises TaskError for parameters that the model lacks and two passes have in common: a loss
    may make others for itself."""
    shapes = [str([*each.shape]) for key, each in first.items() if key in second]
    if shapes:
        raise TaskError(
            f"{place_of(task.loss)}: the loss depends on parameters that the model does not "
            f"contain, of shapes {first_names(shapes)}: they would be neither trained nor saved. "
            "Make them part of the module that model() returns (put modules in an nn.ModuleList, "
            "not a Python list). If they are meant to stay fixed, call requires_grad_(False) on "
            "them."
        )


@contextmanager
def naming_remedy() -> Iterator[None]:
    """Raises ConfigError in place of an error of torch's that another config would avoid."""
    try:
        yield
    except (RuntimeError, ValueError, AttributeError) as error:
        remedy = _remedy_of(str(error))
        if remedy is None:
            raise
        raise ConfigError(remedy) from error


def _remedy_of(text: str) -> str | None:
    if _TOO_SMALL in text:
        return (
            "the last step of an epoch has a micro-batch of one sample, too few for this model's "
            "batch norm: use another --micro-batch or --batch-size."
        )
    if _NO_KERNEL in text:
        return (
            "compute.deterministic = True, but torch has no deterministic kernel for "
            f"{text.partition(_NO_KERNEL)[0]}. Use other layers or operations, or "
            "--compute.no-deterministic: then the run keeps every promise except the same bits."
        )
    if text.startswith("'DistributedDataParallel' object has no attribute"):
        name = text.rpartition("attribute ")[2].strip("'")
        return (
            f"the task's loss uses model.{name}, but with several workers model is wrapped in DDP "
            "and can only be called. Move this into the model's forward, or use --exact, which "
            "does not wrap the model."
        )
    return None
