"""The training loop."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.messages import Outcome
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.training.prepare import prepare
from raytrain_ddp.training.runtime.compilation import naming_compile_failures
from raytrain_ddp.training.session import Session
from raytrain_ddp.training.steps.step_decisions import StepDecisions


@naming_compile_failures()
def train(
    config: TrainConfig, task: Task, session: Session, reads: Collection[str] | None = None
) -> Outcome:
    """Trains to the end or until a stop is requested; resumes from the newest checkpoint, if any.

    All ranks call it, with the same config.

    Args:
        reads: the config fields that the task reads, if they are tracked; see `load_task`.
    """
    run = prepare(config, task, session, reads)
    state, cadence = run.state, run.cadence
    steering = StepDecisions(cadence, session, run.time_is_up)
    stop = run.make_up()
    end = state.step if stop else cadence.total_steps
    with closing(run.feed.steps(state.step, end)) as steps:
        for slots, samples in run.clock.waits(steps):
            steering.ask(state.step + 1)
            rates = run.rates(state.step)
            shares = run.stepper(slots, samples, rates)
            log, evaluate, save, stop = steering.decide(state.step)
            if log:
                run.log(shares, rates[0])
            if evaluate:
                keep, stop = run.evaluate()
                save |= keep  # always save the best
            over = stop > 0 or cadence.is_over(state.step)
            if save or over:
                run.save(last=over)
            if over:
                break
    session.finish()
    return run.outcome(stop)
