"""Which config fields have an effect: fields set without effect are an error or cause a note."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError

Section = TypeVar("Section")


class _Rule(NamedTuple):
    """The fields have an effect only if the condition holds; `needs` describes it for messages, and
    is the condition if it is ``FIELD``, ``FIELD above 0`` or ``FIELD = VALUE``."""

    fields: str
    needs: str
    condition: Callable[[TrainConfig], bool] | None = None

    def holds(self, config: TrainConfig) -> bool:
        if self.condition is not None:
            return self.condition(config)
        name, equals, wanted = self.needs.partition(" = ")
        value = value_of(config, name.removesuffix(" above 0"))
        return str(value) == wanted if equals else bool(value)


_RULES = [
    _Rule("epochs", "steps = 0"),
    _Rule("ema.warmup", "ema.decay"),
    _Rule("stop.min_delta", "stop.patience"),
    _Rule("optim.momentum optim.nesterov", "optim.name = sgd"),
    _Rule("optim.betas", "optim.name = adamw"),
    _Rule("optim.max_nonfinite", "optim.nonfinite = skip"),
    _Rule("optim.decay_norms optim.decay_bias", "optim.weight_decay above 0"),
    _Rule("schedule.final_lr", "schedule.name = cosine"),
    _Rule("schedule.step_epochs schedule.gamma", "schedule.name = step"),
    _Rule(
        "ddp.gradient_as_bucket_view ddp.static_graph",
        "DistributedDataParallel, which exact = true does not use",
        lambda c: not c.exact,
    ),
    _Rule(
        "ddp.find_unused_parameters",
        "ddp.static_graph = false (a static graph finds unused parameters by itself)",
        lambda c: c.exact or not c.ddp.static_graph,
    ),
    _Rule("data.shuffle_window", "data.shuffle = block", lambda c: c.data.shuffle != "full"),
    _Rule("data.max_bad", "data.bad_records = skip"),
    _Rule("data.prefetch data.prefetch_mib", "data.workers above 0"),
    _Rule("augment.spread_repeats", "augment.repeats above 1", lambda c: c.augment.repeats > 1),
    _Rule("data.holdout_seed", "data.holdout"),
    _Rule(
        "scaling.resize_s",
        "scaling.num_workers = MIN:MAX",
        lambda c: ":" in str(c.scaling.num_workers),
    ),
    _Rule("compute.tf32 scaling.gpus_per_worker", "scaling.use_gpu"),
    _Rule("log.project", "log.wandb or log.mlflow", lambda c: c.log.wandb or c.log.mlflow),
    _Rule("log.profile_ranks", "log.profile_steps"),
    _Rule("log.tensorboard", "storage on a file system", lambda c: "://" not in c.storage),
]
_OF_IMAGES = [
    _Rule("loss.gamma", "loss.name = focal"),
    _Rule(
        "optim.label_smoothing",
        "loss.name = cross-entropy or bce, without data.target_columns",
        lambda c: c.loss.name != "focal" and not c.data.target_columns,
    ),
    _Rule("data.label_column", "no data.target_columns", lambda c: not c.data.target_columns),
    _Rule("model.dropout", "model.name = digits-cnn"),
    _Rule("model.args", "a model other than digits-cnn", lambda c: c.model.name != "digits-cnn"),
    _Rule("task_options", "a task of your own", lambda _: False),
    _Rule(
        "data.root",
        "data.source = torchvision:NAME, or paths of images",
        lambda c: any(source != "digits" for source in _sources(c)),
    ),
    _Rule(
        "data.image_column data.label_column data.memory_mib",
        "Parquet files or lists of images",
        lambda c: not all(source.startswith("torchvision:") for source in _sources(c)),
    ),
    _Rule(
        "data.eval_crop",
        "data.image_size or data.eval_size",
        lambda c: c.data.image_size + c.data.eval_size > 0,
    ),
    _Rule(
        "data.interpolation",
        "data.image_size, data.eval_size or augment.crop = random",
        lambda c: c.data.image_size + c.data.eval_size > 0 or c.augment.crop == "random",
    ),
    _Rule("augment.scale", "augment.crop = random"),
    _Rule("augment.operations augment.magnitude", "augment.policy = randaugment"),
]
_OF_RAY = [
    _Rule(
        "scaling.num_workers scaling.placement scaling.max_failures scaling.max_preemptions "
        "scaling.replace_workers scaling.warm_processes "
        "scaling.wait_s scaling.resize_s scaling.start_timeout_s scaling.gpus_per_worker",
        "Ray (without it, the launcher of the processes decides)",
        lambda _: False,
    ),
]
IMAGES = "image-classification"
# Fields of these sections that tasks do not read.
_NOT_OF_TASKS = {
    *("data.shuffle", "data.shuffle_window", "data.bad_records", "data.max_bad"),
    *("data.workers", "data.prefetch", "data.prefetch_mib", "augment.repeats"),
    "augment.spread_repeats",
}


def idle(config: TrainConfig, on_ray: bool = True) -> dict[str, str]:
    """The fields without effect in this config, and what each of them needs."""
    rules = [*_RULES, *(_OF_IMAGES if config.task == IMAGES else []), *([] if on_ray else _OF_RAY)]
    return {
        field: rule.needs
        for rule in rules
        if not rule.holds(config)
        for field in rule.fields.split()
    }


def require_effect(argv: Sequence[str], config: TrainConfig, on_ray: bool = True) -> None:
    """Raises ConfigError if a flag on a command line has no effect."""
    given, without = given_flags(argv), idle(config, on_ray)
    lines = [
        f"{name} has no effect: it needs {needs}. Remove it."
        for name, needs in without.items()
        if name in given
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def under_torchrun() -> bool:
    """Whether torchrun (or its elastic agent) started this process. Then the workers already exist;
    also, torchrun parses a ``--local`` after the script's name as one of its own options."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ranks_of_launcher() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets; 0, 1 and 0 without it.

    Raises:
        PreflightError: they do not fit together.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    values = {name: os.environ.get(name, default) for name, default in defaults.items()}
    numbers = (int(v) if v.isdecimal() and len(v) < 7 else -1 for v in values.values())
    rank, size, local_rank = numbers
    if not 0 <= rank < size or local_rank < 0:
        given = ", ".join(f"{name} = {os.environ.get(name, 'not set')}" for name in defaults)
        raise PreflightError(
            f"the environment has {given}: start with torchrun, which sets these, or unset them."
        )
    port, torch = os.environ.get("MASTER_PORT", ""), sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():  # the caller has initialized it
        return rank, size, local_rank
    if size > 1 and not (os.environ.get("MASTER_ADDR") and port.isdecimal() and int(port) < 65536):
        raise PreflightError(
            f"WORLD_SIZE = {size}, but MASTER_ADDR and MASTER_PORT do not say where rank 0 is: "
            "start with torchrun, which sets these; for a single process, unset WORLD_SIZE and "
            "RANK."
        )
    return rank, size, local_rank


def given_flags(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, such as ``optim.lr``; ``--optim.no-nesterov`` also
    gives ``optim.nesterov``."""
    words = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word[:2] == "--"]
    parts = [word.rpartition(".") for word in words]
    return {*words, *(f"{a}{dot}{last.removeprefix('no_')}" for a, dot, last in parts)}


def effect_notes(config: TrainConfig) -> list[str]:
    """Notes for fields that a recipe or Python code changed from the default without effect."""
    notes = [
        f"{name} = {value_of(config, name)!r} has no effect: it needs {needs}."
        for name, needs in idle(config).items()
        if value_of(config, name) != value_of(TrainConfig(), name)
    ]
    warmup = config.schedule.warmup_epochs
    if not config.steps and warmup > config.epochs:
        notes.append(
            f"schedule.warmup_epochs = {warmup:g} is longer than the run (epochs = "
            f"{config.epochs}): the learning rate does not reach optim.lr."
        )
    return notes


def step_notes(config: TrainConfig, steps_per_epoch: int) -> list[str]:
    """Notes for fields in epochs that a run of `steps` does not reach."""
    epochs = config.steps / steps_per_epoch if config.steps else math.inf
    reached = {
        "schedule.warmup_epochs": "the learning rate does not reach optim.lr",
        "data.grow_epochs": "no image reaches data.image_size",
    }
    return [
        f"{name} = {value:g}: steps = {config.steps} are {epochs:.3g} epochs, so {what}."
        for name, what in reached.items()
        if (value := value_of(config, name)) > epochs or (0 < value == epochs)
    ]


def value_of(config: Any, name: str) -> Any:
    return attrgetter(name)(config)


# ------------------------------------------------------------------ tasks of one's own


def watched(config: TrainConfig, reads: set[str]) -> TrainConfig:
    """A copy of the config that adds the name of each field that is read to `reads`.

    It is pickled and copied as a plain config.
    """
    return _watched(config, "", reads)


def _watched(section: Section, prefix: str, reads: set[str]) -> Section:
    kind: Any = type(section)
    names = {f.name for f in dataclasses.fields(kind)}

    def read(self: Any, name: str) -> Any:
        if name in names:
            reads.add(prefix + name)
        return kind.__getattribute__(self, name)

    def plain(self: Any, *_: object) -> Any:
        return _plain, (kind, {name: getattr(self, name) for name in names})

    made = type(kind.__name__, (kind,), {"__getattribute__": read, "__reduce_ex__": plain})
    copy: Any = object.__new__(made)
    for name in names:
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            value = _watched(value, f"{prefix}{name}.", reads)
        object.__setattr__(copy, name, value)
    return copy  # type: ignore[no-any-return]


def _plain(kind: type[Section], values: dict[str, Any]) -> Section:
    return kind(**values)


def unread_notes(
    config: TrainConfig, reads: Collection[str] | None, replaced: Sequence[str] = ()
) -> list[str]:
    """Notes for fields meant for the task, changed from the default, that the task did not read.

    Args:
        replaced: other fields whose effect the task has replaced by methods of its own.
    """
    if reads is None or config.task == IMAGES:
        return []
    default = TrainConfig()
    return [
        f"{name} = {value_of(config, name)!r} is set, but {config.task} does not read it."
        for name in (*_fields_of_tasks(config), *replaced)
        if name not in reads and value_of(config, name) != value_of(default, name)
    ]


def _fields_of_tasks(config: TrainConfig) -> Iterator[str]:
    for section in ("model", "data", "augment", "loss"):
        for field in dataclasses.fields(getattr(config, section)):
            if f"{section}.{field.name}" not in _NOT_OF_TASKS:
                yield f"{section}.{field.name}"
    yield "optim.label_smoothing"


def _sources(config: TrainConfig) -> list[str]:
    return [config.data.source, *filter(None, [config.data.eval_source])]
