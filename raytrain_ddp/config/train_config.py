"""The config of a run: one frozen dataclass of sections, validated when created.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config import rules
from raytrain_ddp.config.field_types import Section, setting
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

    require_loss = rules.require_loss
    require_slots = rules.require_slots
    require_synced = rules.require_synced

    def __post_init__(self) -> None:
        if not isinstance(self.task, str):
            object.__setattr__(self, "task", TaskName.of(self.task))
        super().__post_init__()
        rules.require_rules(self)

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
        augment, batch = self.augment, self.batch_size
        repeats, least_slots = augment.repeats, workers
        if augment.spread_repeats:
            repeats, least_slots = 1, max(workers, repeats)
        least = 2 * repeats if augment.mixup or augment.cutmix else repeats
        sizes = [m for m in range(batch // least_slots, least - 1, -1) if batch % m == 0]
        return [m for m in sizes if m % repeats == 0]
