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
    """The model."""

    name: str = "digits-cnn"
    """Torchvision model, such as resnet50. Any classification model of torchvision, or digits-cnn,
    a small network for the bundled digits."""
    weights: str | None = None
    """Pretrained torchvision weights, such as DEFAULT. The classification head is replaced."""
    dropout: float = 0.0
    """Dropout probability before the head of digits-cnn."""

    def __post_init__(self) -> None:
        below_one("model", self, "dropout")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, the loss, and the handling of gradients."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = 0.1
    """Peak learning rate, for the global batch. It is never scaled by the number of workers."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Use Nesterov momentum (SGD)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Coefficients of AdamW's running averages of the gradient and its square."""
    weight_decay: float = 5e-4
    """Weight decay. It is not applied to biases and normalization layers."""
    clip_norm: float = 0.0
    """Clip the norm of the whole gradient to this value. 0: do not clip."""
    nonfinite: Literal["stop", "skip"] = field(default="stop", metadata=FREE)
    """What to do when a loss or gradient is not finite. Such a step is never applied. stop: end the
    run (exit status 6); skip: go on with the next step."""
    max_nonfinite: int = field(default=3, metadata=FREE)
    """With nonfinite = skip: number of steps that a run may skip."""
    label_smoothing: float = 0.1
    """Label smoothing of the cross-entropy loss."""

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
    """Shape of the learning rate after the warmup."""
    warmup_epochs: float = 1.0
    """Length of the linear warmup from 0, in epochs."""
    final_lr: float = 0.0
    """cosine: final learning rate, as a fraction of optim.lr."""
    step_epochs: float = 30.0
    """step: multiply the learning rate by gamma every this many epochs."""
    gamma: float = 0.1
    """step: the factor."""

    def __post_init__(self) -> None:
        at_least(0, "schedule", self, "warmup_epochs", "gamma")
        above_zero("schedule", self, "step_epochs")
        fraction = "must be a fraction of optim.lr, 0 to 1"
        require(0 <= self.final_lr <= 1, "schedule.final_lr", self.final_lr, fraction)


@dataclass(frozen=True)
class ComputeConfig:
    """Precision and kernels."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision: fp32, or autocast to bf16 or fp16. fp16 also uses a gradient scaler."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Use the channels_last memory format for images and convolutions. It is faster on tensor
    cores."""
    deterministic: bool = True
    """Use only deterministic kernels, and raise an error where there is none. Bitwise identical
    results after a restart depend on it."""


@dataclass(frozen=True)
class DdpConfig:
    """Options of DistributedDataParallel."""

    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket, in MiB. Also used with exact."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets, which saves one copy."""
    static_graph: bool = False
    """Promise that the graph is the same in every step."""
    find_unused_parameters: bool = False
    """Find parameters that a step does not use. Required for models that skip some."""
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over the current slots of all workers (SyncBatchNorm). The
    result then depends on the number of workers."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Compress gradients, for slow networks. bf16 and fp16 send them in that precision, powersgd as
    low-rank factors, which are far smaller (PowerSGD, arXiv:1905.13727). What the factors leave out
    is sent in later steps. Until then it is part of the checkpoint, which grows by the size of the
    model for each worker."""
    powersgd_rank: int = 4
    """powersgd: rank of the factors. A higher rank is closer to the gradient and takes longer."""

    def __post_init__(self) -> None:
        above_zero("ddp", self, "bucket_cap_mb")
        at_least(1, "ddp", self, "powersgd_rank")


@dataclass(frozen=True)
class EvalConfig:
    """When the model is evaluated."""

    every_epochs: int = 1
    """Evaluate every this many epochs, and always at the end. 0: only at the end."""
    every_steps: int = 0
    """Also evaluate every this many steps. 0: off."""

    def __post_init__(self) -> None:
        at_least(0, "eval", self, "every_epochs", "every_steps")


@dataclass(frozen=True)
class StopConfig:
    """Early stopping, by the metric that decides which checkpoint is the best."""

    patience: int = field(default=0, metadata=FREE)
    """Stop after this many evaluations in a row without improvement. 0: off."""
    min_delta: float = field(default=0.0, metadata=FREE)
    """Improvement that counts: the metric must be better than before by more than this."""

    def __post_init__(self) -> None:
        at_least(0, "stop", self, "patience", "min_delta")


@dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights."""

    decay: float = 0.0
    """Decay of the average of the weights of all steps, such as 0.9999. The average is evaluated
    and exported in place of the weights. 0: off."""
    warmup: bool = True
    """Average over fewer steps at first: the decay of step n is at most (1 + n) / (10 + n)."""

    def __post_init__(self) -> None:
        below_one("ema", self, "decay")


@dataclass(frozen=True)
class CheckpointConfig:
    """When a checkpoint is saved, and which are kept. One is always saved at the end."""

    every_epochs: int = field(default=1, metadata=FREE)
    """Save a checkpoint every this many epochs. 0: off."""
    every_steps: int = field(default=0, metadata=FREE)
    """Save a checkpoint every this many steps. 0: off."""
    every_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Seconds between checkpoints, or auto. 0: off. auto: sqrt(2 * stall * MTBF), which loses the
    least time (Young/Daly). The stall of a checkpoint is measured; the mean time between failures
    is taken as one hour until more is known. The result is 5 to 600 s, and at least twice the time
    of a commit."""
    keep_last: int = field(default=2, metadata=FREE)
    """Number of newest checkpoints to keep (2 or more), besides the best."""
    max_failed: int = field(default=3, metadata=FREE)
    """Number of failed checkpoints in a row that ends the run (exit status 5). Training goes on
    after fewer."""

    def __post_init__(self) -> None:
        at_least(0, "checkpoint", self, "every_epochs", "every_steps")
        number = isinstance(self.every_s, int | float) and self.every_s >= 0
        rule = "must be a number of seconds, 0 or more, or auto"
        require(number or self.every_s == "auto", "checkpoint.every_s", self.every_s, rule)
        at_least(1, "checkpoint", self, "max_failed")
        at_least(2, "checkpoint", self, "keep_last")  # a damaged newest one is not the only one


@dataclass(frozen=True)
class ScalingConfig:
    """The number of workers and their resources. They do not change the mathematics of the
    result."""

    num_workers: int | str = field(default="auto", metadata={**FREE, "metavar": "N|MIN:MAX|auto"})
    """Number, MIN:MAX (elastic), or auto. auto: all GPUs of the cluster, or two CPU workers if it
    has none."""
    use_gpu: bool | Literal["auto"] = field(default="auto", metadata=FREE)
    """Train on GPUs: true, false, or auto. auto: if the cluster has any."""
    cpus_per_worker: float = field(default=1.0, metadata=FREE)
    """CPUs per worker, for its loader threads and, without a GPU, its compute threads."""
    gpus_per_worker: float = field(default=1.0, metadata=FREE)
    """GPUs per worker, at most 1. Below 1, several workers share a GPU (over Gloo)."""
    backend: Literal["auto", "nccl", "gloo"] = field(default="auto", metadata=FREE)
    """Communication backend. auto: nccl if each worker has a whole GPU, else gloo."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = field(
        default="PACK", metadata=FREE
    )
    """How Ray places the workers on nodes (its placement group strategy)."""
    max_failures: int = field(default=3, metadata=FREE)
    """How many times in a row failed workers are replaced before the run ends (exit status 7). A
    new checkpoint resets the count: a long run survives many failures, and a broken one ends."""
    max_preemptions: int = field(default=-1, metadata=FREE)
    """How many times workers are replaced after a preemption notice for their node. -1: no
    limit."""
    wait_s: float = field(default=60.0, metadata=FREE)
    """Seconds to wait while a running cluster lacks resources for the workers, at the start and
    after nodes are lost (autoscaling). Also the time limit for the start of Ray, but at least 300
    s."""
    resize_s: float = field(default=30.0, metadata=FREE)
    """With MIN:MAX workers: seconds between checks whether more workers fit. Adding them costs a
    restart from the newest checkpoint."""
    start_timeout_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Seconds to request the same number of workers from Ray before requesting as many as fit. Ray
    still counts on a lost node for some seconds. Loading torch is not included. auto: 5 with
    MIN:MAX, else 120."""
    hang_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Seconds without a finished step, and at least 10 times the median step, after which workers
    count as hung. The rank that keeps the others waiting is named, the stacks of all ranks are
    saved, and the workers are replaced. The limit is 10 times as long for a batch of data, and 60
    times for startup, evaluation, and checkpoints. auto: 30. 0: never."""
    check_every_steps: int = field(default=100, metadata=FREE)
    """Compare the weights of all workers every this many steps, and before each checkpoint. They
    are bitwise identical unless a device or its memory fails. 0: never."""
    on_divergence: Literal["stop", "resync"] = field(default="stop", metadata=FREE)
    """What to do when the weights of the workers differ. stop: end the run (exit status 6); resync:
    give all workers the state of the majority."""

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
    """Logging, experiment trackers, and profiling."""

    every_steps: int = field(default=10, metadata=FREE)
    """Log the loss and speed every this many steps. The host waits for the device only then."""
    tensorboard: bool = field(default=True, metadata=FREE)
    """Write TensorBoard events next to metrics.jsonl."""
    wandb: bool = field(default=False, metadata=FREE)
    """Also log to Weights & Biases (pip install 'raytrain_ddp[wandb]'). WANDB_MODE is respected."""
    mlflow: bool = field(default=False, metadata=FREE)
    """Also log to MLflow (pip install 'raytrain_ddp[mlflow]'), at MLFLOW_TRACKING_URI."""
    project: str = field(default="raytrain_ddp", metadata=FREE)
    """Project in Weights & Biases, experiment in MLflow."""
    audit: bool = field(default=False, metadata=FREE)
    """Log a hash of the sample ids and pixels of each step, to compare runs. Same as --audit."""
    profile_steps: int = field(default=0, metadata=FREE)
    """Trace this many steps of each start with torch.profiler, after the first ten. See
    --profile."""
    profile_ranks: tuple[int, ...] = field(default=(0,), metadata=FREE)
    """Ranks to trace."""

    def __post_init__(self) -> None:
        at_least(1, "log", self, "every_steps")
        at_least(0, "log", self, "profile_steps")
