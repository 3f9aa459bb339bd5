"""The training loop."""

from __future__ import annotations

from contextlib import closing

from raytrain_ddp.messages import Outcome
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.runtime.compilation import naming_compile_failures
from raytrain_ddp.training.session import Session
from raytrain_ddp.training.steps.step_decisions import StepDecisions
from raytrain_ddp.training.training_run import Run


@naming_compile_failures()
def train(build: Build, session: Session) -> Outcome:
    """Trains to the end or until a stop is requested; resumes from the newest checkpoint, if any.

    All ranks call it, with the same config.
    """
    run = Run(build, session)
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
