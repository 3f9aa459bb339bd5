"""The config of a run: one frozen dataclass of sections, validated when created. What its fields
say together: what is refused, and what has no effect.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain_ddp.config.field_types import (
    Section,
    as_text,
    facts,
    require,
    scalar,
    setting,
    value_of,
)
from raytrain_ddp.config.sections import (
    AugmentConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    DdpConfig,
    EmaConfig,
    EvalConfig,
    LogConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ScalingConfig,
    ScheduleConfig,
    StopConfig,
)
from raytrain_ddp.errors import ConfigError, quoted

if TYPE_CHECKING:
    TaskLike = Any  # accepted from Python code
else:
    TaskLike = str  # stored form; also used in files and flags

RUN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NAME = (RUN_NAME.fullmatch, "use letters, digits, '.', '_' and '-', at most 128")
_TIME = (
    re.compile(r"(?=.*[1-9])\d+(\.\d+)?[smhd]").fullmatch,
    "must be a time above 0, such as 90m, 2.5h or 1d",
)

S = TypeVar("S", bound=Section)
IMAGES = "image-classification"
_RAY = "Ray (without it, the launcher of the processes decides)"
_OF_TASKS = ("model", "data", "augment", "loss")
_OF_NUMBERS = ("mse", "l1", "huber")
_LEAST = {"lr": math.ulp(0.0), "weight_decay": 0.0}  # of optim.groups
_MIXES = ("augment.mixup", "augment.cutmix")
Rule = tuple[str, object, str]
"""(field, whether it is as it must be, how it must be)"""


class TaskName(str):
    """The name of a task that Python code passed as a class, function or object, with a reference
    to it.

    It is pickled as a plain string.
    """

    target: Any

    @classmethod
    def of(cls, target: Any) -> TaskName:
        """``module:Class``; ``module:Class(DIGEST)`` with contents (see `state_digest`), and
        ``module:Class()`` for an object without."""
        from raytrain_ddp.config.task_state import state_digest

        is_made = not hasattr(target, "__qualname__")
        kind = type(target) if is_made else target
        held = state_digest(target)
        name = cls(f"{kind.__module__}:{kind.__qualname__}{f'({held})' if is_made or held else ''}")
        name.target = target
        return name

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True)
class TrainConfig(Section):
    """The complete config of a training run.

    From Python, `task` may be a class, a function that returns a task, or a task instance.
    """

    name: str | None = setting(
        None, free=True, check=_NAME, aka="run-name exp-name experiment job-name"
    )
    """Name of the run and of its folder. Default: the name of the recipe or of the data."""
    storage: str = setting(
        "runs", free=True, path="folder", aka="output output-dir out-dir save-dir default-root-dir"
    )
    """Folder or URI for runs (s3://, gs:// ...). All nodes must have access to it."""
    task: TaskLike = setting("image-classification", path="code")
    """Built in, or file.py:Class. What to train: image-classification, or a task of your own as
    package.module:Class or path/to/file.py:Class."""
    task_options: dict[str, str | bool | int | float] = setting(
        {}, path="options", images=("a task of your own", lambda _: False)
    )
    """Keyword arguments for a task of your own."""
    seed: int = setting(0, least=0, below=2**63)
    """Random seed. All randomness depends on it only."""
    epochs: int = setting(
        12, free=True, least=1, needs="steps = 0", aka="max-epochs num-train-epochs"
    )
    """Passes over the training data."""
    steps: int = setting(0, free=True, least=0, aka="max-steps num-steps train-iters")
    """Optimizer steps, instead of epochs. 0: as many as the epochs have."""
    max_time: str | None = setting(None, free=True, metavar="TIME", check=_TIME)
    """Training time after which the run ends, such as 90m, 2.5h or 1d. It ends with an evaluation
    and a checkpoint. Time before a restart counts. A longer time continues the run."""
    limit_train_batches: int = setting(0, least=0)
    """Steps of each epoch, to try things. 0: all."""
    limit_eval_batches: int = setting(0, least=0)
    """Micro-batches of each evaluation, spread evenly over its data, to try things. 0: all. The
    command evaluate always takes all."""
    overfit_batches: int = setting(0, least=0)
    """Train on this many steps of data, the same ones in each epoch, to see whether the model can
    learn them. 0: off."""
    batch_size: int = setting(64, least=1, most=10**7, aka="bs global-batch-size")
    """Global batch size: samples per optimizer step. It is the total over all workers."""
    micro_batch: int = setting(
        16, least=1, aka="micro-batch-size gradient-accumulation-steps grad-accum"
    )
    """Samples per forward pass. A step has batch_size / micro_batch slots, which are dealt to the
    workers. Batch norm has the statistics of that many samples."""
    exact: bool = False
    """Same bits on any number of workers. Gradients are summed slot by slot, in one order."""
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.task, str):
            object.__setattr__(self, "task", TaskName.of(self.task))
        super().__post_init__()
        group_rules(self.optim.groups)
        _require(self, _rules(self))
        if self.task == IMAGES:
            self.require_loss()
        least, most = self.scaling.worker_range()
        self.require_slots(most)
        self.require_synced(least, most, self.scaling.use_gpu is not False)

    @property
    def max_time_s(self) -> float:
        time = self.max_time
        return math.inf if time is None else float(time[:-1]) * _UNITS[time[-1]]

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run, unless it stops early."""
        return self.steps or self.epochs * steps_per_epoch

    @property
    def slots(self) -> int:
        """Micro-batches per optimizer step."""
        return self.batch_size // self.micro_batch

    @property
    def eval_micro_batch(self) -> int:
        """Samples of one evaluation pass."""
        return self.eval.micro_batch or self.micro_batch

    def micro_batches(self, workers: int) -> list[int]:
        """The sizes that give each of `workers` a slot, from large to small."""
        sizes = []
        for size in range(self.batch_size, 0, -1):
            with suppress(ConfigError):
                if self.batch_size % size == 0:
                    replace(self, micro_batch=size).require_slots(workers)
                    sizes.append(size)
        return sizes

    def require_loss(self) -> None:
        """Raises ConfigError if the loss, or what goes with it, cannot use the kind of targets."""
        _require(self, _of_loss(self))

    def require_slots(self, workers: int) -> None:
        """Raises ConfigError if `workers` are more than the slots of a step."""
        batch, micro, slots = self.batch_size, self.micro_batch, self.slots
        if workers > slots:
            smaller = [m for m in range(1, micro) if batch % m == 0 and batch // m >= workers]
            larger = f"--batch-size {workers} --micro-batch 1"
            flags = f"--micro-batch {smaller[-1]}" if smaller else larger
            raise ConfigError(
                f"batch_size = {batch} is {slots} slots of {micro}, too few for {workers} workers: "
                f"set {flags}, or --scaling.num-workers {slots}."
            )

    def require_synced(self, least: int, most: int, on_gpu: bool) -> None:
        """Raises ConfigError if some number of workers, from `least` to `most`, cannot make the
        same forward passes, in each of which ddp.sync_batchnorm communicates."""
        counts = {*range(max(2, least), most + 1)}
        if self.ddp.sync_batchnorm and counts and not (on_gpu and counts == {self.slots}):
            workers = f"{least} to {most}" if least < most else f"{most}"
            raise ConfigError(
                "ddp.sync_batchnorm needs GPUs, and as many slots (batch_size / micro_batch) as "
                f"workers: there are {workers} workers{'' if on_gpu else ' on CPUs'}, and "
                f"micro_batch = {self.micro_batch} of batch_size = {self.batch_size}. Without it, "
                "statistics are those of a slot, whatever the number of workers."
            )


# ------------------------------------------------------------------ what is refused


def _require(config: TrainConfig, rules: Iterator[Rule]) -> None:
    for name, holds, rule in rules:
        require(bool(holds), name, value_of(config, name), rule)


def _rules(config: TrainConfig) -> Iterator[Rule]:
    data, optim, scaling, augment = config.data, config.optim, config.scaling, config.augment
    batch, micro, repeats = config.batch_size, config.micro_batch, augment.repeats
    rule = f"give only one of this and limit_train_batches = {config.limit_train_batches}"
    yield "overfit_batches", not (config.overfit_batches and config.limit_train_batches), rule
    is_smaller = not data.start_size or data.start_size < data.image_size
    yield "data.start_size", is_smaller, f"must be below data.image_size = {data.image_size}"
    rule = f"set both, or neither, of this and data.start_size = {data.start_size}"
    yield "data.grow_epochs", bool(data.grow_epochs) == bool(data.start_size), rule
    rule = f"must be below epochs = {config.epochs}; else no image has data.image_size"
    yield "data.grow_epochs", config.steps or data.grow_epochs < config.epochs, rule
    rule = "already provides the evaluation data: set it to 0, or remove data.{} = {!r}"
    for name, unset in (("eval_source", (None,)), ("eval_split", ("auto", "none"))):
        given = getattr(data, name)
        yield "data.holdout", not data.holdout or given in unset, rule.format(name, given)
    for name in config.model.args:
        yield "model.args", name.isidentifier(), f"{name!r} must be the name of an argument"
    rule = "needs optim.momentum above 0: set --optim.no-nesterov"
    yield "optim.nesterov", optim.name != "sgd" or not optim.nesterov or optim.momentum, rule
    rule = "must be 1 with NCCL, which needs a GPU per worker; set --scaling.backend gloo"
    yield "scaling.gpus_per_worker", scaling.gpus_per_worker == 1 or scaling.backend != "nccl", rule
    rule = f"must be at least micro_batch = {micro}; set --micro-batch {batch}"
    yield "batch_size", batch >= micro, rule
    below, above = batch // micro * micro, (batch // micro + 1) * micro
    rule = f"must be a multiple of micro_batch = {micro}; use {below} or {above}"
    yield "batch_size", batch % micro == 0, rule
    rule = f"with spread_repeats, it must be at most {config.slots}, the slots of a step"
    yield "augment.repeats", not augment.spread_repeats or repeats <= config.slots, rule
    repeats = 1 if augment.spread_repeats else repeats  # in a micro-batch
    yield "augment.repeats", micro % repeats == 0, f"must divide micro_batch = {micro}"
    rule = (
        f"mixes the images of a micro-batch, but each has only {micro // repeats} (micro_batch = "
        f"{micro}, augment.repeats = {repeats}): set micro_batch to {2 * repeats} or more"
    )
    for name in _MIXES:
        yield name, not value_of(config, name) or micro >= 2 * repeats, rule
    whole = ", whose gradients are summed whole, slot by slot"
    for name, wanted, why in (
        ("ddp.compression", "none", whole),
        ("ddp.sync_batchnorm", False, whole),
        ("compute.compile", False, ": compiled code may depend on earlier inputs"),
        ("compute.deterministic", True, ": other kernels may sum in a different order"),
    ):
        is_right = not config.exact or value_of(config, name) == wanted
        yield name, is_right, f"must be {as_text(wanted)} with exact = true{why}"


def _of_loss(config: TrainConfig) -> Iterator[Rule]:
    loss, columns = config.loss, config.data.target_columns
    of_numbers = loss.name in _OF_NUMBERS
    rule = "compares numbers: name their columns with --data.target-columns"
    yield "loss.name", columns or not of_numbers, rule
    rule = "must be bce (labels), or mse, l1 or huber (numbers) with data.target_columns"
    yield "loss.name", not columns or loss.name == "bce" or of_numbers, rule
    rule = "must be none with data.target_columns, which are not classes"
    yield "loss.class_weights", not columns or loss.class_weights == "none", rule
    rule = f"mixes labels, but loss.name = {loss.name}"
    yield from ((name, not of_numbers or not value_of(config, name), rule) for name in _MIXES)


def group_rules(words: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
    """The patterns of ``optim.groups``, each with its "lr", "weight_decay", or both.

    Raises:
        ConfigError: a word is neither a pattern with values after it, nor a value.
    """
    rules: list[tuple[str, dict[str, float]]] = []
    for word in words:
        name, equals, text = word.partition("=")
        value: Any = scalar(text)
        rule = "must be lr=NUMBER above 0 or weight_decay=NUMBER, 0 or more, after a pattern"
        if not equals:
            rules.append((word, {}))
        elif rules and type(value) in (int, float) and _LEAST.get(name, math.inf) <= value:
            rules[-1][1][name], rule = float(value), ""
        require(not equals or not rule, "optim.groups", tuple(words), f"{quoted(word)} {rule}")
    for pattern, values in rules:
        rule = f"{quoted(pattern)} must have lr=NUMBER or weight_decay=NUMBER after it"
        require(bool(values), "optim.groups", tuple(words), rule)
    return rules


# ------------------------------------------------------------------ what has no effect


def idle(config: TrainConfig, on_ray: bool = True) -> dict[str, str]:
    """The fields without effect in this config, and what each of them needs.

    A field says what it needs: in each task (`needs`), in the built-in one (`images`), or Ray
    (`on_ray`). A need is a text such as ``steps = 0``, ``ema.decay above 0`` or ``log.wandb or
    log.mlflow``, or a text and a function of the config.
    """
    kind = type(config)
    needs = facts(kind, "needs") | (facts(kind, "images") if config.task == IMAGES else {})
    found = {} if on_ray else dict.fromkeys(facts(kind, "on_ray"), _RAY)
    for name, need in needs.items():
        text, holds = need if isinstance(need, tuple) else (need, None)
        if not (holds(config) if holds else _holds(text, config)):
            found.setdefault(name, text)
    return found


def _holds(need: str, config: TrainConfig) -> bool:
    """Whether one of the conditions of a text holds."""
    for condition in need.split(" or "):
        name, equals, wanted = condition.partition(" = ")
        value = value_of(config, name.removesuffix(" above 0"))
        if (as_text(value) == wanted) if equals else value:
            return True
    return False


def require_effect(given: Container[str], *configs: TrainConfig, on_ray: bool = True) -> None:
    """Raises ConfigError if a flag of a command line has no effect in any of the configs.

    Args:
        given: the names that `given_flags` returns.
    """
    first, *others = (idle(config, on_ray) for config in configs)
    wrong = [
        f"{name} has no effect: it needs {needs}. Remove it."
        for name, needs in first.items()
        if name in given and all(name in other for other in others)
    ]
    if wrong:
        raise ConfigError(" ".join(wrong))


def effect_notes(config: TrainConfig) -> list[str]:
    """Notes for fields that a recipe or Python code changed from the default without effect."""
    needs = idle(config)
    return [f"{each} has no effect: it needs {needs[n]}." for n, each in _changed(config, needs)]


def step_notes(config: TrainConfig, steps_per_epoch: int) -> list[str]:
    """Notes for fields in epochs that the run does not reach."""
    epochs = config.steps / steps_per_epoch if config.steps else config.epochs
    reached = {
        "schedule.warmup_epochs": "the learning rate does not reach optim.lr",
        "data.grow_epochs": "no image reaches data.image_size",
    }
    return [
        f"{name} = {value:g}: the run has {epochs:.3g} epochs, so {what}."
        for name, what in reached.items()
        if (value := value_of(config, name)) > epochs or (config.steps and 0 < value == epochs)
    ]


def unread_notes(
    config: TrainConfig, reads: Collection[str] | None, replaced: Sequence[str] = ()
) -> list[str]:
    """Notes for fields meant for the task, changed from the default, that the task did not read.

    Args:
        replaced: other fields whose effect the task has replaced by methods of its own.
    """
    if reads is None or config.task == IMAGES:
        return []
    read = {*reads, *facts(type(config), "of_loop")}
    meant = [f"{each}.{name}" for each in _OF_TASKS for name in vars(getattr(config, each))]
    names = [each for each in (*meant, "optim.label_smoothing", *replaced) if each not in read]
    return [
        f"{each} is set, but {config.task} does not read it." for _, each in _changed(config, names)
    ]


def _changed(config: TrainConfig, names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, ``name = value``) of those of the fields that do not have their default."""
    default, values = type(config)(), {name: value_of(config, name) for name in names}
    return [(n, f"{n} = {v!r}") for n, v in values.items() if v != value_of(default, n)]


def watched(config: S, reads: set[str], prefix: str = "") -> S:
    """A copy of the config that adds the name of each field that is read to `reads`.

    It is pickled and copied as a plain config.
    """
    kind: Any = type(config)
    values = dict(vars(config))

    class Watched(kind):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in values:
                reads.add(prefix + name)
            return super().__getattribute__(name)

        def __reduce_ex__(self, _: Any) -> Any:
            return kind, tuple(values.values())

    copy: S = object.__new__(Watched)
    for name, value in values.items():
        is_section = isinstance(value, Section)
        seen = watched(value, reads, f"{prefix}{name}.") if is_section else value
        object.__setattr__(copy, name, seen)
    return copy
