"""What several fields of a config say together: what is refused, and what has no effect."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain_ddp.config.field_types import Section, as_text, facts, value_of
from raytrain_ddp.config.validation import group_rules, require
from raytrain_ddp.errors import ConfigError

if TYPE_CHECKING:
    from raytrain_ddp.config.train_config import TrainConfig

S = TypeVar("S", bound=Section)
IMAGES = "image-classification"
_RAY = "Ray (without it, the launcher of the processes decides)"
_OF_TASKS = ("model", "data", "augment", "loss")
_OF_NUMBERS = ("mse", "l1", "huber")
Rule = tuple[str, object, str]
"""(field, whether it is as it must be, how it must be)"""


# ------------------------------------------------------------------ what is refused


def require_rules(config: TrainConfig) -> None:
    """Raises ConfigError for the first field that does not fit the others."""
    group_rules(config.optim.groups)
    _require(config, _of_sections(config))
    _require(config, _of_batches(config))
    if config.task == IMAGES:
        require_loss(config)
    least, most = config.scaling.worker_range()
    require_slots(config, most)
    require_synced(config, least, most, config.scaling.use_gpu is not False)
    if config.exact:
        _require(config, _of_exact(config))


def _require(config: TrainConfig, rules: Iterator[Rule]) -> None:
    for name, holds, rule in rules:
        require(bool(holds), name, value_of(config, name), rule)


def _of_sections(config: TrainConfig) -> Iterator[Rule]:
    data, optim, scaling = config.data, config.optim, config.scaling
    rule = f"give only one of this and limit_train_batches = {config.limit_train_batches}"
    both = config.overfit_batches and config.limit_train_batches
    yield "overfit_batches", not both, rule
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


def _of_batches(config: TrainConfig) -> Iterator[Rule]:
    batch, micro, augment = config.batch_size, config.micro_batch, config.augment
    rule = f"must be at least micro_batch = {micro}; set --micro-batch {batch}"
    yield "batch_size", batch >= micro, rule
    below, above = batch // micro * micro, (batch // micro + 1) * micro
    rule = f"must be a multiple of micro_batch = {micro}; use {below} or {above}"
    yield "batch_size", batch % micro == 0, rule
    rule = f"with spread_repeats, it must be at most {config.slots}, the slots of a step"
    fits = not augment.spread_repeats or augment.repeats <= config.slots
    yield "augment.repeats", fits, rule
    repeats = 1 if augment.spread_repeats else augment.repeats  # in a micro-batch
    yield "augment.repeats", micro % repeats == 0, f"must divide micro_batch = {micro}"
    for name in ("augment.mixup", "augment.cutmix"):
        rule = (
            f"mixes the images of a micro-batch, but each has only {micro // repeats} "
            f"(micro_batch = {micro}, augment.repeats = {repeats}): set micro_batch to "
            f"{2 * repeats} or more"
        )
        yield name, not value_of(config, name) or micro >= 2 * repeats, rule


def _of_exact(config: TrainConfig) -> Iterator[Rule]:
    whole = "must be {} with exact = true, whose gradients are summed whole, slot by slot"
    yield "ddp.compression", config.ddp.compression == "none", whole.format("none")
    yield "ddp.sync_batchnorm", not config.ddp.sync_batchnorm, whole.format("off")
    rule = "must be off with exact = true: compiled code may depend on earlier inputs"
    yield "compute.compile", not config.compute.compile, rule
    rule = "must be on with exact = true: other kernels may sum in a different order"
    yield "compute.deterministic", config.compute.deterministic, rule


def require_loss(config: TrainConfig) -> None:
    """Raises ConfigError if the loss, or what goes with it, cannot use the kind of targets."""
    _require(config, _of_loss(config))


def _of_loss(config: TrainConfig) -> Iterator[Rule]:
    loss, columns = config.loss, config.data.target_columns
    of_numbers = loss.name in _OF_NUMBERS
    rule = "compares numbers: name their columns with --data.target-columns"
    yield "loss.name", columns or not of_numbers, rule
    rule = "must be bce (labels), or mse, l1 or huber (numbers) with data.target_columns"
    yield "loss.name", not columns or loss.name == "bce" or of_numbers, rule
    rule = "must be none with data.target_columns, which are not classes"
    yield "loss.class_weights", not columns or loss.class_weights == "none", rule
    for name in ("augment.mixup", "augment.cutmix"):
        is_off = not of_numbers or not value_of(config, name)
        yield name, is_off, f"mixes labels, but loss.name = {loss.name}"


def require_slots(config: TrainConfig, workers: int) -> None:
    """Raises ConfigError if `workers` are more than the slots of a step."""
    batch, micro, slots = config.batch_size, config.micro_batch, config.slots
    if workers <= slots:
        return
    smaller = [m for m in range(1, micro) if batch % m == 0 and batch // m >= workers]
    flags = f"--micro-batch {smaller[-1]}" if smaller else f"--batch-size {workers} --micro-batch 1"
    raise ConfigError(
        f"batch_size = {batch} is {slots} slots of {micro}, too few for {workers} workers: set "
        f"{flags}, or --scaling.num-workers {slots}."
    )


def require_synced(config: TrainConfig, least: int, most: int, on_gpu: bool) -> None:
    """Raises ConfigError if some number of workers, from `least` to `most`, cannot make the same
    forward passes, in each of which ddp.sync_batchnorm communicates."""
    counts = {*range(max(2, least), most + 1)}
    if config.ddp.sync_batchnorm and counts and not (on_gpu and counts == {config.slots}):
        workers = f"{least} to {most}" if least < most else f"{most}"
        raise ConfigError(
            "ddp.sync_batchnorm needs GPUs, and as many slots (batch_size / micro_batch) as "
            f"workers: there are {workers} workers{'' if on_gpu else ' on CPUs'}, and "
            f"micro_batch = {config.micro_batch} of batch_size = {config.batch_size}. Without it, "
            "statistics are those of a slot, whatever the number of workers."
        )


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
        text, holds = need if isinstance(need, tuple) else (need, partial(_holds, need))
        if not holds(config):
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
    wrong = [
        f"{name} has no effect: it needs {needs}. Remove it."
        for name, needs in idle(configs[0], on_ray).items()
        if name in given and all(name in idle(config, on_ray) for config in configs[1:])
    ]
    if wrong:
        raise ConfigError(" ".join(wrong))


def effect_notes(config: TrainConfig) -> list[str]:
    """Notes for fields that a recipe or Python code changed from the default without effect."""
    needs = idle(config)
    return [
        f"{name} = {value_of(config, name)!r} has no effect: it needs {needs[name]}."
        for name in _changed(config, needs)
    ]


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
    meant = [f"{each}.{name}" for each in _OF_TASKS for name in getattr(config, each).kinds()]
    read = {*reads, *facts(type(config), "of_loop")}
    names = [each for each in (*meant, "optim.label_smoothing", *replaced) if each not in read]
    return [
        f"{name} = {value_of(config, name)!r} is set, but {config.task} does not read it."
        for name in _changed(config, names)
    ]


def _changed(config: TrainConfig, names: Iterable[str]) -> list[str]:
    """Those of the fields that do not have their default."""
    default = type(config)()
    return [name for name in names if value_of(config, name) != value_of(default, name)]


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
            return kind, tuple(values[name] for name in kind.kinds())

    copy: S = object.__new__(Watched)
    for name, value in values.items():
        is_section = isinstance(value, Section)
        seen = watched(value, reads, f"{prefix}{name}.") if is_section else value
        object.__setattr__(copy, name, seen)
    return copy
