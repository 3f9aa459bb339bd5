"""Which flag was meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

OTHER_NAMES = {
    "name": "run-name exp-name experiment job-name",
    "storage": "output output-dir out-dir save-dir default-root-dir",
    "epochs": "max-epochs num-train-epochs",
    "steps": "max-steps num-steps train-iters",
    "batch-size": "bs global-batch-size",
    "micro-batch": "micro-batch-size gradient-accumulation-steps grad-accum",
    "data.source": "data dataset data-dir data-path train-dir train-data",
    "data.eval-source": "val-dir eval-dir val-data eval-data test-data",
    "data.holdout": "val-fraction test-size",
    "data.image-size": "imgsz input-size crop-size resolution",
    "data.workers": "loader-workers dataloader-num-workers",
    "augment.policy": "auto-augment autoaugment aa",
    "model.name": "model arch architecture",
    "model.weights": "pretrained",
    "model.dropout": "drop drop-rate",
    "optim.name": "opt optim optimizer",
    "optim.lr": "learning-rate base-lr max-lr",
    "optim.weight-decay": "wd decay l2",
    "optim.clip-norm": "clip-grad grad-clip gradient-clip-val max-grad-norm",
    "schedule.name": "scheduler sched lr-scheduler",
    "schedule.warmup-epochs": "warmup",
    "schedule.final-lr": "min-lr lr-min",
    "compute.precision": "amp fp16 bf16 dtype",
    "compute.compile": "torchcompile torch-compile",
    "ddp.sync-batchnorm": "sync-bn",
    "eval.every-epochs": "eval-interval val-interval",
    "checkpoint.every-steps": "save-every save-steps checkpoint-interval",
    "checkpoint.keep-last": "keep save-total-limit",
    "scaling.num-workers": "gpus num-gpus ngpus devices workers world-size nproc-per-node",
    "scaling.use-gpu": "gpu cuda use-cuda",
    "scaling.max-failures": "max-restarts",
    "log.every-steps": "log-interval print-freq logging-steps",
}
"""Names that torchvision's references, timm, Lightning, Transformers and torchrun give a flag, and
that do not look like it."""


def meant(name: str, known: Collection[str]) -> list[str]:
    """The known flags that may have been meant by `name`; both without dashes in front."""
    name = name.lower().replace("_", "-")
    head, _, last = name.rpartition(".")
    last = last.removeprefix("no-")
    for flag, others in OTHER_NAMES.items():
        is_it = last in others.split() and head in ("", flag.partition(".")[0])
        if is_it and flag in known:
            return [flag]
    of_last = {flag.rpartition(".")[2]: flag for flag in known}
    return (
        [flag for flag in known if flag.replace(".", "-") == name.replace(".", "-")]
        or [flag for flag in known if flag.rpartition(".")[2] == last][:3]
        or get_close_matches(name, known, n=2, cutoff=0.75)
        or [of_last[near] for near in get_close_matches(last, of_last, n=2, cutoff=0.75)]
        or [flag for flag in known if name and flag.startswith(name)][:3]
    )
