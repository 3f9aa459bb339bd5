"""The training loop, and this process's part in a run from its start to its end."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from raytrain_ddp.checkpoint.checkpoints import Checkpoints
from raytrain_ddp.checkpoint.metrics_log import Log
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.snapshot import Snapshot
from raytrain_ddp.checkpoint.trackers import openers
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError, TaskError, first_line
from raytrain_ddp.events import Outcome
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.membership.generations import NewcomerWaits, NoStateLeft
from raytrain_ddp.tasks.task import OwnLoop
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.gradients.reduction import ExactReduction
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.own_run import OwnRun
from raytrain_ddp.training.rehearsal import rehearse_evaluation
from raytrain_ddp.training.runtime.world import versions_here
from raytrain_ddp.training.steps.step_decisions import StepDecisions
from raytrain_ddp.training.steps.warm_up import warm_up
from raytrain_ddp.training.training_run import Run

# Of torch._inductor, Triton and subprocess: by name, as these modules may be missing.
_OF_COMPILERS = {"InvalidCxxCompiler", "CppCompileError", "TritonMissing", "CalledProcessError"}


@contextmanager
def naming_compile_failures() -> Iterator[None]:
    """Reports a failure of torch.compile in one line.

    Raises:
        PreflightError: this machine cannot build or load code.
        TaskError: torch.compile cannot compile the model.
    """
    try:
        yield
    except Exception as error:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        cause = getattr(error, "inner_exception", error)
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        is_of_machine = isinstance(cause, OSError | ImportError) or kinds & _OF_COMPILERS
        raise (PreflightError if is_of_machine else TaskError)(
            f"torch.compile: {type(cause).__name__}: {first_line(cause)}. Change the model, or "
            "train with --compute.no-compile (in a task: without torch.compile). Code is built "
            "with a C++ compiler (g++) and Python's headers, in TORCHINDUCTOR_CACHE_DIR, a folder "
            "that must allow execution."
        ) from error


@naming_compile_failures()
def train(run: Run) -> Outcome:
    """Trains to the end or until a stop is requested; resumes from the newest state, if any.

    All ranks call it, with the same config.
    """
    run.begin()
    state, cadence = run.state, run.cadence
    steering = StepDecisions(cadence, run.membership, run.checkpoints, run.time_is_up)
    stop = run.make_up()
    end = state.step if stop else cadence.total_steps
    with closing(run.feed.steps(state.step, end)) as steps:
        for slots, samples in run.clock.waits(steps):
            steering.ask(state.step + 1)
            rates = run.rates(state.step)
            shares = run.stepper(slots, samples, rates)
            log, evaluate, save, stop = steering.decide(state.step)
            if log:
                run.record(shares, rates[0])
            if evaluate:
                keep, stop = run.evaluate()
                save |= keep  # always save the best
            over = stop > 0 or cadence.is_over(state.step)
            if save or over:
                run.save(last=over)
            if over:
                break
    run.finish()
    return run.outcome(stop)


def take_part(
    membership: Membership,
    config: TrainConfig,
    make: Callable[[bool], Build],
    build: Build | None = None,
) -> Outcome | None:
    """Trains as a member of a run until it is over.

    Every start is a join: of a new run, a resumed one, a newcomer, and a survivor that has lost
    another rank. What differs is what a process brings: a Build or none, a state or none.

    Args:
        make: makes the parts of the run; receives whether this process has a state.
        build: the parts that it has made already, if any.

    Returns:
        How the run has ended; None if it ended without this process.
    """
    log = Log(run_storage(config), openers(config), membership.show)
    checkpoints = Checkpoints(config, log)
    state: Snapshot | None = None
    reached, losses = -1, 0

    with closing(checkpoints):
        while membership.join():
            if not membership.world.is_main:
                checkpoints.close()  # another process writes now
            if build is None or (build.is_begun and state is None):  # no rank can use its state
                build = make(state is not None)
            kind = OwnRun if isinstance(build.task, OwnLoop) else Run
            run, state = kind(build, membership, checkpoints, log, state), None
            try:
                return membership.end(run.lead() if isinstance(run, OwnRun) else train(run))
            except BaseException as error:
                membership.leave()  # first of all, so that the others notice
                if not membership.goes_on(error):
                    checkpoints.close()  # while the watchdog answers the others
                    raise
                run.close()
                traceback.clear_frames(error.__traceback__)  # of the loop and its batches
                state = run.live_state()
                step = run.step if run.has_begun else -1
                is_planned = isinstance(error, NewcomerWaits | NoStateLeft)
                losses = 0 if step > reached else losses
                reached, losses = max(reached, step), losses + (not is_planned)
                if losses > max(1, config.scaling.max_failures):
                    raise
                build = build.remains()
            finally:
                run.close()
            del run
    return None


def made_ahead(build: Build) -> Build:
    """The build, with everything that a process can make before it joins a run in progress; its
    world contains only this process.

    Raises:
        ConfigError, DataError, TaskError: see `Run`.
    """
    if isinstance(build.task, OwnLoop):
        return build
    build.join(build.world)
    build.open_data()
    failpoint("start.alone", build.world.of_run(0))
    versions_here()  # caches them
    _ = build.identity
    if build.keeps_model:
        build.warmed_up = warm_up(build, build.model, ExactReduction.require_all)
        rehearse_evaluation(build, lambda _: None)
    return build
