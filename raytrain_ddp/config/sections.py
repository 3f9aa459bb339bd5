"""The sections of a config: frozen dataclasses, checked at birth. Data and augmentation: inputs.py.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
Fields marked `FREE` may change when a run is resumed; all others decide the result and may not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.validation import FREE, above_zero, at_least, below_one, require


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    name: str = "digits-cnn"
    """'digits-cnn' or any torchvision classification model, such as resnet50."""
    weights: str | None = None
    """Start from torchvision's weights of this name, such as DEFAULT (the head is replaced)."""
    dropout: float = 0.0
    """Dropout before the head of digits-cnn."""

    def __post_init__(self) -> None:
        below_one("model", self, "dropout")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and what is done to gradients."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = 0.1
    """Peak learning rate, for the global batch; it is never scaled by the number of workers."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Nesterov momentum (SGD)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Averaging coefficients of AdamW."""
    weight_decay: float = 5e-4
    """Weight decay; not applied to biases and norm layers."""
    clip_norm: float = 0.0
    """Clip the norm of the whole gradient to this; 0: do not clip."""
    nonfinite: Literal["stop", "skip"] = field(default="stop", metadata=FREE)
    """A step whose loss or gradient is not finite is never applied; stop: the run ends with it."""
    max_nonfinite: int = field(default=3, metadata=FREE)
    """skip: how many such steps a run may have."""
    label_smoothing: float = 0.1
    """Label smoothing of the cross entropy."""

    def __post_init__(self) -> None:
        above_zero("optim", self, "lr")
        at_least(0, "optim", self, "weight_decay", "clip_norm", "max_nonfinite")
        below_one("optim", self, "momentum", "label_smoothing")
        betas_ok = all(0 <= beta < 1 for beta in self.betas)
        require(betas_ok, "optim.betas", self.betas, "each must be 0 or more and below 1")
        nesterov_ok = self.name != "sgd" or not self.nesterov or self.momentum > 0
        rule = "needs optim.momentum above 0: set --optim.no-nesterov"
        require(nesterov_ok, "optim.nesterov", self.nesterov, rule)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of the step."""

    name: Literal["cosine", "step", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_epochs: float = 1.0
    """Linear warm-up from 0, in epochs."""
    final_lr: float = 0.0
    """Where cosine ends, as a fraction of optim.lr."""
    step_epochs: float = 30.0
    """step: multiply the learning rate by gamma every so many epochs."""
    gamma: float = 0.1
    """step: the factor."""

    def __post_init__(self) -> None:
        at_least(0, "schedule", self, "warmup_epochs", "gamma")
        above_zero("schedule", self, "step_epochs")
        fraction = "must be a fraction of optim.lr, 0 to 1"
        require(0 <= self.final_lr <= 1, "schedule.final_lr", self.final_lr, fraction)


@dataclass(frozen=True)
class ComputeConfig:
    """How the arithmetic is done on a worker."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run the forward pass under autocast; fp16 with a gradient scaler."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Memory format of images and convolutions; faster on tensor cores."""
    deterministic: bool = True
    """Refuse kernels whose result changes from run to run (what bitwise resume stands on)."""


@dataclass(frozen=True)
class DdpConfig:
    """DistributedDataParallel's own knobs."""

    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket, in MiB; of `exact`, too."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets: one copy less."""
    static_graph: bool = False
    """Promise that the graph never changes."""
    find_unused_parameters: bool = False
    """For models in which a step may skip parameters."""
    sync_batchnorm: bool = False
    """Normalise over all workers' current slots. Ties the result to the number of workers."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """For slow networks: gradients are sent in this precision or, far shorter, as low-rank factors
    (PowerSGD, arXiv:1905.13727). What those leave out is sent later; until then it is part of the
    checkpoint, which grows by as much as the model for each worker."""
    powersgd_rank: int = 4
    """powersgd: rank of the factors; a higher one is nearer to the gradient, and longer."""

    def __post_init__(self) -> None:
        above_zero("ddp", self, "bucket_cap_mb")
        at_least(1, "ddp", self, "powersgd_rank")


@dataclass(frozen=True)
class EvalConfig:
    """When the model is evaluated."""

    every_epochs: int = 1
    """Evaluate after every so many epochs, and always at the end; 0: only at the end."""

    def __post_init__(self) -> None:
        at_least(0, "eval", self, "every_epochs")


@dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is committed, and which are kept. One is always committed at the end."""

    every_epochs: int = field(default=1, metadata=FREE)
    """After every so many epochs; 0: off."""
    every_steps: int = field(default=0, metadata=FREE)
    """After every so many steps; 0: off."""
    every_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """After so many seconds since the last one; 0: off; auto: sqrt(2 * stall * MTBF), which loses
    the least time (Young/Daly): the stall of a checkpoint is measured, the mean time between
    failures is an hour until more is seen. 5 to 600 s, and twice the time of a commit at least."""
    keep_last: int = field(default=2, metadata=FREE)
    """How many of the newest are kept (2 or more), besides the best."""
    max_failed: int = field(default=3, metadata=FREE)
    """Training goes on when a checkpoint cannot be written; so many in a row end it (status 5)."""

    def __post_init__(self) -> None:
        at_least(0, "checkpoint", self, "every_epochs", "every_steps")
        number = isinstance(self.every_s, int | float) and self.every_s >= 0
        rule = "must be a number of seconds, 0 or more, or auto"
        require(number or self.every_s == "auto", "checkpoint.every_s", self.every_s, rule)
        at_least(1, "checkpoint", self, "max_failed")
        at_least(2, "checkpoint", self, "keep_last")  # a damaged newest one is not the only one


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, and what each is given. None of it changes the result's mathematics."""

    num_workers: int | str = field(default="auto", metadata=FREE)
    """A number, MIN:MAX (elastic), or auto: all GPUs of the cluster, else two CPU workers."""
    use_gpu: bool | Literal["auto"] = field(default="auto", metadata=FREE)
    """Train on GPUs; auto: if the cluster has any."""
    cpus_per_worker: float = field(default=1.0, metadata=FREE)
    """CPUs of a worker: its loader threads, and its compute threads without a GPU."""
    gpus_per_worker: float = field(default=1.0, metadata=FREE)
    """GPUs of a worker; below 1, several workers share one GPU (over gloo)."""
    backend: Literal["auto", "nccl", "gloo"] = field(default="auto", metadata=FREE)
    """Communication; auto: nccl with whole GPUs, else gloo."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = field(
        default="PACK", metadata=FREE
    )
    """How Ray spreads the workers over nodes."""
    max_failures: int = field(default=3, metadata=FREE)
    """How many times in a row dead workers are replaced before the run gives up. A new checkpoint
    sets the count back: a long run meets many failures, a broken one makes no checkpoint."""
    max_preemptions: int = field(default=-1, metadata=FREE)
    """How many times workers are replaced whose node was taken away with a notice; -1: always."""
    wait_s: float = field(default=60.0, metadata=FREE)
    """How long to wait while a running cluster lacks resources for the workers, at the start and
    when nodes are lost (autoscaling). Also the time limit for Ray to start, but at least 300 s."""
    resize_s: float = field(default=30.0, metadata=FREE)
    """MIN:MAX workers: look this often whether more fit. Growing costs a restart from the newest
    checkpoint."""
    start_timeout_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """How long to ask Ray for the same number of workers before asking for as many as then fit.
    After a node's loss Ray counts on it for some seconds more. Loading torch is not part of it.
    auto: 5 with MIN:MAX, else 120."""
    hang_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Workers that finish no step for so long (and for 10 times the median step) are taken for
    hung: the rank that keeps the others waiting is named, the stacks of all are kept, and they are
    replaced. 10 times as long for a batch of data, 60 times for start-ups, evaluations and
    checkpoints. auto: 30; 0: never."""
    check_every_steps: int = field(default=100, metadata=FREE)
    """Compare the weights of all workers, which are alike to the last bit unless a device or a
    memory fails, every so many steps and before each checkpoint; 0: never."""
    on_divergence: Literal["stop", "resync"] = field(default="stop", metadata=FREE)
    """Where they differ: end the run (status 6), or give all workers the state of most of them."""

    def __post_init__(self) -> None:
        self.worker_range()
        above_zero("scaling", self, "cpus_per_worker", "gpus_per_worker")
        at_least(0, "scaling", self, "max_failures", "wait_s", "check_every_steps")
        at_least(-1, "scaling", self, "max_preemptions")
        at_least(1, "scaling", self, "resize_s")
        timeout_s = self.start_timeout_s
        number_ok = timeout_s == "auto" or (not isinstance(timeout_s, str) and timeout_s > 0)
        require(number_ok, "scaling.start_timeout_s", timeout_s, "must be above 0, or auto")
        hang_s = self.hang_s
        number_ok = hang_s == "auto" or (not isinstance(hang_s, str) and hang_s >= 0)
        require(number_ok, "scaling.hang_s", hang_s, "must be 0 or more, or auto")
        gpus = self.gpus_per_worker
        rule = "must be 1 or less: DDP drives one GPU per worker"
        require(gpus <= 1, "scaling.gpus_per_worker", gpus, rule)
        nccl_ok = gpus == 1 or self.backend != "nccl"
        rule = "must be 1 with NCCL, which wants a GPU per worker; set --scaling.backend gloo"
        require(nccl_ok, "scaling.gpus_per_worker", gpus, rule)

    @property
    def threads(self) -> int:
        """For the arithmetic of a worker on CPUs."""
        return max(1, int(self.cpus_per_worker))

    def worker_range(self) -> tuple[int, int]:
        """(least, most) workers; (0, 0) for auto."""
        if self.num_workers == "auto":
            return 0, 0
        low, _, high = str(self.num_workers).partition(":")
        rule = "must be a number from 1 on, MIN:MAX or auto"
        numbers = low.isdigit() and (high or low).isdigit()
        require(numbers, "scaling.num_workers", self.num_workers, rule)
        least, most = int(low), int(high or low)
        require(1 <= least <= most, "scaling.num_workers", self.num_workers, rule)
        return least, most


@dataclass(frozen=True)
class LogConfig:
    """What is written down."""

    every_steps: int = field(default=10, metadata=FREE)
    """Log the loss and speed every so many steps. The host waits for the device only then."""
    tensorboard: bool = field(default=True, metadata=FREE)
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: bool = field(default=False, metadata=FREE)
    """Log to Weights & Biases, too (pip install 'raytrain_ddp[wandb]'; obeys WANDB_MODE)."""
    mlflow: bool = field(default=False, metadata=FREE)
    """Log to MLflow, too (pip install 'raytrain_ddp[mlflow]'; MLFLOW_TRACKING_URI says where)."""
    project: str = field(default="raytrain_ddp", metadata=FREE)
    """Project of Weights & Biases, experiment of MLflow."""
    audit: bool = field(default=False, metadata=FREE)
    """Log a hash of each step's sample ids and pixels, for comparing runs (see --audit)."""
    profile_steps: int = field(default=0, metadata=FREE)
    """Trace so many steps of each start with torch.profiler, after the first ten (--profile)."""
    profile_ranks: tuple[int, ...] = field(default=(0,), metadata=FREE)
    """The ranks that trace."""

    def __post_init__(self) -> None:
        at_least(1, "log", self, "every_steps")
        at_least(0, "log", self, "profile_steps")
