"""The config of a run: one frozen dataclass of sections, validated when created.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.config.input_sections import AugmentConfig, DataConfig
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
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
from raytrain_ddp.config.validation import FREE, require_plain, seconds_of
from raytrain_ddp.errors import ConfigError

if TYPE_CHECKING:
    TaskLike = Any  # accepted from Python code
else:
    TaskLike = str  # stored form; also used in files and flags

AUTO_FIELDS = ("compute.precision", "compute.channels_last")
"""Those that decide the result, and are chosen at the start of a run if they say auto."""
RUN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")


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

    def __deepcopy__(self, _: object) -> str:
        return str(self)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True)
class TrainConfig(Section):
    """The complete config of a training run.

    From Python, `task` may be a class, a function that returns a task, or a task instance.
    """

    name: str | None = field(default=None, metadata=FREE)
    """Name of the run and of its folder. Default: the name of the recipe or of the data."""
    storage: str = field(default="runs", metadata={**FREE, "path": "folder"})
    """Folder or URI for runs (s3://, gs:// ...). All nodes must have access to it."""
    task: TaskLike = field(default="image-classification", metadata={"path": "code"})
    """Built in, or file.py:Class. What to train: image-classification, or a task of your own as
    package.module:Class or path/to/file.py:Class."""
    task_options: dict[str, str | bool | int | float] = field(
        default_factory=dict, metadata={"path": "options"}
    )
    """Keyword arguments for a task of your own."""
    seed: int = 0
    """Random seed. All randomness depends on it only."""
    epochs: int = field(default=12, metadata=FREE)
    """Passes over the training data."""
    steps: int = field(default=0, metadata=FREE)
    """Optimizer steps, instead of epochs. 0: as many as the epochs have."""
    max_time: str | None = field(default=None, metadata={**FREE, "metavar": "TIME"})
    """Training time after which the run ends, such as 90m, 2.5h or 1d. It ends with an evaluation
    and a checkpoint. Time before a restart counts. A longer time continues the run."""
    limit_train_batches: int = 0
    """Steps of each epoch, to try things. 0: all."""
    limit_eval_batches: int = 0
    """Micro-batches of each evaluation, spread evenly over its data, to try things. 0: all. The
    command evaluate always takes all."""
    overfit_batches: int = 0
    """Train on this many steps of data, the same ones in each epoch, to see whether the model can
    learn them. 0: off."""
    batch_size: int = 64
    """Global batch size: samples per optimizer step. It is the total over all workers."""
    micro_batch: int = 16
    """Samples per forward pass. A step has batch_size / micro_batch slots, which are dealt to the
    workers. Batch norm has the statistics of that many samples."""
    exact: bool = False
    """Same bits on any number of workers. Gradients are summed slot by slot, in one order."""
    settled: tuple[str, ...] = field(default=(), metadata=FREE)
    """Set by fit: the fields that said auto, with the values that were chosen as the run began."""
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
        require_plain(self)
        name_ok = self.name is None or bool(RUN_NAME.fullmatch(self.name))
        self.require("name", name_ok, "use letters, digits, '.', '_' and '-', at most 128")
        self.require("storage", self.storage, "must be a folder or URI, not empty")
        self.at_least(1, "epochs", "batch_size")
        self.at_most(10**7, "batch_size")
        known = set(self.settled) <= {*AUTO_FIELDS, "micro_batch"}  # of an earlier version
        self.require("settled", known, f"can name {', '.join(AUTO_FIELDS)}")
        limits = ("limit_train_batches", "limit_eval_batches", "overfit_batches")
        self.at_least(0, "steps", *limits)
        rule = "must be a time above 0, such as 90m, 2.5h or 1d"
        self.require("max_time", self.max_time is None or self.max_time_s > 0, rule)
        rule = f"give only one of this and limit_train_batches = {self.limit_train_batches}"
        both = self.overfit_batches and self.limit_train_batches
        self.require("overfit_batches", not both, rule)
        self.require("seed", 0 <= self.seed < 2**63, "must be 0 or more and below 2**63")
        self._require_micro_batch()
        grows = self.steps or self.data.grow_epochs < self.epochs
        rule = f"must be below epochs = {self.epochs}; else no image has data.image_size"
        self.data.require("grow_epochs", grows, rule)
        if self.task == "image-classification":
            self.require_loss()
        least, most = self.scaling.worker_range()
        self.require_slots(most)
        self.require_synced(least, most, self.scaling.use_gpu is not False)
        if self.exact:
            self._require_exact()

    def _require_micro_batch(self) -> None:
        batch, micro = self.batch_size, self.micro_batch
        repeats, spread = self.augment.repeats, self.augment.spread_repeats
        self.at_least(1, "micro_batch")
        rule = f"must be at least micro_batch = {micro}; set --micro-batch {batch}"
        self.require("batch_size", batch >= micro, rule)
        below, above = batch // micro * micro, (batch // micro + 1) * micro
        rule = f"must be a multiple of micro_batch = {micro}; use {below} or {above}"
        self.require("batch_size", batch % micro == 0, rule)
        rule = f"with spread_repeats, it must be at most {self.slots}, the slots of a step"
        self.augment.require("repeats", not spread or repeats <= self.slots, rule)
        repeats = 1 if spread else repeats  # in a micro-batch
        rule = f"must divide micro_batch = {micro}"
        self.augment.require("repeats", micro % repeats == 0, rule)
        for kind in ("mixup", "cutmix"):
            rule = (
                f"mixes the images of a micro-batch, but each has only {micro // repeats} "
                f"(micro_batch = {micro}, augment.repeats = {repeats}): set micro_batch to "
                f"{2 * repeats} or more"
            )
            is_off = not getattr(self.augment, kind)
            self.augment.require(kind, is_off or micro >= 2 * repeats, rule)

    def micro_batches(self, workers: int) -> list[int]:
        """The sizes that give each of `workers` a slot, from large to small."""
        augment, batch = self.augment, self.batch_size
        repeats, least_slots = augment.repeats, workers
        if augment.spread_repeats:
            repeats, least_slots = 1, max(workers, repeats)
        least = 2 * repeats if augment.mixup or augment.cutmix else repeats
        sizes = [m for m in range(batch // least_slots, least - 1, -1) if batch % m == 0]
        return [m for m in sizes if m % repeats == 0]

    def _require_exact(self) -> None:
        whole = "must be {} with exact = true, whose gradients are summed whole, slot by slot"
        ddp, compute = self.ddp, self.compute
        ddp.require("compression", ddp.compression == "none", whole.format("none"))
        ddp.require("sync_batchnorm", not ddp.sync_batchnorm, whole.format("off"))
        rule = "must be off with exact = true: compiled code may depend on earlier inputs"
        compute.require("compile", not compute.compile, rule)
        rule = "must be on with exact = true: other kernels may sum in a different order"
        compute.require("deterministic", compute.deterministic, rule)

    def require_loss(self) -> None:
        """Raises ConfigError if the loss, or what goes with it, cannot use the kind of targets."""
        name, columns = self.loss.name, self.data.target_columns
        of_numbers = name in ("mse", "l1", "huber")
        rule = "compares numbers: name their columns with --data.target-columns"
        self.loss.require("name", columns or not of_numbers, rule)
        rule = "must be bce (labels), or mse, l1 or huber (numbers) with data.target_columns"
        self.loss.require("name", not columns or name == "bce" or of_numbers, rule)
        rule = "must be none with data.target_columns, which are not classes"
        weighted = self.loss.class_weights != "none"
        self.loss.require("class_weights", not (columns and weighted), rule)
        rule = f"mixes labels, but loss.name = {name}"
        for kind in ("mixup", "cutmix") if of_numbers else ():
            self.augment.require(kind, not getattr(self.augment, kind), rule)

    @property
    def max_time_s(self) -> float:
        return math.inf if self.max_time is None else seconds_of(self.max_time)

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

    def require_slots(self, workers: int) -> None:
        """Raises ConfigError if `workers` are more than the slots of a step."""
        if workers <= self.slots:
            return
        fitting = [m for m in range(1, self.micro_batch) if self.batch_size % m == 0]
        fitting = [m for m in fitting if self.batch_size // m >= workers]
        alone = f"--batch-size {workers} --micro-batch 1"
        raise ConfigError(
            f"batch_size = {self.batch_size} is {self.slots} slots of {self.micro_batch}, too few "
            f"for {workers} workers: set {f'--micro-batch {max(fitting)}' if fitting else alone}, "
            f"or --scaling.num-workers {self.slots}."
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
