"""The sources of the recipes: what each says, in the fields of a recipe.

A field that is not listed is as if it were absent, see `NEUTRAL`. The field "" has differences for
which there is no field.
"""

from __future__ import annotations

from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig


class Differs(str):
    """Names the argument of the source with another value, which the recipe says differs."""


NEUTRAL = {
    **flat(TrainConfig()),
    "augment.crop": "none",
    "optim.label_smoothing": 0.0,
    "optim.nesterov": False,
    "optim.weight_decay": 0.0,
    "schedule.name": "constant",
    "schedule.warmup_epochs": 0.0,
}
_SGD = {"optim.name": "sgd", "optim.momentum": 0.9}
_ADAM = {"optim.name": "adamw", "optim.betas": [0.9, 0.999]}  # AdamW without decay is Adam
_STEPS = {"schedule.name": "step", "schedule.gamma": 0.1}
_COSINE = {"schedule.name": "cosine"}
_CROPPED = {"augment.crop": "random", "augment.scale": [0.08, 1.0], "augment.flip": True}
_OF_IMAGENET = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
_AMP = {"compute.precision": Differs("amp")}

# references/classification/train.py of torchvision 0.13 and later, for 8 GPUs.
_TORCHVISION = _SGD | _CROPPED | _OF_IMAGENET | _AMP | {"model.name": "resnet50"}
_RESNET50 = {
    **_TORCHVISION,
    **_STEPS,
    "batch_size": 8 * 32,
    "micro_batch": 32,
    "epochs": 90,
    "optim.lr": 0.1,
    "optim.weight_decay": 1e-4,
    "optim.decay_norms": True,
    "optim.decay_bias": True,
    "schedule.step_epochs": 30,
    "data.interpolation": "bilinear",
    "data.image_size": 224,
    "data.eval_crop": 224 / 256,
}
_RESNET50_V2 = {
    **_TORCHVISION,
    **_COSINE,
    "batch_size": 8 * 128,
    "micro_batch": 128,
    "epochs": 600,
    "optim.lr": 0.5,
    "optim.weight_decay": 2e-5,
    "optim.groups": ["fc.bias", "weight_decay=2e-5"],  # --norm-weight-decay 0: but of norms
    "optim.label_smoothing": 0.1,
    "schedule.warmup_epochs": 5,
    "augment.policy": "trivial",  # "ta_wide"
    "augment.erase": 0.1,
    "augment.mixup": 0.2,
    "augment.cutmix": 1.0,
    "augment.repeats": 4,
    "augment.spread_repeats": True,
    "data.interpolation": "bilinear",
    "data.image_size": 176,
    "data.eval_size": 224,
    "data.eval_crop": 224 / 232,
    # 0.99998 every 32 steps of 1024 images, adjusted by train.py, and so much every step.
    "ema.decay": round((1 - (1 - 0.99998) * 1024 * 32 / 600) ** (1 / 32), 8),
    "ema.warmup": False,
    "": "lr_warmup_decay model_ema_steps",
}
# main.py of facebookresearch/deit at 7e160fe, and of facebookresearch/ConvNeXt at 048efce.
_OF_BOTH = {
    **_CROPPED,
    **_OF_IMAGENET,
    **_COSINE,
    **_ADAM,
    "epochs": 300,
    "optim.weight_decay": 0.05,
    "optim.label_smoothing": 0.1,
    "augment.policy": Differs("aa"),  # rand-m9-mstd0.5-inc1
    "augment.operations": Differs("aa"),
    "augment.magnitude": Differs("aa"),
    "augment.erase": 0.25,
    "augment.mixup": 0.8,
    "augment.cutmix": 1.0,
    "data.interpolation": "bicubic",
    "data.image_size": 224,
    "data.eval_crop": 0.875,
    "model.args": {"drop_path_rate": 0.1},
}
_DEIT = {
    **_OF_BOTH,
    "model.name": "timm:deit_small_patch16_224",
    "batch_size": 4 * 256,
    "micro_batch": 256,
    "optim.lr": 5e-4 * 4 * 256 / 512,
    "schedule.warmup_epochs": 5,
    "schedule.final_lr": 1e-5 / 1e-3,
    "augment.repeats": 3,
    "augment.spread_repeats": True,
    "ema.decay": Differs("model_ema"),
    "compute.precision": Differs("amp"),  # fp16
    "": "remode warmup_lr",
}
_CONVNEXT = {
    **_OF_BOTH,
    "compute.precision": Differs("use_amp"),
    "": "remode",
    "model.name": "timm:convnext_tiny",
    "batch_size": 32 * 128,
    "micro_batch": 128,
    "optim.lr": 4e-3,
    "optim.layer_decay": 1.0,
    "schedule.warmup_epochs": 20,
    "schedule.final_lr": 1e-6 / 4e-3,
    "ema.decay": 0.9999,
    "ema.warmup": False,
}
# train.py of uoguelph-mlrg/Cutout with --data_augmentation --cutout --length 16.
_CIFAR10 = {
    **_SGD,
    "compute.precision": Differs("precision"),
    "data.source": "torchvision:CIFAR10",
    "data.mean": [0.4914, 0.4824, 0.4467],
    "data.std": [0.2471, 0.2435, 0.2616],
    "model.name": "raytrain_ddp.tasks.small_networks:cifar_resnet18",
    "batch_size": 128,
    "micro_batch": 128,
    "epochs": 200,
    "optim.lr": 0.1,
    "optim.nesterov": True,
    "optim.weight_decay": 5e-4,
    "optim.decay_norms": Differs("weight_decay_of_norms"),
    "optim.decay_bias": Differs("weight_decay_of_norms"),
    "augment.crop": "shift",  # by up to 4 of 32 pixels
    "augment.flip": True,
    "augment.erase": Differs("cutout"),
    "schedule.name": Differs("milestones"),  # times 0.2 after epochs 60, 120 and 160
}
# examples/mnist_cnn.py of Keras 2.
_MNIST = {
    "data.source": "torchvision:MNIST",
    "data.mean": Differs("normalization"),
    "data.std": Differs("normalization"),
    "model.name": "raytrain_ddp.tasks.small_networks:mnist_cnn",
    "batch_size": 128,
    "epochs": 12,
    "optim.name": Differs("optimizer"),  # Adadelta
    "optim.lr": Differs("learning_rate"),
    "schedule.name": Differs("schedule"),
    "schedule.warmup_epochs": Differs("schedule"),
    "": "channels",
}
# transfer_learning_tutorial.py of PyTorch, "Finetuning the ConvNet".
_FINETUNE = {
    **_SGD,
    **_STEPS,
    **_CROPPED,
    **_OF_IMAGENET,
    "model.name": "timm:resnet18.tv_in1k",  # timm's copy of torchvision's first weights
    "batch_size": 4,
    "micro_batch": 4,
    "epochs": 25,
    "optim.lr": 0.001,
    "schedule.step_epochs": 7,
    "data.image_size": 224,
    "data.eval_crop": 224 / 256,
}
# sklearn.neural_network.MLPClassifier() of scikit-learn 1.9.
_MLP = {
    **_ADAM,
    "task_options": {"hidden": "100"},
    "batch_size": 200,  # "auto" with 200 rows or more
    "epochs": 200,
    "optim.lr": 0.001,
    "optim.weight_decay": Differs("alpha"),
    "": "standardization",
}
REFERENCES = {
    "imagenet-resnet50": _RESNET50,
    "imagenet-resnet50-v2": _RESNET50_V2,
    "imagenet-vit-s": _DEIT,
    "imagenet-convnext-t": _CONVNEXT,
    "cifar10": _CIFAR10,
    "mnist": _MNIST,
    "finetune": _FINETUNE,
    "tabular": _MLP,
}
