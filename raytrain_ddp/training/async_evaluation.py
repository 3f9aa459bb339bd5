"""Evaluation of checkpoints by a separate worker while training continues (eval.asynchronous).

At an evaluation that is due, the run saves a checkpoint and notes its step as awaited. The other
worker writes the metrics into the folder of the checkpoint; the ranks log them with the next log
record, in the order of steps, and keep the checkpoint until then. What is awaited is in each
checkpoint, so a start after a death asks again. The last evaluation is by all workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from raytrain_ddp import events
from raytrain_ddp.checkpoint.evaluation_file import Evaluation
from raytrain_ddp.checkpoint.manifest import DamagedError
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader_threads import LoaderThreads
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import model_of
from raytrain_ddp.training.metrics.evaluation import evaluation_of
from raytrain_ddp.training.runtime.world import World, broadcast
from raytrain_ddp.training.start.initial_model import placed
from raytrain_ddp.training.state.shared_checkpoint import load_model
from raytrain_ddp.training.steps.step_decisions import Ballot

if TYPE_CHECKING:
    from raytrain_ddp.training.prepared_run import PreparedRun

_LOOK_EVERY_S = 0.2
_BEHIND = 3


def evaluate_checkpoint(
    config: TrainConfig,
    task: Task,
    data: Data,
    checkpoint: Checkpoint,
    world: World,
    beat: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The metrics of a checkpoint, by this process alone; those that `PreparedRun.evaluate` gives.

    A damaged or missing checkpoint gives an `Evaluation.error`.

    Args:
        world: of size 1.

    Raises:
        DataError: too many bad records. TaskError: the metrics lack the task's monitor.
    """
    began = time.monotonic()
    try:
        model = stored_model(config, task, checkpoint, world.device)
    except (DamagedError, FileNotFoundError) as error:
        return Evaluation(error=str(error))
    threads = LoaderThreads(world.threads)
    return evaluation_of(config, task, model, data, world, threads, beat, began)


def stored_model(
    config: TrainConfig, task: Task, checkpoint: Checkpoint, device: torch.device
) -> nn.Module:
    """The model of a checkpoint, as the evaluation of the run has it."""
    model = model_of(task, pretrained=False)
    load_model(model, checkpoint)
    return placed(config, model, device)


def leave_evaluation(run: PreparedRun) -> None:
    """Leaves the evaluation of the current model, which is saved next, to the other worker."""
    run.metrics, run.state.evaluated_step = {}, run.state.step
    run.state.awaited.append(run.state.step)
    if len(run.state.awaited) == _BEHIND:
        run.session.tell(
            events.Note(
                f"{_BEHIND} evaluations are not done yet: they take longer than the training in "
                "between. Their checkpoints are kept. A larger eval.every_epochs helps."
            )
        )


def take_evaluations(run: PreparedRun, wait: bool = False) -> int:
    """Logs the evaluations of earlier checkpoints that are done; all ranks take part.

    Args:
        wait: for all of them. Rank 0 evaluates itself if no other worker does.

    Returns:
        The number of the signal that interrupts the wait, else 0.
    """
    awaited, session, world = run.state.awaited, run.session, run.session.world
    if not awaited:
        return 0
    if not wait:
        _log(run, broadcast(session.evaluations(awaited), world))
        return 0
    session.drain()
    session.tell(events.Note(f"waiting for the evaluation of step {', '.join(map(str, awaited))}."))
    here = None
    if not run.config.eval.asynchronous and run.eval_data is not None:
        alone = replace(world, rank=0, size=1)
        args = run.config, run.task, run.eval_data
        here = partial(evaluate_checkpoint, *args, world=alone, beat=run.clock.beat)
    ballot = Ballot(session)
    with run.clock.part("evaluation"):
        while True:
            _log(run, broadcast(session.evaluations(awaited, here), world))
            if not awaited:
                return 0
            stop, _, look = session.requests_in_evaluation()
            ballot.cast(stop, False, look)
            stop, _, _ = ballot.count()
            if stop:
                return stop
            run.clock.beat()
            time.sleep(_LOOK_EVERY_S)


def _log(run: PreparedRun, done: Sequence[tuple[int, Evaluation]]) -> None:
    for step, evaluation in done:
        run.state.awaited.remove(step)
        if evaluation.error:
            text = f"step {step} is not evaluated: {evaluation.error}"
            run.session.tell(events.Note(text))
        else:
            run.log_evaluation(step, evaluation)
