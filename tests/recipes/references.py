"""The arguments of the recipes' sources, by their own names and values, and the values that each
would need to match the recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytrain_ddp.config.train_config import TrainConfig

Here = Callable[[TrainConfig], Any]


@dataclass(frozen=True)
class Reference:
    """
    Args:
        arguments: all of the source, with their values.
        here: what each argument would have to be, to say what a recipe says.
        besides: differences that no argument has, by the names that the recipe gives them.
    """

    arguments: dict[str, Any]
    here: dict[str, Here]
    besides: set[str] = field(default_factory=set)


# ------------------------------------------------------------------ torchvision

# references/classification/train.py of torchvision 0.13 and later: get_args_parser(), without what
# does not decide the result: data_path device workers print_freq output_dir resume start_epoch
# cache_dataset test_only world_size dist_url use_deterministic_algorithms backend use_v2.
TORCHVISION = {
    "model": "resnet18",
    "batch_size": 32,  # per GPU
    "epochs": 90,
    "opt": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "norm_weight_decay": None,
    "bias_weight_decay": None,
    "transformer_embedding_decay": None,
    "label_smoothing": 0.0,
    "mixup_alpha": 0.0,
    "cutmix_alpha": 0.0,
    "lr_scheduler": "steplr",
    "lr_warmup_epochs": 0,
    "lr_warmup_method": "constant",
    "lr_warmup_decay": 0.01,
    "lr_step_size": 30,
    "lr_gamma": 0.1,
    "lr_min": 0.0,
    "sync_bn": False,
    "auto_augment": None,
    "ra_magnitude": 9,
    "augmix_severity": 3,
    "random_erase": 0.0,
    "amp": False,
    "model_ema": False,
    "model_ema_steps": 32,
    "model_ema_decay": 0.99998,
    "interpolation": "bilinear",
    "val_resize_size": 256,
    "val_crop_size": 224,
    "train_crop_size": 224,
    "crop": "RandomResizedCrop",  # this and the next in presets.py
    "hflip_prob": 0.5,
    "clip_grad_norm": None,
    "ra_sampler": False,
    "ra_reps": 3,
    "weights": None,
}
_V2 = {
    "model": "resnet50",
    "batch_size": 128,
    "lr": 0.5,
    "lr_scheduler": "cosineannealinglr",
    "lr_warmup_epochs": 5,
    "lr_warmup_method": "linear",
    "auto_augment": "ta_wide",
    "epochs": 600,
    "random_erase": 0.1,
    "weight_decay": 0.00002,
    "norm_weight_decay": 0.0,
    "label_smoothing": 0.1,
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
    "train_crop_size": 176,
    "model_ema": True,
    "val_resize_size": 232,
    "ra_sampler": True,
    "ra_reps": 4,
}


def _eval_size(c: TrainConfig) -> int:
    return c.data.eval_size or c.data.image_size


def _used(is_used: Here, value: Here, otherwise: Any) -> Here:
    """The value, or the source's default if the recipe does not use it."""
    return lambda c: value(c) if is_used(c) else otherwise


def _group_decay(name: str) -> Here:
    def found(c: TrainConfig) -> float | None:
        words = [*c.optim.groups]
        if name not in words:
            return None
        return float(words[words.index(name) + 1].removeprefix("weight_decay="))

    return found


def _bias_decay(c: TrainConfig) -> float | None:
    """None: as weight_decay, but for those of norms."""
    if c.optim.decay_bias or _group_decay("fc.bias")(c) == c.optim.weight_decay:
        return None
    return 0.0


def _torchvision_ema(c: TrainConfig) -> float:
    """The decay that train.py adjusts by images, steps between updates, and epochs."""
    adjust = c.batch_size * 32 / c.epochs
    return round(1 - (1 - c.ema.decay**32) / adjust, 8)


def _crop(c: TrainConfig) -> tuple[str, tuple[float, float]] | str:
    is_usual = c.augment.crop == "random" and c.augment.scale == (0.08, 1.0)
    return "RandomResizedCrop" if is_usual else (c.augment.crop, c.augment.scale)


def _flip(c: TrainConfig) -> float:
    return 0.5 * c.augment.flip


_SCHEDULES = {"step": "steplr", "cosine": "cosineannealinglr", "constant": None}
_IS_WARMED: Here = lambda c: c.schedule.warmup_epochs > 0  # noqa: E731
_HAS_EMA: Here = lambda c: c.ema.decay > 0  # noqa: E731
_TORCHVISION_HERE: dict[str, Here] = {
    "model": lambda c: c.model.name,
    "batch_size": lambda c: c.batch_size // 8,
    "epochs": lambda c: c.epochs,
    "opt": lambda c: c.optim.name + "_nesterov" * c.optim.nesterov,
    "lr": lambda c: c.optim.lr,
    "momentum": lambda c: c.optim.momentum,
    "weight_decay": lambda c: c.optim.weight_decay,
    "norm_weight_decay": lambda c: None if c.optim.decay_norms else 0.0,
    "bias_weight_decay": _bias_decay,
    "transformer_embedding_decay": lambda c: None,  # there are none
    "label_smoothing": lambda c: c.optim.label_smoothing,
    "mixup_alpha": lambda c: c.augment.mixup,
    "cutmix_alpha": lambda c: c.augment.cutmix,
    "lr_scheduler": lambda c: _SCHEDULES[c.schedule.name],
    "lr_warmup_epochs": lambda c: c.schedule.warmup_epochs,
    "lr_warmup_method": _used(_IS_WARMED, lambda c: "linear", "constant"),
    "lr_warmup_decay": _used(_IS_WARMED, lambda c: 0.0, 0.01),
    "lr_step_size": lambda c: c.schedule.step_epochs,
    "lr_gamma": lambda c: c.schedule.gamma,
    "lr_min": lambda c: c.schedule.final_lr * c.optim.lr,
    "sync_bn": lambda c: c.ddp.sync_batchnorm or c.batch_size // c.micro_batch != 8,
    "auto_augment": lambda c: {"none": None, "trivial": "ta_wide"}[c.augment.policy],
    "ra_magnitude": lambda c: c.augment.magnitude,
    "augmix_severity": lambda c: 3,  # is not used
    "random_erase": lambda c: c.augment.erase,
    "amp": lambda c: c.compute.precision != "fp32",
    "model_ema": _HAS_EMA,
    "model_ema_steps": _used(_HAS_EMA, lambda c: 1, 32),
    "model_ema_decay": _used(_HAS_EMA, _torchvision_ema, 0.99998),
    "interpolation": lambda c: c.data.interpolation,
    "val_resize_size": lambda c: round(_eval_size(c) / c.data.eval_crop),
    "val_crop_size": _eval_size,
    "train_crop_size": lambda c: c.data.image_size,
    "crop": _crop,
    "hflip_prob": _flip,
    "clip_grad_norm": lambda c: c.optim.clip_norm or None,
    "ra_sampler": lambda c: c.augment.spread_repeats,
    "ra_reps": _used(lambda c: c.augment.spread_repeats, lambda c: c.augment.repeats, 3),
    "weights": lambda c: c.model.weights,
}

# ------------------------------------------------------------------ DeiT and ConvNeXt

# main.py of facebookresearch/deit at 7e160fe: get_args_parser(), without what the command does not
# use (distillation, cosub, finetune, attn_only, other data sets, train_mode), paths and devices.
DEIT = {
    "batch_size": 64,  # per GPU
    "epochs": 300,
    "bce_loss": False,
    "unscale_lr": False,
    "model": "deit_base_patch16_224",
    "input_size": 224,
    "drop": 0.0,
    "drop_path": 0.1,
    "model_ema": True,
    "model_ema_decay": 0.99996,
    "opt": "adamw",
    "opt_eps": 1e-8,
    "opt_betas": None,
    "clip_grad": None,
    "weight_decay": 0.05,
    "sched": "cosine",
    "lr": 5e-4,
    "lr_noise": None,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "warmup_epochs": 5,
    "color_jitter": 0.3,  # not used: aa replaces it
    "aa": "rand-m9-mstd0.5-inc1",
    "smoothing": 0.1,
    "train_interpolation": "bicubic",
    "repeated_aug": True,
    "ThreeAugment": False,
    "src": False,
    "reprob": 0.25,
    "remode": "pixel",
    "recount": 1,
    "resplit": False,
    "mixup": 0.8,
    "cutmix": 1.0,
    "cutmix_minmax": None,
    "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5,
    "mixup_mode": "batch",
    "eval_crop_ratio": 0.875,
    "amp": "fp16",  # in engine.py
    "crop": "RandomResizedCrop",  # this and the next of timm's create_transform
    "hflip": 0.5,
}
_OF_BOTH: dict[str, Here] = {
    "epochs": lambda c: c.epochs,
    "opt": lambda c: c.optim.name,
    "opt_eps": lambda c: 1e-8,  # torch's default, which nothing here changes
    "opt_betas": lambda c: None if c.optim.betas == (0.9, 0.999) else c.optim.betas,
    "clip_grad": lambda c: c.optim.clip_norm or None,
    "weight_decay": lambda c: c.optim.weight_decay,
    "warmup_epochs": lambda c: c.schedule.warmup_epochs,
    "input_size": lambda c: c.data.image_size,
    "smoothing": lambda c: c.optim.label_smoothing,
    "train_interpolation": lambda c: c.data.interpolation,
    "aa": lambda c: (c.augment.policy, c.augment.operations, c.augment.magnitude),
    "reprob": lambda c: c.augment.erase,
    "remode": lambda c: "const",
    "recount": lambda c: 1,
    "resplit": lambda c: False,
    "mixup": lambda c: c.augment.mixup,
    "cutmix": lambda c: c.augment.cutmix,
    "cutmix_minmax": lambda c: None,
    "mixup_prob": lambda c: 1.0,
    "mixup_switch_prob": lambda c: 0.5,
    "mixup_mode": lambda c: "batch",  # the micro-batch of a GPU
    "crop": _crop,
    "hflip": _flip,
}
_DEIT_HERE: dict[str, Here] = {
    **_OF_BOTH,
    "batch_size": lambda c: c.micro_batch if c.batch_size == 4 * c.micro_batch else None,
    "bce_loss": lambda c: c.loss.name == "bce",
    "unscale_lr": lambda c: False,
    "lr": lambda c: c.optim.lr * 512 / c.batch_size,
    "model": lambda c: c.model.name.removeprefix("timm:"),
    "drop": lambda c: float(c.model.args.get("drop_rate", 0)),
    "drop_path": lambda c: c.model.args["drop_path_rate"],
    "model_ema": lambda c: c.ema.decay > 0,
    "model_ema_decay": lambda c: c.ema.decay or 0.99996,
    "sched": lambda c: c.schedule.name,
    "lr_noise": lambda c: None,
    "warmup_lr": lambda c: 0.0,
    "min_lr": lambda c: round(c.optim.lr * c.schedule.final_lr, 12),
    "color_jitter": lambda c: 0.3,
    "repeated_aug": lambda c: c.augment.spread_repeats and c.augment.repeats == 3,
    "ThreeAugment": lambda c: False,
    "src": lambda c: c.augment.crop != "random",
    "eval_crop_ratio": lambda c: c.data.eval_crop,
    "amp": lambda c: c.compute.precision,
}

# main.py of facebookresearch/ConvNeXt at 048efce, in the same way.
CONVNEXT = {
    "batch_size": 64,
    "epochs": 300,
    "update_freq": 1,
    "model": "convnext_tiny",
    "drop_path": 0,
    "input_size": 224,
    "layer_scale_init_value": 1e-6,
    "model_ema": False,
    "model_ema_decay": 0.9999,
    "model_ema_eval": False,
    "opt": "adamw",
    "opt_eps": 1e-8,
    "opt_betas": None,
    "clip_grad": None,
    "weight_decay": 0.05,
    "weight_decay_end": None,
    "lr": 4e-3,
    "layer_decay": 1.0,
    "min_lr": 1e-6,
    "warmup_epochs": 20,
    "warmup_steps": -1,
    "color_jitter": 0.4,  # not used: aa replaces it
    "aa": "rand-m9-mstd0.5-inc1",
    "smoothing": 0.1,
    "train_interpolation": "bicubic",
    "crop_pct": None,  # 224 / 256
    "reprob": 0.25,
    "remode": "pixel",
    "recount": 1,
    "resplit": False,
    "mixup": 0.8,
    "cutmix": 1.0,
    "cutmix_minmax": None,
    "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5,
    "mixup_mode": "batch",
    "head_init_scale": 1.0,
    "use_amp": False,
    "crop": "RandomResizedCrop",  # this and the next of timm's create_transform
    "hflip": 0.5,
}
_CONVNEXT_HERE: dict[str, Here] = {
    **_OF_BOTH,
    "batch_size": lambda c: c.micro_batch if c.batch_size == 32 * c.micro_batch else None,
    "update_freq": lambda c: 1,
    "model": lambda c: c.model.name.removeprefix("timm:"),
    "drop_path": lambda c: c.model.args["drop_path_rate"],
    "layer_scale_init_value": lambda c: c.model.args.get("ls_init_value", 1e-6),  # timm's default
    "model_ema": lambda c: c.ema.decay > 0,
    "model_ema_decay": lambda c: c.ema.decay,
    "model_ema_eval": lambda c: c.ema.decay > 0,
    "weight_decay_end": lambda c: None,
    "lr": lambda c: c.optim.lr,
    "layer_decay": lambda c: c.optim.layer_decay,
    "min_lr": lambda c: round(c.optim.lr * c.schedule.final_lr, 12),
    "warmup_steps": lambda c: -1,
    "color_jitter": lambda c: 0.4,
    "crop_pct": lambda c: None if c.data.eval_crop == 224 / 256 else c.data.eval_crop,
    "head_init_scale": lambda c: c.model.args.get("head_init_scale", 1.0),
    "use_amp": lambda c: c.compute.precision != "fp32",
}

# ------------------------------------------------------------------ small ones

# train.py of uoguelph-mlrg/Cutout with --data_augmentation --cutout --length 16.
_CIFAR10 = {
    "dataset": "cifar10",
    "model": "resnet18",
    "batch_size": 128,
    "epochs": 200,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 5e-4,
    "weight_decay_of_norms": 5e-4,
    "crop": (32, 4),  # size, padding
    "flip": True,
    "cutout": (1, 16),  # holes, length
    "mean": (125.3, 123.0, 113.9),
    "std": (63.0, 62.1, 66.7),
    "milestones": ([60, 120, 160], 0.2),
    "precision": "fp32",
}
_CIFAR10_HERE: dict[str, Here] = {
    "dataset": lambda c: c.data.source.removeprefix("torchvision:").lower(),
    "model": lambda c: c.model.name.rpartition("cifar_")[2],
    "batch_size": lambda c: c.batch_size if c.micro_batch == c.batch_size else None,
    "epochs": lambda c: c.epochs,
    "learning_rate": lambda c: c.optim.lr,
    "momentum": lambda c: c.optim.momentum,
    "nesterov": lambda c: c.optim.nesterov,
    "weight_decay": lambda c: c.optim.weight_decay,
    "weight_decay_of_norms": lambda c: c.optim.weight_decay * c.optim.decay_norms,
    "crop": lambda c: (32, 32 // 8) if c.augment.crop == "shift" else None,
    "flip": lambda c: c.augment.flip,
    "cutout": lambda c: ("erase", c.augment.erase),
    "mean": lambda c: tuple(round(255 * x, 1) for x in c.data.mean),
    "std": lambda c: tuple(round(255 * x, 1) for x in c.data.std),
    "milestones": lambda c: c.schedule.name,
    "precision": lambda c: c.compute.precision,
}

# examples/mnist_cnn.py of Keras 2.
_MNIST = {
    "batch_size": 128,
    "epochs": 12,
    "loss": "categorical_crossentropy",
    "optimizer": "adadelta",
    "learning_rate": 1.0,
    "schedule": ("constant", 0.0),
    "augmentation": "none",
    "normalization": (0.0, 1.0),
    "channels": 1,
    "model": "mnist_cnn",
    "weight_decay": 0.0,
}
_MNIST_HERE: dict[str, Here] = {
    "batch_size": lambda c: c.batch_size,
    "epochs": lambda c: c.epochs,
    "loss": lambda c: "categorical_crossentropy" if not c.optim.label_smoothing else "smoothed",
    "optimizer": lambda c: c.optim.name,
    "learning_rate": lambda c: c.optim.lr,
    "schedule": lambda c: (c.schedule.name, c.schedule.warmup_epochs),
    "augmentation": lambda c: c.augment.crop,
    "normalization": lambda c: (c.data.mean[0], c.data.std[0]),
    "channels": lambda c: 3,
    "model": lambda c: c.model.name.rpartition(":")[2],
    "weight_decay": lambda c: c.optim.weight_decay,
}

# transfer_learning_tutorial.py of PyTorch, "Finetuning the ConvNet".
_FINETUNE = {
    "model": "resnet18",
    "weights": "IMAGENET1K_V1",
    "batch_size": 4,
    "num_epochs": 25,
    "lr": 0.001,
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
    "step_size": 7,
    "gamma": 0.1,
    "RandomResizedCrop": 224,
    "RandomHorizontalFlip": True,
    "Resize": 256,
    "CenterCrop": 224,
    "Normalize": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "label_smoothing": 0.0,
}
_FINETUNE_HERE: dict[str, Here] = {
    "model": lambda c: c.model.name.removeprefix("timm:").partition(".")[0],
    # timm's copy of torchvision's first weights
    "weights": lambda c: {"tv_in1k": "IMAGENET1K_V1"}.get(c.model.name.rpartition(".")[2]),
    "batch_size": lambda c: c.batch_size,
    "num_epochs": lambda c: c.epochs,
    "lr": lambda c: c.optim.lr,
    "momentum": lambda c: c.optim.momentum,
    "nesterov": lambda c: c.optim.nesterov,
    "weight_decay": lambda c: c.optim.weight_decay,
    "step_size": lambda c: c.schedule.step_epochs if c.schedule.name == "step" else None,
    "gamma": lambda c: c.schedule.gamma,
    "RandomResizedCrop": lambda c: c.data.image_size if c.augment.crop == "random" else None,
    "RandomHorizontalFlip": lambda c: c.augment.flip,
    "Resize": lambda c: round(_eval_size(c) / c.data.eval_crop),
    "CenterCrop": _eval_size,
    "Normalize": lambda c: (c.data.mean, c.data.std),
    "label_smoothing": lambda c: c.optim.label_smoothing,
}

# sklearn.neural_network.MLPClassifier() of scikit-learn 1.9; others of its arguments belong to
# other solvers, or to stopping early, which is off.
SCIKIT = {
    "hidden_layer_sizes": (100,),
    "activation": "relu",
    "solver": "adam",
    "alpha": 0.0001,
    "batch_size": 200,  # "auto" with 200 rows or more
    "learning_rate_init": 0.001,
    "max_iter": 200,  # epochs
    "early_stopping": False,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-8,
}
_TABULAR_HERE: dict[str, Here] = {
    "hidden_layer_sizes": lambda c: tuple(map(int, c.task_options["hidden"].split(","))),
    "activation": lambda c: "relu",
    # AdamW without weight decay is Adam.
    "solver": lambda c: {"adamw": "adam"}.get(c.optim.name),
    "alpha": lambda c: c.optim.weight_decay,
    "batch_size": lambda c: c.batch_size,
    "learning_rate_init": lambda c: c.optim.lr if c.schedule.name == "constant" else None,
    "max_iter": lambda c: c.epochs,
    "early_stopping": lambda c: c.stop.patience > 0,
    "beta_1": lambda c: c.optim.betas[0],
    "beta_2": lambda c: c.optim.betas[1],
    "epsilon": lambda c: 1e-8,
}

# config/train_shakespeare_char.py of nanoGPT at 3adf61e, over the defaults of its train.py.
_CHAR_LM = {
    "optimizer": "adamw",
    "eval_interval": 250,
    "eval_iters": 200,
    "gradient_accumulation_steps": 1,
    "batch_size": 64,
    "block_size": 256,
    "n_layer": 6,
    "n_head": 6,
    "n_embd": 384,
    "dropout": 0.2,
    "bias": False,
    "learning_rate": 1e-3,
    "max_iters": 5000,
    "weight_decay": 1e-1,
    "beta1": 0.9,
    "beta2": 0.99,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 100,
    "lr_decay_iters": 5000,
    "min_lr": 1e-4,
    "dtype": "bfloat16 or float16",
    "compile": True,
}
_STEPS_PER_EPOCH = 62  # of tiny Shakespeare: 0.9 * 1,115,394 characters, 64 windows of 256


def _option(name: str) -> Here:
    return lambda c: float(c.task_options[name])


_CHAR_LM_HERE: dict[str, Here] = {
    "optimizer": lambda c: c.optim.name,
    "eval_interval": lambda c: c.eval.every_steps,
    "eval_iters": lambda c: c.limit_eval_batches,
    "gradient_accumulation_steps": lambda c: 1,
    "batch_size": lambda c: c.batch_size,
    "block_size": _option("length"),
    "n_layer": _option("depth"),
    "n_head": _option("heads"),
    "n_embd": _option("width"),
    "dropout": _option("dropout"),
    "bias": lambda c: False,
    "learning_rate": lambda c: c.optim.lr,
    "max_iters": lambda c: c.steps,
    "weight_decay": lambda c: c.optim.weight_decay,
    "beta1": lambda c: c.optim.betas[0],
    "beta2": lambda c: c.optim.betas[1],
    "grad_clip": lambda c: c.optim.clip_norm,
    "decay_lr": lambda c: c.schedule.name == "cosine",
    "warmup_iters": lambda c: math.floor(c.schedule.warmup_epochs * _STEPS_PER_EPOCH),
    "lr_decay_iters": lambda c: c.steps,
    "min_lr": lambda c: c.optim.lr * c.schedule.final_lr,
    "dtype": lambda c: c.compute.precision,
    "compile": lambda c: c.compute.compile,
}

REFERENCES = {
    "imagenet-resnet50": Reference({**TORCHVISION, "model": "resnet50"}, _TORCHVISION_HERE),
    "imagenet-resnet50-v2": Reference({**TORCHVISION, **_V2}, _TORCHVISION_HERE),
    "imagenet-vit-s": Reference(
        {**DEIT, "model": "deit_small_patch16_224", "batch_size": 256}, _DEIT_HERE
    ),
    "imagenet-convnext-t": Reference(
        {
            **CONVNEXT,
            "drop_path": 0.1,
            "batch_size": 128,
            "model_ema": True,
            "model_ema_eval": True,
        },
        _CONVNEXT_HERE,
    ),
    "cifar10": Reference(_CIFAR10, _CIFAR10_HERE),
    "mnist": Reference(_MNIST, _MNIST_HERE),
    "finetune": Reference(_FINETUNE, _FINETUNE_HERE),
    "tabular": Reference(SCIKIT, _TABULAR_HERE, besides={"standardization"}),
    "char-lm": Reference(_CHAR_LM, _CHAR_LM_HERE, besides={"windows"}),
}
