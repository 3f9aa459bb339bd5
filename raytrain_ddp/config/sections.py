"""The sections of a config: frozen dataclasses, checked when built.

Imports nothing heavy, so that ``--help`` and every error of a config answer in well under a second.
A field has all facts about it; what several fields say together is in train_config.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from raytrain_ddp.config.field_types import LEAST_OF_RESOURCE, Section, scalar, setting

TORCHVISION_ROOT = "data"
_MOST = 2**14  # far more is a slip, and would take all memory
_SCALE = "each value must be {} 1: divide values on the scale 0 to 255 by 255"
_MEAN = (lambda each: all(0 <= mean <= 1 for mean in each), _SCALE.format("0 to"))
_STD = (lambda each: all(0 < std <= 1 for std in each), _SCALE.format("above 0 and at most"))
_DIFFERENT = (lambda names: len({*names}) == len(names), "must be different columns")
_CLASSES = (
    lambda names: len({*names}) == len(names) >= 2,
    "must have 2 or more names, all different",
)
_RANGE = (lambda ends: ends[0] <= ends[1], "must be 0 < from <= to <= 1")
_JITTER = (
    lambda changes: all(0 <= each <= 2 for each in changes) and changes[3] <= 0.5,
    "must be 0 to 2, such as 0.4 for 40%, and hue, the last value, 0 to 0.5",
)


def _sources(config: Any) -> set[str]:
    return {config.data.source, config.data.eval_source or config.data.source}


def _has_columns(config: Any) -> bool:
    return not all(source.startswith("torchvision:") for source in _sources(config))


def _range(given: int | str) -> tuple[int, int]:
    low, _, high = str(given).partition(":")
    return int(low), int(high or low)


def _is_count(given: int | str) -> bool:
    is_range = re.fullmatch(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", str(given))
    return given == "auto" or (is_range is not None and _range(given)[0] <= _range(given)[1])


_PATHS = (
    "data.source = torchvision:NAME, or paths of images",
    lambda c: _sources(c) != {"digits"},
)
_COLUMNS = ("Parquet files or lists of images", _has_columns)
_LABELS = (
    "Parquet files or lists of images, and no data.target_columns",
    lambda c: _has_columns(c) and not c.data.target_columns,
)
_SMOOTHED = (
    "loss.name = cross-entropy or bce, without data.target_columns",
    lambda c: c.loss.name != "focal" and not c.data.target_columns,
)
_OWN_MODEL = ("a model other than digits-cnn", lambda c: c.model.name != "digits-cnn")
_REPEATED = ("augment.repeats above 1", lambda c: c.augment.repeats > 1)
_ON_FILES = ("storage on a file system", lambda c: "://" not in c.storage)
_ELASTIC = ("scaling.num_workers = MIN:MAX", lambda c: ":" in str(c.scaling.num_workers))
_WORKERS = (_is_count, "must be a number of 1 or more, MIN:MAX or auto")


@dataclass(frozen=True)
class DataConfig(Section, name="data"):
    """Where the images come from, their order, and how they are loaded."""

    source: str = setting(
        "digits", path="data", aka="data dataset data-dir data-path train-dir train-data"
    )
    """Folder, Parquet, tar, list, or URI. A folder of class folders
    (ImageFolder), or one written by save_to_disk of Hugging Face datasets; Parquet files,
    WebDataset tar files, or lists of images (CSV, TSV, JSON lines), as a file, folder, glob or URI
    (s3://, gs://, hf://; not for tar files); a classification data set of torchvision, such as
    torchvision:CIFAR10, or any of the Hugging Face Hub, such as hf:ylecun/mnist, which are
    downloaded; or digits, which is bundled."""
    eval_source: str | None = setting(
        None, path="data", aka="val-dir eval-dir val-data eval-data test-data"
    )
    """Data to evaluate on, like source. Default: the validation or test split of source."""
    train_split: str = "auto"
    """Split to train on. auto: train, or all data if there are no named splits; a dot: the folder
    itself, if classes have the names of splits."""
    eval_split: str = "auto"
    """Split to evaluate on, of eval_source if set. auto: validation, else test; none: nothing."""
    config: str = "auto"
    """Data set to use from a repository with several: a config of its README.md."""
    root: str | None = setting(None, free=True, path="folder", images=_PATHS)
    """Folder or URI of the images that a list names. Default: the folder of the list. For
    torchvision data sets, the folder to download into; default: data."""
    image_column: str = setting("image", may_be_empty=True, images=_COLUMNS)
    """Column with the images: struct<bytes, path> or binary (Parquet), or paths of files. For tar
    files: suffix of the images."""
    label_column: str = setting("label", may_be_empty=True, images=_LABELS)
    """Column with the labels: integers, strings, or booleans. For tar files: suffix of the labels
    (default: cls), or a field of the JSON files."""
    target_columns: tuple[str, ...] = setting((), check=_DIFFERENT)
    """Columns to predict instead of one class. With loss.name = bce, several labels: a column of
    booleans (or 0 and 1) for each, or one column of lists of labels. With mse, l1 or huber:
    columns of numbers."""
    classes: tuple[str, ...] | None = setting(None, free=True, check=_CLASSES)
    """Class names, in order. Default: the classes of the training set, sorted. Hidden folders are
    classes only if they are named here."""
    holdout: float = setting(0.0, least=0, below=1, aka="val-fraction test-size")
    """Fraction of the training set to evaluate on, such as 0.1. The run trains on the rest. The
    fraction is the same for each class. Replaces the evaluation split."""
    holdout_seed: int = setting(0, least=0, needs="data.holdout above 0")
    """Random seed that selects the held-out rows. They do not depend on seed."""
    image_size: int = setting(0, least=0, most=_MOST, aka="imgsz input-size crop-size resolution")
    """Side of the square images, in pixels. 0: as stored; all must then have the same size."""
    start_size: int = setting(0, least=0, most=_MOST)
    """Side of the training images in the first epoch, in pixels. It grows to image_size in steps of
    32 pixels, over grow_epochs. 0: image_size from the start."""
    grow_epochs: int = setting(0, least=0, most=_MOST)
    """With start_size: the first epoch with images of image_size, counted from 0."""
    eval_size: int = setting(0, least=0, most=_MOST)
    """Side of the images in evaluation, in pixels. 0: same as image_size."""
    eval_crop: float = setting(0.875, above=0, most=1, images="data.image_size or data.eval_size")
    """Share of the shorter side that evaluation keeps, in the center, such as 224 of 256 pixels."""
    interpolation: Literal["bilinear", "bicubic"] = setting(
        "bilinear", images="data.image_size or data.eval_size or augment.crop = random"
    )
    """How images are resized, with antialiasing."""
    mean: tuple[float, float, float] = setting((0.485, 0.456, 0.406), check=_MEAN)
    """Mean of each channel (RGB, scale 0 to 1), subtracted on the device."""
    std: tuple[float, float, float] = setting((0.229, 0.224, 0.225), check=_STD)
    """Standard deviation of each channel (RGB, scale 0 to 1)."""
    exif_orientation: bool = False
    """Rotate images as their EXIF tag says. torchvision does not."""
    jpeg_scaling: bool = True
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size if that leaves twice the pixels needed."""
    shuffle: Literal["auto", "full", "block"] = setting("auto", of_loop=True)
    """Order of the samples. full: any row may follow any other; block: blocks (Parquet row groups)
    are permuted, then the rows within windows of blocks; auto: block for Parquet files with more
    than 512 MiB of images."""
    shuffle_window: int | Literal["auto"] = setting(
        "auto", least=1, needs="data.shuffle = block or data.shuffle = auto", of_loop=True
    )
    """Blocks per window of the block shuffle. auto: as many as take 64 MiB, 1 to 16."""
    bad_records: Literal["error", "skip"] = setting("error", of_loop=True)
    """When an image cannot be decoded. error: end the run (exit status 4); skip: leave it out."""
    max_bad: int = setting(100, free=True, least=0, needs="data.bad_records = skip", of_loop=True)
    """With bad_records = skip: number of bad records that an epoch may have."""
    memory_mib: int = setting(1024, free=True, least=1, images=_COLUMNS)
    """Memory limit for row groups of Parquet files, in MiB per worker; evaluation adds as much."""
    workers: int | Literal["auto"] = setting(
        "auto",
        free=True,
        least=0,
        most=_MOST,
        of_loop=True,
        aka="loader-workers dataloader-num-workers",
    )
    """Loader threads per training worker, or processes for your own data sets. 0: load in the
    training thread. auto: as many as the worker has CPUs."""
    prefetch: int = setting(4, free=True, least=1, needs="data.workers above 0", of_loop=True)
    """Micro-batches prepared ahead per loader thread or process."""
    prefetch_mib: int = setting(
        1024, free=True, least=1, needs="data.workers above 0", of_loop=True
    )
    """Memory limit for micro-batches prepared ahead, in MiB per worker."""

    @property
    def may_skip(self) -> bool:
        """Whether bad records are left out."""
        return self.bad_records == "skip"


@dataclass(frozen=True)
class AugmentConfig(Section, name="augment"):
    """Augmentation of training images. The random numbers depend on (seed, epoch, row, repeat), or
    on (seed, step, slot) where images are mixed."""

    crop: Literal["none", "shift", "random"] = "shift"
    """How images are cropped. shift: pad by an eighth, crop back; random: random resized crop."""
    scale: tuple[float, float] = setting(
        (0.08, 1.0), above=0, most=1, check=_RANGE, images="augment.crop = random"
    )
    """With crop = random: smallest and largest area of a crop, as a fraction of the image."""
    flip: bool = False
    """Flip half of the images left to right."""
    policy: Literal["none", "randaugment", "trivial", "augmix"] = setting(
        "none", aka="auto-augment autoaugment aa"
    )
    """RandAugment, TrivialAugmentWide, or AugMix, with torchvision's operations and defaults."""
    operations: int = setting(2, least=1, images="augment.policy = randaugment")
    """randaugment: number of operations per image."""
    magnitude: int = setting(9, least=0, most=30, images="augment.policy = randaugment")
    """randaugment: strength of the operations, 0 to 30."""
    jitter: tuple[float, float, float, float] = setting((0.0, 0.0, 0.0, 0.0), check=_JITTER)
    """Maximum change of brightness, contrast, saturation, and hue (torchvision's ColorJitter)."""
    erase: float = setting(0.0, least=0, most=1)
    """Probability that a random rectangle is erased."""
    mixup: float = setting(0.0, least=0)
    """Alpha of mixup with another image of the micro-batch. 0: off. If cutmix is on too, each is
    applied half of the time. An image that is alone in its micro-batch is not mixed."""
    cutmix: float = setting(0.0, least=0)
    """Alpha of CutMix with another image of the micro-batch. 0: off."""
    repeats: int = setting(1, least=1, of_loop=True)
    """Number of times that each image is used per epoch (repeated augmentation). It is decoded once
    and augmented differently each time."""
    spread_repeats: bool = setting(False, needs=_REPEATED, of_loop=True)
    """Put the repeats of an image into different micro-batches of a step, like torchvision's
    RASampler. An epoch is then as long as without repeats, and uses one in `repeats` images."""


@dataclass(frozen=True)
class ModelConfig(Section, name="model"):
    """The model."""

    name: str = setting("digits-cnn", path="code", of_state=True, aka="model arch architecture")
    """Model, such as resnet50 or timm:NAME. Any classification model of torchvision;
    timm:NAME, or timm:NAME.TAG, which starts from the pretrained weights of that tag;
    module:function or path/to/file.py:function for your own, called with classes=N and model.args;
    or digits-cnn, a small network for the bundled digits."""
    args: dict[str, str | bool | int | float] = setting(
        {}, path="options", images=_OWN_MODEL, of_state=True
    )
    """Keyword arguments for the model, such as drop_path_rate 0.1."""
    weights: str | None = setting(None, path="weights", aka="pretrained")
    """Weights to start from, such as DEFAULT. The name of torchvision's or timm's pretrained
    weights; hf-hub:OWNER/NAME; a .safetensors or .pth file; or a run or checkpoint. A head for
    other classes is newly initialized."""
    freeze: tuple[str, ...] = setting((), of_state=True)
    """Parameters that are not trained, such as 'layer1.*'. Patterns of names, or modules; backbone:
    all but the head. Batch norm that is frozen keeps its statistics."""
    dropout: float = setting(
        0.0, least=0, below=1, images="model.name = digits-cnn", aka="drop drop-rate"
    )
    """Dropout probability before the head of digits-cnn."""

    def __post_init__(self) -> None:
        super().__post_init__()  # values are the same, from a command line and from TOML
        vars(self)["args"] = {name: scalar(value) for name, value in self.args.items()}


@dataclass(frozen=True)
class OptimConfig(Section, name="optim"):
    """The optimizer, the loss, and the handling of gradients."""

    name: Literal["sgd", "adamw"] = setting("sgd", of_state=True, aka="opt optim optimizer")
    """SGD with momentum, or AdamW."""
    lr: float = setting(0.1, above=0, aka="learning-rate base-lr max-lr")
    """Peak learning rate, for the global batch. It is never scaled by the number of workers."""
    momentum: float = setting(0.9, least=0, below=1, needs="optim.name = sgd")
    """Momentum of SGD."""
    nesterov: bool = setting(True, needs="optim.name = sgd")
    """Use Nesterov momentum (SGD)."""
    betas: tuple[float, float] = setting((0.9, 0.999), least=0, below=1, needs="optim.name = adamw")
    """Coefficients of AdamW's running averages of the gradient and its square."""
    weight_decay: float = setting(5e-4, least=0, aka="wd decay l2")
    """Weight decay. It is not applied to biases, normalization layers, layer scale, class tokens,
    or positional embeddings."""
    decay_norms: bool = setting(False, needs="optim.weight_decay above 0", of_state=True)
    """Also decay the weights of normalization layers."""
    decay_bias: bool = setting(False, needs="optim.weight_decay above 0", of_state=True)
    """Also decay biases."""
    head_lr: float | None = setting(None, above=0, of_state=True)
    """Peak learning rate of the classification head. Default: lr."""
    layer_decay: float = setting(1.0, above=0, most=1, of_state=True)
    """Ratio of a layer's learning rate to that of the layer after it (models of timm)."""
    groups: tuple[str, ...] = setting((), of_state=True)
    """Other values for some parameters, such as 'layer1.*' lr=0.001 weight_decay=0. A pattern of
    names or a module, then its peak learning rate, its weight decay, or both. The last one wins."""
    clip_norm: float = setting(
        0.0, least=0, aka="clip-grad grad-clip gradient-clip-val max-grad-norm"
    )
    """Clip the norm of the whole gradient to this value. 0: do not clip."""
    nonfinite: Literal["stop", "skip"] = setting("stop", free=True)
    """What to do when a loss or gradient is not finite. Such a step is never applied. stop: end the
    run (exit status 6); skip: continue with the next step."""
    max_nonfinite: int = setting(3, free=True, least=0, needs="optim.nonfinite = skip")
    """With nonfinite = skip: number of steps that a run may skip."""
    label_smoothing: float = setting(0.1, least=0, below=1, images=_SMOOTHED)
    """Label smoothing of cross entropy and binary cross entropy."""


@dataclass(frozen=True)
class LossConfig(Section, name="loss"):
    """The loss of the built-in task, the mean over the samples of a step."""

    name: Literal["cross-entropy", "bce", "focal", "mse", "l1", "huber"] = "cross-entropy"
    """Cross entropy, binary cross entropy, focal loss, or a regression loss. bce: the mean over
    classes, each by itself; focal: cross entropy times (1 - p)^gamma, without label smoothing.
    Mixed images have soft targets. mse, l1, huber (delta 1): the mean over data.target_columns."""
    gamma: float = setting(2.0, least=1, images="loss.name = focal")
    """focal: the exponent, 1 or more."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of the samples of a class. balanced: rows / (classes * rows of the class), counted in
    the training set; a step's mean is over its samples, not over their weights."""


@dataclass(frozen=True)
class ScheduleConfig(Section, name="schedule"):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "step", "constant"] = setting("cosine", aka="sched lr-scheduler")
    """Shape of the learning rate after the warmup."""
    warmup_epochs: float = setting(1.0, least=0, aka="warmup")
    """Length of the linear warmup from 0, in epochs."""
    final_lr: float = setting(
        0.0, least=0, most=1, needs="schedule.name = cosine", aka="min-lr lr-min"
    )
    """cosine: final learning rate, as a fraction of optim.lr."""
    step_epochs: float = setting(30.0, above=0, needs="schedule.name = step")
    """step: multiply the learning rate by gamma every this many epochs."""
    gamma: float = setting(0.1, least=0, most=1, needs="schedule.name = step")
    """step: the factor."""


@dataclass(frozen=True)
class ComputeConfig(Section, name="compute"):
    """Precision and kernels."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting("auto", aka="amp fp16 bf16 dtype")
    """Precision: fp32, or autocast to bf16 or fp16. auto: bf16 on GPUs that have it (Ampere and
    later), else fp32. fp16 also uses a gradient scaler."""
    tf32: bool = setting(True, needs="scaling.use_gpu")
    """Use TF32 (10 bits of mantissa) for what stays in fp32, on GPUs that have it."""
    compile: bool = setting(False, aka="torchcompile torch-compile")
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

    bucket_cap_mb: float = setting(25.0, above=0)
    """Size of a gradient bucket, in MiB. Also used with exact."""
    gradient_as_bucket_view: bool = setting(True, needs="exact = false")
    """Let gradients be views of the buckets, which saves one copy."""
    static_graph: bool = setting(False, needs="exact = false")
    """Promise that the graph is the same in every step."""
    find_unused_parameters: bool = setting(False, needs="ddp.static_graph = false or exact = true")
    """Find parameters that a step does not use. Required for models that skip some. With exact,
    their gradient is 0, so weight decay and momentum still change them."""
    sync_batchnorm: bool = setting(False, aka="sync-bn")
    """Compute batch-norm statistics over the current slots of all workers (SyncBatchNorm). The
    result then depends on the number of workers."""
    compression: Literal["none", "bf16", "fp16"] = "none"
    """Send gradients in this precision, for slow networks."""


@dataclass(frozen=True)
class EvalConfig(Section, name="eval"):
    """When the model is evaluated."""

    every_epochs: int = setting(1, least=0, aka="eval-interval val-interval")
    """Evaluate every this many epochs, and always at the end. 0: only at the end."""
    every_steps: int = setting(0, least=0)
    """Also evaluate every this many steps. 0: off."""
    micro_batch: int = setting(0, least=0)
    """Samples of one evaluation pass through the model. 0: same as micro_batch."""


@dataclass(frozen=True)
class StopConfig(Section, name="stop", free=True):
    """Early stopping, by the metric that decides which checkpoint is the best."""

    patience: int = setting(0, least=0)
    """Stop after this many evaluations in a row without improvement. 0: off."""
    min_delta: float = setting(0.0, least=0, needs="stop.patience above 0")
    """Minimum improvement: the metric must be better than before by more than this."""


@dataclass(frozen=True)
class EmaConfig(Section, name="ema"):
    """An exponential moving average of the weights."""

    decay: float = setting(0.0, least=0, below=1)
    """Decay of the average of the weights of all steps, such as 0.9999. The average is evaluated
    and exported in place of the weights. 0: off."""
    warmup: bool = setting(True, needs="ema.decay above 0")
    """Average over fewer steps at first: the decay of step n is at most (1 + n) / (10 + n)."""


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint", free=True):
    """When a checkpoint is saved, and which are kept. One is always saved at the end."""

    every_epochs: int = setting(1, least=0)
    """Save a checkpoint every this many epochs. 0: off."""
    every_steps: int = setting(0, least=0, aka="save-every save-steps checkpoint-interval")
    """Save a checkpoint every this many steps. 0: off."""
    every_s: float | Literal["auto"] = setting("auto", least=0)
    """Seconds between checkpoints, or auto. 0: off. auto: sqrt(2 * stall * MTBF), which loses the
    least time (Young/Daly). The stall of a checkpoint is measured; the mean time between failures
    is taken as one hour until more is known. At least 5 s and twice a commit, at most 600 s."""
    keep_last: int = setting(2, least=2, aka="keep save-total-limit")
    """Number of newest checkpoints to keep (2 or more), besides the best."""
    max_failed: int = setting(3, least=1)
    """Number of failed checkpoints in a row that ends the run (exit status 5). Fewer do not."""


@dataclass(frozen=True)
class LogConfig(Section, name="log", free=True):
    """Logging, experiment trackers, and profiling."""

    every_steps: int = setting(10, least=1, aka="log-interval print-freq logging-steps")
    """Log the loss and speed every this many steps. The host waits for the device only then."""
    tensorboard: bool = setting(True, needs=_ON_FILES)
    """Write TensorBoard events next to metrics.jsonl."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'raytrain_ddp[wandb]'). WANDB_MODE is respected."""
    mlflow: bool = False
    """Also log to MLflow (pip install 'raytrain_ddp[mlflow]'), at MLFLOW_TRACKING_URI."""
    project: str = setting("raytrain_ddp", needs="log.wandb or log.mlflow")
    """Project in Weights & Biases, experiment in MLflow."""
    audit: bool = False
    """Log a hash of the sample ids and pixels of each step, to compare runs."""
    profile_steps: int = setting(0, least=0)
    """Trace this many steps of each start with torch.profiler, after the first ten."""
    profile_ranks: tuple[int, ...] = setting((0,), needs="log.profile_steps above 0")
    """Ranks to trace."""


@dataclass(frozen=True)
class ScalingConfig(Section, name="scaling", free=True, on_ray=True):
    """The workers and their resources, which do not change the mathematics of the result."""

    num_workers: int | str = setting(
        "auto",
        metavar="N|MIN:MAX|auto",
        check=_WORKERS,
        aka="gpus num-gpus ngpus devices workers world-size nproc-per-node",
    )
    """Number, MIN:MAX (elastic), or auto. auto: all GPUs of the cluster, else two CPU workers."""
    use_gpu: bool | Literal["auto"] = setting("auto", on_ray=False, aka="gpu cuda use-cuda")
    """Train on GPUs: true, false, or auto. auto: if the cluster has any."""
    cpus_per_worker: float | Literal["auto"] = setting(
        "auto", least=LEAST_OF_RESOURCE, on_ray=False
    )
    """CPUs per worker, for its loader threads and, without a GPU, its compute threads. auto: with
    GPUs, each worker gets its share of its node's CPUs; without GPUs, 1 (with --local and without
    --exact, as many compute threads as torch chooses)."""
    gpus_per_worker: float = setting(1.0, least=LEAST_OF_RESOURCE, most=1, needs="scaling.use_gpu")
    """GPUs per worker, at most 1. Below 1, several workers share a GPU (over Gloo)."""
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", on_ray=False)
    """Communication backend. auto: nccl if each worker has a whole GPU, else gloo. Variables of
    NCCL and torch that the environment sets are kept."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = setting("PACK")
    """How Ray places the workers on nodes (its placement group strategy)."""
    max_failures: int = setting(3, least=0, aka="max-restarts")
    """How many times in a row failed workers are replaced before the run ends (exit status 7). A
    new checkpoint resets the count: a long run survives many failures, and a broken one ends."""
    replace_workers: bool | Literal["auto"] = "auto"
    """When a worker dies, replace it while the others keep their state: no step is repeated. With
    exact, or MIN:MAX workers, the others continue meanwhile. false: all workers restart from the
    newest checkpoint. auto: true, except over NCCL, where replacement has never run on several
    GPUs. With true, each step over NCCL waits for its last collective before its update."""
    warm_processes: bool | Literal["auto"] = "auto"
    """Start Ray's processes as forks of one process per node, which already has torch loaded.
    Works on Linux, with or without GPUs. auto: true. On a running cluster, that process stays for
    an hour after its last fork."""
    wait_s: float = setting(60.0, least=0)
    """Seconds to wait while a running cluster lacks resources for the workers, at the start and
    after nodes are lost (autoscaling). Ray may take as long to start, and at least 300 s."""
    resize_s: float = setting(30.0, least=1, needs=_ELASTIC)
    """With MIN:MAX workers: seconds between checks whether more workers fit. Growing costs a
    restart from the newest checkpoint. Where dead workers are replaced (replace_workers), new ones
    join between two steps once they fit, without a restart."""
    start_timeout_s: float | Literal["auto"] = setting("auto", above=0)
    """Seconds to request the same number of workers from Ray before requesting as many as fit. Ray
    still counts a lost node as alive for some seconds. Loading torch is not included. auto: 5 with
    MIN:MAX, else 120."""
    hang_s: float | Literal["auto"] = setting("auto", least=0, on_ray=False)
    """Seconds without a finished step, and at least 10 times the median step, after which workers
    count as hung. The rank that keeps the others waiting is named, the stacks of all ranks are
    saved, and the workers are replaced. The limit is 10 times as long for a batch of data, and 60
    times for startup, evaluation, and checkpoints. auto: 30. 0: never."""
    check_every_steps: int = setting(100, least=0, on_ray=False)
    """Compare the weights of all workers at this interval in steps, and before each checkpoint. If
    a device or its memory fails, they differ, and the run ends with exit status 6. 0: never."""

    @property
    def cpus_without_gpu(self) -> float:
        """CPUs of a worker without a GPU. auto is a fixed number, as sums depend on threads."""
        return 1.0 if isinstance(self.cpus_per_worker, str) else self.cpus_per_worker

    @property
    def threads(self) -> int:
        """The number of compute threads of a worker on CPUs."""
        return max(1, int(self.cpus_without_gpu))

    def worker_range(self) -> tuple[int, int]:
        """(least, most) workers; (0, 0) for auto."""
        return (0, 0) if self.num_workers == "auto" else _range(self.num_workers)
