"""``python -m raytrain_ddp.fit [RECIPE] [flags]``: train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.config.command_line import Command, given_flags
from raytrain_ddp.config.field_types import ADDRESS
from raytrain_ddp.config.process import run_command, under_torchrun
from raytrain_ddp.config.recipe import default_name, described, dumps
from raytrain_ddp.config.train_config import TaskName, TrainConfig, require_effect
from raytrain_ddp.driver.recipe_args import RecipeArgs, parse_with_recipe
from raytrain_ddp.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_ddp.driver.result import FitResult, Listener
    from raytrain_ddp.training.own_run import OwnRun


@dataclass(frozen=True)
class FitArgs(RecipeArgs):
    """Train a model on Ray: one worker per GPU, on this machine or on a cluster.

    Without arguments, train a small network on the bundled digits on two CPU workers. The same
    command again resumes where the run stopped.
    """

    print_config: bool = False
    """Print the whole config as TOML and exit."""
    describe: bool = False
    """Print where the recipe comes from and what it reaches, and exit. Without a recipe: list all
    recipes that ship with the package."""
    dry_run: bool = False
    """Print batches, steps, workers, sizes; start nothing."""
    find_micro_batch: bool = False
    """Print the largest --micro-batch that fits the memory of this machine's GPU, and exit."""
    emit: Literal["slurm", "kuberay", "command"] | None = None
    """Print a Slurm or KubeRay file, and exit. The file starts this run on a cluster. command:
    print the command line of this run."""
    resume_from: str | None = field(default=None, metadata={"metavar": "RUN"})
    """Start a new run from the last state of another run, or from a checkpoint. A note lists how
    their configs differ."""
    local: bool = False
    """Train in this process, or under torchrun, without Ray."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started for this run."""
    dashboard: bool = False
    """Start the dashboard of the Ray that is started for this run."""


COMMAND = Command(
    "fit",
    FitArgs,
    "[RECIPE] [--FLAG VALUE ...]",
    {
        "Data": ["data.source", "data.eval-source", "data.image-size"],
        "Model": ["model.name", "model.weights", "task"],
        "Optimization": ["epochs", "batch-size", "optim.name", "optim.lr", "compute.precision"],
        "Scaling": ["scaling.num-workers", "scaling.use-gpu", "exact", "address"],
        "Run and checkpoints": ["name", "storage", "checkpoint.every-s", "seed"],
        "Instead of training": ["dry-run", "print-config", "emit"],
    },
)


_IDLE = {  # a flag, and those that have no effect with it
    "print_config": "dry_run emit find_micro_batch resume_from local address dashboard",
    "dry_run": "emit find_micro_batch address dashboard",
    "emit": "find_micro_batch resume_from local address dashboard",
    "find_micro_batch": "resume_from local address dashboard",
    "local": "address dashboard",
    "torchrun": "address dashboard",
    "address": "dashboard",
}


def parse_fit(argv: Sequence[str]) -> FitArgs:
    """Raises ConfigError for a recipe or a flag that is wrong, SystemExit (0) after --help."""
    args = parse_with_recipe(argv, COMMAND)
    for first, idle in _IDLE.items():
        is_given = under_torchrun() if first == "torchrun" else getattr(args, first)
        for other in filter(partial(getattr, args), idle.split() if is_given else ()):
            words = [f"--{other}", first if first == "torchrun" else f"--{first}"]
            without, by = (word.replace("_", "-") for word in words)
            raise ConfigError(f"{without} has no effect with {by}: remove one of them.")
    others = [word for word in argv if word[:2] == "--" and word.partition("=")[0] != "--describe"]
    if args.describe and others:
        raise ConfigError(f"{others[0]} has no effect with --describe: remove it.")
    require_effect(given_flags(argv), args.config, on_ray=not (args.local or under_torchrun()))
    return args


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse_fit(argv)
    if args.describe or args.print_config:
        print(described(args.recipe) if args.describe else dumps(args.config), end="")
        return 0
    if args.emit:
        from raytrain_ddp.driver.cluster_files import emit

        text, notes = emit(args.config, args.emit, args.recipe)
        print(text, end="")
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return 0
    if args.find_micro_batch:
        from raytrain_ddp.driver.preflight import check
        from raytrain_ddp.ray_backend.placement import choose_layout, local_resources

        config = check(args.config)
        workers = choose_layout(config, local_resources()).most
        from raytrain_ddp.training.rehearsal import find_micro_batch

        print(find_micro_batch(config, workers))
        return 0
    name = default_name(args.recipe)
    if args.dry_run:
        from raytrain_ddp.driver.dry_run import dry_run

        print(dry_run(args.config, name, args.resume_from, args.local))
        return 0
    train: Callable[..., FitResult] = fit_locally
    if not (args.local or under_torchrun()):
        train = partial(fit, address=args.address, dashboard=args.dashboard)
    return train(args.config, resume_from=args.resume_from, default_name=name).exit_status


def fit(
    config: TrainConfig | None = None,
    *,
    address: str | None = None,
    dashboard: bool = False,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
    display: Listener | None = None,
) -> FitResult:
    """Trains on Ray; resumes from the newest checkpoint if the run exists.

    Args:
        config: if it has no name, resumes the run with this config, or starts a new one.
        address: of a running Ray cluster ("auto": the one on this machine). Default: RAY_ADDRESS,
            else an embedded Ray that lasts as long as the run.
        dashboard: start the embedded Ray with its dashboard.
        default_name: name of a new run if the config has none; a number is appended if it is taken.
        resume_from: a run or checkpoint whose state a new run starts from.
        display: shows the run. Default: on the terminal or in the notebook.

    Raises:
        RaytrainError: one of errors.py, each with its exit status.
        KeyboardInterrupt: Ctrl-C before training began, or twice.
    """
    given = {"default_name": default_name, "resume_from": resume_from}
    return _fit(config, display, address=address, dashboard=dashboard, **given)


def fit_locally(
    config: TrainConfig | None = None,
    *,
    default_name: str | None = None,
    resume_from: str | os.PathLike[str] | None = None,
    display: Listener | None = None,
) -> FitResult:
    """Like `fit`, but without Ray: in this process, or in each process that torchrun started.

    Only rank 0 shows and writes; all ranks return the result. An exception raised by the task
    propagates unchanged, where `fit` raises a `TaskError` with its traceback.
    """
    given = {"default_name": default_name, "resume_from": resume_from}
    return _fit(config, display, local=True, **given)


_SECTIONS_OF_OWN_LOOP = {"compute", "ddp", "checkpoint", "scaling", "log"}


def launch(
    train: Callable[[OwnRun], object],
    *,
    num_workers: int | str | None = None,
    save_every_s: float | None = None,
    address: str | None = None,
    **fields: Any,
) -> FitResult:
    """Calls a train function of one's own in each worker; the same call resumes the run.

    Args:
        train: ``train(run)`` receives an `OwnRun`.
        num_workers: on Ray; None, or under torchrun: in this process.
        save_every_s: seconds between checkpoints; see `CheckpointConfig` for other cadences.
        address: see `fit`.
        fields: of TrainConfig: name, storage, seed, exact, and the sections compute, ddp,
            checkpoint, scaling and log.

    Raises:
        RaytrainError: one of errors.py, each with its exit status.
    """
    if idle := set(fields) - {"name", "storage", "seed", "exact", *_SECTIONS_OF_OWN_LOOP}:
        raise ConfigError(
            f"launch({min(idle)}=...) has no effect on a loop of your own: remove it."
        )
    from raytrain_ddp.tasks.task import OwnLoop  # with NumPy, which --help does without

    named: Any = getattr(train, "func", train)  # of a partial
    task = TaskName(f"{named.__module__}:{named.__qualname__}(run)")
    task.target = OwnLoop(train)
    # The loop sets the real sizes; with these, any number of workers fits.
    config = TrainConfig(task=task, batch_size=10**7, micro_batch=1, **fields)
    if (config.compute.precision, config.compute.channels_last) != ("auto", "auto"):
        raise ConfigError("launch(): compute.precision and channels_last are for your loop to set.")
    compute = replace(config.compute, precision="fp32", channels_last=False)
    config = replace(config, compute=compute)
    if save_every_s is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, every_s=save_every_s))
    if num_workers is None or under_torchrun():
        return fit_locally(config)
    scaling = replace(config.scaling, num_workers=num_workers)
    return fit(replace(config, scaling=scaling), address=address)


def _fit(config: TrainConfig | None, display: Listener | None, **given: Any) -> FitResult:
    from raytrain_ddp.driver import fit_driver
    from raytrain_ddp.tools.display.progress_display import Display

    return fit_driver.fit(config, display=display or Display(), **given)


class _CallableModule(ModuleType):
    """Lets ``raytrain_ddp.fit(config)`` work also where this module hides the function `fit`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    run_command(main)
