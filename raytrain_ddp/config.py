"""What a run is told: one frozen dataclass of sections, checked at birth.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from raytrain_ddp.errors import ConfigError
from raytrain_ddp.sections import (
    FREE,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    DdpConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ScalingConfig,
    ScheduleConfig,
    require,
)

RUN_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class TrainConfig:
    """One training run, entirely."""

    name: str | None = field(default=None, metadata=FREE)
    """Name of the run and of its folder. Default: the recipe's or the data's name."""
    storage: str = field(default="runs", metadata=FREE)
    """Folder or URI (s3://, gs://) that holds the runs; all nodes must reach it."""
    task: str = "image-classification"
    """What is learned: image-classification, package.module:Class or path/to/file.py:Class."""
    task_options: dict[str, str] = field(default_factory=dict)
    """Keyword arguments for a task of your own: KEY VALUE ..."""
    seed: int = 0
    """Everything random is a function of it."""
    epochs: int = field(default=12, metadata=FREE)
    """Passes over the training data."""
    batch_size: int = 64
    """Samples per optimizer step over all workers: the global batch."""
    micro_batch: int = 16
    """Samples per forward pass; batch_size / micro_batch slots are dealt to the workers."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(
            self.name is None or bool(RUN_NAME.fullmatch(self.name)),
            f"name = {self.name!r}: use letters, digits, '.', '_' and '-', at most 128.",
        )
        require(self.epochs >= 1, f"epochs = {self.epochs}: must be 1 or more.")
        require(0 <= self.seed < 2**63, f"seed = {self.seed}: must lie in 0 to 2**63 - 1.")
        require(self.micro_batch >= 1, f"micro_batch = {self.micro_batch}: must be 1 or more.")
        require(
            self.batch_size >= self.micro_batch,
            f"batch_size = {self.batch_size} is smaller than micro_batch = {self.micro_batch}: "
            f"lower it with --micro-batch {max(self.batch_size, 1)}.",
        )
        require(
            self.batch_size % self.micro_batch == 0,
            f"batch_size = {self.batch_size} is not a multiple of micro_batch = "
            f"{self.micro_batch}: take {self.batch_size // self.micro_batch * self.micro_batch} or "
            f"{(self.batch_size // self.micro_batch + 1) * self.micro_batch}.",
        )
        self.require_slots(self.scaling.worker_range()[1])

    @property
    def slots(self) -> int:
        """Micro-batches per optimizer step."""
        return self.batch_size // self.micro_batch

    def require_slots(self, workers: int) -> None:
        """Raises ConfigError if `workers` are more than the slots of a step."""
        if workers > self.slots:
            fitting = self.batch_size // workers
            remedy = f"--micro-batch {fitting}" if fitting else f"--batch-size {workers}"
            while fitting > 1 and self.batch_size % fitting:
                fitting -= 1
                remedy = f"--micro-batch {fitting}"
            raise ConfigError(
                f"batch_size = {self.batch_size} is {self.slots} slots of {self.micro_batch}, too "
                f"few for {workers} workers: set {remedy}, or --scaling.num-workers {self.slots}."
            )
