"""A step of a loop of one's own: its slots, its gradients, and what a loop must not do in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import TaskError
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.gradients.buffer_sync import SlotBuffers, buffers_of
from raytrain_ddp.training.gradients.reduction import (
    DdpReduction,
    ExactReduction,
    compress,
    require_used,
)
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.own_state import Registered, unwrapped
from raytrain_ddp.training.runtime.world import seed_slot
from raytrain_ddp.training.steps.warm_up import Collectives

_MASK = 4096  # elements; a bool buffer with more is taken for a constant mask
_WATCHED = 3  # steps after which gradients are looked at


class Gradients:
    """Sums gradients, losses and changes of buffers over the slots of a step, of all workers.

    Args:
        nets: the prepared models; wrapped in DDP, unless there is one worker or `config.exact`.
        slots: of a step.
        scaler: scales losses, if it is enabled.
    """

    def __init__(
        self,
        nets: Sequence[nn.Module],
        slots: int,
        config: TrainConfig,
        scaler: torch.amp.GradScaler,
        membership: Membership,
        clock: Clock,
    ) -> None:
        world = membership.world
        self.slots, self.seed, self.scaler = slots, config.seed, scaler
        self.membership, self.world, self.clock = membership, world, clock
        self.is_exact = config.exact
        model = nn.ModuleList(map(unwrapped, nets))
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self.reductions: list[DdpReduction | ExactReduction] = []
        if config.exact:
            bucket_mib = config.ddp.bucket_cap_mb
            self.reductions.append(ExactReduction(model, slots, world, bucket_mib, clock))
        for net in () if config.exact else nets:
            compress(net, config, scaler, world)
            scale = 1.0 if scaler.is_enabled() else float(world.size)
            self.reductions.append(reduction := DdpReduction(net, scale, world))
            # DDP divides parameters into buckets anew after its first backward pass. With passes
            # that do not depend on the loop, all starts have the same buckets, and sum alike.
            for _ in range(2 if isinstance(net, DistributedDataParallel) else 0):
                with reduction.passing(None, is_last=True):
                    pass
        flags = [b for b in buffers_of(model) if b.tensor().dtype is torch.bool]
        self.buffers = SlotBuffers(
            model,
            world,
            with_loss=True,
            exact_slots=slots if config.exact else 0,
            changing=[each for each in flags if each.tensor().numel() <= _MASK],
            scalars=1,
        )
        self.drop()

    def drop(self) -> None:
        """Frees all gradients: those of a step are of its slots only."""
        for parameter in self._trained:
            parameter.grad = None

    def require_dropped(self, step: int) -> None:
        """Raises TaskError if gradients are left after the update of one of the first steps."""
        left = (each.grad for each in self._trained if each.grad is not None)
        if step < _WATCHED and any(bool(gradient.any()) for gradient in left):
            raise TaskError(
                "gradients are left at the end of a step: call optimizer.zero_grad() after "
                "optimizer.step(). Gradients over several steps: use a larger batch_size, which "
                "micro_batch divides."
            )

    @contextmanager
    def passing(self, slot: Slot | None, is_last: bool) -> Iterator[None]:
        """Wraps the passes of a slot; None: this worker has none in this step."""
        with ExitStack() as stack:
            for each in self.reductions:
                if slot is not None:
                    stack.enter_context(each.passing(slot, is_last))
                elif isinstance(each, DdpReduction):
                    stack.enter_context(each.passing(None, is_last))
            yield

    @property
    def forbids_collectives(self) -> bool:
        """Whether a collective in a slot could make some workers wait forever."""
        return self.world.size > 1 and (self.is_exact or self.slots != self.world.size)

    @property
    def unused(self) -> list[str]:
        """The parameters to which this worker gave NaN; see `DdpReduction`."""
        return [name for each in self.reductions for name in each.unused]

    def divide(self, by: Tensor) -> None:
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.div_(by)


class OwnStep:
    """A step. Iterating over it yields the batch of each slot of this worker, for which
    `backward` must be called once; then, all gradients are final.

    It may be iterated over several times, for the updates of several optimizers one after another.

    Attributes:
        loss: the mean over all samples of all workers, shape (), float64; known after the slots.
        samples: of all workers.
    """

    def __init__(self, slots: list[Slot], step: int, samples: int, gradients: Gradients) -> None:
        self._slots, self._number, self.samples = slots, step, samples
        self._gradients = gradients
        self.loss = torch.tensor(torch.nan, dtype=torch.float64)
        self.turns, self.is_open = 0, False
        self._slot: Slot | None = None
        self._found: Tensor | None = None  # loss and count of the slot
        self._is_last = self._counts = False
        self._watch = _NoCollectives()
        self._is_watched = False

    def __iter__(self) -> Iterator[Batch]:
        given, first = self._gradients, self.turns * (self._gradients.slots + 1)
        world, clock, step = given.world, given.clock, self._number
        self.turns, self.is_open = self.turns + 1, True
        working = [slot for slot in self._slots if slot.samples]
        self._counts = not working  # this worker cannot know
        given.drop()
        given.buffers.begin()
        for each in given.reductions:
            each.begin()
        for slot in working:
            given.membership.require_ranks()
            seed_slot(world.device, given.seed, step, first + slot.index)
            given.buffers.rewind()
            self._slot, self._found, self._is_last = slot, None, slot is working[-1]
            with given.passing(slot, self._is_last):
                self._look(step == 0 == first and given.forbids_collectives)
                try:
                    yield slot.batch
                finally:
                    self._look(False)
                if self._found is None:
                    raise TaskError(
                        "step.backward(loss) must be called once for each batch of a step, in "
                        "place of loss.backward()."
                    )
            spoilt = self._found * torch.nan if given.unused else self._found
            given.buffers.add(slot.index, slot.samples / self.samples, spoilt)
            clock.beat()
        self._slot = None
        if not working:
            with given.passing(None, is_last=True):
                pass
        failpoint("train.after_backward", world.rank, step + 1)
        for each in given.reductions:
            each.finish()
        given.buffers.agree()
        given.membership.confirm()
        clock.mark("communication" if world.size > 1 else "compute")
        self.loss, count = given.buffers.means.clone()
        if (world.device.type == "cpu" or step < _WATCHED) and self.loss.isnan():
            require_used(given.unused, world, step + 1)
        self.is_open = False
        given.buffers.finish(torch.zeros((), dtype=torch.bool, device=world.device))
        if self._counts:
            count = torch.where(count > 0, count, 1.0)
            given.divide(count)
            self.loss = self.loss / count
        seed_slot(world.device, given.seed, step, first + given.slots)

    def backward(self, loss: Tensor, count: float | Tensor | None = None) -> None:
        """Computes the gradients of a batch's loss, in place of ``loss.backward()``.

        Args:
            loss: the mean over the batch's samples, or over `count`, shape (). A registered
                GradScaler scales it.
            count: of what the loss is the mean, such as tokens. The gradients and `self.loss` are
                then means over the counts of all slots, else over their samples.
        """
        slot, given = self._slot, self._gradients
        if slot is None or self._found is not None:
            raise TaskError("step.backward(loss): call it exactly once for each batch of a step.")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TaskError(
                "step.backward(loss): give the mean loss of the batch, a tensor of one number that "
                "depends on the model."
            )
        watched = self._is_watched
        self._look(False)
        if self._is_last and given.world.size > 1:
            given.clock.after_backward(loss)
        loss, scale = loss.reshape(()), slot.samples / self.samples * given.reductions[0].scale
        shown, share = loss.detach().double(), loss.new_zeros((), dtype=torch.float64)
        if count is None:
            weighted = loss * scale
        else:
            self._counts = True
            share = torch.as_tensor(count, dtype=torch.float64, device=loss.device) / slot.samples
            weighted, shown = loss * (share * scale), shown * share
        self._found = torch.stack([shown, share])
        given.scaler.scale(weighted).backward()
        self._look(watched)

    def _look(self, begins: bool) -> None:
        """Begins or ends to watch a slot for collectives."""
        if self._is_watched and not begins:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif begins:
            self._watch.__enter__()  # type: ignore[no-untyped-call]
        self._is_watched = begins


class _NoCollectives(Collectives):
    def found(self, name: str) -> None:
        raise TaskError(
            f"a slot calls a collective ({name}), but some workers have more slots than others, or "
            "sum gradients meanwhile: call it after the loop over the step's batches."
        )


@contextmanager
def watching_updates(objects: Registered, current: Callable[[], OwnStep | None]) -> Iterator[None]:
    """Raises TaskError within an optimizer's step that is not registered, or comes too early."""

    def look(optimizer: Optimizer, *_: object) -> None:
        kind, step = type(optimizer).__name__, current()
        if step is not None and step.is_open:
            raise TaskError(
                f"{kind}.step() before the loop over the step's batches is over, in it or after a "
                "break: gradients are final after all batches."
            )
        if not any(optimizer is each for each in objects.of_kind(Optimizer)):
            raise TaskError(
                f"an optimizer ({kind}) takes a step that is not registered, so its state would "
                "not be saved: run.register(optimizer=optimizer)."
            )

    hook = register_optimizer_step_post_hook(look)
    try:
        yield
    finally:
        hook.remove()
