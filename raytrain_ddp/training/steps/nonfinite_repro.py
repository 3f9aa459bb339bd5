"""Reports a non-finite step, and writes the file that helps to reproduce it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, checkpoint_store, run_storage
from raytrain_ddp.config.recipe import publishable
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import TrainLoader
from raytrain_ddp.errors import DivergedError, RaytrainError
from raytrain_ddp.events import Note
from raytrain_ddp.training.runtime.seeding import slot_seed
from raytrain_ddp.training.runtime.world import World, broadcast
from raytrain_ddp.training.session import Session
from raytrain_ddp.training.state.train_state import TrainState
from raytrain_ddp.training.steps.nonfinite import StepTrace

_MOST_NAMES = 10
REMEDY = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm"


class _SlotLoss(NamedTuple):
    rank: int
    slot: int
    loss: float


def handle_nonfinite(
    config: TrainConfig, state: TrainState, session: Session, loader: TrainLoader, trace: StepTrace
) -> None:
    """Counts and reports a refused step, or ends the run; all ranks take part.

    Raises:
        DivergedError: no such step, or no further one, is allowed. It names step, slots and
            ranks, and the file in the run's folder with the details.
    """
    losses = _all_losses(trace, session.world)
    names = _names(trace, losses)
    what = _description(trace, losses, names)
    state.nonfinite += 1
    most = config.optim.max_nonfinite
    if config.optim.nonfinite == "skip" and state.nonfinite <= most:
        text = f"{what}. Its update is skipped ({state.nonfinite} of at most {most})."
        session.tell(Note(text[0].upper() + text[1:]))
        return
    file = f"diverged-step-{trace.step:08d}.json"
    if session.world.is_main:
        session.keep(file, _repro_document(config, session, loader, trace, losses, names))
    broadcast(None, session.world)  # the first rank to raise may cause the others to be killed
    if config.optim.nonfinite == "skip":
        what += f", and {most} such steps (optim.max_nonfinite) were skipped before"
    raise DivergedError(
        f"{what}. Committed checkpoints are kept, and {file} in the run's folder names these "
        f"samples; {REMEDY}, or skip such steps with --optim.nonfinite skip."
    )


def _all_losses(trace: StepTrace, world: World) -> list[_SlotLoss]:
    rank = world.of_run(world.rank)
    mine = [_SlotLoss(rank, slot, loss.item()) for slot, loss in trace.losses.items()]
    parts = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(parts, mine)
    return sorted((loss for part in parts for loss in part), key=lambda loss: loss.slot)


def _names(trace: StepTrace, losses: list[_SlotLoss]) -> list[str]:
    """Parameters whose gradient norm is not finite, except a sentinel that carries another
    cause."""
    norms = zip(trace.names, trace.norms.tolist(), strict=True)
    names = [name for name, norm in norms if not math.isfinite(norm)]
    spoken_for = not trace.forward.isfinite() or not all(math.isfinite(x.loss) for x in losses)
    return [] if names == [trace.sentinel] and spoken_for else names


def _description(trace: StepTrace, losses: list[_SlotLoss], names: list[str]) -> str:
    at = f"at step {trace.step} (learning rate {trace.lr:.3g})"
    lost = [x for x in losses if not math.isfinite(x.loss)]
    if lost:
        where = _some([f"slot {x.slot} (rank {x.rank})" for x in lost])
        return f"the loss of {where} is {lost[0].loss} {at}"
    if not names and not trace.forward.isfinite():
        return f"a buffer, such as batch norm's variance, would not be finite {at}"
    by = f", by {_some(names)}" if names else ""
    return f"the norm of the gradient is {trace.norm.item()} {at}{by}"


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _repro_document(
    config: TrainConfig,
    session: Session,
    loader: TrainLoader,
    trace: StepTrace,
    losses: list[_SlotLoss],
    names: list[str],
) -> dict[str, Any]:
    """Everything that a step is a function of, besides the config: JSON, with nan and inf as
    text."""
    plan, step = loader.plan, trace.step - 1
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    order = loader.order(epoch)
    place = f"{publishable(config).storage}/{config.name}"
    again = f"python -m raytrain_ddp.fit {place}/{CONFIG_FILE}"
    return {
        "step": trace.step,
        "epoch": epoch,
        "learning_rate": trace.lr,
        "seed": config.seed,
        "world_size": session.world.size,
        "gradient_norm": _number(trace.norm.item()),
        "parameters": names[:_MOST_NAMES],
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
        "checkpoint": _newest(config, session),
        "command": "the same command again" if "://" in place else again,
    }


def _newest(config: TrainConfig, session: Session) -> str | None:
    """Name of the newest checkpoint, including the one being written."""
    with suppress(RaytrainError, OSError):  # the run ends with its own error, not the storage's
        session.drain()
        names = checkpoint_store(run_storage(config)).names()
        return str(names[0]) if names else None
    return None


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
