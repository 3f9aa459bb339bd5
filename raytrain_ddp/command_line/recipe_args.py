"""The commands that take a recipe and the flags of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from raytrain_ddp.command_line.commands import Command
from raytrain_ddp.command_line.flags import flat, positional
from raytrain_ddp.config.effects import require_effect, under_torchrun
from raytrain_ddp.config.recipe import load, shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import ADDRESS, require_no_control
from raytrain_ddp.errors import ConfigError

_PROFILE_STEPS = 5


@dataclass(frozen=True)
class RecipeArgs:
    """The flags of all commands that train."""

    config: TrainConfig = field(metadata=flat("run"))
    recipe: str | None = field(default=None, metadata=positional("RECIPE"))
    """A .toml file, a run, or a name from fit --describe. Flags override it."""


Args = TypeVar("Args", bound=RecipeArgs)


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
    emit: Literal["slurm", "kuberay", "ray-up", "command"] | None = None
    """Print a Slurm, KubeRay, or `ray up` file, and exit. The file starts this run on a cluster.
    command: print the command line of this run."""
    audit: bool = False
    """Log a hash of the sample ids and pixels of each step, to compare runs. See --log.audit."""
    profile: bool = False
    """Trace five steps with torch.profiler on rank 0. Same as --log.profile-steps 5; see also
    --log.profile-ranks."""
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


FIT = Command(
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


def parse_fit(argv: Sequence[str]) -> FitArgs:
    """Raises ConfigError for a recipe or a flag that is wrong, SystemExit (0) after --help."""
    args = parse_with_recipe(argv, FIT)
    _require_one_thing(args)
    others = [word for word in argv if word[:2] == "--" and word.partition("=")[0] != "--describe"]
    if args.describe and others:
        raise ConfigError(f"{others[0]} has no effect with --describe: remove it.")
    log = args.config.log
    if args.audit:
        log = replace(log, audit=True)
    if args.profile and not log.profile_steps:
        log = replace(log, profile_steps=_PROFILE_STEPS)
    args = replace(args, config=replace(args.config, log=log))
    require_effect(argv, args.config, on_ray=not (args.local or under_torchrun()))
    return args


def _config_of(recipe: str) -> TrainConfig:
    """Loads the config of a file, a shipped recipe, or an existing run."""
    is_file = recipe.endswith(".toml") and PurePath(recipe).name != "config.toml"
    if is_file or recipe in shipped_recipes():
        return load(recipe)
    from raytrain_ddp.checkpoint.run_folder import config_of_run  # imports PyArrow

    return config_of_run(recipe) or load(recipe)


def _require_one_thing(args: FitArgs) -> None:
    """Raises ConfigError if one flag makes another one ineffective."""
    modes = {"--print-config": args.print_config, "--dry-run": args.dry_run, "--emit": args.emit}
    modes |= {"--find-micro-batch": args.find_micro_batch}
    asked = [flag for flag, given in modes.items() if given]
    if args.resume_from and {*asked} - {"--dry-run"}:
        raise ConfigError(f"--resume-from has no effect with {asked[0]}: remove one of them.")
    local = ["--local"] * args.local
    rays = {"--address": args.address, "--dashboard": args.dashboard}
    ray = [flag for flag, given in rays.items() if given]
    alone = local or ["torchrun"] * under_torchrun()
    of_local = [] if asked == ["--dry-run"] else local
    for this, others in ((asked, asked[1:] + of_local + ray), (alone, ray), (ray, ray[1:])):
        if this and others:
            raise ConfigError(f"{others[0]} has no effect with {this[0]}: remove one of them.")


def parse_with_recipe(argv: Sequence[str], command: Command[Args]) -> Args:
    """The arguments of a command that trains: its flags override the recipe, which comes first.

    Raises:
        ConfigError: a recipe or a flag is wrong. SystemExit (0): help was printed.
    """
    require_no_control(argv)
    recipe = argv[0] if argv and not argv[0].startswith("-") else None
    config = _config_of(recipe) if recipe is not None else TrainConfig()
    args: Any = command.parse(argv, config=config)
    if args.recipe != recipe:
        flags = command.flags(command.defaults(config=config))
        switches = {f"--{flag.name}" for flag in flags if flag.kind is bool}
        for before, word in pairwise(argv):
            if word == args.recipe and before.replace("_", "-") in switches:
                raise ConfigError(f"{before} takes true, false or no value, not {word!r}.")
        raise ConfigError(
            f"unexpected argument {args.recipe!r}: a recipe must be the first argument, before the "
            "flags."
        )
    return args  # type: ignore[no-any-return]
