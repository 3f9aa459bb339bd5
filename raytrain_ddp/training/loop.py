"""The training loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from raytrain_ddp.errors import TaskError, first_line
from raytrain_ddp.messages import Outcome
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.session import Session
from raytrain_ddp.training.steps.step_decisions import StepDecisions
from raytrain_ddp.training.training_run import Run


@contextmanager
def naming_compile_failures() -> Iterator[None]:
    """Raises TaskError, in one line, if torch.compile cannot compile the model."""
    try:
        yield
    except Exception as error:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        cause = getattr(error, "inner_exception", error)
        raise TaskError(
            f"torch.compile: {type(cause).__name__}: {first_line(cause)}. Change the model, or "
            "train with --compute.no-compile (in a task: without torch.compile). Code is built "
            "with a C++ compiler (g++) and Python's headers, in TORCHINDUCTOR_CACHE_DIR, a folder "
            "that must allow execution."
        ) from error


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
