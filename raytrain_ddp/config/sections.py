"""The sections of a config: frozen dataclasses, checked when built. The data: input_sections.py.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
Fields marked `FREE` may change when a run is resumed; all others decide the result and may not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.config.scaling_section import ScalingConfig as ScalingConfig  # noqa: PLC0414
from raytrain_ddp.config.validation import FREE, group_rules, scalar


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """The model."""

    name: str = field(default="digits-cnn", metadata={"path": "code"})
    """Model, such as resnet50 or timm:NAME. Any classification model of torchvision;
    timm:NAME, or timm:NAME.TAG, which starts from the pretrained weights of that tag;
    module:function or path/to/file.py:function for your own, called with classes=N and model.args;
    or digits-cnn, a small network for the bundled digits."""
    args: dict[str, str | bool | int | float] = field(
        default_factory=dict, metadata={"path": "options"}
    )
    """Keyword arguments for the model, such as drop_path_rate 0.1."""
    weights: str | None = field(default=None, metadata={"path": "weights"})
    """Weights to start from, such as DEFAULT. The name of torchvision's or timm's pretrained
    weights; hf-hub:OWNER/NAME; a .safetensors or .pth file; or a run or checkpoint. A head for
    other classes is newly initialized."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, such as 'layer1.*'. Patterns of names, or modules; backbone:
    all but the head. Batch norm that is frozen keeps its statistics."""
    dropout: float = 0.0
    """Dropout probability before the head of digits-cnn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.below_one("dropout")
        values = {name: scalar(value) for name, value in self.args.items()}
        object.__setattr__(self, "args", values)  # the same, from a command line and from TOML
        for name in values:
            rule = f"{name!r} must be the name of an argument"
            self.require("args", name.isidentifier(), rule)


@dataclass(frozen=True)
class OptimConfig(Section, name="optim"):
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
    """Weight decay. It is not applied to biases, normalization layers, layer scale, class tokens,
    or positional embeddings."""
    decay_norms: bool = False
    """Also decay the weights of normalization layers."""
    decay_bias: bool = False
    """Also decay biases."""
    head_lr: float | None = None
    """Peak learning rate of the classification head. Default: lr."""
    layer_decay: float = 1.0
    """Ratio of a layer's learning rate to that of the layer after it (models of timm)."""
    groups: tuple[str, ...] = ()
    """Other values for some parameters, such as 'layer1.*' lr=0.001 weight_decay=0. A pattern of
    names or a module, then its peak learning rate, its weight decay, or both; if several match,
    the last one applies."""
    clip_norm: float = 0.0
    """Clip the norm of the whole gradient to this value. 0: do not clip."""
    nonfinite: Literal["stop", "skip"] = field(default="stop", metadata=FREE)
    """What to do when a loss or gradient is not finite. Such a step is never applied. stop: end the
    run (exit status 6); skip: continue with the next step."""
    max_nonfinite: int = field(default=3, metadata=FREE)
    """With nonfinite = skip: number of steps that a run may skip."""
    label_smoothing: float = 0.1
    """Label smoothing of cross entropy and binary cross entropy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.above_zero("lr")
        self.at_least(0, "weight_decay", "clip_norm", "max_nonfinite")
        self.below_one("momentum", "label_smoothing")
        self.require("layer_decay", 0 < self.layer_decay <= 1, "must be above 0 and at most 1")
        head_ok = self.head_lr is None or self.head_lr > 0
        self.require("head_lr", head_ok, "must be above 0; see model.freeze")
        group_rules(self.groups)
        betas_ok = all(0 <= beta < 1 for beta in self.betas)
        self.require("betas", betas_ok, "each must be 0 or more and below 1")
        nesterov_ok = self.name != "sgd" or not self.nesterov or self.momentum > 0
        rule = "needs optim.momentum above 0: set --optim.no-nesterov"
        self.require("nesterov", nesterov_ok, rule)


@dataclass(frozen=True)
class LossConfig(Section, name="loss"):
    """The loss of the built-in task, the mean over the samples of a step."""

    name: Literal["cross-entropy", "bce", "focal", "mse", "l1", "huber"] = "cross-entropy"
    """Cross entropy, binary cross entropy, focal loss, or a regression loss. bce: the mean over
    classes, each by itself; focal: cross entropy times (1 - p)^gamma, without label smoothing.
    Images that are mixed have a soft target in all of them. mse, l1, huber (delta 1): the mean over
    data.target_columns."""
    gamma: float = 2.0
    """focal: the exponent, 1 or more."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of the samples of a class. balanced: rows / (classes * rows of the class), counted in
    the training set; a step's mean is over its samples, not over their weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "gamma")


@dataclass(frozen=True)
class ScheduleConfig(Section, name="schedule"):
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
        super().__post_init__()
        self.at_least(0, "warmup_epochs")
        self.above_zero("step_epochs")
        rule = "must be a fraction of optim.lr, 0 to 1"
        self.require("final_lr", 0 <= self.final_lr <= 1, rule)
        self.require("gamma", 0 <= self.gamma <= 1, "must be a fraction, 0 to 1")


@dataclass(frozen=True)
class ComputeConfig(Section, name="compute"):
    """Precision and kernels."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision: fp32, or autocast to bf16 or fp16. auto: bf16 on GPUs that have it (Ampere and
    later), else fp32. fp16 also uses a gradient scaler."""
    tf32: bool = True
    """Use TF32 (10 bits of mantissa) for what stays in fp32, on GPUs that have it."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool | Literal["auto"] = "auto"
    """Use the channels_last memory format for images and the weights of convolutions, which is
    faster on tensor cores. auto: on GPUs with bf16."""
    deterministic: bool = True
    """Use only kernels that give the same bits each time; layers that have none are an error at the
    start. The same bits after a restart depend on it. It rules out cuDNN's search for the fastest
    kernels, and uses slower ones for some layers; without it, all other promises hold."""


@dataclass(frozen=True)
class DdpConfig(Section, name="ddp"):
    """Options of DistributedDataParallel."""

    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket, in MiB. Also used with exact."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the buckets, which saves one copy."""
    static_graph: bool = False
    """Promise that the graph is the same in every step."""
    find_unused_parameters: bool = False
    """Find parameters that a step does not use. Required for models that skip some. With exact,
    their gradient is 0, so weight decay and momentum still change them."""
    sync_batchnorm: bool = False
    """Compute batch-norm statistics over the current slots of all workers (SyncBatchNorm). The
    result then depends on the number of workers."""
    compression: Literal["none", "bf16", "fp16"] = "none"
    """Send gradients in this precision, for slow networks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.above_zero("bucket_cap_mb")


@dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """When the model is evaluated."""

    every_epochs: int = 1
    """Evaluate every this many epochs, and always at the end. 0: only at the end."""
    every_steps: int = 0
    """Also evaluate every this many steps. 0: off."""
    micro_batch: int = 0
    """Samples of one evaluation pass through the model. 0: same as micro_batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "every_epochs", "every_steps", "micro_batch")


@dataclass(frozen=True)
class StopConfig(Section, name="stop"):
    """Early stopping, by the metric that decides which checkpoint is the best."""

    patience: int = field(default=0, metadata=FREE)
    """Stop after this many evaluations in a row without improvement. 0: off."""
    min_delta: float = field(default=0.0, metadata=FREE)
    """Minimum improvement: the metric must be better than before by more than this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "patience", "min_delta")


@dataclass(frozen=True)
class EmaConfig(Section, name="ema"):
    """An exponential moving average of the weights."""

    decay: float = 0.0
    """Decay of the average of the weights of all steps, such as 0.9999. The average is evaluated
    and exported in place of the weights. 0: off."""
    warmup: bool = True
    """Average over fewer steps at first: the decay of step n is at most (1 + n) / (10 + n)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.below_one("decay")


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
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
    """Number of failed checkpoints in a row that ends the run (exit status 5). Training continues
    after fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "every_epochs", "every_steps", "every_s")
        self.at_least(1, "max_failed")
        self.at_least(2, "keep_last")  # a damaged newest one is not the only one


@dataclass(frozen=True)
class LogConfig(Section, name="log"):
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
        super().__post_init__()
        self.at_least(1, "every_steps")
        self.at_least(0, "profile_steps")
