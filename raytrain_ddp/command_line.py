"""Command lines: a recipe, flags from the dataclasses, errors in one line with their status."""

from __future__ import annotations

import inspect
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import tyro

from raytrain_ddp.config.effects import require_effect, under_torchrun
from raytrain_ddp.config.recipe import load, shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, RaytrainError, status_of

_PROFILE_STEPS = 5
_BROKEN_PIPE = 128 + signal.SIGPIPE


@dataclass(frozen=True)
class RecipeArgs:
    """The flags of all commands that train."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    recipe: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe (.toml) or the name of a shipped one; must come first. Flags win over it."""


Args = TypeVar("Args", bound=RecipeArgs)


@dataclass(frozen=True)
class FitArgs(RecipeArgs):
    """Train a model on Ray: one worker per GPU, on this machine or on a cluster.

    Without arguments it trains a small network on handwritten digits with two CPU workers. The same
    command again goes on where the run stopped; all randomness follows from the seed.
    """

    print_config: bool = False
    """Print the resolved config as TOML, and do nothing else."""
    dry_run: bool = False
    """Print what would be done (batches, steps, learning rate, sizes, workers); take no worker."""
    emit: Literal["slurm", "kuberay", "ray-up", "command"] | None = None
    """Print a file for this run on a cluster, or its command line, and do nothing else."""
    audit: bool = False
    """Log a hash of each step's sample ids and pixels: equal hashes, equal data (log.audit)."""
    profile: bool = False
    """Trace five steps with torch.profiler on rank 0 (log.profile_steps, log.profile_ranks)."""
    local: bool = False
    """Without Ray: in this process, or under torchrun."""
    address: str | None = None
    """A running Ray cluster (auto: on this machine). Default: RAY_ADDRESS, else an embedded Ray."""
    dashboard: bool = False
    """Start the embedded Ray with its dashboard."""


def parse_fit(argv: Sequence[str]) -> FitArgs:
    """Raises ConfigError for a recipe, SystemExit (2) for a flag that is wrong."""
    args = parse_with_recipe(argv, FitArgs, "fit")
    _require_one_thing(args)
    log = args.config.log
    if args.audit:
        log = replace(log, audit=True)
    if args.profile and not log.profile_steps:
        log = replace(log, profile_steps=_PROFILE_STEPS)
    args = replace(args, config=replace(args.config, log=log))
    require_effect(argv, args.config, on_ray=not (args.local or under_torchrun()))
    return args


def _require_one_thing(args: FitArgs) -> None:
    """Raises ConfigError if one flag makes another one ineffective."""
    modes = {"--print-config": args.print_config, "--dry-run": args.dry_run, "--emit": args.emit}
    asked = [flag for flag, given in modes.items() if given]
    local = ["--local"] * args.local
    rays = {"--address": args.address, "--dashboard": args.dashboard}
    ray = [flag for flag, given in rays.items() if given]
    alone = local or ["torchrun"] * under_torchrun()
    for this, others in ((asked, asked[1:] + local + ray), (alone, ray), (ray, ray[1:])):
        if this and others:
            raise ConfigError(f"{others[0]} has no effect with {this[0]}: remove one of them.")


def parse_with_recipe(argv: Sequence[str], kind: type[Args], command: str) -> Args:
    """The flags of a command that trains: those of `kind`, over the recipe that comes first, if
    any.

    Raises ConfigError for a recipe, SystemExit (2) for a flag that is wrong.
    """
    recipe = argv[0] if argv and not argv[0].startswith("-") else None
    config = load(recipe) if recipe is not None else TrainConfig()
    names = ", ".join(shipped_recipes())
    args = tyro.cli(
        kind,
        prog=f"python -m raytrain_ddp.{command}",
        description=f"{inspect.getdoc(kind)}\n\nShipped recipes: {names}.",
        args=list(argv),
        default=kind(config=config),
    )
    if args.recipe != recipe:
        raise ConfigError(
            f"the recipe {args.recipe!r} must be the first argument, before the flags. (If it is "
            "none: the flag before it takes no value.)"
        )
    return args


def run_command(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command's main with the command line, and exits with its status.

    A RaytrainError prints its message on standard error, without a traceback. If the reader of the
    output has exited (`| head`), the status is 141, as with other Unix tools.
    """
    _open_closed_streams()
    try:
        status = _status_of(main)
    except BrokenPipeError:
        if not _reader_is_gone():  # another connection broke
            raise
        status = _BROKEN_PIPE
    sys.exit(_flushed(status))


def _status_of(main: Callable[[Sequence[str]], int]) -> int:
    try:
        return main(sys.argv[1:])
    except RaytrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return status_of(error)
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        number = stop.args[0] if stop.args and isinstance(stop.args[0], int) else 2
        return 128 + number
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich ends with 1
            return _BROKEN_PIPE
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1


def _flushed(status: int) -> int:
    """Flushes the buffered output; returns the exit status, nonzero if that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())  # otherwise, Python tries again at exit
            broken = isinstance(error, BrokenPipeError)
            status = status or (_BROKEN_PIPE if broken else 1)
            if not broken:
                print(f"error: cannot write the output: {error}", file=sys.stderr)
    return status


def _reader_is_gone() -> bool:
    """Whether standard output or error is a pipe without a reader."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open_closed_streams() -> None:
    """Opens closed standard streams (`2>&-`) on /dev/null; otherwise, the next opened file would
    get their descriptor and receive printed output."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115
